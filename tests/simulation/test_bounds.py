"""No legal plan of the same actions is quicker than their lower bound."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import catalogue_plans, costs, legal_cases, reduced

import pipelab
from pipelab import Cost, F, Plan, ScheduleError, compare, lower_bound, schedules, simulate
from pipelab.errors import CostError, UsageError


def reordered(plan, random):
    """Return a random legal plan of the same actions on the same ranks; pairs are taken apart."""
    graph = plan.graph()
    lacks = {
        action: {giver for giver, _, edge in graph.in_edges(action, data=True) if edge["kind"] == "data"}
        for action in graph
    }
    rows = [[] for _ in range(plan.ranks)]
    done = set()
    while len(done) < len(lacks):
        action = random.choice([each for each, givers in lacks.items() if each not in done and givers <= done])
        done.add(action)
        where = graph.nodes[action]
        for rank in where.get("ranks", [where.get("rank")]):
            rows[rank].append(action)
    return Plan(rows, plan.stages, plan.microbatches, plan.place)


def drawn_cost(data, plan, **more):
    """Return a random cost, one number per stage, that all orders of a plan share."""
    per_stage = st.lists(costs(), min_size=plan.stages, max_size=plan.stages)
    names = ("forward", "backward", "input_grad", "weight_grad")
    same = data.draw(st.booleans())  # costs that all stages share make ties
    times = {name: data.draw(costs()) if same else data.draw(per_stage) for name in names}
    reduce = [3.0 * (stage in reduced(plan)) for stage in range(plan.stages)]
    return Cost(**times, all_reduce=reduce, latency=data.draw(st.sampled_from([0, 0.5, 3])), per="stage", **more)


def at_most(bound, makespan):
    return bound <= makespan * (1 + 1e-9)


@given(legal_cases(), st.data(), st.randoms(use_true_random=False))
def test_no_random_plan_of_the_same_actions_is_below_the_bound(case, data, random):
    cost = drawn_cost(data, case.plan)
    bound = lower_bound(case.plan, cost)
    for plan in (case.plan, reordered(case.plan, random), reordered(case.plan, random)):
        trace = simulate(plan, cost)
        assert at_most(bound, trace.makespan)
        assert lower_bound(plan, cost) == pytest.approx(bound)
        assert lower_bound(trace) == pytest.approx(bound)
        peaks = [max(1, peak) for peak in trace.peak_activations]
        assert at_most(lower_bound(plan, cost, memory_cap=peaks), trace.makespan)


@given(legal_cases(), st.data(), costs())
def test_no_plan_with_pairs_in_one_slot_is_below_the_bound(case, data, pair):
    cost = drawn_cost(data, case.plan, pair=pair)
    try:
        trace = simulate(case.plan, cost)
    except ScheduleError:  # with each pair as one slot, it would deadlock
        assume(False)
    peaks = [max(1, peak) for peak in trace.peak_activations]
    assert at_most(lower_bound(case.plan, cost), trace.makespan)
    assert at_most(lower_bound(case.plan, cost, memory_cap=peaks), trace.makespan)
    assert at_most(lower_bound(trace, memory_cap=peaks), trace.makespan)


@given(catalogue_plans(), st.data(), st.randoms(use_true_random=False))
def test_no_schedule_and_no_order_of_its_actions_is_below_the_bound(plan, data, random):
    cost = drawn_cost(data, plan)
    bound = lower_bound(plan, cost)
    trace = simulate(plan, cost)
    assert at_most(bound, trace.makespan)
    assert at_most(lower_bound(plan, cost, memory_cap=trace.peak_activations), trace.makespan)
    if plan.stages * plan.microbatches <= 24:
        other = simulate(reordered(plan, random), cost)
        assert at_most(bound, other.makespan)
        assert at_most(lower_bound(plan, cost, memory_cap=other.peak_activations), other.makespan)


@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 8), st.booleans(), st.sampled_from([0, 0.5, 3]))
def test_no_order_of_a_greedy_policy_is_below_the_bound_of_its_memory_cap(ranks, count, cap, split, latency):
    cost = Cost(latency=latency)
    plan = pipelab.Greedy(ranks, count, memory_cap=cap, cost=cost, split=split).plan()
    assert at_most(lower_bound(plan, cost, memory_cap=cap), simulate(plan, cost).makespan)


SLOWER = {"naive", "delayed", "gems", "chimera", "v-1f1b", "v-half", "v-min", "hanayo", "bitpipe", "zeropp"}
"""For less memory or fewer gathers, or by a policy that is not the best."""


@pytest.mark.parametrize("name", sorted(set(schedules) - SLOWER))
def test_the_bound_is_exact_for_the_catalogues_schedules_without_latency(name):
    plan = schedules[name](4, 8).plan()
    assert simulate(plan).makespan == lower_bound(plan)


@pytest.mark.parametrize(
    ("schedule", "cost", "cap", "bound"),
    [
        (pipelab.OneFOneB(4, 8), Cost(), None, 33),
        (pipelab.OneFOneB(4, 8), Cost(), 4, 33),
        (pipelab.OneFOneB(4, 8), Cost(), 3, 39),
        (pipelab.OneFOneB(4, 8), Cost(), 1, 96),
        (pipelab.OneFOneB(4, 8), Cost(latency=0.5), None, 36),
        (pipelab.ZBH1(4, 8), Cost(), 4, 27),
        (pipelab.Interleaved1F1B(3, 4), Cost(forward=1, backward=1, per="stage"), 6, 20),
    ],
)
def test_the_bound_of_known_optima(schedule, cost, cap, bound):
    assert lower_bound(schedule, cost, memory_cap=cap) == bound


def test_a_lower_cap_never_lowers_the_bound():
    bounds = [lower_bound(pipelab.ZBH1(4, 8), memory_cap=cap) for cap in range(8, 0, -1)]
    assert bounds == sorted(bounds)
    assert bounds[0] == lower_bound(pipelab.ZBH1(4, 8))


@pytest.mark.sweep
@pytest.mark.parametrize("name", schedules)
@pytest.mark.parametrize("copies", [1, 2])
def test_without_a_cap_the_bound_is_the_one_with_a_cap_that_all_activations_fit_under(name, copies):
    plan = pipelab.replicate(schedules[name](2, 4), copies).plan() if copies > 1 else schedules[name](4, 8).plan()
    costs = (
        Cost(latency=0.25, all_reduce=3),
        Cost(forward=lambda m, s: 1 + (3 * m + s) % 2, backward=2.5, latency=0.5),  # two kinds of micro-batches
        Cost(forward=lambda m, s: 1 + 0.1 * m + 0.01 * s, backward=2),  # each another one
    )
    for cost in costs:
        for subject in ((plan, cost), (simulate(plan, cost),)):
            fits = lower_bound(*subject, memory_cap=plan.stages * plan.microbatches)
            assert lower_bound(*subject) == pytest.approx(fits, rel=1e-12)


def test_a_measured_traces_actions_take_as_long_as_they_took():
    simulated = simulate(pipelab.OneFOneB(2, 2), Cost(forward=1, backward=2))
    measured = pipelab.Trace(simulated.plan, simulated.starts, simulated.ends, "ms", "measured")
    assert lower_bound(measured) == 9
    late = [[time + 100 * (rank == 1) for time in row] for rank, row in enumerate(simulated.ends)]
    assert lower_bound(pipelab.Trace(simulated.plan, simulated.starts, late, "ms", "measured")) > 9


def test_a_comparison_has_a_column_for_the_bound_only_if_asked():
    subjects = (pipelab.DelayedBackward(4, 8), simulate(pipelab.ZBH2(4, 8)))
    assert [row.bound for row in compare(*subjects).rows] == [None, None]
    assert [row.bound for row in compare(*subjects, bound=True).rows] == [33, 27]
    assert "163.6 %" in str(compare(*subjects, bound=True))
    assert "without C" not in str(compare(*subjects, bound=True))
    assert "bound" not in str(compare(*subjects))


def test_an_order_that_recomputes_is_compared_with_one_that_does_not_too():
    plain = pipelab.OneFOneB(4, 8)
    found = compare(pipelab.with_recompute(plain), plain, cost=Cost(recompute=1), bound=True)
    assert [row.bare_bound for row in found.rows] == [found.rows[1].bound] * 2
    assert found.rows[0].bound > found.rows[1].bound
    assert "without C" in str(found)


def test_bounds_are_computed_once_and_the_one_without_recomputations_only_for_plans_that_have_some(monkeypatch):
    def counting(trace, *, bare=False):
        asked.append((trace.plan.name, bare))
        return lower_bound(trace, bare=bare)

    asked = []
    monkeypatch.setattr("pipelab.simulation.comparison.lower_bound", counting)
    plain = pipelab.OneFOneB(2, 2).plan()
    again = pipelab.with_recompute(plain)
    found = compare(plain, again, bound=True)
    assert found.rows == found.rows
    assert asked == [(plain.name, False), (again.name, False), (again.name, True)]


@pytest.mark.parametrize(
    ("given_", "cap", "error", "told"),
    [
        ((simulate(pipelab.GPipe(2, 2)), Cost()), None, CostError, "own times"),
        ((pipelab.GPipe(2, 2), 3), None, TypeError, "expected a Cost"),
        ((pipelab.GPipe(2, 2),), [1], UsageError, "memory_cap has 1 number for 2 ranks"),
        ((Plan([[F(0)]]),), None, ScheduleError, "missing"),
    ],
)
def test_what_is_no_subject_or_cap_is_refused(given_, cap, error, told):
    with pytest.raises(error, match=told):
        lower_bound(*given_, memory_cap=cap)
