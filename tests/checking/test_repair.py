"""A deadlock's hint mends the whole plan where that can be said in few words, and is tried out before it is given."""

from __future__ import annotations

import pytest
from following import follow
from hypothesis import given
from hypothesis import strategies as st
from strategies import catalogue_plans

import pipelab
from pipelab import Action, B, F, GPipe, OneFOneB, Plan, check
from pipelab.checking import checker, repair


class Naive0(pipelab.Schedule):
    """One rank goes one micro-batch at a time, the others as in another schedule."""

    def __init__(self, ranks, microbatches, others=GPipe, rank=0):
        super().__init__(ranks, microbatches)
        self.others, self.rank = others, rank

    def actions(self, rank):
        if rank != self.rank:
            yield from self.others(self.ranks, self.microbatches).actions(rank)
            return
        for m in range(self.microbatches):
            yield F(m)
            yield B(m)


class WrongWayRound(pipelab.Schedule):
    """1F1B whose warm-up grows with the rank."""

    def actions(self, rank):
        warmup = min(self.microbatches, rank + 1)
        for m in range(warmup):
            yield F(m)
        for m in range(self.microbatches - warmup):
            yield B(m)
            yield F(warmup + m)
        for m in range(self.microbatches - warmup, self.microbatches):
            yield B(m)


def hint_of(schedule):
    (fault,) = check(schedule)
    assert fault.code == "deadlock"
    assert check(follow(schedule.draft(), fault.hint)) == []
    return fault.hint


FORWARDS_FIRST = "yield all forwards before the first backward (GPipe: holds all activations)"


@pytest.mark.parametrize(
    ("schedule", "hint"),
    [
        (Naive0(2, 2), "yield F(1) before B(0) on rank 0"),
        (Naive0(2, 3), "yield F(1) and F(2) before B(0) on rank 0"),
        (Naive0(4, 8), "yield F(1) to F(7) before B(0) on rank 0"),
        (Naive0(4, 200), "yield F(1) to F(199) before B(0) on rank 0"),
        (
            Naive0(4, 8, OneFOneB, rank=1),
            "yield F(1) before B(0), F(2) before B(1), and so on to F(7) before B(6) on rank 1",
        ),
        (
            Naive0(5, 8, OneFOneB, rank=1),
            "on rank 1, yield F(1) and F(2) before B(0), F(3) before B(1), F(4) before B(2), "
            "and so on to F(7) before B(5)",
        ),
        (WrongWayRound(2, 4), "yield F(1) before B(0), F(2) before B(1), and so on to F(3) before B(2) on rank 0"),
        (WrongWayRound(4, 8), f"on ranks 0…2, {FORWARDS_FIRST}"),
        (WrongWayRound(16, 64), f"on ranks 0…14, {FORWARDS_FIRST}"),
    ],
)
def test_a_row_in_a_naive_order_is_mended_in_one_go(schedule, hint):
    assert hint_of(schedule) == hint


@given(catalogue_plans().filter(lambda plan: max(map(len, plan.rows)) <= repair._LONGEST_ROW), st.data())
def test_one_row_in_any_order_is_mended_in_one_go(plan, data):
    rank = data.draw(st.integers(0, plan.ranks - 1))
    rows = list(plan.rows)
    rows[rank] = data.draw(st.permutations(rows[rank]))
    broken = Plan(rows, plan.stages, plan.microbatches)
    faults = check(broken)
    for fault in faults if {fault.code for fault in faults} == {"deadlock"} else ():
        assert "check again" not in fault.hint
        assert check(follow(broken, fault.hint)) == []


@given(catalogue_plans(), st.data())
def test_a_hint_that_does_not_ask_to_check_again_mends_everything(plan, data):
    rows = [data.draw(st.permutations(row)) if data.draw(st.booleans()) else row for row in plan.rows]
    broken = Plan(rows, plan.stages, plan.microbatches)
    faults = check(broken)
    for fault in faults if {fault.code for fault in faults} == {"deadlock"} else ():
        left = check(follow(broken, fault.hint))
        assert fault.hint.endswith(", then check again") == bool(left)


def test_what_others_do_not_wait_for_stays_where_it_is():
    # rank 1 needs F(3) early, and F(1), F(2) only later
    plan = Plan.parse(["0F0 0B0 0F3 0B3 0F1 0B1 0F2 0B2", "1F0 1F3 1B0 1B3 1F1 1F2 1B1 1B2"])
    (fault,) = check(plan)
    assert fault.hint == "on rank 0, yield F(3) before B(0), F(2) before B(1)"
    assert check(follow(plan, fault.hint)) == []


def test_a_big_plan_is_searched_only_so_long(monkeypatch):
    walked = []
    traverse = repair.traverse
    monkeypatch.setattr(
        repair, "traverse", lambda program, **options: walked.append(program) or traverse(program, **options)
    )
    (fault,) = check(WrongWayRound(32, 512))
    assert fault.hint == f"on ranks 0…30, {FORWARDS_FIRST}"
    actions = 2 * 32 * 512
    assert len(walked) * actions <= 2 * repair._TRIAL_ACTIONS + 5 * actions


@pytest.mark.parametrize(
    ("rows", "blocked", "left", "words"),
    [
        ("0F0 0B0 0F1 0B1; 1F0 1F1 1B0 1B1", ["0B0 0F1"], 0, "yield F(1) before B(0) on rank 0"),
        # both moves let all ranks run: the earlier action is named
        ("0F1 0B0 0B1 0F0; 1F0 1B0 1F1 1B1", ["0B1 0F0", "1F0 1B1"], 0, "yield F(0) before B(1) on rank 0"),
        # the moves on the first rank of the cycle help nobody
        (
            "0F0 0B0 0F1 0B1; 1F0 1B0 1B1 1F1; 2F0 2F1 2B0 2B1",
            ["1B0 1F1", "2F1 2B0"],
            0,
            "yield B(0) before F(1) on rank 2",
        ),
        (
            "0F1 0B0 0B1 0F0; 1F1 1B0 1B1 1F0; 2F0 2F1 2B1 2B0",
            ["1B1 1F0", "2F0 2B1"],
            0,
            "yield F(0) after B(1) on rank 2",
        ),
        # none lets all ranks run: of those that leave as few stuck, the first
        (
            "0F1 0B0 0B1 0F0; 1F0 1B0 1F1 1B1; 2F0 2F1 2B0 2B1",
            ["0B1 0F0", "1F0 1B1"],
            3,
            "yield F(0) before B(1) on rank 0",
        ),
        # nor may a move put an action before one of its own rank that it needs
        (
            "0F0 0F1 0F2 2F0 0B2 2F2 2B0 2B1 2B2 0B0 0B1 2F1; 1F0 1F1 1F2 3F0 3B0 1B2 3F1 3B1 3F2 3B2 1B0 1B1",
            ["0B2 2B2"],
            2,
            "yield B(2, stage=0) after B(2, stage=2) on rank 0",
        ),
    ],
)
def test_the_one_move_is_the_first_that_leaves_the_fewest_ranks_stuck(rows, blocked, left, words):
    trials, stuck = trials_of(rows, blocked)
    found, move = repair._one_move(trials, stuck)
    assert (found, move.words) == (left, words)
    before = trials.bound.computing
    (changed,) = [rank for rank, row in enumerate(move.rows) if row != before[rank]]
    assert words.endswith(f"on rank {changed}")
    assert sorted(move.rows[changed]) == sorted(before[changed])
    assert trials.stuck(move.rows) == left


def test_the_search_for_one_move_ends_with_its_budget(monkeypatch):
    monkeypatch.setattr(repair, "_TRIAL_ACTIONS", 24)
    trials, stuck = trials_of("0F1 0B0 0B1 0F0; 1F0 1B0 1F1 1B1; 2F0 2F1 2B0 2B1", ["0B1 0F0", "1F0 1B1"])
    repair._one_move(trials, stuck)
    assert trials.walked == 24


def trials_of(rows, blocked):
    """Return trials of a plan, and its blocked ranks, each given by what it is stuck at and what is wanted of it."""
    bound = Plan.parse(rows).bound
    pairs = [[bound.codes.code(Action.parse(word)) for word in each.split()] for each in blocked]
    stuck = [repair.BlockedRank(bound.rank_of[pair[0]], *pair) for pair in pairs]
    return repair._Trials(bound, (), checker._unordered(bound)[1]), stuck
