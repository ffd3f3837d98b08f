"""The gradients of a stage's replicas, summed: here in a world of one, whose sum is its own gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipelab.engine.torchrun.stage import Reducer


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def sums(monkeypatch):
    """What is summed over the processes: the type and size of each tensor."""
    seen, summing = [], dist.all_reduce

    def watched(tensor, group, **_):
        seen.append((tensor.dtype, tensor.numel()))
        if tensor.dtype != torch.complex64:
            summing(tensor, group=group)

    monkeypatch.setattr(dist, "all_reduce", watched)
    return seen


def reducer(*parameters) -> Reducer:
    return Reducer(nn.ParameterList(parameters), dist.group.WORLD, torch.device("cpu"))


def summed(reduces: Reducer, make) -> None:
    """Go through a step whose gradients `make` makes."""
    reduces.begin()
    make()
    reduces.meet()
    reduces.reduce()
    reduces.end()


@pytest.mark.parametrize("turn", [1, -1])
def test_gradients_of_several_types_are_summed_in_the_parameters_order(turn, sums):
    types = [torch.float64, torch.bfloat16, torch.float32, torch.float16, torch.complex64][::turn]
    parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in types]

    def make():
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)

    summed(reducer(*parameters), make)
    assert [dtype for dtype, _ in sums[1:]] == types  # the first sum is about which parameters have a gradient


@pytest.mark.parametrize("before", [False, True])
def test_sparse_gradients_are_summed_densely_and_added_to(before):
    table = nn.Embedding(4, 2, sparse=True)
    rows = torch.tensor([1, 3])
    if before:
        table(rows).sum().backward()
    reduces = reducer(*table.parameters())
    for steps in (1, 2):
        summed(reduces, lambda: table(rows).sum().backward())
        assert torch.equal(table.weight.grad, torch.zeros(4, 2).index_fill(0, rows, steps + before))


def test_a_parameter_that_learns_from_a_later_step_on_is_summed_from_then_on(sums):
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    learns = nn.Parameter(torch.ones(2))
    reduces = reducer(frozen, learns)

    def make():
        (frozen.sum() + learns.sum()).backward()

    summed(reduces, make)
    frozen.requires_grad_(True)
    summed(reduces, make)
    assert [size for _, size in sums] == [1, 2, 2, 5]
    assert torch.equal(learns.grad, torch.full((2,), 2.0))
    assert torch.equal(frozen.grad, torch.ones(3))


def test_parameters_that_took_the_place_of_others_are_summed(sums):
    """As `load_state_dict(assign=True)` does."""
    layer = nn.Linear(2, 1)
    reduces = Reducer(layer, dist.group.WORLD, torch.device("cpu"))
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)
    summed(reduces, lambda: layer(torch.ones(1, 2)).sum().backward())
    assert [size for _, size in sums] == [2, 3]
    assert torch.equal(layer.weight.grad, torch.ones(1, 2))
