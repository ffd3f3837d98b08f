"""What is launched on a GPU is in order: after the caller's work and what it needs, before what the caller does next.

All on a stand-in for CUDA, which knows of every launch what must be over before it begins.
"""

from __future__ import annotations

from pipes import mse

import plain
import pytest
import torch
from fake_cuda import FakeGPU
from torch import nn

from pipelab import GPipe, OneFOneB, Pipeline, schedules
from pipelab.errors import StageError


@pytest.fixture
def gpu(monkeypatch):
    return FakeGPU().install(monkeypatch)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, launch):
        ctx.launch = launch
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.launch("B")
        return gradient, None


class Launches(nn.Linear):
    """A stage whose forwards and backwards are launches, named as actions are."""

    def __init__(self, gpu, stage):
        super().__init__(6, 6)
        self.gpu, self.stage, self.step, self.fails = gpu, stage, -1, False
        self.next_step()

    def forward(self, x):
        self.launch("F")
        if self.fails:
            raise ValueError("no")
        return Backward.apply(super().forward(x), self.launch)

    def launch(self, kind):
        self.gpu.launch((self.step, f"{self.stage}{kind}{self.done[kind]}"))
        self.done[kind] += 1

    def next_step(self):
        self.step += 1
        self.done = {"F": 0, "B": 0}


def piped(gpu, schedule):
    """Return a pipeline of such stages, and its model."""
    model = nn.Sequential(*(Launches(gpu, stage) for stage in range(schedule.ranks)))
    return Pipeline(model, schedule, mse, devices=["cuda:0"] * schedule.ranks), model


def actions(plan, step=0):
    return [(step, str(action)) for row in plan.rows for action in row]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "delayed"])
def test_every_action_comes_after_what_it_needs_and_within_the_callers_order(gpu, name):
    plan = schedules[name](3, 4).plan()
    pipe, model = piped(gpu, plan)
    with pipe:
        for step in range(3):
            gpu.launch(("the batch is written", step))
            waited = gpu.waits
            pipe.step(*plain.batch(8))
            assert gpu.waits == waited
            gpu.launch(("the batch is spoiled", step))
            for stage in model:
                stage.next_step()
    for step in range(3):
        assert all(("the batch is written", step) in gpu.before[each] for each in actions(plan, step))
        assert set(actions(plan, step)) <= gpu.before["the batch is spoiled", step]
        for giver, needer in plan.graph().edges:
            assert (step, str(giver)) in gpu.before[step, str(needer)]


def test_an_evaluation_is_launched_within_the_callers_order_and_waits_for_nothing(gpu):
    plan = GPipe(3, 4).forwards()
    pipe, _ = piped(gpu, plan)
    with pipe:
        gpu.launch("the batch is written")
        waited = gpu.waits
        pipe.evaluate(*plain.batch(8))
        assert gpu.waits == waited
        gpu.launch("the batch is spoiled")
    assert all("the batch is written" in gpu.before[each] for each in actions(plan))
    assert set(actions(plan)) <= gpu.before["the batch is spoiled"]
    for giver, needer in plan.graph().edges:
        assert (0, str(giver)) in gpu.before[0, str(needer)]


def test_ranks_run_on_streams_of_their_own(gpu):
    with piped(gpu, GPipe(2, 2))[0] as pipe:
        pipe.step(*plain.batch(4))
    assert (0, "0F1") not in gpu.before[0, "1F0"]  # the second rank does not wait for what it does not need


def test_the_callers_stream_need_not_be_the_default_one(gpu):
    with piped(gpu, GPipe(2, 2))[0] as pipe, torch.cuda.stream(torch.cuda.Stream()):
        gpu.launch("before")
        pipe.step(*plain.batch(4))
        gpu.launch("after")
    assert all("before" in gpu.before[each] for each in actions(pipe.plan))
    assert set(actions(pipe.plan)) <= gpu.before["after"]


def test_after_a_failed_step_too_the_callers_work_comes_behind_what_was_launched(gpu):
    pipe, model = piped(gpu, GPipe(2, 2))
    model[1].fails = True
    with pipe, pytest.raises(StageError):
        pipe.step(*plain.batch(4))
    gpu.launch("zero_grad")
    assert {(0, "0F0"), (0, "1F0")} <= gpu.before["zero_grad"]


def test_ranks_on_one_gpu_share_its_clock_and_a_processor_has_the_hosts(gpu):
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    x, y = plain.batch(6)
    with Pipeline(model, OneFOneB(3, 3), mse, devices=["cuda:0"] * 3) as pipe:
        step = pipe.step(x, y)
        assert len(set(step._clocks)) == 1
        assert step.clock_error_ms == 0
    with Pipeline(model, OneFOneB(3, 3), mse, devices=["cuda:0", "cpu", "cuda:0"]) as pipe:
        step = pipe.step(x, y)
        assert step._clocks[0] is step._clocks[2] is not step._clocks[1]
        assert 0 < step.clock_error_ms < 0.01
    with Pipeline(model, OneFOneB(3, 3), mse, devices=["cpu"] * 3) as pipe:
        assert pipe.step(x, y).clock_error_ms == 0


def test_a_gpus_trace_obeys_the_plan_exactly(gpu):
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    with Pipeline(model, OneFOneB(4, 8), mse, devices=["cuda:0"] * 4) as pipe:
        traces = [pipe.step(*plain.batch(16)) for _ in range(3)]
        for step in reversed(traces):  # in whatever order they are read
            at = {event.action: event for event in step.trace.events}
            for giver, needer in pipe.plan.graph().edges:
                assert at[giver].end <= at[needer].start
