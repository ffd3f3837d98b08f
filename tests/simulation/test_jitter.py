"""Slow ranks and noise: the draws are simulations."""

from __future__ import annotations

import sys
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import catalogue_plans, costs

import pipelab
from pipelab import Cost, ScheduleError, jitter, simulate
from pipelab.errors import CostError, UsageError

PAIRED = pipelab.Plan([[pipelab.F(0), pipelab.F(1) & pipelab.B(0), pipelab.B(1)]])


@given(catalogue_plans(), costs(), st.sampled_from([0, 0.5]), st.sampled_from(["free", "busy"]), st.data())
def test_a_draw_without_noise_is_the_simulation_with_slow_ranks(plan, forward, latency, sender, data):
    slow = {data.draw(st.integers(0, plan.ranks - 1)): data.draw(st.sampled_from([0.5, 1.25, 3]))}
    cost = Cost(forward=forward, backward=3, latency=latency, sender=sender, per="stage")
    ranks, stages = plan.bound.rank_of_slot, plan.stages
    slower = Cost(
        forward=lambda m, s: forward * slow.get(ranks[m * stages + s], 1),
        backward=lambda m, s: 3 * slow.get(ranks[m * stages + s], 1),
        latency=latency,
        sender=sender,
    )
    drawn, expected = jitter(plan, cost, spread=0, slow=slow, draws=2), simulate(plan, slower)
    assert drawn.makespans == pytest.approx((expected.makespan,) * 2)
    assert drawn.undisturbed == simulate(plan, cost).makespan
    before = [drawn.undisturbed - busy for busy in simulate(plan, cost).busy]
    assert drawn.waits == pytest.approx(
        [expected.makespan - busy - then for busy, then in zip(expected.busy, before, strict=True)]
    )


def test_noise_keeps_the_mean_and_has_the_given_spread():
    alone = jitter(pipelab.GPipe(1, 50), Cost(forward=1, backward=1), spread=0.3, draws=4000)
    assert mean(alone.makespans) == pytest.approx(100, rel=0.005)
    assert stdev(alone.makespans) == pytest.approx(0.3 * 10, rel=0.1)
    assert min(jitter(pipelab.GPipe(1, 1), spread=3).makespans) > 0


def test_noise_makes_a_pipeline_longer_and_a_seed_repeats_it():
    first, again, other = (jitter(pipelab.OneFOneB(4, 8), draws=50, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first.mean > first.undisturbed == 33


def test_draws_in_several_blocks_are_as_many(monkeypatch):
    monkeypatch.setattr("pipelab.simulation.what_if._NUMBERS_AT_ONCE", 1000)
    drawn = jitter(pipelab.ZBH1(2, 8), draws=100)
    assert len(set(drawn.makespans)) == 100
    assert jitter(pipelab.ZBH1(2, 8), spread=0, draws=100).waits == (0, 0)


def test_pairs_as_one_slot_and_all_reduces_are_drawn_too():
    assert jitter(PAIRED, Cost(pair=10), spread=0, slow={0: 2}, draws=1).makespans == (26,)
    replicated = pipelab.replicate(pipelab.GPipe(2, 2), 2)
    assert jitter(replicated, Cost(all_reduce=5), spread=0, slow={3: 2}, draws=1).makespans == (23,)


def test_quantiles_lie_on_the_draws():
    drawn = jitter(pipelab.GPipe(2, 2), draws=5)
    assert [drawn.quantile(q / 4) for q in range(5)] == sorted(drawn.makespans)
    for wrong in (-0.1, 1.1, "half", float("nan")):
        with pytest.raises(UsageError, match="q="):
            drawn.quantile(wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"slow": {4: 2}}, {"slow": {0: -1}}, {"slow": {"0": 2}}, {"spread": -1}, {"spread": "0.1"}, {"draws": 0}],
    ids=str,
)
def test_arguments_that_cannot_be_are_named(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        jitter(pipelab.GPipe(4, 2), **wrong)


def test_what_cannot_be_drawn_is_refused(monkeypatch):
    with pytest.raises(CostError, match="slowdown=2"):
        jitter(pipelab.GPipe(2, 2), Cost(slowdown=2))
    with pytest.raises(ScheduleError):
        jitter(pipelab.Plan.parse(["0F0"]))
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(UsageError, match="NumPy"):
        jitter(pipelab.GPipe(2, 2))
