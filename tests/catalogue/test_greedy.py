"""Greedy: whenever a rank is free, it runs what the policy likes best; never over the cap."""

from __future__ import annotations

import itertools
from zlib import crc32

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import costs, sizes

import pipelab
from pipelab import B, Cost, F, GPipe, Greedy, OneFOneB, ScheduleError, check, simulate
from pipelab.catalogue.greedy import policies
from pipelab.errors import CostError, UsageError


def placed(table, stages):
    """Return a kind of Greedy with this placement: for every micro-batch in turn, the rank of each stage."""

    class Placed(Greedy):
        @property
        def stages(self):
            return stages

        def place(self, microbatch, stage):
            return table[microbatch * stages + stage]

    return Placed


def whims():
    """Priorities that follow no plan, but always say the same."""
    return st.integers(0, 10**6).map(lambda seed: lambda action, rank, _: crc32(f"{seed} {action} {rank}".encode()) % 7)


def priorities():
    """Priorities with a name, and without."""
    return st.sampled_from(sorted(policies)) | whims()


@st.composite
def placements(draw):
    """(ranks, stages, micro-batches, table): any placement, of which some visit a rank again or go several ways."""
    ranks, stages, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 8))
    ways = [draw(st.lists(st.integers(0, ranks - 1), min_size=stages, max_size=stages)) for _ in range(3)]
    which = draw(st.lists(st.integers(0, draw(st.integers(0, 2))), min_size=microbatches, max_size=microbatches))
    return ranks, stages, microbatches, [rank for each in which for rank in ways[each]]


def peaks(row):
    """The most stage activations that a row holds at once."""
    held = itertools.accumulate({"F": 1, "B": -1, "W": -1}.get(item.kind, 0) for item in row)
    return max(held, default=0)


# Never over the cap


@given(placements(), priorities(), st.booleans(), st.data())
def test_every_plan_keeps_to_its_cap_and_every_cap_that_is_a_deadlock_is_reported(placement, priority, split, data):
    ranks, stages, microbatches, table = placement
    caps = data.draw(st.lists(st.integers(1, 6), min_size=ranks, max_size=ranks))
    cost = Cost(
        forward=data.draw(costs()), backward=data.draw(costs()), latency=data.draw(st.sampled_from([0, 0.5, 4]))
    )
    kind = placed(table, stages)
    try:
        plan = kind(ranks, microbatches, priority=priority, memory_cap=caps, cost=cost, split=split).plan()
    except ScheduleError as error:
        for fault in error.faults:
            assert fault.code == "deadlock"
            assert table[fault.action.microbatch * stages + fault.action.stage] == fault.rank
            assert f"(memory_cap {caps[fault.rank]})" in fault.message
        return
    assert oracle.legal(plan.rows, stages, microbatches, lambda m, s: table[m * stages + s])
    assert check(plan, memory_cap=caps) == []
    assert all(peaks(row) <= cap for row, cap in zip(plan.rows, caps, strict=True))


@given(sizes(), priorities(), st.booleans(), st.data())
def test_no_cap_is_a_deadlock_with_one_stage_per_rank(size, priority, split, data):
    caps = data.draw(st.lists(st.integers(1, 4), min_size=size[0], max_size=size[0]))
    assert check(Greedy(*size, priority=priority, memory_cap=caps, split=split)) == []


@given(placements(), priorities(), st.booleans())
def test_without_a_cap_every_placement_runs(placement, priority, split):
    ranks, stages, microbatches, table = placement
    assert check(placed(table, stages)(ranks, microbatches, priority=priority, split=split)) == []


@pytest.mark.parametrize(("split", "release"), [(False, "0B0"), (True, "0W0")])
def test_a_cap_that_is_a_deadlock_is_reported_with_rank_cap_and_what_it_waits_for(split, release):
    schedule = Greedy(4, 8, stages_per_rank=2, memory_cap=4, split=split)
    (fault,) = check(schedule)
    assert (fault.code, fault.rank, fault.action) == ("deadlock", 0, F(0, 4))
    assert fault.message == (
        f"rank 0 holds 4 activations (memory_cap 4): 4F0 cannot start before {release} releases one, "
        f"and {release} waits too"
    )
    assert fault.hint == "give rank 0 a memory_cap of more than 4, or none"
    with pytest.raises(ScheduleError, match=r"^1 fault in Greedy\(ranks=4, "):
        schedule.plan()
    assert check(Greedy(4, 8, stages_per_rank=2, memory_cap=5, split=split)) == []


# What is run, and when


@given(sizes(), st.integers(1, 3), priorities(), st.booleans(), costs(), costs(), st.sampled_from([0, 0.5, 3]))
def test_a_free_rank_runs_at_once_what_it_likes_best(
    size, stages_per_rank, priority, split, forward, backward, latency
):
    cost = Cost(forward=forward, backward=backward, latency=latency, per="stage")
    trace = simulate(Greedy(*size, stages_per_rank, priority=priority, cost=cost, split=split), cost)
    priority = policies.get(priority, priority)
    stages, microbatches = trace.plan.stages, trace.plan.microbatches
    given_at = {value: event for event in trace.events for value in oracle.gives(event.action)}
    for rank in range(trace.ranks):
        events = trace.events_of(rank)
        there = []
        for event in events:
            arrivals = [0.0]
            for value in oracle.needs(event.action, stages, microbatches):
                giver = given_at[value]
                arrivals.append(giver.end + latency * (giver.rank != rank))
            there.append(max(arrivals))
        free = 0.0
        for at, event in enumerate(events):
            assert event.start == max(free, min(there[at:])), "it waits only while it can run nothing"
            ready = [
                each.action for each, arrival in zip(events[at:], there[at:], strict=True) if arrival <= event.start
            ]
            liked = [(priority(each, rank, None), -each.microbatch, each.stage) for each in ready]
            assert liked[0] == max(liked)
            free = event.end


@given(sizes(), costs(), costs(), st.sampled_from([0, 0.5, 3]))
def test_backward_first_with_room_for_the_ranks_to_come_is_1f1b(size, forward, backward, latency):
    ranks, microbatches = size
    cost = Cost(forward=forward, backward=backward, latency=latency)
    greedy = Greedy(ranks, microbatches, memory_cap=[ranks - rank for rank in range(ranks)], cost=cost)
    assert greedy.plan() == OneFOneB(ranks, microbatches).plan()


@given(sizes(), costs(), costs(), st.sampled_from([0, 0.5, 3]))
def test_forward_first_without_a_cap_is_gpipe(size, forward, backward, latency):
    cost = Cost(forward=forward, backward=backward, latency=latency)
    assert Greedy(*size, priority="forward-first", cost=cost).plan() == GPipe(*size).plan()


@given(sizes())
def test_a_cap_of_one_sends_one_microbatch_after_the_other_through_all_ranks(size):
    assert all([item.kind for item in row] == ["F", "B"] * size[1] for row in Greedy(*size, memory_cap=1).plan().rows)


@given(sizes(), costs())
def test_weight_gradients_fill_the_bubble(size, time):
    """Zero bubble's makespan is the bound: the last rank starts after the others' forwards, and never waits."""
    ranks, microbatches = size
    cost = Cost(forward=time, backward=2 * time)
    split = simulate(Greedy(*size, cost=cost, split=True), cost).makespan
    assert split <= simulate(OneFOneB(*size), cost).makespan
    if microbatches >= 2 * ranks:
        assert split == pytest.approx(3 * time * microbatches + (ranks - 1) * time)


def test_times_that_floats_add_up_differently_count_as_one():
    cost = Cost(forward=0.1, backward=0.2)
    assert Greedy(4, 64, priority="forward-first", cost=cost).plan() == GPipe(4, 64).plan()
    cost = Cost(forward=1 / 3, backward=0.7)
    assert Greedy(6, 64, memory_cap=[6, 5, 4, 3, 2, 1], cost=cost).plan() == OneFOneB(6, 64).plan()


def test_actions_that_take_no_time_do_not_stop_the_clock():
    assert check(Greedy(3, 4, cost=Cost(forward=0, backward=0), split=True)) == []
    assert check(Greedy(3, 4, cost=Cost(first_stage="as-run"), split=True)) == []


def test_a_slow_stage_is_planned_for():
    cost = Cost(forward=[1, 1, 3, 1], backward=[2, 2, 6, 2])
    planned = simulate(Greedy(4, 8, cost=cost, split=True), cost)
    assert planned.makespan < simulate(OneFOneB(4, 8), cost).makespan
    slow = planned.events_of(2)
    assert all(before.end == after.start for before, after in itertools.pairwise(slow)), "the slow rank never waits"


def test_a_priority_sees_the_action_the_rank_and_the_moment():
    seen = []

    def spy(action, rank, moment):
        seen.append((str(action), rank, moment.time, moment.held, str(moment.last)))
        return action.kind == "B"

    Greedy(1, 2, priority=spy).plan()
    assert seen == [
        ("0F0", 0, 0, 0, "None"),
        ("0F1", 0, 0, 0, "None"),
        ("0B0", 0, 1, 1, "0F0"),
        ("0F1", 0, 1, 1, "0F0"),
        ("0F1", 0, 3, 0, "0B0"),
        ("0B1", 0, 4, 1, "0F1"),
    ]


def test_a_priority_may_reverse_the_backwards_as_gpipes_paper_does():
    def reverse(action, rank, moment):
        return (action.kind == "F", action.microbatch if action.kind == "B" else 0)

    plan = Greedy(2, 3, priority=reverse).plan()
    assert [str(item) for item in plan.rows[1]] == ["1F0", "1F1", "1F2", "1B2", "1B1", "1B0"]


def test_a_replicated_stage_gets_its_all_reduces():
    both_ways = placed([0, 1, 1, 0] * 2, 2)(2, 4)
    assert both_ways.plan().replicas == {0: (0, 1), 1: (0, 1)}
    assert len(both_ways.plan().bound.reduces) == 2


def test_greedy_shows_its_policy():
    def mine(action, rank, moment):
        return 0

    assert repr(Greedy(4, 8)) == "Greedy(ranks=4, microbatches=8)"
    shown = "stages_per_rank=2, priority='oldest-first', memory_cap=3, split=True"
    assert repr(Greedy(4, 8, 2, priority="oldest-first", memory_cap=3, split=True)).endswith(f"=8, {shown})")
    assert repr(Greedy(2, 8, priority=mine, memory_cap=[2, 1])).endswith("=8, priority=mine, memory_cap=(2, 1))")


# Mistakes


def nan_of(action):
    return float("nan") if action == F(1, 0) else 0.0


@pytest.mark.parametrize(
    ("priority", "words"),
    [
        (lambda *_: 1 / 0, ["asking the priority raised ZeroDivisionError: division by zero\n  at "]),
        (lambda action: 0, ["pipelab calls priority(action, rank, moment), but it is written <lambda>(action)"]),
        *(
            (lambda action, *_, answer=answer: answer(action.microbatch), ["it returned", "cannot be compared"])
            for answer in (lambda m: None, lambda m: "x" if m else 1, lambda m: {}, lambda m: 1j)
        ),
        (lambda action, *_: nan_of(action), ["it returned nan for 0F1 on rank 0 at time 0, and NaN is neither"]),
        (lambda action, *_: (0, nan_of(action)), ["it returned (0, nan) for 0F1 on rank 0 at time 0"]),
        (lambda action, *_: (1, [nan_of(action)]), ["it returned (1, [nan]) for 0F1 on rank 0 at time 0"]),
    ],
)
def test_a_priority_that_raises_or_cannot_be_compared_is_told_with_its_line(priority, words):
    (fault,) = check(Greedy(1, 3, priority=priority, memory_cap=1))
    assert fault.code == "exception"
    assert all(each in fault.message for each in words)
    assert "test_greedy.py, line " in fault.message


@pytest.mark.parametrize(
    ("given_", "error", "told"),
    [
        *(
            ({"memory_cap": cap}, UsageError, "memory_cap")
            for cap in (0, -1, 1.5, True, [1], [1, 2, 3], [1, 0], ["1", 1], object())
        ),
        *(
            ({"memory_cap": word}, UsageError, f"memory_cap='{word}': expected a whole number, at least 1")
            for word in ("x", "22", "")
        ),
        *(
            ({"priority": each}, UsageError, "'backward-first', 'forward-first', 'oldest-first', or a function of")
            for each in ("1f1b", "", None, 3, ["F", "B"])
        ),
        ({"cost": 3}, TypeError, "cost=3: expected a Cost"),
        ({"cost": Cost(forward=[1, 2, 3])}, CostError, "forward has 3 numbers for 2 stages"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(given_, error, told):
    with pytest.raises(error, match=told):
        Greedy(2, 2, **given_).plan()


@pytest.mark.parametrize(("cap", "shown"), [(np.int64(2), "2"), ([np.int64(2), 1], "(2, 1)")])
def test_a_cap_may_be_another_librarys_whole_number(cap, shown):
    schedule = Greedy(2, 4, memory_cap=cap)
    assert repr(schedule) == f"Greedy(ranks=2, microbatches=4, memory_cap={shown})"
    assert check(schedule) == check(schedule, memory_cap=cap) == []


def test_a_place_that_answers_nonsense_is_told():
    nowhere = type("Nowhere", (Greedy,), {"place": lambda *_: 7})
    (fault,) = check(nowhere(2, 2))
    assert fault.code == "out-of-range"
    assert "place(0, 0) returns 7" in fault.message


def test_greedy_is_a_schedule_like_any_other():
    assert pipelab.schedules["greedy"] is Greedy
    assert list(Greedy(2, 2, memory_cap=1).actions(1)) == [F(0, 1), B(0, 1), F(1, 1), B(1, 1)]
    assert pipelab.replicate(Greedy(2, 3, memory_cap=2), 2).plan().microbatches == 6
