"""A legal plan whose sends and receives wait for each other is a fault of its own, explained rank by rank."""

from __future__ import annotations

from random import Random

import pytest
from fuzz.wire import ON_GLOO, happened, legal_plan, on_gloo, processes
from strategies import WIRES, near

from pipelab import B, F, Plan, ScheduleError, check, lower, replicate, schedules, simulate

HANGS = Plan.parse("0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1")

THROUGH_AN_ALL_REDUCE = Plan.parse("1F2 2F2 2B2 2F0 2B0 2R 1B2; 1F0 1B0 2F1 2B1 2R; 0F2 0F0 0F1 0B2 0B0 0B1; 1F1 1B1")


def test_the_cycle_through_sends_and_receives_is_explained_step_by_step():
    assert check(HANGS) == []
    (fault,) = check(HANGS, order="at-use", transport="rank")
    assert fault.message.splitlines() == [
        "rank 0 waits for rank 1, which waits for rank 0",
        "  0SEND_F1 (rank 0) has to meet 1RECV_F1",
        "  1RECV_F1 (rank 1) comes after 1SEND_B0, which has to meet 0RECV_B0",
        "  0RECV_B0 comes after 0SEND_F1 on rank 0",
    ]
    assert 'pipelab.lower(plan, order="by-time")' in fault.hint
    assert fault.excerpt == "rank 0 | 0F0 0F1 0B0 0B1\n             ^^^"
    assert (fault.rank, fault.position, fault.action) == (0, 1, F(1, 0))


@pytest.mark.sweep
@pytest.mark.parametrize("name", schedules)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 3), (4, 8)])
def test_only_late_receives_hang_and_only_in_queues_and_simulate_refuses_what_check_refuses(name, ranks, microbatches):
    plan = near(name, ranks, microbatches)
    for wire in WIRES:
        faults = check(plan, **wire)
        assert {fault.code for fault in faults} <= {"transfer-deadlock"}
        if faults:
            assert wire["order"] in ("at-use", "deferred")
            assert wire["transport"] in ("rank", "pair", "edge")
            with pytest.raises(ScheduleError) as refused:
                simulate(plan, **wire)
            assert refused.value.faults == faults
        else:
            assert simulate(plan, **wire).makespan > 0


def test_other_faults_come_first_and_a_memory_cap_beside():
    broken = Plan.parse("0F0 0F1 0B0 0B1; 1F0 1B0 1F1")
    wire = {"order": "at-use", "transport": "rank"}
    assert [fault.code for fault in check(broken, **wire)] == ["missing"]
    assert [fault.code for fault in check(HANGS, memory_cap=1, **wire)] == ["transfer-deadlock", "memory-cap"]


def test_replicas_hang_each_for_itself():
    faults = check(replicate(HANGS, 2), order="at-use", transport="rank")
    assert [(fault.code, fault.rank) for fault in faults] == [("transfer-deadlock", 0), ("transfer-deadlock", 2)]


def test_a_pair_that_needs_what_comes_of_its_own_output_hangs_on_every_wire():
    plan = Plan([[F(0) & B(0)], [F(0), B(0)]])
    assert check(plan) == []
    for wire in WIRES:
        if wire["transport"] == "buffered":
            assert check(plan, **wire) == []
            continue
        (fault,) = check(plan, **wire)
        assert (fault.code, fault.rank) == ("transfer-deadlock", 0)
        assert fault.message.endswith("1F0, which needs (0F0;0B0)OVERLAP_F_B")
        assert "halves" in fault.hint
    with pytest.raises(ScheduleError):
        lower(plan, order="at-use")


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_a_pair_whose_halves_only_need_each_other_is_no_deadlock(wire):
    # On the last stage, PyTorch runs the backward right after its own forward.
    plan = Plan([[F(0), B(0)], [F(0) & B(0)]])
    assert check(plan, **wire) == []
    assert simulate(plan, **wire).makespan == 6


def test_an_all_reduce_in_the_cycle_is_named():
    # Rank 2 needs what rank 0 makes after its all-reduce, and only then takes what rank 1 sends before it gets there.
    assert check(THROUGH_AN_ALL_REDUCE) == []
    (fault,) = check(THROUGH_AN_ALL_REDUCE, order="at-use", transport="rank")
    assert fault.message.splitlines()[1:] == [
        "  2R (rank 0) needs rank 1 to reach it too",
        "  2R (rank 1) comes after 2F1, which needs 2RECV_F1",
        "  2RECV_F1 (rank 1) comes after 1SEND_B0, which has to meet 0RECV_B0",
        "  0RECV_B0 (rank 2) comes after 0RECV_B2, which needs 1B2",
        "  1B2 comes after 2R on rank 0",
    ]


@pytest.fixture(scope="module")
def real():
    with processes() as script:
        yield script


@pytest.mark.dist
def test_processes_with_blocking_sends_hang_exactly_there(real):
    for plan in (HANGS, THROUGH_AN_ALL_REDUCE, schedules["dualpipe"](4, 8), schedules["gpipe"](4, 4)):
        for wire in WIRES:
            rows = lower(plan, **wire).rows
            assert happened(real, rows, wire["transport"]) is bool(check(plan, **wire)), wire


def test_a_receive_that_holds_its_rank_hangs_where_an_all_reduce_comes_before_its_send():
    # Stages 2 to 5 are on both ranks. PyTorch's order puts rank 1's receive of 1B1's gradient before its all-reduces.
    plan = Plan.parse(
        "2F1 3F1 4F1 5F1 5B1 4B1 3B1 2B1; 0F0 0F1 1F1 1F0 2F0 3F0 4F0 5F0 5B0 4B0 3B0 2B0 1B0 1B1 0B1 0B0"
    )
    (fault,) = check(plan, transport="holding")
    assert fault.message.splitlines()[1:] == [
        "  3R (rank 0) needs rank 1 to reach it too",
        "  3R (rank 1) comes after 1RECV_B1, which needs 2B1",
        "  2B1 comes after 3R on rank 0",
    ]
    assert check(plan, order="at-use", transport="holding") == []


LISTED = "0F0 0SEND_F0 0RECV_B0 0B0; 1RECV_F0 1F0 1B0 1SEND_B0"


def test_rows_with_sends_and_receives_say_with_which_transports_they_hang():
    rows = lower(HANGS, order="at-use").rows
    listed = Plan.parse([" ".join(row) for row in rows])
    assert str(check(listed)).splitlines()[1:] == [
        "transports with which its sends and receives hang: rank, pair",
        "  try: to check it with transport rank, which says why",
    ]
    assert check(listed, transport="rank") == check(HANGS, order="at-use", transport="rank")
    assert check(listed, order="by-time", transport="rank") == []
    assert str(check(Plan.parse(LISTED))).endswith("with which its sends and receives hang: none")
    assert str(check(HANGS)).count("\n") == 0


@pytest.mark.parametrize(
    ("text", "code", "rank", "message", "hint"),
    [
        (LISTED.replace(" 1SEND_B0", ""), "missing", 1, "lists no 1SEND_B0: 0B0 needs the value of 1B0", "after 1B0"),
        (LISTED.replace("1RECV_F0", ""), "missing", 1, "lists no 1RECV_F0: 1F0 needs the value of 0F0", "before 1F0"),
        (LISTED + " 1SEND_B0", "duplicate", 1, "lists 1SEND_B0 2 times", "write 1SEND_B0 once"),
        ("0SEND_F0 0F0 0RECV_B0 0B0; 1RECV_F0 1F0 1B0 1SEND_B0", "unordered", 0, "but not after 0F0", "after 0F0"),
        ("0F0 0SEND_F0 0B0 0RECV_B0; 1RECV_F0 1F0 1B0 1SEND_B0", "unordered", 0, "but not before 0B0", "before 0B0"),
        (LISTED + " 1SEND_F0", "wrong-rank", 1, "no such value crosses", "remove 1SEND_F0"),
        (LISTED + " 0RECV_B7", "wrong-rank", 1, "no such value crosses", "remove 0RECV_B7"),
    ],
)
def test_a_send_or_receive_that_is_not_where_it_has_to_be_is_a_fault_with_every_transport(
    text, code, rank, message, hint
):
    for transport in ("buffered", "rank", "holding"):
        found = check(Plan.parse(text), transport=transport)[0]
        assert (found.code, found.rank) == (code, rank)
        assert message in found.message
        assert hint in found.hint
    with pytest.raises(ScheduleError):
        simulate(Plan.parse(text))


def test_a_send_behind_what_waits_for_its_answer_hangs_with_every_transport():
    plan = Plan.parse("0F0 0RECV_B0 0B0 0SEND_F0; 1RECV_F0 1F0 1B0 1SEND_B0")
    (fault,) = check(plan)
    assert fault.message.splitlines() == [
        "rank 0 waits for rank 1, which waits for rank 0",
        "  0B0 (rank 0) needs 1B0",
        "  1B0 (rank 1) comes after 1F0, which needs 0SEND_F0",
        "  0SEND_F0 comes after 0B0 on rank 0",
    ]
    with pytest.raises(ScheduleError, match="0SEND_F0 comes after 0B0"):
        simulate(plan)


def test_rows_of_a_part_of_a_step_say_which_send_is_lacking_first():
    found = check(Plan.parse("0F0 0SEND_F0 2RECV_F0 2F0; 1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0"))
    assert found[0].message == "rank 0 lists no 2SEND_F0: 3F0 needs the value of 2F0 on rank 0"


def moved(row, random):
    """Return a row with some of its sends later and some of its receives earlier."""
    row = list(row)
    for word in [word for word in row if "_" in word and random.random() < 0.3]:
        at = row.index(word)
        to = min(len(row) - 1, at + random.randint(0, 3)) if "SEND" in word else max(0, at - random.randint(0, 3))
        row.insert(to, row.pop(at))
    return row


@pytest.mark.dist
def test_on_gloo_rows_hang_where_check_says_in_orders_of_their_own_too(real):
    pytest.importorskip("torch", reason="needs PyTorch")
    jobs, predicted = [], []
    for order in ("pytorch", "at-use"):
        plan = schedules["1f1b"](2, 2).plan()
        for how, transport in ON_GLOO.items():
            jobs.append((lower(plan, order=order).rows, how))
            predicted.append(bool(check(plan, order=order, transport=transport)))
    for seed in (0, 2, 3):
        plan, random = legal_plan(seed), Random(seed)  # noqa: S311 - the same ones on every run
        rows = [moved(row, random) for row in lower(plan, order="at-use").rows]
        listed = Plan.parse([" ".join(row) or '""' for row in rows])
        for how, transport in ON_GLOO.items():
            if how != "blocking" or not plan.bound.reduces:
                jobs.append((rows, how))
                predicted.append(bool(check(listed, transport=transport)))
        for transport in ("pair", "edge"):  # there, a send may be quicker than what comes before it
            assert check(listed, transport=transport) or not happened(real, rows, transport), (seed, transport)
    with processes("gloo_rows.py") as gloo:
        assert [each is None for each in on_gloo(gloo, *jobs)] == predicted
    assert sum(predicted[6:]) > 3
