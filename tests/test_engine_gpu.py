"""On a CUDA device: the same gradients, no waiting inside a step, times in the plan's order, no memory kept."""

from __future__ import annotations

import copy
import gc
import warnings

import plain
import pytest
import torch
from strategies import RUNNABLE, near
from test_engine_split_backward import split_plan
from test_engine_traces import Held
from torch import nn

import pipelab
from pipelab import GPipe, OneFOneB, Pipeline, replicate

mse = nn.functional.mse_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]

WIDTH = 64


def on_gpu(rows):
    return tuple(tensor.cuda() for tensor in plain.batch(rows, WIDTH))


@pytest.mark.parametrize("name", RUNNABLE)
def test_ranks_that_share_a_gpu_give_the_plain_gradients(name):
    plan = near(name, 4, 6)
    model = plain.mlp(2 * plan.stages, WIDTH).cuda()
    x, y = on_gpu(26)
    loss = plain.one_after_another(model, mse, x, y, plan.microbatches)
    expected = plain.taken(model)
    with Pipeline(model, plan, mse, devices=["cuda:0"] * 4) as pipe:
        for _ in range(5):
            step = pipe.step(x, y)
            assert plain.difference(plain.taken(model), expected) <= 1e-6
            torch.testing.assert_close(step.loss, loss)
        torch.testing.assert_close(pipe.forward(x), model(x).detach())
        pipe.verify(x, y)


def test_a_split_backward_gives_the_plain_gradients_on_a_gpu():
    model = plain.mlp(6, WIDTH).cuda()
    x, y = on_gpu(26)
    plain.one_after_another(model, mse, x, y, 6)
    expected = plain.taken(model)
    with Pipeline(model, split_plan(3, 6), mse, devices=["cuda:0"] * 3) as pipe:
        for _ in range(5):
            pipe.step(x, y)
            assert plain.difference(plain.taken(model), expected) <= 1e-6
        pipe.verify(x, y)


@pytest.mark.parametrize("devices", [["cuda"] * 4, ["cpu", "cpu", "cuda", "cuda"], ["cuda", "cuda", "cpu", "cpu"]])
def test_replicas_give_the_plain_gradients_on_a_gpu_and_beside_a_cpu(devices):
    model = plain.mlp(4, WIDTH)
    twin = copy.deepcopy(model)
    x, y = plain.batch(16, WIDTH)
    plain.one_after_another(twin, mse, x, y, 8)
    expected = plain.taken(twin)
    with Pipeline(model, replicate(OneFOneB(2, 4), 2), mse, devices=devices) as pipe:
        for _ in range(3):
            trace = pipe.step(x, y).trace
            gradients = {name: gradient.cpu() for name, gradient in plain.taken(model).items()}
            assert plain.difference(gradients, expected) <= 1e-4  # another device's arithmetic
    assert all(parameter.device.type == devices[0] for parameter in model.parameters())
    assert [str(event.action) for event in trace.events_of(2)][-1] == "0R"


def test_a_batch_on_the_cpu_goes_to_the_gpu_by_itself():
    model = plain.mlp(4, WIDTH)
    parameters = list(model.parameters())
    x, y = plain.batch(8, WIDTH)
    plain.one_after_another(model, mse, x, y, 4)
    expected = plain.taken(model)
    with Pipeline(model, OneFOneB(2, 4), mse, devices=["cuda:0"] * 2) as pipe:
        pipe.step(x, y)
    assert all(parameter is before for parameter, before in zip(model.parameters(), parameters, strict=True))
    assert all(parameter.is_cuda and parameter.grad.is_cuda for parameter in parameters)
    gradients = {name: gradient.cpu() for name, gradient in plain.taken(model).items()}
    assert plain.difference(gradients, expected) <= 1e-4  # another device's arithmetic


@pytest.mark.parametrize("devices", [["cpu", "cuda", "cpu"], ["cuda", "cpu", "cuda"]])
def test_ranks_on_the_cpu_and_on_a_gpu_work_together(devices):
    model = plain.mlp(6, WIDTH)
    twin = copy.deepcopy(model)
    x, y = plain.batch(10, WIDTH)
    loss = plain.one_after_another(twin, mse, x, y, 4)
    expected = plain.taken(twin)
    with Pipeline(model, OneFOneB(3, 4), mse, devices=devices) as pipe:
        for _ in range(3):
            step = pipe.step(x, y)
            torch.testing.assert_close(step.loss.cpu(), loss, rtol=1e-4, atol=1e-5)
            gradients = {name: gradient.cpu() for name, gradient in plain.taken(model).items()}
            assert plain.difference(gradients, expected) <= 1e-4
        assert_order(step.trace, pipe.plan, same_rank_only=True)  # two clocks
        pipe.verify(x, y)


def test_an_optimizer_that_was_at_work_before_is_told_and_helped():
    model = plain.mlp(4, WIDTH)
    optimizer = torch.optim.Adam(model.parameters())
    plain.at_once(model, mse, *plain.batch(8, WIDTH))
    optimizer.step()
    with Pipeline(model, GPipe(2, 2), mse, devices=["cuda:0"] * 2) as pipe:
        pipe.step(*on_gpu(8))
        with pytest.raises(pipelab.errors.DeviceError, match="call pipe.move_optimizer_state"):
            optimizer.step()
        pipe.move_optimizer_state(optimizer)
        optimizer.step()


def test_a_step_never_waits_for_the_gpu():
    model = plain.mlp(8, WIDTH)
    x, y = on_gpu(16)
    with Pipeline(model, OneFOneB(4, 8), mse, devices=["cuda:0"] * 4) as pipe:
        pipe.step(x, y)  # the first use of a kernel may wait
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch says that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            pipe.step(x, y)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def assert_order(trace, plan, same_rank_only=False):
    graph = plan.graph()
    at = {event.action: event for event in trace.events}
    assert set(at) == set(graph.nodes)
    for before, after in graph.edges:
        if not same_rank_only or at[before].rank == at[after].rank:
            assert at[before].end <= at[after].start, f"{after} started before {before} ended"


@pytest.mark.parametrize("schedule", [GPipe(4, 8), OneFOneB(4, 8)], ids=repr)
def test_a_gpus_trace_obeys_the_plan(schedule):
    plan = schedule.plan()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(4)))
    x, y = (tensor.cuda() for tensor in plain.batch(1024, 2048))
    with Pipeline(model, plan, mse, devices=["cuda:0"] * 4) as pipe:
        assert pipe.step(x, y).trace.makespan > 0  # sets the clocks
        # Each rank has a reference event of its own, set against the host's clock: readings of two ranks agree within
        # both errors, and CUDA's times within half a microsecond.
        slack = 2 * max(lane.clock_error_ns for lane in pipe._lanes) / 1e6 + 1e-3
        trace = pipe.step(x, y).trace
    assert trace.unit == "ms"
    assert all(event.end > event.start for event in trace.events)
    assert all("cuda:0" in lane for lane in trace.lanes)
    assert_order(trace, plan, same_rank_only=True)
    at = {event.action: event for event in trace.events}
    for before, after in plan.graph().edges:
        assert at[before].end <= at[after].start + slack


def test_the_callers_work_comes_before_and_after_in_order():
    model = plain.mlp(8, WIDTH)
    x, y = on_gpu(16)
    with Pipeline(model, OneFOneB(4, 4), mse, devices=["cuda:0"] * 4) as pipe:
        pipe.step(x, y)
        model.zero_grad()
        plain.one_after_another(model, mse, 2 * x, y, 4)
        expected = plain.taken(model)
        for _ in range(5):
            twice = torch.empty_like(x)
            torch.cuda._sleep(20_000_000)  # the batch is written late, on the caller's stream
            torch.mul(x, 2, out=twice)
            outputs = pipe.step(twice, y).outputs
            twice.fill_(float("nan"))  # and spoiled as soon as the step is done
            assert plain.difference(plain.taken(model), expected) <= 1e-6
            assert torch.isfinite(outputs).all()


def test_memory_goes_back_to_where_it_was():
    model = nn.Sequential(*(Held() for _ in range(4)))
    x, y = (tensor.cuda() for tensor in plain.batch(64))
    with Pipeline(model, OneFOneB(4, 8), mse, devices=["cuda:0"] * 4) as pipe:
        for _ in range(2):
            pipe.step(x, y)
            pipe.forward(x)
            model.zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            pipe.step(x, y)
            pipe.forward(x)
            model.zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before


def test_an_exception_on_a_gpu_leaves_a_pipeline_that_works():
    model = plain.mlp(8, WIDTH)
    x, y = on_gpu(16)
    with Pipeline(model, OneFOneB(4, 4), mse, devices=["cuda:0"] * 4) as pipe:
        pipe.step(x, y)
        expected = plain.taken(model)
        with pytest.raises(pipelab.errors.StageError, match="0F0 on rank 0 failed"):
            pipe.step(x[:, :3], y)
        model.zero_grad()
        pipe.step(x, y)
        assert plain.difference(plain.taken(model), expected) <= 1e-6
