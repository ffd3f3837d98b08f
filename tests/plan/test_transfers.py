"""Lowered rows: a plan's sends and receives, in PyTorch's order and in others."""

from __future__ import annotations

import pytest
from fuzz.wire import legal_plan
from strategies import WIRES, near

from pipelab import Plan, check, lower, replicate, schedules, simulate
from pipelab.checking.transfers import Wire
from pipelab.errors import UsageError
from pipelab.plan.transfers import lowered

CALM = Plan.parse("0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1")


def rows(low):
    return list(map(" ".join, low.words()))


AT_USE = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"


@pytest.mark.parametrize(
    ("order", "first", "second"),
    [
        (  # posts a receive when its send is placed
            "pytorch",
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
        ),
        ("at-use", "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", AT_USE),
        # Both exchange F1 and B0 at once. PyTorch's own order has rank 1 receive first; deferred, rank 0 does.
        ("deferred", "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", AT_USE),
        ("by-time", "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1", AT_USE),  # micro-batch by micro-batch
    ],
)
def test_every_order_puts_sends_and_receives_where_it_says(order, first, second):
    low = lowered(CALM.bound, "pytorch")
    values = sorted(low.crossings, key=lambda value: (low.bound.codes.microbatch[low.crossings[value].giver], value))
    assert rows(lowered(CALM.bound, order, values if order == "by-time" else None)) == [first, second]


def test_a_pair_receives_before_both_halves_and_sends_after_both():
    plan = schedules["dualpipev"](2, 4).plan()
    pairs = 0
    for order in ("pytorch", "at-use", "deferred"):
        for text in rows(lowered(plan.bound, order)):
            row = text.split()
            for at, word in enumerate(row):
                if word.endswith("OVERLAP_F_B"):
                    pairs += 1
                    forward, backward = word[1:].removesuffix(")OVERLAP_F_B").split(";")
                    received = {forward.replace("F", "RECV_F"), backward.replace("B", "RECV_B")} & set(row)
                    sent = {forward.replace("F", "SEND_F"), backward.replace("B", "SEND_B")} & set(row)
                    assert received <= set(row[:at])
                    assert sent <= set(row[at + 1 :])
    assert pairs


@pytest.mark.sweep
@pytest.mark.parametrize("name", schedules)
@pytest.mark.parametrize("order", ["pytorch", "at-use", "deferred", "by-time"])
def test_every_lowered_row_has_its_plans_actions_and_each_transfer_twice(name, order):
    plan = near(name, 3, 5)
    found = lower(plan, order=order)
    low = lowered(plan.bound, found.order, found.values)
    assert [[code for word, item in row if word == "run" for code in item] for row in low.rows] == plan.bound.computing
    both = sorted(value for values in Wire(low, "rank").queues.values() for value in values)
    assert both == sorted([*low.crossings, *low.crossings])
    for row in low.rows:
        done = [(word, number) for word, item in row for number in item]
        place = {step: at for at, step in enumerate(done)}
        for value, crossing in low.crossings.items():
            if ("SEND", value) in place:
                assert place["SEND", value] > place["run", crossing.giver]
            if ("RECV", value) in place:
                assert place["RECV", value] < place["run", crossing.needer]


def test_the_number_of_queues_is_that_of_the_transport():
    # A ring of four ranks: each has two neighbours, and sends to both and receives from both.
    low = lowered(schedules["interleaved-1f1b"](4, 8).plan().bound, "pytorch")
    numbers = {wire["transport"]: len(Wire(low, wire["transport"]).queues) for wire in WIRES}
    assert numbers == {"buffered": 0, "holding": 0, "rank": 4, "pair": 8, "edge": 16}


def test_replicas_send_to_the_ranks_of_their_own_copy():
    plan = replicate(schedules["1f1b"](2, 4), 2).plan()
    low = lowered(plan.bound, "pytorch")
    assert {(each.source, each.target) for each in low.crossings.values()} == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert check(plan, transport="rank") == []


def test_the_words_of_a_runtime_are_those_of_its_version():
    low = lower(schedules["1f1b"](2, 2))
    old, new = low.for_runtime("2.14"), low.for_runtime("2.15")
    assert "WAIT" not in str(old)
    assert [[word for word in row if "WAIT" not in word] for row in new] == list(map(list, old))
    assert [word for word in new[0] if "WAIT" in word] == ["0WAIT_SEND_F0", "0WAIT_SEND_F1", "0WAIT_REDUCE_GRAD"]
    assert new[1][-2:] == ("1WAIT_SEND_B0", "1WAIT_SEND_B1")


@pytest.mark.sweep
@pytest.mark.parametrize("name", schedules)
@pytest.mark.parametrize("most", [1, 2])
def test_no_rank_has_more_sends_under_way_than_it_may(name, most):
    plan = near(name, 2, 4)
    rows = lower(plan).for_runtime("2.15", max_outstanding_sends=most)
    for row, free in zip(rows, lower(plan).for_runtime("2.15"), strict=True):
        under_way = [0]
        for word in row:
            under_way.append(under_way[-1] + ("SEND" in word) * (-1 if "WAIT" in word else 1))
        assert max(under_way) <= most
        assert under_way[-1] == 0
        assert sorted(row) == sorted(free)


@pytest.mark.sweep
@pytest.mark.parametrize("name", schedules)
@pytest.mark.parametrize("order", ["pytorch", "at-use", "deferred", "by-time"])
def test_rows_with_sends_and_receives_read_back_as_the_plan_and_hang_where_it_does(name, order):
    plan = near(name, 3, 6)
    low = lower(plan, order=order)
    back = Plan.parse([" ".join(row) or '""' for row in low.rows])
    assert back.rows == plan.rows
    assert lower(back).rows == low.rows
    for transport in ("rank", "pair", "edge", "holding"):
        if order != "by-time":
            assert bool(check(back, transport=transport)) is bool(check(plan, order=order, transport=transport))
            if not check(back, transport=transport):
                there = simulate(plan, order=order, transport=transport).makespan
                assert simulate(back, transport=transport).makespan == there


@pytest.mark.parametrize("torch", ["2.13", "2.15"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_a_file_with_all_words_of_a_runtime_reads_back(name, torch, tmp_path):
    low = lower(schedules[name](3, 5), order="at-use")
    back = Plan.from_csv(low.to_csv(tmp_path / "rows.csv", torch))
    assert check(back) == []
    assert lower(back).for_runtime(torch) == low.for_runtime(torch)
    words = [word for row in lower(back).rows for word in row if "REDUCE" not in word and "WAIT" not in word]
    assert words == [word for row in low.rows for word in row]


@pytest.mark.parametrize(("seed", "order"), [(348, "at-use"), (348, "deferred"), (791, "pytorch")])
def test_rows_with_few_sends_under_way_run_to_their_end_through_all_reduces(seed, order):
    plan = legal_plan(seed)
    try:
        rows = lower(plan, order=order).for_runtime("2.15", max_outstanding_sends=1)
    except UsageError:  # no order of waits keeps to it
        return
    at, done = [0] * len(rows), set()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and may_run(row[at[rank]], rank, rows, at, done):
                done.add(row[at[rank]])
                at[rank] += 1
                moved = True
    assert at == list(map(len, rows))


def may_run(word, rank, rows, at, done):
    """A receive waits for its send, a wait for its receive to be reached, and an all-reduce for all of its ranks."""
    if "RECV_" in word:
        stage, value = word.split("RECV_")
        return f"{int(stage) + (1 if value[0] == 'B' else -1)}SEND_{value}" in done
    if "WAIT_SEND_" in word:
        stage, value = word.split("WAIT_SEND_")
        receive = f"{int(stage) + (-1 if value[0] == 'B' else 1)}RECV_{value}"
        return any(receive in row[: at[other] + 1] for other, row in enumerate(rows))
    if word.endswith("REDUCE_GRAD") and "WAIT" not in word:
        return all(word in row[: at[other] + 1] for other, row in enumerate(rows) if word in row)
    return True


@pytest.mark.parametrize(
    ("torch", "options"),
    [
        ("new", {}),
        ("2.14", {"max_outstanding_sends": 1}),
        *(("2.15", {"max_outstanding_sends": each}) for each in (-1, 0)),
        *(("2.15", {"unshard_lookahead": each}) for each in ([3], "most")),
    ],
)
def test_what_a_runtime_cannot_do_is_refused(torch, options):
    with pytest.raises(UsageError):
        lower(schedules["1f1b"](2, 2)).for_runtime(torch, **options)
