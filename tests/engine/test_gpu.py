"""On a CUDA device: the same gradients, no waiting inside a step, times in the plan's order, no memory kept.

Ranks share one GPU by streams.
"""

from __future__ import annotations

import copy
import gc
from functools import partial

import plain
import pytest
import torch
from stashed import Stashed
from strategies import near
from torch import nn
from traces import assert_obeys

import pipelab
from pipelab import GPipe, OneFOneB, Pipeline, diagnose, replicate, schedules, with_recompute

mse = nn.functional.mse_loss

pytestmark = pytest.mark.gpu

WIDTH = 64


def on_gpu(rows):
    return tuple(tensor.cuda() for tensor in plain.batch(rows, WIDTH))


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "delayed"])
def test_gradients_are_those_of_the_same_microbatches_bit_for_bit(name):
    plan = schedules[name](4, 6).plan()
    model = plain.mlp(8, WIDTH).cuda()
    x, y = on_gpu(24)
    expected = plain.gradients(model, mse, x, y, 6)
    with Pipeline(model, plan, mse, devices=["cuda:0"] * 4) as pipe:
        for _ in range(3):
            pipe.step(x, y)
            assert plain.equal(plain.taken(model), expected)
        assert pipe.verify(x, y).exact


def test_dropout_draws_the_same_numbers_in_every_schedule_and_nothing_waits():
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4))
    model, (x, y) = nn.Sequential(*layers).cuda(), on_gpu(24)
    found = []
    for schedule in (GPipe(4, 6), OneFOneB(4, 6), with_recompute(OneFOneB(4, 6))):
        with Pipeline(model, schedule, mse, devices=["cuda:0"] * 4) as pipe:
            pipe.step(x, y)
            for _ in range(2):
                model.zero_grad()
                torch.manual_seed(7)
                with plain.no_waiting_for_the_gpu():
                    pipe.step(x, y)
                found.append(plain.taken(model))
            assert pipe.verify(x, y).exact
    assert all(plain.equal(each, found[0]) for each in found[1:])
    assert not plain.equal(plain.gradients(model.eval(), mse, x, y, 6), found[0])


def test_an_evaluation_has_the_plain_losses_and_outputs_bit_for_bit():
    model = plain.mlp(8, WIDTH).cuda()
    x, y = on_gpu(24)
    with torch.no_grad():
        outputs = [model(rows) for rows in x.chunk(6)]
        losses = [mse(*pair) / 6 for pair in zip(outputs, y.chunk(6), strict=True)]
    with Pipeline(model, OneFOneB(4, 6), mse, devices=["cuda:0"] * 4) as pipe:
        pipe.evaluate(x, y)
        with plain.no_waiting_for_the_gpu():
            found = pipe.evaluate(x, y)
        assert torch.equal(found.outputs, torch.cat(outputs))
        torch.testing.assert_close(found.loss, sum(losses))
        assert found.trace.plan == OneFOneB(4, 6).forwards()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_mask_and_rows_in_another_dimension_are_cut_as_on_a_processor():
    layers = [nn.TransformerEncoderLayer(WIDTH, 2, 128, dropout=0.0) for _ in range(4)]
    x, y = (rows.expand(10, 24, WIDTH).contiguous() for rows in on_gpu(24))
    with Pipeline(layers, OneFOneB(4, 6), mse, devices=["cuda:0"] * 4, batch_dim=1) as pipe:
        assert pipe.verify(x, y).largest_difference <= 1e-5

    def masked(_, given):
        return given[0].softmax(-1) @ given[1] @ given[0]

    stages = [plain.Made(masked), nn.Linear(WIDTH, WIDTH).cuda()]
    x, y, mask = torch.randn(6, WIDTH, WIDTH).cuda(), torch.randn(6, WIDTH, WIDTH).cuda(), torch.eye(WIDTH).cuda()
    with Pipeline(stages, GPipe(2, 3), mse, devices=["cuda:0"] * 2) as pipe:
        assert pipe.verify((x, pipelab.whole(mask)), y).largest_difference <= 1e-5


@pytest.mark.parametrize("kind", [pipelab.TwoBW, pipelab.PipeDream])
def test_updates_within_a_step_train_as_plain_training_with_stashed_weights(kind):
    plan, rate = kind(3, 7).plan(), partial(torch.optim.SGD, lr=0.5)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))).cuda()
    oracle, (x, y) = copy.deepcopy(layers), on_gpu(14)
    with Pipeline(layers, plan, mse, devices=["cuda:0"] * 3, optimizer=rate) as pipe:
        pipe.step(x, y)
    Stashed(oracle, plan, rate).step(x.chunk(7), y.chunk(7), mse)
    assert all(map(torch.equal, layers.parameters(), oracle.parameters()))


def test_a_training_step_on_the_gpu_is_diagnosed():
    model, (x, y) = plain.mlp(8, WIDTH).cuda(), on_gpu(24)
    with Pipeline(model, OneFOneB(4, 6), mse, devices=["cuda:0"] * 4) as pipe:
        assert diagnose(pipe.step, model, x, y, mse, microbatches=6).code == "right"

    def undivided(x, y):
        for rows, targets in zip(x.chunk(6), y.chunk(6), strict=True):
            mse(model(rows), targets).backward()

    assert diagnose(undivided, model, x, y, mse, microbatches=6).code == "times-microbatches"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_callers_autocast_holds_on_the_gpu(dtype):
    model = plain.mlp(8, WIDTH).cuda()
    x, y = on_gpu(24)
    seen = []
    model[2].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    for rows, targets in zip(x.tensor_split(6), y.tensor_split(6), strict=True):
        with torch.autocast("cuda", dtype=dtype):
            loss = mse(model(rows), targets) * (len(rows) / len(x))
        loss.backward()
    del loss  # with its graph, PyTorch would keep the stream in which gradients were added
    expected = plain.taken(model)
    with Pipeline(model, OneFOneB(4, 6), mse, devices=["cuda:0"] * 4) as pipe:
        pipe.step(x, y)
        model.zero_grad()
        seen.clear()
        for _ in range(3):
            with torch.autocast("cuda", dtype=dtype), plain.no_waiting_for_the_gpu():
                pipe.step(x, y)
            assert plain.equal(plain.taken(model), expected)
        assert set(seen) == {dtype}
        with torch.autocast("cuda", dtype=dtype):
            assert pipe.verify(x, y).exact
            assert pipe.forward(x).dtype == dtype


@pytest.mark.parametrize("name", schedules)
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


@pytest.mark.parametrize("devices", [["cuda"] * 4, ["cpu", "cpu", "cuda", "cuda"], ["cuda", "cuda", "cpu", "cpu"]])
def test_replicas_give_the_plain_gradients_on_a_gpu_and_beside_a_cpu(devices):
    model = plain.mlp(4, WIDTH)
    twin = copy.deepcopy(model)
    x, y = plain.batch(16, WIDTH)
    loss = plain.one_after_another(twin, mse, x, y, 8)
    expected = plain.taken(twin)
    with Pipeline(model, replicate(OneFOneB(2, 4), 2), mse, devices=devices) as pipe:
        for _ in range(3):
            step = pipe.step(x, y)
            trace = step.trace
            gradients = {name: gradient.cpu() for name, gradient in plain.taken(model).items()}
            assert plain.difference(gradients, expected) <= 1e-4  # another device's arithmetic
            assert step.loss.device == step.outputs.device == pipe.forward(x).device
            assert torch.equal(pipe.evaluate(x, y).loss, step.loss)
            torch.testing.assert_close(step.loss.cpu(), loss, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(step.outputs.cpu(), twin(x).detach(), rtol=1e-4, atol=1e-5)
        pipe.verify(x, y)
    assert all(parameter.device.type == devices[0] for parameter in model.parameters())
    assert [str(event.action) for event in trace.events_of(2)][-1] == "0R"


def test_the_state_of_an_optimizer_that_stepped_before_moves_to_the_gpu():
    model = plain.mlp(4, WIDTH)
    optimizer = torch.optim.Adam(model.parameters())
    plain.at_once(model, mse, *plain.batch(8, WIDTH))
    optimizer.step()
    with Pipeline(model, GPipe(2, 2), mse, devices=["cuda:0"] * 2) as pipe:
        pipe.step(*on_gpu(8))
        with pytest.raises(RuntimeError):  # PyTorch's own, of tensors on two devices
            optimizer.step()
        pipe.move_optimizer_state(optimizer)
        optimizer.step()


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_a_step_never_waits_for_the_gpu(where):
    model = plain.mlp(8, WIDTH)
    x, y = (tensor.to(where) for tensor in on_gpu(16))
    with Pipeline(model, OneFOneB(4, 8), mse, devices=["cuda:0"] * 4) as pipe:
        pipe.step(x, y)  # the first use of a kernel may wait
        pipe.forward(x)
        with plain.no_waiting_for_the_gpu():
            step = pipe.step(x, y)
            outputs = pipe.forward(x)
        assert step.outputs.is_cuda
        assert outputs.is_cuda


def test_the_host_runs_ahead_of_the_gpu():
    model = plain.mlp(8, WIDTH)
    x, y = on_gpu(16)
    with Pipeline(model, OneFOneB(4, 8), mse, devices=["cuda:0"] * 4) as pipe:
        for batch in ((x, y), (x.cpu(), y.cpu())):
            for is_warm in (False, True):  # to reserve memory the driver may wait; the second time there is enough
                pipe.step(*batch)
                torch.cuda.synchronize()
                done = torch.cuda.Event()
                torch.cuda._sleep(1_000_000_000)  # half a second: all that follows on the GPU is behind it
                done.record()
                pipe.step(*batch)
                assert not is_warm or not done.query()  # the step is launched, and nothing of it has run
                torch.cuda.synchronize()


@pytest.mark.parametrize("schedule", [GPipe(4, 8), OneFOneB(4, 8)], ids=repr)
def test_a_gpus_trace_obeys_the_plan_exactly(schedule):
    plan = schedule.plan()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(4)))
    x, y = (tensor.cuda() for tensor in plain.batch(1024, 2048))
    with Pipeline(model, plan, mse, devices=["cuda:0"] * 4) as pipe:
        steps = [pipe.step(x, y) for _ in range(4)]
    for step in reversed(steps):  # in whatever order, and however late, traces are read
        trace = step.trace
        assert trace.unit == "ms"
        assert trace.makespan > 0
        assert step.clock_error_ms == 0  # one GPU, one clock
        assert all(event.end > event.start for event in trace.events)
        assert all("cuda:0" in lane for lane in trace.lanes)
        assert_obeys(trace, plan)


def test_a_weight_of_stages_on_two_devices_learns_from_both():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    with Pipeline(model, OneFOneB(3, 4), mse, devices=["cpu", "cuda", "cuda"]) as pipe:
        assert pipe.verify(*plain.batch(8, WIDTH)).parameters == 3
        assert model[0].weight is model[2].weight
        assert model[0].weight.device.type == "cpu"


def test_the_clocks_of_a_processor_and_a_gpu_agree_within_their_error():
    model = plain.mlp(6, WIDTH)
    with Pipeline(model, OneFOneB(3, 4), mse, devices=["cpu", "cuda", "cpu"]) as pipe:
        for _ in range(3):
            step = pipe.step(*plain.batch(8, WIDTH))
            assert_obeys(step.trace, pipe.plan, slack=step.clock_error_ms)
            assert step.clock_error_ms > 0


@pytest.mark.parametrize("devices", [["cuda:0"] * 4, ["cpu", "cuda:0", "cpu", "cuda:0"]], ids=["cuda", "mixed"])
@pytest.mark.parametrize("stream", [None, "own"])
def test_the_callers_work_comes_before_and_after_in_order(devices, stream):
    model = plain.mlp(8, WIDTH)
    x, y = on_gpu(16)
    torch.cuda.synchronize()
    callers = torch.cuda.Stream() if stream else torch.cuda.default_stream()
    with torch.cuda.stream(callers), Pipeline(model, OneFOneB(4, 4), mse, devices=devices) as pipe:
        pipe.step(2 * x, y)
        expected = plain.taken(model)
        for _ in range(5):
            twice = torch.empty_like(x)
            torch.cuda._sleep(20_000_000)  # the batch is written late, on the caller's stream
            torch.mul(x, 2, out=twice)
            outputs = pipe.step(twice, y).outputs
            twice.fill_(float("nan"))  # and spoiled as soon as the step is done
            assert plain.equal(plain.taken(model), expected)
            assert torch.isfinite(outputs).all()


def test_memory_goes_back_to_where_it_was():
    model = nn.Sequential(*(plain.Held() for _ in range(4)))
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


def test_1f1b_needs_less_memory_than_gpipe():
    peaks = {}
    x, y = (tensor.cuda() for tensor in plain.batch(4096, 256))
    for schedule in (GPipe(4, 16), OneFOneB(4, 16)):
        model = nn.Sequential(*(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))) for _ in range(4)))
        with Pipeline(model, schedule, mse, devices=["cuda:0"] * 4) as pipe:
            pipe.step(x, y)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            pipe.step(x, y)
            torch.cuda.synchronize()
            peaks[type(schedule)] = torch.cuda.max_memory_allocated() - before
    # By the plans, 4 + 3 + 2 + 1 micro-batches' activations against 4 * 16.
    assert peaks[OneFOneB] < 0.5 * peaks[GPipe]


class Hungry(nn.Module):
    """Asks for more memory than the GPU has, once it is told to."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.wants = 0

    def forward(self, x):
        if self.wants:
            kept = self.linear(x).expand(self.wants, *x.shape).contiguous()
            return kept.sum(0)
        return self.linear(x)


def test_where_the_gpus_memory_runs_out_it_is_told_and_the_next_step_works():
    model = nn.Sequential(*(Hungry() for _ in range(4)))
    x, y = on_gpu(16)
    with Pipeline(model, OneFOneB(4, 4), mse, devices=["cuda:0"] * 4) as pipe:
        pipe.step(x, y)
        expected = plain.taken(model)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        total = torch.cuda.get_device_properties(0).total_memory
        model[2].wants = 2 * total // (4 * WIDTH * 4)  # twice the card
        with pytest.raises(pipelab.errors.StageError) as caught:
            pipe.step(x, y)
        told = str(caught.value)
        assert "2F0 on rank 2 failed: OutOfMemoryError: CUDA out of memory" in told
        assert "on cuda:0" in told
        assert "try: more micro-batches of fewer rows each" in told
        model[2].wants = 0
        model.zero_grad()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + 4 * x.nbytes  # while the error is still held
        pipe.step(x, y)
        assert plain.equal(plain.taken(model), expected)


def test_the_allocator_gives_out_at_least_what_the_fullest_rank_holds():
    x, y = on_gpu(24)
    with Pipeline(plain.mlp(8, WIDTH).cuda(), GPipe(4, 6), mse, devices=["cuda:0"] * 4) as pipe:
        predicted, measured = pipelab.memory_use(pipe.plan, pipe.memory(x, y)), pipe.memory_use(x, y)
    assert [max(held.activations for held in curve) for curve in measured.curves] == [
        max(held.activations for held in curve) for curve in predicted.curves
    ]
    assert measured.allocated["cuda:0"] >= max(measured.peaks)
