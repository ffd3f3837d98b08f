"""Costs: fitted from a trace, they predict it again."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import catalogue_plans, costs, legal_cases, reduced

import pipelab
from pipelab import Cost, Plan, simulate
from pipelab.errors import CostError, UsageError

SPLIT = Plan.parse(["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1W0 1I1 1W1"])
REPLICATED = Plan.parse(["0F0 0B0 0R", "0F1 0B1 0R"])


@given(catalogue_plans(), costs(), costs())
def test_costs_fitted_from_a_trace_predict_it(plan, forward, backward):
    trace = simulate(plan, Cost(forward=forward, backward=backward))
    assert simulate(plan, Cost.fit(trace)).makespan == pytest.approx(trace.makespan)


@given(legal_cases(), costs(), costs(), costs(), costs())
def test_every_kind_of_action_is_fitted(case, forward, inputs, weights, reduce):
    lists = set(range(case.stages)) <= reduced(case.plan)
    cost = Cost(
        forward=forward,
        backward=inputs + weights,
        input_grad=inputs,
        weight_grad=weights,
        all_reduce=reduce if lists else 0,
        per="stage",
    )
    trace = simulate(case.plan, cost)
    assert simulate(case.plan, Cost.fit(trace)).makespan == pytest.approx(trace.makespan)


def test_a_full_backward_is_predicted_from_a_split_one():
    trace = simulate(SPLIT, Cost(forward=1, input_grad=3, weight_grad=2, per="stage"))
    assert simulate(pipelab.OneFOneB(2, 2), Cost.fit(trace)).makespan == 3 * (1 + 5)


def test_a_pair_in_one_slot_is_fitted_as_a_pair():
    plan = Plan([[pipelab.F(0), pipelab.F(1) & pipelab.B(0), pipelab.B(1)]])
    trace = simulate(plan, Cost(forward=1, backward=2, pair=2.5))
    fitted = Cost.fit(trace)
    assert (fitted.forward, fitted.backward, fitted.pair) == ((1,), (2,), (2.5,))


def test_one_slow_action_does_not_change_the_fit():
    trace = simulate(pipelab.GPipe(1, 5), Cost(forward=1, backward=2))
    starts = [list(row) for row in trace.starts]
    starts[0][0] -= 100
    slow = pipelab.Trace(trace.plan, starts, trace.ends)
    assert Cost.fit(slow).forward == (1,)
    assert Cost.fit(slow, typical="mean").forward == (21,)
    with pytest.raises(CostError, match="typical="):
        Cost.fit(slow, typical="middle")


@pytest.mark.parametrize("taken", [pipelab.GPipe(2, 4), [1, 2], None, [], "trace"], ids=str)
def test_a_fit_of_anything_but_traces_says_which_traces(taken):
    with pytest.raises(TypeError, match=r"^Cost.fit takes a trace, from step.trace or simulate, .* got "):
        Cost.fit(taken)


def test_a_fit_for_other_stages_is_refused_with_the_next_move():
    fitted = Cost.fit(simulate(pipelab.GPipe(2, 4)))
    with pytest.raises(CostError) as refusal:
        simulate(pipelab.GPipe(4, 4), fitted)
    assert str(refusal.value).startswith("forward has 2 numbers for 4 stages: give one number, or one per stage; ")
    assert "of a fitted cost, run the model with 4 and fit that trace" in str(refusal.value)


def test_micro_batches_share_what_grows_with_the_rows_and_nothing_else():
    same = {"all_reduce": 5, "gather": 8, "latency": 3, "bandwidth": 2, "per": "stage", "unit": "ms"}
    grow = {"backward": 16, "input_grad": 6, "pair": 24, "offload": 8, "load": 4, "activation_bytes": 64}
    whole = Cost(forward=[8, 4], boundary_gradient_bytes=[8, 16], **grow, **same)
    quarters = {name: value / 4 for name, value in grow.items()}
    assert whole.shared(4) == Cost(forward=[2, 1], boundary_gradient_bytes=[2, 4], **quarters, **same)
    assert whole.shared(1) == whole
    with pytest.raises(UsageError, match="microbatches=0"):
        whole.shared(0)


def test_an_all_reduce_costs_the_same_whether_it_is_listed_or_not():
    assert simulate(REPLICATED, Cost(all_reduce=5)).makespan == 8
    silent = Plan.parse(["0F0 0B0", "0F1 0B1"])
    assert simulate(silent, Cost(all_reduce=5)) == simulate(REPLICATED, Cost(all_reduce=5))
    assert simulate(silent).makespan == 3


def test_where_all_reduces_ran_is_fitted_too():
    beside = Cost(all_reduce=[1, 7], all_reduce_runs="beside", per="stage")
    trace = simulate(pipelab.replicate(pipelab.Interleaved1F1B(1, 2), 2), beside)
    fitted = Cost.fit(trace)
    assert fitted.all_reduce_runs == "beside"
    assert simulate(trace.plan, fitted).makespan == trace.makespan
    alone = simulate(trace.plan, dataclasses.replace(beside, all_reduce_runs="in-row"))
    assert simulate(trace.plan, Cost.fit(alone)).makespan == alone.makespan > trace.makespan


def test_a_comparison_says_that_stage_0_ran_as_pytorch_runs_it():
    uniform, as_run = (simulate(SPLIT, Cost(first_stage=how)) for how in ("uniform", "as-run"))
    names = pipelab.compare(uniform, as_run).names
    assert "stage 0 as run" in names[1]
    assert "stage 0" not in names[0]


@pytest.mark.parametrize("number", [1e308, 1.1e30, 9e-31, 5e-324], ids=str)
def test_a_number_whose_sums_or_ratios_could_overflow_is_refused_as_traces_refuse_it(number):
    for given_ in ({"forward": number}, {"backward": [1, number]}, {"latency": number}, {"bandwidth": number}):
        with pytest.raises(CostError, match=r"1e-30 .* 1e\+30"):
            Cost(**given_)
    with pytest.raises(CostError, match=r"forward\(microbatch=0, stage=0\) returned .* 1e-30 .* 1e\+30"):
        simulate(SPLIT, Cost(forward=lambda m, s: number))
    with pytest.raises(CostError, match=r"inside=.* 1e-30 .* 1e\+30"):
        pipelab.Links(2, inside=(number, None), between=(1, None))


@pytest.mark.parametrize(
    "cost",
    [
        Cost(forward=1e30, backward=1e30, latency=1e30),
        Cost(activation_bytes=1e30, boundary_gradient_bytes=1e30, bandwidth=1e-30),
        Cost(forward=1e-30, backward=1e-30, latency=1e-30),
    ],
    ids=["long", "long on the way", "short"],
)
def test_the_largest_and_smallest_costs_are_drawn(cost, tmp_path):
    trace = simulate(pipelab.OneFOneB(4, 8), cost)
    assert "rank 3" in str(trace)
    assert trace.save(tmp_path / "page.html").stat().st_size > 0


# Functions of (micro-batch, stage)


@given(legal_cases(), costs(), costs())
def test_a_function_that_gives_each_stage_its_number_is_a_list(case, forward, backward):
    given_ = {"forward": forward, "backward": backward, "input_grad": 1.5, "activation_bytes": 3}
    lists = Cost(**{name: [value] * case.stages for name, value in given_.items()}, bandwidth=2)
    for name, value in given_.items():
        mixed = dataclasses.replace(lists, **{name: lambda microbatch, stage, value=value: value})
        assert simulate(case.plan, mixed) == simulate(case.plan, lists)


def test_every_micro_batch_takes_what_a_function_says():
    cost = Cost(forward=lambda m, s: 1 + m, backward=lambda m, s: 10 + s, first_stage="as-run")
    for event in simulate(SPLIT, cost).events:
        m, s = event.action.microbatch, event.action.stage
        halves = {"I": (10 + s) / 2 if s else 0, "W": (10 + s) / 2 if s else 10}
        assert event.duration == {"F": 1 + m, **halves}[event.action.kind]


def test_a_pair_in_one_slot_takes_what_a_function_says_of_its_forward():
    plan = Plan([[pipelab.F(0), pipelab.F(1) & pipelab.B(0), pipelab.F(2) & pipelab.B(1), pipelab.B(2)]])
    trace = simulate(plan, Cost(forward=1, backward=2, pair=lambda m, s: 10 * m, per="stage"))
    assert trace.ends[0] == (1, 11, 11, 31, 31, 33)
    plan = pipelab.DualPipe(2, 4).plan()
    cost = Cost(forward=1, backward=2, pair=lambda m, s: 10 * (m + 1), per="stage")
    trace = simulate(plan, cost, order="by-time", transport="rank")
    forwards = {plan.bound.codes.action(code) for code in plan.bound.pairs}
    found = [event for event in trace.events if event.action in forwards]
    assert found
    assert [event.duration for event in found] == [10 * (event.action.microbatch + 1) for event in found]
    assert pipelab.lower_bound(plan, cost) >= max(trace.busy)


def test_functions_are_shared_and_merged_too():
    cost = Cost(forward=lambda m, s: m + s, backward=[1, 2, 3, 4])
    assert cost.shared(2).forward(3, 1) == 2
    merged = cost.merged([1, 3])
    assert (merged.forward(1, 0), merged.forward(1, 1), merged.backward) == (1, 2 + 3 + 4, (1, 9))


@pytest.mark.parametrize("answer", [-1, None, float("nan"), "1"])
def test_a_function_that_returns_no_time_is_named_with_its_arguments(answer):
    cost = Cost(weight_grad=lambda m, s: answer if (m, s) == (1, 0) else 1)
    with pytest.raises(CostError, match=r"weight_grad\(microbatch=1, stage=0\) returned"):
        simulate(SPLIT, cost)


def test_a_function_of_other_arguments_is_refused_at_once():
    with pytest.raises(CostError, match=r"pipelab calls forward\(microbatch, stage\)"):
        Cost(forward=lambda stage: 1)
    with pytest.raises(CostError, match="all_reduce="):
        Cost(all_reduce=lambda m, s: 1)


# Fits of transfers and of split backwards


@given(catalogue_plans(), costs(), st.lists(costs(), min_size=24, max_size=24), st.sampled_from([0, 0.5]))
def test_transfers_are_fitted_from_a_trace_and_predict_it(plan, forward, sizes, latency):
    sizes = sizes[: plan.stages]
    cost = Cost(forward=forward, latency=latency, bandwidth=4, activation_bytes=sizes, boundary_gradient_bytes=2)
    trace = simulate(plan, cost)
    assert simulate(plan, Cost.fit(trace)).makespan == pytest.approx(trace.makespan)


def test_what_split_backwards_cost_is_fitted_from_a_second_trace_or_as_a_ratio():
    cost = Cost(forward=[1, 2], backward=4, input_grad=3, weight_grad=2, per="stage")
    whole, split = simulate(pipelab.GPipe(2, 4), cost), simulate(SPLIT, cost)
    fitted = Cost.fit(whole, split)
    assert (fitted.backward, fitted.input_grad, fitted.weight_grad) == ((4, 4), (3, 3), (2, 2))
    assert simulate(pipelab.ZBH1(2, 6), fitted) == simulate(pipelab.ZBH1(2, 6), cost)
    even = dataclasses.replace(cost, weight_grad=3)
    assert Cost.fit(simulate(pipelab.GPipe(2, 4), even), split=1.5).weight_grad == (3, 3)
    assert Cost.fit(simulate(SPLIT, even), split=1.5).backward == (4, 4)


def test_a_second_trace_that_does_not_fit_is_refused():
    trace = simulate(pipelab.GPipe(2, 4))
    for split in (simulate(pipelab.ZBH1(3, 3)), trace, 0, float("inf"), -1):
        with pytest.raises(CostError, match="split"):
            Cost.fit(trace, split)
    with pytest.raises(TypeError, match="split="):
        Cost.fit(trace, "1.1")


def measured(plan, cost, late=0.25):
    """Return a measured trace: as simulated, but each action starts late, by work that no action's own time shows."""
    ideal = simulate(plan, dataclasses.replace(cost, forward=cost.forward + late, backward=cost.backward + late))
    return measured_as(ideal, late)


def measured_as(ideal, late=0.0):
    """Return a measured trace with the times of a simulated one, each action's start late."""
    starts = [[start + late for start in row] for row in ideal.starts]
    return pipelab.Trace(ideal.plan, starts, ideal.ends, source="measured")


def test_work_between_actions_and_waits_for_values_are_seen_in_a_measured_trace():
    trace = measured(pipelab.GPipe(2, 32), Cost(forward=2, backward=4, latency=0.5))
    fitted = Cost.fit(trace)
    assert fitted.forward == (2.25, 2.25)
    assert fitted.backward[1] == 4.25
    predicted = simulate(pipelab.GPipe(2, 32), fitted).makespan
    assert predicted == pytest.approx(trace.makespan, rel=0.01)
    assert sum(event.duration for event in trace.events_of(0)) < 0.9 * predicted


def test_on_the_first_stage_of_a_measured_trace_a_weight_gradient_is_the_whole_backward():
    fitted = Cost.fit(measured(pipelab.GPipe(2, 4), Cost(), late=0), split=1.5)
    times = fitted.times(SPLIT)
    assert (times["I"], times["W"]) == ([0, 1.5], [2, 1.5])
    assert simulate(pipelab.GPipe(2, 4), fitted).note == ""


# Several steps


def steps_of(*factors, plan=None):
    """Return measured steps that take so many times as long as the quiet one, whose forwards take 2 and backwards 4."""
    plan = plan or pipelab.GPipe(2, 8)
    return [measured(plan, Cost(forward=2 * each, backward=4 * each), late=0) for each in factors]


def test_one_disturbed_step_of_several_changes_neither_the_fit_nor_its_predictions():
    quiet, disturbed = Cost.fit(steps_of(1)), Cost.fit(steps_of(3))
    fitted = Cost.fit(steps_of(1, 1, 3, 1, 1))
    assert (fitted.forward, fitted.backward) == (quiet.forward, quiet.backward) == ((2, 2), (4, 4))
    assert disturbed.forward == (6, 6)
    assert fitted.spread == (0, 0, 0, 0, 2)


def test_an_interval_is_as_wide_as_the_fitted_steps_are_apart():
    alike = Cost.fit([step for _ in range(5) for step in [steps_of(1)[0]]])
    assert alike.interval(22) == pytest.approx((22, 22))
    apart = [Cost.fit(steps_of(*times)) for times in ((0.9, 1, 1.1), (0.9, 0.9, 1, 1.1, 1.1))]
    few, five = (high / low for low, high in (each.interval(1) for each in apart))
    assert 1.21 < five < few
    with pytest.raises(CostError, match=r"-50% to \+200% off these costs, and half of their actions 0% or more"):
        Cost.fit(steps_of(0.5, 1, 1, 1, 3)).interval(1)
    low, high = apart[1].interval(10)
    assert low < 9
    assert high > 11
    assert apart[1].merged(1).interval(10) == (low, high)
    for cost in (Cost(), Cost.fit(steps_of(1, 1))):
        with pytest.raises(CostError, match="3 steps or more"):
            cost.interval(10)


def test_steps_that_hardly_differ_give_intervals_that_separate_similar_orders():
    cost = Cost.fit(steps_of(0.999, 1, 1, 1.001, 1.002))
    (_, quick), (slow, high) = cost.interval(505), cost.interval(551)
    assert quick < slow
    assert high / slow < 1.01


def test_actions_that_differ_within_equal_steps_make_an_interval_wider():
    uneven = Cost(forward=lambda m, s: 2 + 0.2 * (m % 2), backward=lambda m, s: 4 + 0.4 * (m % 2))
    cost = Cost.fit([measured_as(simulate(pipelab.GPipe(1, 8), uneven))] * 5, typical="mean")
    assert cost.spread == pytest.approx([0] * 5)
    assert cost.variation == pytest.approx(0.1 / 2.1)
    low, high = cost.interval(1)
    assert low * high == pytest.approx(1)
    assert 1.05 < high < 1.1  # another order may have more of the slow ones where they count
    with pytest.raises(CostError, match="half of their actions 30% or more off the usual"):
        dataclasses.replace(cost, variation=0.3).interval(1)


def test_an_interval_knows_how_far_the_split_steps_are_too():
    whole = steps_of(1, 1, 1)
    apart = [measured(pipelab.ZBH1(2, 8), Cost(forward=2 * each, backward=4 * each), late=0) for each in (1, 1, 1.3)]
    cost = Cost.fit(whole, apart)
    assert cost.spread == pytest.approx((0, 0, 0, 0, 0, 0.3))
    assert cost.interval(1)[1] > 1.2
    assert Cost.fit(whole, 1.1).interval(1) == (1, 1)


def test_the_spread_says_how_far_each_step_is_from_what_the_costs_predict():
    assert Cost.fit(steps_of(1)).spread == (0,)
    fitted = Cost.fit(steps_of(1, 1.1, 0.9))
    assert fitted.spread == pytest.approx((-0.1, 0, 0.1))
    assert fitted.merged(1).spread == fitted.shared(2).spread == fitted.spread
    orders = [*steps_of(1), *steps_of(1.2, 1, plan=pipelab.OneFOneB(2, 4))]  # the makespans themselves cannot compare
    assert Cost.fit(orders).spread == pytest.approx((0, 0, 0.2))
    assert Cost(spread=[1, 2]) == Cost()


def test_a_step_whose_actions_differ_is_warned_of_even_if_it_is_the_only_one():
    cost = Cost(forward=lambda m, s: 2 + m % 2, backward=lambda m, s: 4 + 2 * (m % 2))  # every other one is disturbed
    (noisy,), (quiet,) = [measured_as(simulate(pipelab.GPipe(2, 8), cost))], steps_of(1)
    with pytest.warns(UserWarning, match=r"timings vary by 2\d % [^|]*try: Cost.fit\(\[") as found:
        Cost.fit(noisy)
    assert found[0].filename == __file__
    with pytest.warns(UserWarning, match="timings vary"):
        Cost.fit([noisy, noisy, noisy])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Cost.fit([quiet, noisy, quiet])
        Cost.fit(simulate(pipelab.GPipe(2, 8), cost))  # nothing disturbs a simulation


def test_steps_with_split_backwards_are_fitted_together_too():
    cost = Cost(forward=[1, 2], backward=4, input_grad=3, weight_grad=2, per="stage")
    slow = Cost(forward=9, backward=9, input_grad=9, weight_grad=9, per="stage")
    steps = ([simulate(plan, each) for each in (cost, slow, cost)] for plan in (pipelab.GPipe(2, 4), SPLIT))
    fitted = Cost.fit(*steps)
    assert (fitted.forward, fitted.backward, fitted.input_grad) == ((1, 2), (4, 4), (3, 3))


def test_traces_of_other_stages_units_or_sources_are_refused():
    trace = simulate(pipelab.GPipe(2, 4))
    for other in (simulate(pipelab.GPipe(3, 4)), simulate(trace.plan, Cost(unit="ms")), *steps_of(1)):
        with pytest.raises(CostError, match="stages"):
            Cost.fit([trace, other])


# Fewer stages than a trace had


def test_a_fine_trace_predicts_coarser_cuts():
    fine = Cost(forward=[1, 2, 3, 4], backward=[2, 3, 4, 5], latency=0.5, per="stage")
    fitted = Cost.fit(simulate(pipelab.LoopedBFS(2, 4), fine))
    coarse = Cost(forward=[3, 7], backward=[5, 9], latency=0.5, per="stage")
    assert simulate(pipelab.OneFOneB(2, 6), fitted.merged(2)) == simulate(pipelab.OneFOneB(2, 6), coarse)


def test_merged_stages_send_what_their_outer_stages_sent():
    fine = Cost(activation_bytes=[1, 2, 3, 4], boundary_gradient_bytes=[5, 6, 7, 8], per="stage")
    merged = fine.merged([1, 3])
    assert (merged.activation_bytes, merged.boundary_gradient_bytes) == ((1, 4), (5, 6))
    assert merged.forward == (1, 3)
    assert dataclasses.replace(fine, per="rank").merged(2).forward == 1


@pytest.mark.parametrize("stages", [3, 8, [1, 2], [4, 4]], ids=str)
def test_stages_that_do_not_add_up_are_refused(stages):
    with pytest.raises(CostError, match="4 stages cannot be merged"):
        Cost(forward=[1, 2, 3, 4]).merged(stages)
    with pytest.raises(CostError, match="one number per stage"):
        Cost(forward=1).merged(2)
    with pytest.raises(CostError, match=r"cost.merged\(2\)"):
        simulate(pipelab.GPipe(2, 2), Cost(forward=[1, 2, 3, 4]))
