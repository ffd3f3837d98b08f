"""A legal plan whose sends and receives wait for each other is a fault of its own, told rank by rank."""

from __future__ import annotations

import pytest
from fuzz.wire import QUEUES, happened, processes
from strategies import near

from pipelab import B, Cost, F, Plan, ScheduleError, UsageError, check, lower, replicate, schedules, simulate
from pipelab.plan.transfers import SEMANTICS

HANGS = Plan.parse("0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1")

THROUGH_AN_ALL_REDUCE = Plan.parse("1F2 2F2 2B2 2F0 2B0 2R 1B2; 1F0 1B0 2F1 2B1 2R; 0F2 0F0 0F1 0B2 0B0 0B1; 1F1 1B1")


def test_the_cycle_through_sends_and_receives_is_told_step_by_step():
    assert check(HANGS) == []
    (fault,) = check(HANGS, transfers="deferred")
    assert str(fault) == (
        "transfer-deadlock: rank 0 waits for rank 1, which waits for rank 0\n"
        "  rank 0 stands before 0SEND_F1; rank 1 comes to 1RECV_F1 only after 1SEND_B0\n"
        "  rank 1 stands before 1SEND_B0; rank 0 comes to 0RECV_B0 only after 0SEND_F1\n"
        '  try: take the order of pipelab.lower(plan, "by-time"), which cannot hang; its to_csv is for PyTorch\n'
        "    rank 0 | 0F0 0F1 0B0 0B1\n"
        "                 ^^^"
    )
    assert (fault.rank, fault.position, fault.action) == (0, 1, F(1, 0))


@pytest.mark.parametrize("name", schedules)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 3), (4, 8)])
def test_only_deferred_receives_hang_and_simulate_refuses_what_check_refuses(name, ranks, microbatches):
    plan = near(name, ranks, microbatches)
    for semantics in SEMANTICS:
        faults = check(plan, transfers=semantics)
        assert {fault.code for fault in faults} <= {"transfer-deadlock"}
        if faults:
            assert semantics == "deferred"
            with pytest.raises(ScheduleError) as told:
                simulate(plan, Cost(transfers=semantics))
            assert told.value.faults == faults
        else:
            assert simulate(plan, Cost(transfers=semantics)).makespan > 0


def test_other_faults_come_first_and_a_memory_cap_beside():
    broken = Plan.parse("0F0 0F1 0B0 0B1; 1F0 1B0 1F1")
    assert [fault.code for fault in check(broken, transfers="deferred")] == ["missing"]
    assert [fault.code for fault in check(HANGS, 1, "deferred")] == ["transfer-deadlock", "memory-cap"]


def test_replicas_hang_each_for_itself():
    faults = check(replicate(HANGS, 2), transfers="deferred")
    assert [(fault.code, fault.rank) for fault in faults] == [("transfer-deadlock", 0), ("transfer-deadlock", 2)]


def test_a_pair_that_needs_what_comes_of_its_own_output_hangs_on_every_wire():
    plan = Plan([[F(0) & B(0)], [F(0), B(0)]])
    assert check(plan) == []
    for semantics in SEMANTICS[1:]:
        (fault,) = check(plan, transfers=semantics)
        assert (fault.code, fault.rank) == ("transfer-deadlock", 0)
        assert fault.message.splitlines()[-1] == "  rank 1 stands before 1RECV_F0, which needs (0F0;0B0)OVERLAP_F_B"
        assert "halves" in fault.hint
    with pytest.raises(ScheduleError):
        lower(plan, "deferred")


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_a_pair_whose_halves_only_need_each_other_is_no_deadlock(semantics):
    # On the last stage, PyTorch runs the backward right after its own forward.
    plan = Plan([[F(0), B(0)], [F(0) & B(0)]])
    assert check(plan, transfers=semantics) == []
    assert simulate(plan, Cost(transfers=semantics)).makespan == 6


def test_an_all_reduce_in_the_cycle_is_told():
    # Rank 2 needs what rank 0 makes after its all-reduce, and only then takes what rank 1 sends before it gets there.
    assert check(THROUGH_AN_ALL_REDUCE) == []
    (fault,) = check(THROUGH_AN_ALL_REDUCE, transfers="deferred")
    assert fault.message.splitlines()[1:] == [
        "  2R (rank 0) needs rank 1 to reach it too",
        "  2F1 (rank 1) needs 2RECV_F1, which stands behind 1SEND_B0",
        "  rank 1 stands before 1SEND_B0; rank 2 comes to 0RECV_B0 only after 0RECV_B2",
        "  rank 2 stands before 0RECV_B2, which needs 1B2",
    ]


@pytest.mark.dist
def test_processes_with_blocking_sends_hang_exactly_there():
    with processes() as real:
        for plan in (HANGS, THROUGH_AN_ALL_REDUCE, schedules["dualpipe"](4, 8), schedules["gpipe"](4, 4)):
            for semantics, queues in QUEUES.items():
                assert happened(real, lower(plan, semantics).rows, queues) is bool(check(plan, transfers=semantics))


@pytest.mark.parametrize("wrong", ["", "torch", None, 3])
def test_an_unknown_word_is_refused_with_those_that_there_are(wrong):
    with pytest.raises(UsageError, match="by-time"):
        check(HANGS, transfers=wrong)
