"""Updates within a step train as their papers say: 2BW one step late, PipeDream with each rank's own delay."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

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


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 4), (2, 8), (3, 10)])
def test_2bw_trains_as_gradient_descent_with_gradients_one_step_late_bit_for_bit(ranks, microbatches):
    model, plain = made(ranks), made(ranks)
    x, y = torch.randn(2 * microbatches, 4), torch.randn(2 * microbatches, 4)
    optimizer = partial(torch.optim.SGD, lr=0.5)
    with pipelab.Pipeline(model, pipelab.TwoBW(ranks, microbatches), nn.MSELoss(), optimizer=optimizer) as pipe:
        pipe.step(x, y)
    expected = delayed(plain, x, y, microbatches, ranks, late=1, rate=0.5)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), expected, strict=True))
    assert all(each.grad is None for each in model.parameters())


def test_pipedreams_last_stage_is_not_stale_and_its_first_is():
    ranks, microbatches = 2, 6
    model = made(ranks)
    x, y = torch.randn(12, 4), torch.randn(12, 4)
    seen = []
    model[1].register_forward_pre_hook(lambda part, _: seen.append(part[0].weight.detach().clone()))
    first = []
    model[0].register_forward_pre_hook(lambda part, _: first.append(part[0].weight.detach().clone()))
    optimizer = partial(torch.optim.SGD, lr=0.5)
    with pipelab.Pipeline(model, pipelab.PipeDream(ranks, microbatches), nn.MSELoss(), optimizer=optimizer) as pipe:
        pipe.step(x, y)
    assert all(not torch.equal(one, other) for one, other in pairwise(seen))
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])


def test_without_an_optimizer_updates_change_nothing_and_verify_freezes_them():
    model = made(2)
    before = [each.detach().clone() for each in model.parameters()]
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    for optimizer in (None, partial(torch.optim.SGD, lr=0.5)):
        with pipelab.Pipeline(model, pipelab.PipeDream(2, 4), nn.MSELoss(), optimizer=optimizer) as pipe:
            assert pipe.verify(x, y).exact
        assert all(torch.equal(each, other) for each, other in zip(model.parameters(), before, strict=True))


def test_gpipe_with_a_flush_is_an_update_at_the_end():
    rows = [[*row, pipelab.U(3, stage)] for stage, row in enumerate(pipelab.GPipe(2, 4).plan().rows)]
    model, plain = made(2), made(2)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    optimizer = partial(torch.optim.SGD, lr=0.5)
    with pipelab.Pipeline(model, pipelab.Plan(rows), nn.MSELoss(), optimizer=optimizer) as pipe:
        pipe.step(x, y)
    expected = delayed(plain, x, y, 4, 4, late=0, rate=0.5)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), expected, strict=True))


def test_processes_do_not_run_updates():
    with pytest.raises(pipelab.EngineError, match="update"):
        pipelab.Pipeline(made(2), pipelab.PipeDream(2, 4), nn.MSELoss(), engine="torch")
