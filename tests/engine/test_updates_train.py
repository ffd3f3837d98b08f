"""Updates within a step train as their papers say: 2BW one step late, PipeDream with each rank's own delay."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pipes import stepped, verified

import plain
import pytest
import torch
from torch import nn

import pipelab


def delayed(model, x, y, microbatches, group, late, rate):
    """Train in plain PyTorch: each group with the weights of `late` groups before; return the final weights."""
    versions = [[each.detach().clone() for each in model.parameters()]]
    rows = list(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True))
    for first in range(0, microbatches, group):
        old = versions[max(0, len(versions) - 1 - late)]
        for parameter, value in zip(model.parameters(), old, strict=True):
            parameter.data, parameter.grad = value.clone(), None
        for inputs, targets in rows[first : first + group]:
            (nn.functional.mse_loss(model(inputs), targets) / microbatches).backward()
        pairs = zip(versions[-1], model.parameters(), strict=True)
        versions.append([value - rate * parameter.grad for value, parameter in pairs])
    return versions[-1]


def made(ranks):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(ranks)))


FLUSHED = pipelab.Plan([[*row, pipelab.U(3, stage)] for stage, row in enumerate(pipelab.GPipe(2, 4).plan().rows)])


@pytest.mark.parametrize(
    ("schedule", "group", "late"),
    [(pipelab.TwoBW(1, 4), 1, 1), (pipelab.TwoBW(2, 8), 2, 1), (pipelab.TwoBW(3, 10), 3, 1), (FLUSHED, 4, 0)],
)
def test_updates_train_as_gradient_descent_with_gradients_so_late_bit_for_bit(schedule, group, late):
    plan = schedule.plan() if hasattr(schedule, "plan") else schedule
    model, plainly, (x, y) = made(plan.ranks), made(plan.ranks), plain.batch(2 * plan.microbatches, 4)
    stepped(model, plan, (x, y), optimizer=partial(torch.optim.SGD, lr=0.5))
    expected = delayed(plainly, x, y, plan.microbatches, group, late, rate=0.5)
    assert all(map(torch.equal, model.parameters(), expected))
    assert all(each.grad is None for each in model.parameters())


def test_pipedreams_last_stage_is_not_stale_and_its_first_is():
    model, seen = made(2), ([], [])
    for stage, weights in zip(model, seen, strict=True):
        stage.register_forward_pre_hook(lambda part, _, kept=weights: kept.append(part[0].weight.detach().clone()))
    stepped(model, pipelab.PipeDream(2, 6), plain.batch(12, 4), optimizer=partial(torch.optim.SGD, lr=0.5))
    first, last = seen
    assert all(not torch.equal(one, other) for one, other in pairwise(last))
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])


@pytest.mark.parametrize("optimizer", [None, partial(torch.optim.SGD, lr=0.5)])
def test_without_an_optimizer_updates_change_nothing_and_verify_freezes_them(optimizer):
    model = made(2)
    before = [each.detach().clone() for each in model.parameters()]
    assert verified(model, pipelab.PipeDream(2, 4), plain.batch(8, 4), optimizer=optimizer).exact
    assert all(map(torch.equal, model.parameters(), before))


def test_processes_do_not_run_updates():
    with pytest.raises(pipelab.EngineError, match="update"):
        pipelab.Pipeline(made(2), pipelab.PipeDream(2, 4), nn.MSELoss(), engine="torch")
