"""Deadlocks are named before anything runs: which rank waits for which, why, and the move that undoes it."""

from __future__ import annotations

from itertools import permutations

import oracle
import pytest
from following import follow, written
from strategies import Case, near
from tiers import sampled

from pipelab import B, Cost, F, I, Plan, R, ScheduleError, W, check, schedules, simulate


def deadlocks(plan):
    return [fault for fault in check(plan) if fault.code == "deadlock"]


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


def test_the_message_of_the_design_is_what_a_student_reads():
    plan = Plan.parse(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])
    (fault,) = check(plan)
    assert str(fault) == (
        "deadlock: rank 0 waits for rank 1, which waits for rank 0\n"
        "  0B0 (rank 0, position 1) needs gin(0, 1), given by 1B0\n"
        "  1B0 (rank 1, position 2) comes after 1F1, which needs out(1, 0), given by 0F1\n"
        "  0F1 comes after 0B0 on rank 0\n"
        "  try: yield F(1) before B(0) on rank 0\n"
        "    rank 0 | 0F0 0B0 0F1 0B1\n"
        "                 ^^^"
    )
    assert (fault.rank, fault.position, fault.action) == (0, 1, B(0, 0))
    assert check(follow(plan, fault.hint)) == []


def test_two_cycles_are_two_faults_and_either_hint_undoes_both():
    plan = Plan(ring(2, of=5).written + ring(3, at=2, of=5).written, 2, 5)
    faults = check(plan)
    assert [fault.rank for fault in faults] == [0, 2]
    for fault in faults:
        assert check(follow(plan, fault.hint)) == []


def test_a_rank_that_waits_for_a_cycle_is_not_part_of_it():
    plan = Plan.parse(["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1", "3F0 3B0 3F1 3B1"])
    (fault,) = check(plan)
    assert fault.message.splitlines()[0] == "rank 1 waits for rank 2, which waits for rank 1"
    assert fault.rank == 1


def test_a_cycle_is_told_from_its_lowest_rank_whoever_runs_into_it():
    plan = Plan.parse(["0F0 0F1 0B0 0B1", "2F1 2F0 2B0 2B1", "1F0 1B0 1F1 1B1"])
    (fault,) = check(plan)
    assert fault.message.splitlines()[0] == "rank 1 waits for rank 2, which waits for rank 1"
    assert fault.rank == 1


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


def test_an_own_backward_before_its_forward_is_unordered_not_a_deadlock():
    (fault,) = check(Plan.parse(["0F0 0B0", "1B0 1F0"]))
    assert fault.code == "unordered"


def test_both_are_told_where_both_are():
    plan = Plan.parse(["0F0 0B0 0F1 0B1 0B2 0F2", "1F0 1F1 1B0 1B1 1F2 1B2"])
    assert [fault.code for fault in check(plan)] == ["unordered", "deadlock"]


def test_a_missing_action_is_not_mistaken_for_a_deadlock():
    assert [fault.code for fault in check(Plan.parse(["0F0 0B0", "1F0"]))] == ["missing"]
    assert [fault.code for fault in check(Plan.parse(["0B0", "1F0 1B0"]))] == ["missing"]


def test_split_backwards_deadlock_too():
    plan = Plan([[F(0, 0), I(0, 0), W(0, 0), F(1, 0), B(1, 0)], [F(0, 1), F(1, 1), I(0, 1), W(0, 1), B(1, 1)]], 2, 2)
    (fault,) = check(plan)
    assert fault.code == "deadlock"
    assert "given by 1I0" in fault.message
    assert check(follow(plan, fault.hint)) == []


# All-reduces


def test_two_all_reduces_in_opposite_orders_are_a_deadlock():
    replicated = Plan.parse(["0F0 1F0 1B0 0B0 0R 1R", "0F1 1F1 1B1 0B1 1R 0R"])
    (fault,) = check(replicated)
    assert str(fault) == (
        "deadlock: rank 0 waits for rank 1, which waits for rank 0\n"
        "  0R (rank 0, position 4) needs rank 1 to reach it too\n"
        "  0R (rank 1, position 5) comes after 1R, which needs rank 0 to reach it too\n"
        "  1R comes after 0R on rank 0\n"
        "  try: list the all-reduces R in the same order on every rank, each after its stage's last gradient; "
        "or list none, and pipelab inserts them\n"
        "    rank 0 | 0F0 1F0 1B0 0B0 0R 1R\n"
        "                             ^^"
    )


def test_two_all_reduces_in_one_order_run():
    assert check(Plan.parse(["0F0 1F0 1B0 0B0 0R 1R", "0F1 1F1 1B1 0B1 0R 1R"])) == []


def test_an_all_reduce_that_a_rank_reaches_only_through_another_is_a_deadlock():
    # rank 1 comes to 0R only after gin(0, 1), which rank 0 gives after 0R
    plan = Plan([[F(0, 0), B(0, 0), R(0)], [F(1, 0), B(1, 0), R(0)], [F(1, 1), B(1, 1), F(0, 1), B(0, 1)]], 2, 2)
    assert check(plan) == []
    crossed = Plan([[F(0, 0), F(1, 1), B(0, 0), R(0), B(1, 1)], [F(1, 0), B(1, 0), R(0), F(0, 1), B(0, 1)]], 2, 2)
    assert "deadlock" in [fault.code for fault in check(crossed)]


# Overlapped pairs as one slot


def test_a_pair_that_needs_itself_is_refused_only_where_it_is_one_slot():
    plan = Plan([[F(0), F(1) & B(1), B(0)]], 1, 2)
    assert check(plan) == []
    assert simulate(plan).makespan == 6
    with pytest.raises(ScheduleError, match="as one slot") as refusal:
        simulate(plan, Cost(pair=3))
    (fault,) = refusal.value.faults
    assert str(fault) == (
        "deadlock: rank 0 waits for itself\n"
        "  (0F1;0B1)OVERLAP_F_B (rank 0, position 1) needs out(1, 0), which it gives itself\n"
        "  try: leave out Cost(pair=...), or yield the halves of one of these pairs one after the other\n"
        "    rank 0 | F0 (F1;B1)OVERLAP_F_B B0\n"
        "                ^^^^^^^^^^^^^^^^^^"
    )
    assert (fault.rank, fault.position, fault.action) == (0, 1, F(1, 0) & B(1, 0))


def test_two_pairs_that_need_each_other_are_refused_only_where_each_is_one_slot():
    rows = [[F(1, 0), F(0, 0) & B(1, 0), B(0, 0)], [F(1, 1), F(0, 1) & B(1, 1), B(0, 1)]]
    plan = Plan(rows, 2, 2)
    assert check(plan) == []
    with pytest.raises(ScheduleError, match="as one slot") as refusal:
        simulate(plan, Cost(pair=3))
    (fault,) = refusal.value.faults
    assert fault.message == (
        "rank 0 waits for rank 1, which waits for rank 0\n"
        "  (0F0;0B1)OVERLAP_F_B (rank 0, position 1) needs gin(1, 1), given by (1F0;1B1)OVERLAP_F_B\n"
        "  (1F0;1B1)OVERLAP_F_B (rank 1, position 1) needs out(0, 0), given by (0F0;0B1)OVERLAP_F_B"
    )


def test_a_pair_that_is_one_slot_has_one_name_on_both_sides_of_the_cycle():
    plan = Plan([[F(0), F(1) & B(0), B(1)], [F(0), F(1), B(0), B(1)]])
    assert check(plan) == []
    with pytest.raises(ScheduleError) as refusal:
        simulate(plan, Cost(pair=3))
    (fault,) = refusal.value.faults
    assert fault.message == (
        "rank 0 waits for rank 1, which waits for rank 0\n"
        "  (0F1;0B0)OVERLAP_F_B (rank 0, position 1) needs gin(0, 1), given by 1B0\n"
        "  1B0 (rank 1, position 2) comes after 1F1, which needs out(1, 0), given by (0F1;0B0)OVERLAP_F_B"
    )


def test_the_hint_for_pairs_that_need_each_other_is_to_take_one_apart():
    rows = [[F(1, 0), F(0, 0) & B(1, 0), B(0, 0)], [F(1, 1), F(0, 1) & B(1, 1), B(0, 1)]]
    with pytest.raises(ScheduleError) as refusal:
        simulate(Plan(rows, 2, 2), Cost(pair=3))
    hint = refusal.value.faults[0].hint
    assert hint == "leave out Cost(pair=...), or yield the halves of one of these pairs one after the other"


def test_a_hint_names_the_stage_only_where_a_rank_has_several():
    one = check(Plan.parse(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]))[0].hint
    several = check(ring(2))[0].hint
    assert one == "yield F(1) before B(0) on rank 0"
    assert several == "yield F(0, stage=0) before F(1, stage=1) on rank 0"
