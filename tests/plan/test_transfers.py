"""Lowered rows: a plan's sends and receives, in PyTorch's order and in others."""

from __future__ import annotations

import pytest
from strategies import near

from pipelab import Plan, check, replicate, schedules
from pipelab.plan.transfers import SEMANTICS, in_order, lowered, queues

CALM = Plan.parse("0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1")


def rows(low):
    return [" ".join(low.word(step) for step in row if step[0] in ("run", "SEND", "RECV")) for row in low.rows]


def test_pytorchs_order_posts_a_receive_when_its_send_is_placed():
    assert rows(lowered(CALM.bound, "pytorch")) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_a_deferred_receive_stands_right_before_its_use():
    assert rows(lowered(CALM.bound, "deferred"))[1] == "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"


def test_a_pair_receives_before_both_halves_and_sends_after_both():
    plan = schedules["dualpipev"](2, 4).plan()
    pairs = 0
    for semantics in ("pytorch", "deferred"):
        for text in rows(lowered(plan.bound, semantics)):
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


@pytest.mark.parametrize("name", schedules)
@pytest.mark.parametrize("semantics", SEMANTICS)
def test_every_lowered_row_has_its_plans_actions_and_each_transfer_twice(name, semantics):
    plan = near(name, 3, 5)
    low = lowered(plan.bound, semantics)
    assert [[code for word, item in row if word == "run" for code in item] for row in low.rows] == plan.bound.rows
    wire = queues(low, semantics)
    both = sorted(value for values in wire.values for value in values)
    assert both == sorted([*low.crossings, *low.crossings])
    for row in low.rows:
        done = [(word, number) for word, item in row for number in item]
        place = {step: at for at, step in enumerate(done)}
        for value, crossing in low.crossings.items():
            if ("SEND", value) in place:
                assert place["SEND", value] > place["run", crossing.giver]
            if ("RECV", value) in place:
                assert place["RECV", value] < place["run", crossing.needer]


def test_the_number_of_queues_is_that_of_the_semantics():
    plan = schedules["interleaved-1f1b"](4, 8).plan()
    numbers = {name: len(queues(lowered(plan.bound, name), name).values) for name in SEMANTICS}
    crossing = len(lowered(plan.bound, "pytorch").crossings)
    one = dict.fromkeys(("pytorch", "pytorch-runtime", "deferred", "by-time"), 4)
    assert numbers == one | {"arrive": 2 * crossing, "two-way": 8, "per-peer": 8}


def test_an_order_of_values_is_the_order_of_every_queue():
    low = lowered(CALM.bound, "pytorch")
    order = sorted(low.crossings, key=lambda value: (low.bound.codes.microbatch[low.crossings[value].giver], value))
    assert rows(in_order(CALM.bound, order)) == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    ]


def test_replicas_send_to_the_ranks_of_their_own_copy():
    plan = replicate(schedules["1f1b"](2, 4), 2).plan()
    low = lowered(plan.bound, "pytorch")
    assert {(each.source, each.target) for each in low.crossings.values()} == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert check(plan, transfers="pytorch") == []
