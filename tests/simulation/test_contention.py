"""Transfers that occupy their sender, or slow down the work beside them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import costs, legal_cases, reduced

import pipelab
from pipelab import Cost, Plan, ScheduleError, simulate
from pipelab.errors import CostError
from pipelab.simulation.contention import contended


def union(spans):
    """Return spans that overlap as one."""
    joined = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(end, joined[-1][1])
        else:
            joined.append([start, end])
    return joined


@given(legal_cases(), costs(), costs(), costs())
def test_without_contention_everything_happens_when_the_plain_clock_says(case, forward, backward, latency):
    plan = case.plan
    cost = Cost(forward=forward, backward=backward, all_reduce=1.5, latency=latency, per="stage")
    trace = simulate(plan, cost)
    begun, ended, _ = contended(trace.plan, cost, None)
    rows = trace.plan.bound.rows
    assert [[begun[code] for code in row] for row in rows] == [list(row) for row in trace.starts]
    assert [[ended[code] for code in row] for row in rows] == [list(row) for row in trace.ends]


@given(legal_cases(), costs(), st.sampled_from([0.25, 1, 4]), st.sampled_from([1, 1.5, 3]), st.booleans())
def test_each_action_does_its_work_at_the_speed_that_transfers_leave(case, time, latency, slowdown, busy):
    plan = case.plan
    cost = Cost(
        forward=time,
        backward=2 * time,
        latency=latency,
        slowdown=slowdown,
        sender="busy" if busy else "free",
        all_reduce=1 if reduced(plan) else 0,
        per="stage",
    )
    trace = simulate(plan, cost)
    lasts = {"F": time, "B": 2 * time, "I": time, "W": time}
    for rank in range(plan.ranks):
        moving = union((each.start, each.end) for each in trace.transfers if rank in (each.source, each.target))
        free = 0.0
        for event in trace.events_of(rank):
            arrivals = [t.end for t in trace.transfers if t.target == rank and t.needer == event.action]
            if busy:
                sent = [t.end for t in trace.transfers if t.source == rank and t.start <= free]
                free = max([free, *sent])
            if event.action.kind == "R":
                assert event.duration == pytest.approx(1)
            else:
                beside = sum(max(0, min(event.end, end) - max(event.start, start)) for start, end in moving)
                assert event.duration - beside * (1 - 1 / slowdown) == pytest.approx(lasts[event.action.kind])
                assert event.start == pytest.approx(max([free, *arrivals]))
            free = event.end


@given(legal_cases(), st.sampled_from([0, 0.5]))
def test_a_pair_as_one_slot_is_one_slot_beside_transfers_too(case, latency):
    cost = Cost(forward=1, backward=2, pair=2.5, latency=latency, per="stage")
    try:
        trace = simulate(case.plan, cost)
    except ScheduleError:  # its pairs only run one half after the other
        return
    begun, ended, _ = contended(trace.plan, cost, cost.pair_times(trace.plan))
    assert [[begun[code] for code in row] for row in trace.plan.bound.rows] == [list(row) for row in trace.starts]
    assert [[ended[code] for code in row] for row in trace.plan.bound.rows] == [list(row) for row in trace.ends]


def test_a_busy_sender_starts_nothing_before_its_value_has_arrived():
    plan = Plan.parse(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"])
    trace = simulate(plan, Cost(forward=1, backward=1, latency=2, sender="busy"))
    assert [event.start for event in trace.events_of(0)] == [0, 3, 10, 13]
    assert [event.start for event in trace.events_of(1)] == [3, 6, 7, 10]
    assert trace.busy == (4, 4)


def test_words_and_factors_that_make_no_sense_are_refused():
    for wrong in ({"sender": "lazy"}, {"slowdown": 0.5}, {"slowdown": [1, 2]}, {"slowdown": None}):
        with pytest.raises(CostError, match=next(iter(wrong))):
            Cost(**wrong)
    assert simulate(pipelab.GPipe(2, 2), Cost(sender="busy", slowdown=2)) == simulate(pipelab.GPipe(2, 2))


@pytest.mark.parametrize("more", [{"sender": "busy"}, {"slowdown": 2}], ids=str)
def test_transfers_in_queues_do_not_keep_ranks_busy_as_well(more):
    with pytest.raises(CostError, match="transport='rank'"):
        simulate(pipelab.GPipe(2, 2), Cost(**more), transport="rank")
