"""Costs, bounds and fits of plans with recomputation, gathers and offloads."""

from __future__ import annotations

import pytest

import pipelab
from pipelab import BPipe, Cost, UsageError


@pytest.mark.parametrize("plan", [pipelab.with_gathers(pipelab.Interleaved1F1B(2, 4), 1), BPipe(4, 6).plan()])
def test_the_optimum_leaves_no_gather_or_offload_out(plan):
    with pytest.raises(UsageError, match="would leave it out"):
        pipelab.optimum(plan, Cost(gather=3, offload=3, load=3))


def test_a_plan_that_offloads_has_no_bound_under_a_cap():
    with pytest.raises(UsageError, match="sends activations away"):
        pipelab.lower_bound(BPipe(4, 6), memory_cap=3)
    assert pipelab.lower_bound(BPipe(4, 6)) <= pipelab.simulate(BPipe(4, 6)).makespan


@pytest.mark.parametrize(
    ("plan", "cost"),
    [
        (BPipe(4, 8), Cost(offload=3, load=2)),
        (pipelab.with_gathers(pipelab.Interleaved1F1B(2, 4), 1), Cost(gather=1.5)),
        (pipelab.TwoBW(2, 6), Cost(update=0.5)),
        (pipelab.with_recompute(pipelab.GPipe(3, 4)), Cost(recompute=1.5, latency=0.25)),
    ],
)
def test_fitted_costs_predict_the_step_that_they_were_fitted_to(plan, cost):
    trace = pipelab.simulate(plan, cost)
    assert pipelab.simulate(trace.plan, Cost.fit(trace)).makespan == pytest.approx(trace.makespan)
