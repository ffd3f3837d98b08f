"""An evaluation has the numbers of plain evaluation, makes no gradient, and leaves the model as it was."""

from __future__ import annotations

import copy
import signal
import threading
import time
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from pipes import mse, stepped

import plain
import pytest
import torch
import torch.distributed as dist
from strategies import near
from torch import nn

import pipelab
from pipelab import F, GPipe, OneFOneB, Pipeline, Plan, StageError, StepTimeoutError, UsageError, schedules

ENGINES = ["threads", "torch"]


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sized(engine):
    """Return a schedule for an engine: in this one process, PyTorch's runtime runs one rank."""
    return pipelab.LoopedBFS(1, 4) if engine == "torch" else pipelab.Interleaved1F1B(2, 4)


def plainly(model, x, y, loss=mse, microbatches=4):
    """Return the loss of micro-batches, weighed by their rows, and the outputs, without gradients."""
    with torch.no_grad():
        outputs = [model(rows) for rows in x.tensor_split(microbatches)]
        losses = [loss(*pair) for pair in zip(outputs, y.tensor_split(microbatches), strict=True)]
    weights = [len(rows) / len(x) for rows in x.tensor_split(microbatches)]
    return torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum(), torch.cat(outputs)


def assert_evaluates(pipe, model, x, y, **given):
    """Assert that an evaluation has plain evaluation's numbers bit for bit, and leaves the model as it was."""
    before = copy.deepcopy((model.state_dict(), [each.grad for each in model.parameters()]))
    expected = plainly(copy.deepcopy(model), x, y, **given)
    found = pipe.evaluate(x, y)
    torch.testing.assert_close(found.loss, expected[0], rtol=0, atol=0)
    assert torch.equal(found.outputs, expected[1])
    assert not found.outputs.requires_grad
    assert not found.loss.requires_grad
    after = (model.state_dict(), [each.grad for each in model.parameters()])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    return found


@pytest.mark.parametrize("name", schedules)
def test_every_schedule_evaluates_as_plain_training_would_and_then_trains(name):
    schedule = near(name, 2, 4)
    model, (x, y) = plain.mlp(2 * schedule.stages), plain.batch(2 * schedule.microbatches + 1)
    with Pipeline(model, schedule, mse) as pipe:
        found = assert_evaluates(pipe, model, x, y, microbatches=schedule.microbatches)
        expected = plain.gradients(model, mse, x, y, schedule.microbatches)
        pipe.step(x, y)
        assert plain.difference(plain.taken(model), expected) < 1e-6
    assert found.trace.plan == schedule.forwards()
    assert {event.action.kind for event in found.trace.events} == {"F"}
    assert all(event.start < event.end for event in found.trace.events)
    assert pipelab.Trace.from_dict(found.trace.to_dict()) == found.trace


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("without", [nullcontext, torch.no_grad, torch.inference_mode])
def test_an_evaluation_may_come_first_between_steps_and_without_gradients(engine, without):
    schedule = sized(engine)
    model, (x, y) = plain.mlp(2 * schedule.stages), plain.batch(9)
    with Pipeline(model, schedule, mse, engine=engine) as pipe:
        for _ in range(2):
            with without():
                assert_evaluates(pipe, model, x, y)
            pipe.step(x, y)
    once = copy.deepcopy(model)
    once.zero_grad()
    plain.one_after_another(once, mse, x, y, 4)
    for parameter, gradient in zip(model.parameters(), once.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient.grad)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_mode_is_the_models_and_random_numbers_are_a_steps(engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
    x, y = plain.batch(8)
    schedule = GPipe(1, 2) if engine == "torch" else OneFOneB(2, 2)
    with Pipeline(model, schedule, mse, engine=engine) as pipe:
        pipe.step(x, y)
        pipe.eval()
        assert_evaluates(pipe, model, x, y, microbatches=2)
        pipe.train()
        seen, state = int(model[1].num_batches_tracked), copy.deepcopy(model.state_dict())
        results, moved = [], []
        for call in (pipe.step, pipe.evaluate):
            model.load_state_dict(state)
            torch.manual_seed(3)
            results.append(call(x, y))
            moved.append([float(torch.rand(())), *map(torch.clone, model.buffers())])
        assert torch.equal(results[0].loss, results[1].loss)
        assert torch.equal(results[0].outputs, results[1].outputs)
        torch.testing.assert_close(*moved, rtol=0, atol=0)
        assert int(model[1].num_batches_tracked) == seen + 2


def scored(output, target):
    return nn.functional.cross_entropy(output, target)


def test_a_micro_batch_whose_targets_are_all_ignored_counts_as_nothing():
    model, x = plain.mlp(4), plain.batch(8)[0]
    y = torch.tensor([1, 2, -100, -100, 3, -100, 0, 5])
    with Pipeline(model, GPipe(2, 4), scored, reduction=lambda target: (target != -100).sum()) as pipe:
        torch.testing.assert_close(pipe.evaluate(x, y).loss, scored(model(x), y).detach())


def test_other_losses_are_weighed_and_refused_as_in_a_step():
    model, x = plain.mlp(4), plain.batch(8)[0]
    y = torch.tensor([1, 2, -100, -100, 3, -100, 0, 5])
    with Pipeline(model, GPipe(2, 4), nn.CrossEntropyLoss()) as pipe:
        for call in (pipe.step, pipe.evaluate):
            with pytest.raises(pipelab.LossError, match="ignores targets that are -100"):
                call(x, y)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_evaluation_needs_neither_a_parameter_that_learns_nor_a_loss_with_history(engine):
    def right(output, target):
        return (output.argmax(1) == target).sum()

    model, x = plain.mlp(4).requires_grad_(False), plain.batch(8)[0]
    y = model(x).argmax(1) * (torch.arange(8) > 2)
    schedule = GPipe(1, 4) if engine == "torch" else GPipe(2, 4)
    with Pipeline(model, schedule, right, engine=engine, reduction="sum") as pipe:
        assert int(pipe.evaluate(x, y).loss) == int((model(x).argmax(1) == y).sum())
        with pytest.raises((StageError, pipelab.LossError), match="the loss has no history"):
            pipe.step(x, y)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [torch.bool, torch.int32, torch.int64, torch.float32])
def test_a_count_is_a_loss_that_warns_of_its_average(engine, kind):
    model, (x, y) = plain.mlp(4), plain.batch(8)
    schedule = GPipe(1, 4) if engine == "torch" else GPipe(2, 4)
    with Pipeline(model, schedule, lambda output, _: output.new_tensor(len(output)).to(kind), engine=engine) as pipe:
        with pytest.warns(UserWarning, match="average to") if kind != torch.bool else nullcontext():
            loss = pipe.evaluate(x, y).loss
        assert float(loss) == (1 if kind == torch.bool else 2)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, mask=None, scale=None):
        return self.linear(x * mask) if scale is None else self.linear(x * mask) * scale


@pytest.mark.parametrize("engine", ENGINES)
def test_inputs_are_cut_as_a_steps(engine):
    stages, (x, y) = [Masked(), Masked()], plain.batch(10)
    keywords = {"mask": (torch.rand(10, 6) > 0.3).float(), "scale": pipelab.whole(torch.rand(6))}
    pieces = [pipelab.microbatches([each[:1], each[1:5], each[5:]]) for each in (x, y)]
    schedule = Plan.parse("0F0 1F0 0F1 1F1 0F2 1F2 1B0 0B0 1B1 0B1 1B2 0B2") if engine == "torch" else OneFOneB(2, 3)
    with Pipeline(stages, schedule, mse, engine=engine) as pipe:
        for given in ((x, y), pieces):
            named = {"keywords": keywords}
            if given is pieces:
                named = {
                    "keywords": {"mask": pipelab.microbatches([torch.rand(1, 6), torch.rand(4, 6), torch.rand(5, 6)])}
                }
            step, evaluation = pipe.step(*given, **named), pipe.evaluate(*given, **named)
            assert torch.equal(step.loss, evaluation.loss)
            torch.testing.assert_close(step.outputs, evaluation.outputs, rtol=0, atol=0)
        with pytest.raises(pipelab.BatchError, match="y has 9: every row of x needs a target"):
            pipe.evaluate(x, y[:9], keywords=keywords)
    with Pipeline(plain.mlp(4), OneFOneB(2, 3), mse, batch_dim=1) as pipe:
        sequences = torch.randn(2, 7, 6), torch.randn(2, 7, 6)
        step, evaluation = pipe.step(*sequences), pipe.evaluate(*sequences)
        assert evaluation.outputs.shape == (2, 7, 6)
        assert torch.equal(step.loss, evaluation.loss)
        assert torch.equal(step.outputs, evaluation.outputs)


def test_recomputation_updates_and_replicas_have_no_part_in_an_evaluation():
    x, y = plain.batch(8)
    updating = Plan.parse("0F0 0F1 0B0 0U0 0B1 0U1 0F2 0F3 0B2 0U2 0B3 0U3")
    model = plain.mlp(2)
    with Pipeline(model, updating, mse, optimizer=partial(torch.optim.SGD, lr=0.1)) as pipe:
        assert_evaluates(pipe, model, x, y)
    for plan in (pipelab.with_recompute(GPipe(2, 4)), pipelab.replicate(OneFOneB(2, 2), 2)):
        model = plain.mlp(4)
        with Pipeline(model, plan, mse) as pipe:
            pipe.step(x, y)
            assert_evaluates(pipe, model, x, y)
    tied = plain.mlp(4)
    tied[2].weight = tied[0].weight
    with Pipeline(tied, GPipe(2, 4), mse) as pipe:
        pipe.step(x, y)
        assert_evaluates(pipe, tied, x, y)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pipeline_of_forwards_alone_evaluates_and_says_that_it_does_not_train(engine):
    model, (x, y) = plain.mlp(4), plain.batch(9)
    schedule = pipelab.LoopedBFS(1, 4) if engine == "torch" else GPipe(2, 4)
    with Pipeline(model, schedule.forwards(), mse, engine=engine) as pipe:
        assert_evaluates(pipe, model, x, y)
        torch.testing.assert_close(pipe.forward(x), model(x).detach())
        for call in (pipe.step, pipe.verify, *[pipe.memory_use] * (engine == "threads")):
            with pytest.raises(
                UsageError, match=r"only forwards, so there are no gradients\n  try: pipe.evaluate\(x, y\)"
            ):
                call(x, y)
        assert_evaluates(pipe, model, x, y)
        if engine == "threads":
            assert pipelab.memory_use(pipe.plan, pipe.memory(x, y)).at_peak[0].activations == 0
    only = Plan([[F(m) for m in range(4)]] * 2, forwards_only=True)
    assert torch.equal(pipelab.Pipeline(model, only, mse).evaluate(x, y).loss, stepped(model, GPipe(2, 4), (x, y)).loss)


def test_autocast_holds_in_an_evaluation():
    model, (x, y) = plain.mlp(4), plain.batch(8)
    with Pipeline(model, GPipe(2, 4), mse) as pipe, torch.autocast("cpu", dtype=torch.bfloat16):
        step, evaluation = pipe.step(x, y), pipe.evaluate(x, y)
    assert evaluation.outputs.dtype == torch.bfloat16
    assert torch.equal(step.loss, evaluation.loss)


class Wayward(nn.Module):
    """Does something else than to pass its input on, if it is told to."""

    does = None

    def forward(self, x):
        return x if self.does is None else self.does(x)


@contextmanager
def wayward(**settings):
    model = nn.Sequential(nn.Linear(6, 6), Wayward())
    with Pipeline(model, GPipe(2, 2), mse, **settings) as pipe:
        yield pipe, model


def test_errors_and_nan_in_an_evaluation_are_a_steps():
    def fails(_):
        raise ValueError("no")

    x, y = plain.batch(4)
    with wayward() as (pipe, model):
        model[1].does = fails
        with pytest.raises(StageError, match="1F0 on rank 1 failed: ValueError: no") as failed:
            pipe.evaluate(x, y)
        assert "partial" not in str(failed.value)
        model[1].does = lambda x: x * float("nan")
        with pytest.warns(UserWarning, match="the loss of this step is nan") as warned:
            pipe.evaluate(x, y)
        assert [each.filename for each in warned] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe.evaluate(x, y)
        model[1].does = None
        assert_evaluates(pipe, model, x, y, microbatches=2)
    with wayward(watch_nan=True) as (pipe, model):
        model[1].does = lambda x: x * float("nan")
        for call in (pipe.evaluate, lambda x, _: pipe.forward(x)):
            with pytest.raises(StageError, match="1F0 on rank 1 made NaN: the output of stage 1, micro-batch 0"):
                call(x, y)
        model[1].does = None
        with pytest.raises(StageError, match="1F1 on rank 1 made infinity: the loss of stage 1, micro-batch 1"):
            pipe.evaluate(x, y.index_fill(0, torch.tensor([3]), float("inf")))
        assert_evaluates(pipe, model, x, y, microbatches=2)


def test_an_evaluation_that_hangs_or_is_interrupted_ends_as_a_step_does():
    x, y = plain.batch(4)
    going_on = threading.Event()

    def waits(given):
        going_on.wait(20)
        return given

    with wayward(timeout=0.5) as (pipe, model):
        model[1].does = waits
        with pytest.raises(StepTimeoutError, match=r"rank 1 was running 1F0 \(stage 1, position 0\)"):
            pipe.evaluate(x, y)
        going_on.set()
    going_on.clear()
    with wayward() as (pipe, model):
        model[1].does = waits

        def interrupt():
            time.sleep(0.3)
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.5)  # until the caller has looked
            going_on.set()

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt) as interrupted:
            pipe.evaluate(x, y)
        thread.join()
        signal.signal(signal.SIGINT, before)
        assert "rank 1 was running 1F0" in "".join(interrupted.value.__notes__)
        model[1].does = None
        assert_evaluates(pipe, model, x, y, microbatches=2)


def test_a_sequence_cut_into_slices_evaluates_as_a_whole():
    class Sums(nn.Module):
        def forward(self, x):
            return x + pipelab.cached(x).sum(-2, keepdim=True)

    model, (x, y) = nn.Sequential(Sums(), nn.Linear(4, 4), Sums()), (torch.randn(2, 8, 4), torch.randn(2, 8, 4))
    with Pipeline(model, pipelab.Seq1F1B(2, 8, slices=4), mse, sequence_dim=1) as pipe:
        step, evaluation = pipe.step(x, y), pipe.evaluate(x, y)
    torch.testing.assert_close(evaluation.loss, step.loss)
    assert torch.equal(evaluation.outputs, step.outputs)
