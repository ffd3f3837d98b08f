"""Comparing traces, and the chain of actions that a makespan hangs on."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import catalogue_plans, costs, legal_cases, reduced

import pipelab
from pipelab import Cost, F, Pair, Plan, ScheduleError, Trace, compare, simulate
from pipelab.errors import CostError, UsageError

# The critical path


def assert_hangs_together(trace):
    path = trace.critical_path
    assert path[0].start == trace.start
    assert path[-1].end == trace.end
    ends = {(transfer.giver, transfer.needer): transfer.end for transfer in trace.transfers}
    assert set(path) <= set(trace.events)
    edges = trace.plan.graph().edges
    slots = {}
    for row in trace.plan.rows:
        for item in row:
            if isinstance(item, Pair):
                slots[item.forward] = slots[item.backward] = (item.forward, item.backward)
    for before, after in pairwise(path):
        steps = [(one, other) for one in slots.get(before.action, (before.action,))
                 for other in slots.get(after.action, (after.action,))]  # fmt: skip
        assert any(ends.get(step, before.end) == after.start for step in steps) or before.end == after.start
        assert any(step in edges for step in steps)
    return path


@given(legal_cases(), costs(), costs(), st.sampled_from([0, 0.5, 3]), st.none() | costs())
def test_the_critical_path_is_one_chain_as_long_as_the_makespan(case, forward, backward, latency, pair):
    reduces = [float(stage in reduced(case.plan)) for stage in range(case.plan.stages)]
    cost = Cost(forward=forward, backward=backward, latency=latency, pair=pair, all_reduce=reduces, per="stage")
    try:
        trace = simulate(case.plan, cost)
    except ScheduleError:
        assert pair is not None
        return
    path = assert_hangs_together(trace)
    travels = sum(after.start - before.end for before, after in pairwise(path))
    assert sum(event.duration for event in path) + travels == pytest.approx(trace.makespan)
    if latency == 0:
        assert travels == 0


@given(catalogue_plans(), costs(), costs())
def test_the_critical_path_of_every_schedule_is_one_chain(plan, forward, backward):
    assert_hangs_together(simulate(plan, Cost(forward=forward, backward=backward)))


def test_the_critical_path_of_naive_is_everything_and_of_nothing_is_empty():
    trace = simulate(pipelab.Naive(3, 2))
    assert len(trace.critical_path) == len(trace.events)
    assert Trace(Plan([[]], 1, 1), [[]], [[]]).critical_path == ()


def test_a_pairs_slot_hangs_on_whichever_half_came_last():
    plan = Plan([[F(0, 0), F(1, 0) & pipelab.B(0, 0), pipelab.B(1, 0)],
                 [F(0, 1), pipelab.B(0, 1), F(1, 1), pipelab.B(1, 1)]])  # fmt: skip
    trace = simulate(plan, Cost(forward=1, backward=2, pair=3))
    path = trace.critical_path
    assert [str(event.action) for event in path][:3] == ["0F0", "1F0", "1B0"]
    assert path[3].start == 4


@pytest.mark.parametrize("backward", [0, 2])
def test_forwards_that_take_no_time_make_no_slots_of_their_pairs(backward):
    pairs = [[F(0, s), F(1, s) & pipelab.B(0, s), pipelab.B(1, s)] for s in range(2)]
    trace = simulate(Plan(pairs, 2, 2), Cost(forward=0, backward=backward))
    assert_hangs_together(trace)


# Comparing


def test_a_comparison_has_one_row_per_trace_with_its_figures():
    gpipe, one = simulate(pipelab.GPipe(4, 8)), simulate(pipelab.OneFOneB(4, 8), Cost(unit="ms"))
    both = compare(gpipe, one)
    assert [row.name for row in both.rows] == [
        "GPipe(ranks=4, microbatches=8), simulated",
        "OneFOneB(ranks=4, microbatches=8), simulated",
    ]
    row = both.rows[1]
    assert (row.makespan, row.unit, row.source, row.bubble) == (33, "ms", "simulated", one.bubble)
    assert row.peak_activations == (4, 3, 2, 1)
    assert row.peak_share == (4 / 8, 3 / 8, 2 / 8, 1 / 8)
    assert row.busy_share == (24 / 33,) * 4
    assert both.traces == (gpipe, one)


@pytest.mark.parametrize(
    ("plan", "cost", "peaks", "busy"),
    [
        (Plan.parse("0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1"), Cost(), (1.0,), (1.0,)),  # of what the rank ever holds
        (Plan([[F(0, 0), pipelab.B(0, 0)], []]), Cost(), (1.0, 0.0), (1.0, 0.0)),
        (pipelab.GPipe(1, 1).plan(), Cost(forward=0, backward=0), (1.0,), (0.0,)),
    ],
)
def test_shares_are_of_what_a_rank_could_hold_and_do(plan, cost, peaks, busy):
    (row,) = compare(simulate(plan, cost)).rows
    assert (row.peak_share, row.busy_share) == (peaks, busy)


def test_traces_share_an_axis_only_if_they_share_a_unit():
    ideal, ms = simulate(pipelab.GPipe(2, 2)), simulate(pipelab.GPipe(2, 2), Cost(unit="ms"))
    assert compare(ideal, ideal, names=["theory", "again"]).names == ("theory", "again")
    assert compare(ideal, ideal).shares_axis
    assert not compare(ideal, ms).shares_axis


def test_plans_and_schedules_are_simulated_before_they_are_compared():
    cost = Cost(forward=50, backward=80, unit="ms")
    schedule = pipelab.OneFOneB(2, 4)
    assert compare(schedule, schedule.plan()).traces == (simulate(schedule), simulate(schedule))
    measured = simulate(pipelab.GPipe(2, 4), Cost(forward=1, backward=1, unit="s"))
    assert compare(measured, schedule, cost=cost).traces == (measured, simulate(schedule, cost))
    assert compare(schedule).names == ("OneFOneB(ranks=2, microbatches=4), simulated",)


TRACE = simulate(pipelab.OneFOneB(2, 2))


@pytest.mark.parametrize(
    ("subjects", "options", "error", "told"),
    [
        ([], {}, UsageError, "at least one"),
        ([TRACE, TRACE], {"names": ["one"]}, UsageError, "1 name for 2 traces"),
        ([TRACE, 3], {}, TypeError, "compare takes traces, plans and schedules, one by one, got 3"),
        ([SimpleNamespace(trace=TRACE)], {}, TypeError, "one by one, got namespace.*: take its trace$"),
        ([[TRACE, TRACE]], {}, TypeError, r"one by one, got \[<simulated"),
        ([TRACE, "gpipe"], {}, TypeError, r"make a schedule with pipelab.schedules\['gpipe'\]\(ranks=4"),
        ([TRACE, pipelab.GPipe], {}, TypeError, r"got the class GPipe: make a schedule with GPipe\(ranks=4"),
        ([TRACE], {"cost": Cost()}, CostError, "traces have their own times"),
        ([Plan.parse(["0F0"])], {}, ScheduleError, "missing"),
    ],
)
def test_what_cannot_be_compared_is_refused(subjects, options, error, told):
    with pytest.raises(error, match=told):
        compare(*subjects, **options)
