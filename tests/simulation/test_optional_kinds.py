"""Costs, bounds and fits of plans with passes of every rank, recomputation, gathers and offloads."""

from __future__ import annotations

import pytest

import pipelab
from pipelab import BPipe, Cost, CostError, UsageError

SHARES = pipelab.VocabularyParallel(4, 4)


@pytest.mark.parametrize("slow", [{"sender": "busy"}, {"slowdown": 2}])
def test_a_busy_sender_or_a_slow_down_is_refused_where_a_value_goes_to_all_ranks(slow):
    with pytest.raises(CostError, match="has S"):
        pipelab.simulate(SHARES, Cost(vocabulary=1, latency=0.5, **slow))


@pytest.mark.parametrize("plan", [pipelab.with_gathers(pipelab.Interleaved1F1B(2, 4), 1), BPipe(4, 6).plan()])
def test_the_optimum_leaves_no_gather_or_offload_out(plan):
    with pytest.raises(UsageError, match="would leave it out"):
        pipelab.optimum(plan, Cost(gather=3, offload=3, load=3))


def test_a_plan_that_offloads_has_no_bound_under_a_cap():
    with pytest.raises(UsageError, match="sends activations away"):
        pipelab.lower_bound(BPipe(4, 6), memory_cap=3)
    assert pipelab.lower_bound(BPipe(4, 6)) <= pipelab.simulate(BPipe(4, 6)).makespan


def test_a_micro_batch_has_its_share_of_the_vocabulary_and_of_what_is_sent_away():
    shared = Cost(vocabulary=8, vocabulary_grad=8, offload=8, load=8, gather=8).shared(8)
    assert (shared.vocabulary, shared.vocabulary_grad, shared.offload, shared.load, shared.gather) == (1, 1, 1, 1, 8)


@pytest.mark.parametrize(
    ("plan", "cost"),
    [
        (SHARES, Cost(vocabulary=2, vocabulary_grad=1, latency=0.5)),
        (pipelab.VocabularyParallel(3, 5, 2), Cost(vocabulary=2, vocabulary_grad=3)),
        (BPipe(4, 8), Cost(offload=3, load=2)),
        (pipelab.with_gathers(pipelab.Interleaved1F1B(2, 4), 1), Cost(gather=1.5)),
        (pipelab.TwoBW(2, 6), Cost(update=0.5)),
        (pipelab.with_recompute(pipelab.GPipe(3, 4)), Cost(recompute=1.5, latency=0.25)),
    ],
)
def test_fitted_costs_predict_the_step_that_they_were_fitted_to(plan, cost):
    trace = pipelab.simulate(plan, cost)
    assert pipelab.simulate(trace.plan, Cost.fit(trace)).makespan == pytest.approx(trace.makespan)


def test_barriers_take_the_latency_of_links():
    one = pipelab.simulate(pipelab.VocabularyParallel(4, 8), Cost(vocabulary=1, latency=1))
    links = pipelab.Links(2, (1, None), (1, None))
    assert pipelab.simulate(pipelab.VocabularyParallel(4, 8), Cost(vocabulary=1, links=links)).makespan == one.makespan
