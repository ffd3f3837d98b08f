"""Links between ranks, and all-reduces on them."""

from __future__ import annotations

import dataclasses
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipelab
from pipelab import Cost, Links, all_reduce_time, simulate
from pipelab.errors import CostError, UsageError


def ring(replicas, size, latency, bandwidth):
    """Return what a ring takes, message by message."""
    return sum(latency + size / replicas / bandwidth for _phase in range(2) for _step in range(replicas - 1))


def tree(replicas, size, latency, bandwidth):
    """Return what a binomial tree takes: in each round, whoever has the sum halves in number."""
    left, rounds = replicas, 0
    while left > 1:
        left, rounds = (left + 1) // 2, rounds + 1
    return 2 * rounds * (latency + size / bandwidth)


@given(st.integers(1, 70), st.integers(0, 1000), st.integers(0, 9), st.integers(1, 50))
def test_all_reduces_take_what_their_messages_take(replicas, size, latency, bandwidth):
    given_ = (size, replicas, latency, bandwidth)
    assert all_reduce_time("ring", *given_) == pytest.approx(ring(replicas, size, latency, bandwidth))
    assert all_reduce_time("tree", *given_) == pytest.approx(tree(replicas, size, latency, bandwidth))
    server = 0 if replicas == 1 else 2 * replicas * (latency + size / bandwidth)
    assert all_reduce_time("parameter-server", *given_) == pytest.approx(server)


def test_a_ring_is_best_for_large_gradients_and_a_tree_for_small_ones():
    assert all_reduce_time("ring", 1e6, 64, 1, 100) < all_reduce_time("tree", 1e6, 64, 1, 100)
    assert all_reduce_time("ring", 1, 64, 1, 100) > all_reduce_time("tree", 1, 64, 1, 100)
    assert all_reduce_time("tree", 5, 8, 1) == 2 * ceil(log2(8))


@pytest.mark.parametrize("wrong", [{"algorithm": "star"}, {"bytes": -1}, {"latency": "1"}, {"bandwidth": 0}])
def test_an_all_reduce_that_cannot_be_is_refused(wrong):
    with pytest.raises(CostError, match=next(iter(wrong))):
        all_reduce_time(**{"algorithm": "ring", "bytes": 8, "replicas": 2, "latency": 1, "bandwidth": 2} | wrong)
    with pytest.raises(UsageError, match="replicas=0"):
        all_reduce_time("ring", 8, 0, 1)


def test_a_transfer_takes_as_long_as_its_own_link():
    links = Links(ranks_per_node=2, inside=(1, 4), between=(3, 2))
    cost = Cost(links=links, activation_bytes=8, boundary_gradient_bytes=[0, 4, 8, 16])
    trace = simulate(pipelab.GPipe(4, 2), cost)
    took = {(each.source, each.target): each.end - each.start for each in trace.transfers}
    assert took == {(0, 1): 3, (1, 2): 7, (2, 3): 3, (1, 0): 2, (2, 1): 7, (3, 2): 5}


def test_each_micro_batch_of_a_bidirectional_schedule_takes_its_own_way():
    plan = pipelab.DualPipe(4, 8).plan()
    trace = simulate(plan, Cost(links=Links(3, inside=(0.5, None), between=(2, None))))
    for each in trace.transfers:
        assert each.end - each.start == (0.5 if each.source // 3 == each.target // 3 else 2)


def test_links_of_one_kind_are_a_latency_and_a_bandwidth():
    sizes = {"activation_bytes": 6, "boundary_gradient_bytes": lambda m, s: m + s}
    plan = pipelab.Interleaved1F1B(2, 4).plan()
    assert simulate(plan, Cost(links=Links(1, (9, 9), (1, 2)), **sizes)) == simulate(
        plan, Cost(latency=1, bandwidth=2, **sizes)
    )


LINKS = {"ranks_per_node": 2, "inside": (0, None), "between": (1, None)}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        *(
            (lambda inside=inside: Links(2, inside=inside, between=(1, None)), "inside=")
            for inside in (1, (1,), (1, 0), (None, 1), (-1, 2), (1, "2"), (1, 2, 3))
        ),
        (lambda: Links(0, (0, None), (1, None)), "ranks_per_node=0"),
        (lambda: Cost(links=Links(**LINKS), latency=1), "leave out latency and bandwidth"),
        (lambda: Cost(links=Links(**LINKS), bandwidth=1), "leave out latency and bandwidth"),
        (lambda: Cost(links=(2, 1)), "links="),
        (lambda: Cost(links={"inside": (1, None)}), "links="),
    ],
)
def test_links_that_cannot_be_are_refused(make, told):
    with pytest.raises((CostError, UsageError), match=told):
        make()


def test_a_dict_of_its_arguments_is_as_good_as_links():
    assert Cost(links=LINKS) == Cost(links=Links(**LINKS))
    assert Cost(**dataclasses.asdict(Cost(links=LINKS))) == Cost(links=LINKS)
