"""Deadlocks are named before anything runs: which rank waits for which, why, and the move that undoes it."""

from __future__ import annotations

from itertools import permutations

import oracle
import pytest
from following import follow, written
from strategies import Case, near
from tiers import sampled

from pipelab import B, Cost, F, I, Plan, ScheduleError, W, check, schedules, simulate


def ring(ranks, at=0, of=None):
    """Every rank wants stage 1 of a micro-batch before it runs stage 0 of the one that the next rank wants."""
    whole = of or ranks
    rows = []
    for rank in range(ranks):
        before, own = at + (rank - 1) % ranks, at + rank
        rows.append([F(before, 1), F(own, 0), B(before, 1), B(own, 0)])
    return Plan(rows, 2, whole)


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_a_cycle_is_named_rank_by_rank_and_its_hint_undoes_it(ranks):
    plan = ring(ranks)
    (fault,) = check(plan)
    assert fault.code == "deadlock"
    order = [0, *range(ranks - 1, 0, -1), 0]
    waits = "".join(f", which waits for rank {rank}" for rank in order[2:])
    assert fault.message.splitlines()[0] == f"rank 0 waits for rank {order[1]}{waits}"
    assert len(str(fault).splitlines()) <= 12
    assert check(follow(plan, fault.hint)) == []


def test_a_long_cycle_is_told_in_few_lines():
    (fault,) = check(ring(40))
    assert len(str(fault).splitlines()) <= 12
    assert "…" in fault.message


def test_two_cycles_are_two_faults_and_either_hint_undoes_both():
    plan = Plan(ring(2, of=5).written + ring(3, at=2, of=5).written, 2, 5)
    faults = check(plan)
    assert [fault.rank for fault in faults] == [0, 2]
    for fault in faults:
        assert check(follow(plan, fault.hint)) == []


@pytest.mark.parametrize(
    "rows",
    [
        "0F0 0B0 0F1 0B1; 1F0 1B0 1F1 1B1; 2F0 2F1 2B0 2B1; 3F0 3B0 3F1 3B1",  # ranks 0 and 3 wait for it
        "0F0 0F1 0B0 0B1; 2F1 2F0 2B0 2B1; 1F0 1B0 1F1 1B1",  # rank 2 runs into it first
    ],
)
def test_a_cycle_is_told_from_its_lowest_rank_and_who_waits_for_it_is_no_part_of_it(rows):
    (fault,) = check(Plan.parse(rows))
    assert fault.message.splitlines()[0] == "rank 1 waits for rank 2, which waits for rank 1"
    assert fault.rank == 1


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(schedules))
def test_hints_undo_every_deadlock_that_one_moved_action_makes(name):
    found = 0
    for plan in {near(name, *size) for size in [(2, 3), (3, 4), (4, 3)]}:
        for moved in sampled(moved_by_one(plan)):
            broken = moved
            faults = check(broken)
            if {fault.code for fault in faults} != {"deadlock"}:
                continue
            found += 1
            for _ in range(20):
                claims = not faults[0].hint.endswith(", then check again")
                broken = follow(broken, faults[0].hint)
                faults = check(broken)
                assert not (claims and faults)
                assert {fault.code for fault in faults} <= {"deadlock"}, "a hint makes no mistake of another kind"
                if not faults:
                    break
            assert Case(broken.rows, broken.stages, broken.microbatches).legal
    assert found


def moved_by_one(plan):
    """Yield every plan in which one action stands elsewhere on its rank."""
    rows = [[half for item in row for half in oracle.halves(item)] for row in written(plan)]
    for rank, row in enumerate(rows):
        for source, target in permutations(range(len(row)), 2):
            changed = [*row[:source], *row[source + 1 :]]
            changed.insert(target, row[source])
            yield Plan([*rows[:rank], changed, *rows[rank + 1 :]], plan.stages, plan.microbatches)


@pytest.mark.parametrize(
    ("rows", "codes"),
    [
        ("0F0 0B0; 1B0 1F0", ["unordered"]),
        ("0F0 0B0 0F1 0B1 0B2 0F2; 1F0 1F1 1B0 1B1 1F2 1B2", ["unordered", "deadlock"]),
        ("0F0 0B0; 1F0", ["missing"]),
        ("0B0; 1F0 1B0", ["missing"]),
        ("0F0 1F0 1B0 0B0 0R 1R; 0F1 1F1 1B1 0B1 0R 1R", []),
    ],
)
def test_what_is_no_deadlock_is_not_called_one(rows, codes):
    assert [fault.code for fault in check(Plan.parse(rows))] == codes


def test_split_backwards_deadlock_too():
    plan = Plan([[F(0, 0), I(0, 0), W(0, 0), F(1, 0), B(1, 0)], [F(0, 1), F(1, 1), I(0, 1), W(0, 1), B(1, 1)]], 2, 2)
    (fault,) = check(plan)
    assert fault.code == "deadlock"
    assert "given by 1I0" in fault.message
    assert check(follow(plan, fault.hint)) == []


# All-reduces


def test_two_all_reduces_in_opposite_orders_are_a_deadlock():
    (fault,) = check(Plan.parse("0F0 1F0 1B0 0B0 0R 1R; 0F1 1F1 1B1 0B1 1R 0R"))
    assert fault.message.splitlines() == [
        "rank 0 waits for rank 1, which waits for rank 0",
        "  0R (rank 0, position 4) needs rank 1 to reach it too",
        "  0R (rank 1, position 5) comes after 1R, which needs rank 0 to reach it too",
        "  1R comes after 0R on rank 0",
    ]
    assert "the same order on every rank" in fault.hint


def test_an_all_reduce_that_a_rank_reaches_only_through_another_is_a_deadlock():
    # rank 1 comes to 0R only after gin(0, 1), which rank 0 gives after 0R
    assert check(Plan.parse("0F0 0B0 0R; 0F1 0B1 0R; 1F1 1B1 1F0 1B0")) == []
    crossed = Plan.parse("0F0 1F1 0B0 0R 1B1; 0F1 0B1 0R 1F0 1B0")
    assert "deadlock" in [fault.code for fault in check(crossed)]


# Overlapped pairs as one slot


def as_one_slot(plan):
    """Return the fault of a plan that runs but where each pair is one slot."""
    assert check(plan) == []
    with pytest.raises(ScheduleError, match="as one slot") as refusal:
        simulate(plan, Cost(pair=3))
    (fault,) = refusal.value.faults
    return fault


def test_a_pair_that_needs_itself_is_refused_only_where_it_is_one_slot():
    plan = Plan([[F(0), F(1) & B(1), B(0)]], 1, 2)
    assert simulate(plan).makespan == 6
    fault = as_one_slot(plan)
    assert fault.message.splitlines() == [
        "rank 0 waits for itself",
        "  (0F1;0B1)OVERLAP_F_B (rank 0, position 1) needs the output of micro-batch 1 from stage 0, "
        "which it gives itself",
    ]
    assert "leave out Cost(pair=...)" in fault.hint
    assert fault.excerpt.endswith("^" * len("(F1;B1)OVERLAP_F_B"))
    assert (fault.rank, fault.position, fault.action) == (0, 1, F(1, 0) & B(1, 0))


@pytest.mark.parametrize(
    ("rows", "links"),
    [
        (
            [[F(1, 0), F(0, 0) & B(1, 0), B(0, 0)], [F(1, 1), F(0, 1) & B(1, 1), B(0, 1)]],
            [
                "(0F0;0B1)OVERLAP_F_B (rank 0, position 1) needs the gradient of micro-batch 1 from stage 1, "
                "given by (1F0;1B1)OVERLAP_F_B",
                "(1F0;1B1)OVERLAP_F_B (rank 1, position 1) needs the output of micro-batch 0 from stage 0, "
                "given by (0F0;0B1)OVERLAP_F_B",
            ],
        ),
        (
            [[F(0), F(1) & B(0), B(1)], [F(0), F(1), B(0), B(1)]],
            [
                "(0F1;0B0)OVERLAP_F_B (rank 0, position 1) needs the gradient of micro-batch 0 from stage 1, "
                "given by 1B0",
                "1B0 (rank 1, position 2) comes after 1F1, which needs the output of micro-batch 1 from stage 0, "
                "given by (0F1;0B0)OVERLAP_F_B",
            ],
        ),
    ],
)
def test_pairs_in_a_cycle_are_refused_by_one_name_only_where_each_is_one_slot(rows, links):
    first, *rest = as_one_slot(Plan(rows, 2, 2)).message.splitlines()
    assert first == "rank 0 waits for rank 1, which waits for rank 0"
    assert list(map(str.strip, rest)) == links


def test_a_hint_names_the_stage_where_a_rank_has_several():
    assert check(ring(2))[0].hint == "yield F(0, stage=0) before F(1, stage=1) on rank 0"
