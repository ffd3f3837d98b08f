"""Bytes measured: of one micro-batch in each stage, and of every rank in a step; and the step predicted from them."""

from __future__ import annotations

from dataclasses import astuple
from pipes import no_trace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipelab
from pipelab import Pipeline, UsageError, memory_use
from pipelab.cli.demo import Setting, next_byte_loss

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
    setting = Setting()
    x, y = next(setting.batches())
    schedule, model = pipelab.schedules[name](setting.ranks, setting.microbatches), setting.model()
    adam = torch.optim.Adam(model.parameters())
    with Pipeline(model, schedule, next_byte_loss, ["cpu"] * setting.ranks) as pipe:
        pipe.step(x, y)
        adam.step()
        measured = pipe.memory_use(x, y, adam)
        predicted = memory_use(schedule, pipe.memory(x, y, adam))
    for part in ("activations", "total", "weights", "optimizer"):
        both = zip(predicted.at_peak, measured.at_peak, strict=True)
        off = [100 * (getattr(said, part) / getattr(found, part) - 1) for said, found in both]
        assert off == pytest.approx([0, 0], abs=10), f"{part}: {off} per cent on each rank"
    for said, found in zip(predicted.curves, measured.curves, strict=True):
        assert astuple(said[-1])[2:] == astuple(found[-1])[2:]  # all but the time and the action


def test_what_a_forward_keeps_is_what_pytorchs_profiler_sees_left():
    setting = Setting(blocks=2, width=32)
    x, y = next(setting.batches())
    model, rows = setting.model(), setting.rows // setting.microbatches
    with Pipeline(model, pipelab.GPipe(1, setting.microbatches), next_byte_loss, ["cpu"]) as pipe:
        memory = pipe.memory(x, y)
    with torch.profiler.profile(profile_memory=True) as profiler:
        output = model(x[:rows])
        loss = next_byte_loss(output, y[:rows])
    left = sum(each.self_cpu_memory_usage for each in profiler.key_averages())
    assert sum(memory.activations) + memory.outputs == left
    del loss  # until here, it holds the graph


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
        with no_trace(model):
            pipe.memory(x, y)
            pipe.memory_use(x, y)


def test_measuring_under_other_hooks_on_saved_tensors_is_refused():
    pipe, x, y = small(pipelab.GPipe(2, 4))
    with pipe, torch.autograd.graph.save_on_cpu(), pytest.raises(UsageError, match="save_on_cpu"):
        pipe.memory_use(x, y)


def test_measuring_by_an_engine_of_several_processes_is_refused(monkeypatch):
    pipe, x, y = small(pipelab.GPipe(2, 4))
    monkeypatch.setattr("pipelab.engine.memory.ThreadsEngine", type(None))
    with pipe, pytest.raises(UsageError, match="engine='threads'"):
        pipe.memory(x, y)


def test_steps_before_and_after_measuring_run_the_same_instructions():
    pipe, x, y = small(pipelab.ZBH1(2, 4))
    with pipe:
        rows = pipe.engine._rows
        losses = [float(pipe.step(x, y).loss)]
        pipe.memory_use(x, y)
        pipe.memory(x, y)
        losses.append(float(pipe.step(x, y).loss))
        assert pipe.engine._rows is rows
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_a_measured_step_makes_the_same_gradients_bit_for_bit(monkeypatch, name):
    pipe, x, y = small(pipelab.schedules[name](2, 4))
    gradients = []

    def run(*args, **more):  # for measuring restores the gradients when it ends
        made = Pipeline.run(pipe, *args, **more)
        gradients.append([each.grad.clone() for each in pipe.parameters()])
        return made

    monkeypatch.setattr(pipe, "run", run)
    with pipe:
        pipe.step(x, y)
        pipe.memory_use(x, y)
    plain, measured = gradients
    assert all(map(torch.equal, plain, measured))
