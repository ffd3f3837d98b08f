"""An all-reduce that a schedule places by hand: the same gradients, while other ranks go on with their backwards."""

from __future__ import annotations

import placing
import plain
import pytest
import torch
from torch import nn

import pipelab
from pipelab import Cost, Pipeline, emulated, replicate, simulate

mse = nn.functional.mse_loss
cost = Cost(forward=20, backward=40, all_reduce=40, per="stage", unit="ms")
EARLY, LATE = (replicate(kind(2, 1), 2) for kind in (placing.ReducesEarly, placing.ReducesLate))


def test_an_early_all_reduce_hides_behind_the_backwards_of_the_other_ranks():
    assert [simulate(schedule, cost).makespan for schedule in (EARLY, LATE)] == [280, 320]
    assert placing.beside(simulate(EARLY, cost), 3) == {0, 2}  # they run 2B
    assert placing.beside(simulate(EARLY, cost), 2) == {1, 3}
    assert placing.beside(simulate(LATE, cost), 2) == set()


def test_pipelab_places_all_reduces_that_early_itself():
    left_out = replicate(pipelab.Interleaved1F1B(2, 1), 2)
    assert left_out.plan().rows == EARLY.plan().rows


@pytest.mark.parametrize("kind", [placing.ReducesEarly, placing.ReducesLate])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_do_not_depend_on_where_the_all_reduces_are(kind, microbatches):
    models = [plain.mlp(8) for _ in range(3)]
    x, y = plain.batch(4 * microbatches)
    for model, each in zip(models, (kind, pipelab.Interleaved1F1B), strict=False):
        with Pipeline(model, replicate(each(2, microbatches), 2), mse) as pipe:
            pipe.step(x, y)
    plain.at_once(models[2], mse, x, y)
    ours, inserted, expected = map(plain.taken, models)
    assert plain.equal(ours, inserted)
    assert plain.difference(ours, expected) < 1e-6


def test_other_ranks_go_on_with_their_backwards_in_threads():
    x = torch.ones(2, 1)
    with Pipeline(emulated(4, 2, 20, all_reduce_ms=200), EARLY, mse, devices=["cpu"] * 4) as pipe:
        trace = pipe.step(x, x).trace
    assert placing.beside(trace, 3)  # the replica that came last at least
