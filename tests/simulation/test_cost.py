"""Costs: fitted from a trace, they predict it again."""

from __future__ import annotations

import pytest
from hypothesis import given
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


@pytest.mark.parametrize("taken", [pipelab.GPipe(2, 4), [1, 2], None], ids=str)
def test_a_fit_of_anything_but_a_trace_says_which_trace(taken):
    with pytest.raises(TypeError, match=r"^Cost.fit takes a trace, from step.trace or simulate, got "):
        Cost.fit(taken)


def test_a_fit_for_other_stages_is_refused_with_the_next_move():
    fitted = Cost.fit(simulate(pipelab.GPipe(2, 4)))
    with pytest.raises(CostError) as refusal:
        simulate(pipelab.GPipe(4, 4), fitted)
    assert str(refusal.value).startswith("forward has 2 numbers for 4 stages: give one number, or one per stage; ")
    assert "for 4 stages, run the model with so many and fit that trace" in str(refusal.value)


def test_micro_batches_share_what_grows_with_the_rows_and_nothing_else():
    whole = Cost(
        forward=[8, 4], backward=16, input_grad=6, pair=24, all_reduce=5, latency=3, bandwidth=2,
        activation_bytes=64, boundary_gradient_bytes=[8, 16], parameter_bytes=7, per="stage", unit="ms",
    )  # fmt: skip
    assert whole.shared(4) == Cost(
        forward=[2, 1], backward=4, input_grad=1.5, pair=6, all_reduce=5, latency=3, bandwidth=2,
        activation_bytes=16, boundary_gradient_bytes=[2, 4], parameter_bytes=7, per="stage", unit="ms",
    )  # fmt: skip
    assert whole.shared(1) == whole
    with pytest.raises(UsageError, match="microbatches=0"):
        whole.shared(0)


def test_an_all_reduce_costs_the_same_whether_it_is_listed_or_not():
    assert simulate(REPLICATED, Cost(all_reduce=5)).makespan == 8
    silent = Plan.parse(["0F0 0B0", "0F1 0B1"])
    assert simulate(silent, Cost(all_reduce=5)) == simulate(REPLICATED, Cost(all_reduce=5))
    assert simulate(silent, Cost(all_reduce=5)).makespan == 8
    assert simulate(silent).makespan == 3


def test_a_comparison_says_that_stage_0_ran_as_pytorch_runs_it():
    uniform, as_run = (simulate(SPLIT, Cost(first_stage=how)) for how in ("uniform", "as-run"))
    names = pipelab.compare(uniform, as_run).names
    assert "stage 0 as run" in names[1]
    assert "stage 0" not in names[0]
