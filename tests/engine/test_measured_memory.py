"""Bytes measured: of one micro-batch in each stage, and of every rank in a step; and the step predicted from them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipelab
from pipelab import Pipeline, UsageError, memory_use
from pipelab.labs.demo import Setting
from pipelab.labs.language_model import next_byte_loss, standard_library

ROWS = 3
"""Of a micro-batch."""


def small(schedule, **more):
    """A pipeline of two stages whose bytes can be counted by hand, and a batch of four micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 2))
    pipe = Pipeline(model, schedule, nn.MSELoss(), ["cpu"] * 2, **more)
    return pipe, torch.randn(4 * ROWS, 4), torch.randn(4 * ROWS, 2)


def test_the_bytes_of_one_microbatch_are_those_counted_by_hand():
    pipe, x, y = small(pipelab.GPipe(2, 4))
    adam = torch.optim.Adam(pipe.parameters())
    with pipe:
        before = pipe.memory(x, y, adam)
        pipe.step(x, y)
        adam.step()
        memory = pipe.memory(x, y, adam)
    hidden, output = ROWS * 8 * 4, ROWS * 2 * 4
    loss = output  # its one number is in the memory of the squares that it is the mean of
    weights = ((4 * 8 + 8) * 4, (8 * 2 + 2) * 4)
    assert memory.weights == memory.gradients == weights
    assert before.optimizer == (0, 0)
    assert memory.optimizer == tuple(2 * size + 2 * 4 for size in weights)  # and a step count for each parameter
    assert memory.activations == (hidden, hidden + loss)  # the ReLU's result, which is what the linear layer saves
    assert memory.for_weight_grad == (hidden + hidden, hidden + output)  # and the gradients that arrived
    assert memory.outputs == output


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_the_peaks_of_the_demo_are_predicted_within_ten_per_cent(name):
    setting = Setting(blocks=3)
    x, y = setting.batches(standard_library()).take()
    schedule = pipelab.schedules[name](setting.ranks, setting.microbatches)
    with Pipeline(setting.model(), schedule, next_byte_loss, ["cpu"] * setting.ranks) as pipe:
        measured = pipe.memory_use(x, y)
        predicted = memory_use(schedule, pipe.memory(x, y))
    assert measured.source == "measured"
    for said, found in zip(predicted.at_peak, measured.at_peak, strict=True):
        assert said.activations == pytest.approx(found.activations, rel=0.1)
        assert said.total == pytest.approx(found.total, rel=0.1)
    assert [curve[-1].activations for curve in measured.curves] == [0, 0]


@pytest.mark.parametrize("name", ["zb-h2", "interleaved-1f1b", "dualpipe"])
def test_other_schedules_hold_what_was_predicted_and_nothing_at_the_end(name):
    schedule = pipelab.schedules[name](2, 4)
    stages = schedule.plan().stages
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(stages)))
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    with Pipeline(model, schedule, nn.MSELoss(), ["cpu"] * 2) as pipe:
        memory, measured = pipe.memory(x, y), pipe.memory_use(x, y)
    predicted = memory_use(measured.trace, memory)
    for found, said in zip(measured.curves, predicted.curves, strict=True):
        assert max(held.activations for held in found) == max(held.activations for held in said) > 0
        assert found[-1].activations == said[-1].activations == 0
        assert found[-1].outputs == said[-1].outputs
        assert found[-1].weights == said[-1].weights


def test_a_stage_under_a_checkpoint_keeps_less():
    class Checkpointed(nn.Sequential):
        def forward(self, given):
            return checkpoint(super().forward, given, use_reentrant=False)

    def activations(kind):
        model = nn.Sequential(*(kind(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
        with Pipeline(model, pipelab.GPipe(2, 2), nn.MSELoss(), ["cpu"] * 2) as pipe:
            return pipe.memory(torch.randn(4, 8), torch.randn(4, 8)).activations

    assert all(less < more for less, more in zip(activations(Checkpointed), activations(nn.Sequential), strict=True))


def test_measuring_leaves_gradients_buffers_and_random_state_as_they_are():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()), nn.Linear(4, 2))
    x, y = torch.randn(12, 4), torch.randn(12, 2)
    with Pipeline(model, pipelab.OneFOneB(2, 4), nn.MSELoss(), ["cpu"] * 2) as pipe:
        pipe.step(x, y)
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        state = {name: value.clone() for name, value in model.state_dict().items()}
        random_state = torch.get_rng_state()
        pipe.memory(x, y)
        pipe.memory_use(x, y)
    assert all(torch.equal(each.grad, before) for each, before in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_measuring_under_other_hooks_on_saved_tensors_is_refused():
    pipe, x, y = small(pipelab.GPipe(2, 4))
    with pipe, torch.autograd.graph.save_on_cpu(), pytest.raises(UsageError, match="save_on_cpu"):
        pipe.memory_use(x, y)


def test_measuring_a_part_of_the_stages_is_refused(monkeypatch):
    pipe, x, y = small(pipelab.GPipe(2, 4))
    monkeypatch.setattr(pipe.engine, "local_stages", range(1))
    with pipe, pytest.raises(UsageError, match="1 of 2"):
        pipe.memory(x, y)
