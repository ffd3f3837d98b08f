"""Whatever goes wrong ends soon, says where it was, and leaves a pipeline that works."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pipes import assert_trains, mse, refused, verified

import plain
import processes
import pytest
import torch
from strategies import near
from torch import nn

import pipelab
from pipelab import B, F, GPipe, Naive, OneFOneB, Pipeline, Plan, ScheduleError, schedules
from pipelab.engine import threads
from pipelab.errors import BatchError, EngineError, LossError, PipelabError, StageError, StepTimeoutError, UsageError

pytestmark = pytest.mark.timeout(60)  # far more than any of these takes: what hangs, fails here


class Fuse(nn.Module):
    """Passes its input on, until it is lit: then it does something else, forward or backward."""

    def __init__(self):
        super().__init__()
        self.forward_does = self.backward_does = None

    def forward(self, x):
        if self.forward_does is not None:
            x = self.forward_does(x)
        return Burn.apply(x, self)


class Burn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fuse):
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fuse.backward_does is not None:
            gradient = ctx.fuse.backward_does(gradient)
        return gradient, None


def model_with(fuse, stages=3, at=1):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), fuse if stage == at else nn.Tanh()) for stage in range(stages))
    )


@contextmanager
def lit(schedule=OneFOneB(3, 4), **settings):  # noqa: B008 - no schedule changes
    """A pipeline, the fuse in its stage 1, and its model. When the fuse is out, the pipeline trains as plainly."""
    fuse = Fuse()
    model = model_with(fuse)
    with Pipeline(model, schedule, mse, **settings) as pipe:
        yield pipe, fuse, model
        fuse.forward_does = fuse.backward_does = None
        assert_trains(pipe, model)


def partial(model):
    return any(parameter.grad is not None for parameter in model.parameters())


def ranks_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("pipelab-rank-")}


def assert_end(workers):
    for thread in workers:
        for _ in range(100):  # a worker that was just about to drop its last job held the pipeline until now
            gc.collect()
            thread.join(0.2)
            if not thread.is_alive():
                break
        assert not thread.is_alive()


def raises(error):
    def does(_):
        raise error

    return does


def at_call(number, does):
    """Do something at the call of this number, from 0."""
    calls = iter(range(1000))
    return lambda x: does(x) if next(calls) == number else x


def fails_forward(x):
    return x @ torch.zeros(7, 7)  # the student's line


def fails_backward(gradient):
    return gradient.reshape(5, 5, 5)  # the student's other line


@pytest.mark.sweep
@pytest.mark.parametrize("name", schedules)
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("does", [fails_forward, fails_backward])
def test_an_exception_names_its_place_and_line(name, at, does):
    fuse = Fuse()
    plan = near(name, 3, 4)
    first = {plan.bound.route(m)[at]: m for m in reversed(range(plan.microbatches))}  # by rank
    model = model_with(fuse, plan.stages, at)
    with Pipeline(model, plan, mse) as pipe:
        assert_trains(pipe, model)
        workers = ranks_threads()
        setattr(fuse, "forward_does" if does is fails_forward else "backward_does", does)
        with pytest.raises(StageError) as failed:
            pipe.step(*plain.batch(8))
        fuse.forward_does = fuse.backward_does = None
        assert ranks_threads() <= workers  # everybody stopped by itself, nobody was given up
        error, told = failed.value, str(failed.value)
        assert error.stage == at
        assert error.rank in plan.replicas[at]
        assert str(error.action)[:2] in ([f"{at}F"] if does is fails_forward else [f"{at}B", f"{at}I", f"{at}W"])
        assert f"{__file__}, line {does.__code__.co_firstlineno + 1}, in {does.__name__}: return " in told
        assert isinstance(error.__cause__, RuntimeError)
        if does is fails_forward:
            m = first[error.rank]
            assert told.startswith(f"{at}F{m} on rank {error.rank} failed: RuntimeError: {error.__cause__}")
            assert f"stage {at}, micro-batch {m}, on cpu" in told
            assert ("gradients are partial now" in told) == partial(model)
        assert_trains(pipe, model)


def burnt():
    """Return a module of a class of its own, with a layer in it, that fails."""
    fuse = Fuse()
    fuse.forward_does, fuse.inner = fails_forward, nn.Identity()
    return fuse


class Shy(nn.Module):
    def forward(self, x):
        return fails_forward(x)

    def extra_repr(self):
        raise ValueError("not to be shown")


LINEAR, WIDER, TWICE = nn.Linear(6, 6), nn.Linear(7, 6), nn.Linear(6, 6)
WIDERS_NAME = r"Linear\(in_features=7, out_features=6, bias=True\)"


@pytest.mark.parametrize("call", ["step", "forward"])
@pytest.mark.parametrize(
    ("model", "layer"),
    [
        (nn.Sequential(LINEAR, nn.ReLU(), WIDER), f"2, {WIDERS_NAME}\n"),
        (nn.Sequential(LINEAR, nn.ReLU(), nn.Sequential(nn.Linear(6, 6), WIDER)), f"2.1, {WIDERS_NAME}\n"),
        (nn.Sequential(LINEAR, nn.Sequential(nn.ReLU(), burnt())), "1.1, Fuse"),
        (nn.Sequential(LINEAR, TWICE, nn.Linear(6, 7), TWICE), "1 or 3, Linear"),
        (nn.Sequential(LINEAR, nn.Sequential(Shy(), nn.ReLU())), "1.0, Shy\n"),
    ],
)
def test_an_error_names_its_layer(model, layer, call):
    """Otherwise the line told is PyTorch's own, the same for every layer of that kind."""
    stages = 1 if "or" in layer else 2
    error = refused(rf"\n  in layer {layer}", model, OneFOneB(stages, 2), batch=4, call=call)
    assert str(error.__cause__) in str(error)


def test_an_error_in_a_traced_model_names_the_students_own_layer():
    body = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model = plain.Made(lambda self, x: self.body(x).relu(), body=body)
    x, y = plain.batch(4)
    stages = pipelab.split(model, into=2, example=x[:2])
    refused(r"\n  in layer body\.0\n", stages, OneFOneB(2, 2), batch=(x.double(), y))


@pytest.mark.parametrize(
    ("model", "loss"),
    [([LINEAR, burnt()], mse), (plain.mlp(2), nn.Sequential(nn.Identity(), nn.Identity()))],
    ids=["a whole stage", "the loss"],
)
def test_an_error_of_a_whole_stage_or_of_the_loss_names_no_layer(model, loss):
    assert "in layer" not in str(refused("failed", model, OneFOneB(2, 2), batch=4, loss=loss))


def test_a_model_that_has_a_draft_is_a_model():
    model = plain.mlp(4)
    model.draft = "a smaller model's guess: nothing to do with plans"
    assert verified(model, OneFOneB(2, 2), 4).exact


def test_after_an_error_no_rank_begins_another_action():
    seen = []
    slow = plain.Made(lambda _, x: seen.append(time.sleep(0.05)) or x * 1)
    refused("1F0 on rank 1 failed", nn.Sequential(slow, burnt()), GPipe(2, 32), batch=32)
    assert len(seen) < 32


def test_stages_that_all_fail_at_once_are_one_error():
    fuses = [Fuse() for _ in range(4)]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), fuse) for fuse in fuses))
    with Pipeline(model, GPipe(4, 4), mse) as pipe:
        for _ in range(20):
            for number, fuse in enumerate(fuses):
                fuse.forward_does = at_call(3 - number, fails_forward)
            with pytest.raises(StageError):
                pipe.step(*plain.batch(8))
        for fuse in fuses:
            fuse.forward_does = None
        assert_trains(pipe, model)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), MemoryError("no room")])
def test_even_what_would_end_a_program_is_reported(error):
    with lit() as (pipe, fuse, _):
        fuse.forward_does = raises(error)
        with pytest.raises(StageError, match=f"1F0 on rank 1 failed: {type(error).__name__}") as failed:
            pipe.step(*plain.batch(8))
        assert failed.value.__cause__ is error


# --- losses


@pytest.mark.parametrize(
    ("loss", "cause", "told"),
    [
        (lambda output, target: fails_forward(output), RuntimeError, "RuntimeError: .*mat1 and mat2"),
        (lambda output, target: output - target, LossError, r"a tensor of shape \(2, 6\), not one number"),
        (lambda output, target: 3.0, LossError, "returned float, not a tensor"),
        (lambda output, target: None, LossError, "returned NoneType, not a tensor"),
        (lambda output, target: mse(output.detach(), target), LossError, "the loss has no history"),
        (lambda output, target: (output - target).mean() * 1j, LossError, r"torch\.complex64: only a real number"),
        (lambda output, target: output.sum().item() * torch.ones(()), LossError, "the loss has no history"),
    ],
)
def test_a_loss_that_is_none_is_told_on_the_last_stage(loss, cause, told):
    chosen = [loss]
    model = plain.mlp(6)
    with Pipeline(model, OneFOneB(3, 4), lambda output, target: chosen[0](output, target)) as pipe:
        with pytest.raises(StageError, match=rf"2F0 on rank 2 failed: .*{told}") as failed:
            pipe.step(*plain.batch(8))
        assert isinstance(failed.value.__cause__, cause)
        chosen[0] = mse
        assert_trains(pipe, model)


# --- NaN and infinity


@pytest.mark.parametrize(
    ("value", "told"), [(float("nan"), "NaN"), (float("inf"), "infinity"), (-float("inf"), "infinity")]
)
def test_the_first_nan_or_infinity_is_told(value, told):
    with lit(watch_nan=True) as (pipe, fuse, model):
        assert_trains(pipe, model)
        fuse.forward_does = at_call(2, lambda x: x * value)
        with pytest.raises(StageError, match=rf"1F2 on rank 1 made {told}: the output of stage 1") as failed:
            pipe.step(*plain.batch(8))
        assert (failed.value.rank, failed.value.stage, str(failed.value.action)) == (1, 1, "1F2")
        fuse.forward_does = None
        fuse.backward_does = at_call(1, lambda gradient: torch.full_like(gradient, value))
        with pytest.raises(StageError, match=rf"1B1 on rank 1 made (NaN|{told}): the input gradient of stage 1"):
            pipe.step(*plain.batch(8))


@pytest.mark.parametrize(("at", "after"), [(0, False), (3, True)])  # in 1F0, before any backward, and in 1F3
def test_a_nan_after_a_backward_says_that_gradients_are_partial(at, after):
    with lit(watch_nan=True) as (pipe, fuse, model):
        fuse.forward_does = at_call(at, lambda x: x * float("nan"))
        with pytest.raises(StageError) as failed:
            pipe.step(*plain.batch(8))
        notes = getattr(failed.value, "__notes__", [])
        assert [note.startswith("gradients are partial now") for note in notes] == [True] * after
        assert partial(model) == after


def test_a_nan_that_was_there_before_is_not_said_to_be_made():
    x, y = plain.batch(8)
    model = plain.mlp(6)
    with Pipeline(model, OneFOneB(3, 4), mse, watch_nan=True) as pipe:
        x[5, 1] = float("nan")
        told = r"^0F2 on rank 0 made NaN: .*\n  there was NaN in its input: in the rows of x of micro-batch 2\b"
        with pytest.raises(StageError, match=told):
            pipe.step(x, y)
        x[5, 1] = 0
        with torch.no_grad():
            model[2].bias[0] = float("nan")
        with pytest.raises(StageError, match=r"\n  there was NaN in 2\.bias of stage 1 before: look at the step"):
            pipe.step(x, y)


def test_infinities_that_are_meant_are_not_blamed_for_a_nan():
    x, y = plain.batch(8)
    masks = plain.Made(lambda self, x: x.log_() + 0 * self.mask.exp())
    masks.register_buffer("mask", torch.full((6,), -torch.inf))
    for model in (nn.Sequential(masks, nn.Linear(6, 6)), nn.Sequential(nn.Linear(6, 6), masks, nn.BatchNorm1d(6))):
        error = refused("made NaN", model, OneFOneB(2, 4), batch=(x - 5, y), watch_nan=True)
        assert "there was" not in str(error)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_backward_that_fails_late_says_that_gradients_are_partial(name):
    with lit(schedules[name](3, 4)) as (pipe, fuse, model):
        fuse.backward_does = at_call(3, fails_backward)
        with pytest.raises(StageError, match="\n  gradients are partial now"):
            pipe.step(*plain.batch(8))
        assert partial(model)


def test_without_the_watch_a_nan_passes_as_in_plain_training():
    with lit() as (pipe, fuse, _):
        fuse.forward_does = lambda x: x * float("nan")
        with pytest.warns(UserWarning, match="the loss of this step is nan"):
            assert torch.isnan(pipe.step(*plain.batch(8)).loss)


# --- a worker that does not come back


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(threads, "_GRACE_SECONDS", 1.0)


class Hang:
    """A stage that does not come back until it is released."""

    def __init__(self):
        self.over = threading.Event()

    def __call__(self, x):
        self.over.wait(50)  # the student's waiting line
        return x


def test_a_stage_that_never_returns_is_told_with_who_waits_for_whom(short_grace):
    hang = Hang()
    with lit(Naive(3, 2), timeout=0.5) as (pipe, fuse, _):
        fuse.forward_does = hang
        with pytest.raises(StepTimeoutError) as timeout:
            pipe.step(*plain.batch(8))
        hang.over.set()
    first, *ranks = str(timeout.value).splitlines()
    assert first.startswith("nothing moved for ")
    value = "the gradient of micro-batch 0 from stage 1"
    assert ranks[0] == f"  rank 0 waits, before 0B0 (stage 0, position 1), for {value}, given by 1B0 on rank 1"
    line = Hang.__call__.__code__.co_firstlineno + 1
    assert ranks[1] == (
        f"  rank 1 was running 1F0 (stage 1, position 0), at {__file__}, line {line}, in __call__: "
        "self.over.wait(50)  # the student's waiting line"
    )
    value = "the output of micro-batch 0 from stage 1"
    assert ranks[2] == f"  rank 2 waits, before 2F0 (stage 2, position 0), for {value}, given by 1F0 on rank 1"


def test_a_stage_that_hangs_is_given_up_soon_after_the_timeout(monkeypatch):
    waited, hang, halt = [], Hang(), threads.ThreadsEngine._halt
    monkeypatch.setattr(
        threads.ThreadsEngine,
        "_halt",
        lambda self, step, running, grace: waited.append(grace) or halt(self, step, running, grace),
    )
    with lit(Naive(3, 2), timeout=1) as (pipe, fuse, _):
        fuse.backward_does = hang
        with pytest.raises(StepTimeoutError, match="may still add to gradients"):
            pipe.step(*plain.batch(8))
        hang.over.set()
    assert waited == [0.1]  # a tenth of the timeout, however long a stage may take to come back after an error


def test_only_the_worker_that_hangs_is_replaced_and_coming_back_late_it_does_no_harm(short_grace):
    hang, others = Hang(), ranks_threads()
    with lit(timeout=1.5) as (pipe, fuse, model):
        started = ranks_threads() - others
        assert_trains(pipe, model)
        before = pipe.step(*plain.batch(8)).trace.lanes
        fuse.backward_does = hang
        with pytest.raises(StepTimeoutError, match="rank 1 was running 1B0"):
            pipe.step(*plain.batch(8))
        fuse.backward_does = None
        assert len(ranks_threads() - started - others) == 1
        (stuck,) = [thread for thread in started if thread.name == "pipelab-rank-1"]
        assert_trains(pipe, model)
        after = pipe.step(*plain.batch(8)).trace.lanes
        assert [lane in after for lane in before] == [True, False, True]
        model.zero_grad()
        hang.over.set()  # the late one comes back, and ends
        assert_end([stuck])
        assert not partial(model)
        assert_trains(pipe, model)


def test_a_slow_step_in_which_something_moves_does_not_time_out():
    with lit(GPipe(3, 5), timeout=1.0) as (pipe, fuse, _):
        fuse.forward_does = lambda x: time.sleep(0.3) or x
        trace = pipe.step(*plain.batch(5)).trace
    assert trace.makespan > 1000 * 1.0  # 5 x 0.3 s: with nothing moving for so long, it would have stopped


def test_no_timeout_waits_for_ever():
    with lit(GPipe(3, 2), timeout=None) as (pipe, fuse, _):
        fuse.forward_does = at_call(0, lambda x: time.sleep(0.3) or x)
        assert pipe.step(*plain.batch(8)).trace.makespan > 1000 * 0.3


# --- interruptions


class Alarm(Exception):  # noqa: N818 - no error of ours
    pass


@contextmanager
def handling(number, handler):
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Alarm])
def test_an_interruption_stops_all_workers_and_says_where_they_were(kind):
    release = threading.Event()

    def interrupts(x):
        os.kill(os.getpid(), signal.SIGINT)
        release.wait(1)
        return x

    def handler(number, frame):
        raise kind

    with handling(signal.SIGINT, handler), lit() as (pipe, fuse, model):
        assert_trains(pipe, model)
        fuse.forward_does = at_call(1, interrupts)
        with pytest.raises(kind) as interrupted:
            pipe.step(*plain.batch(8))
        release.set()
        note, *_ = interrupted.value.__notes__
        assert note.startswith("interrupted while")
        assert "rank 1 was running 1F1" in note
        model.zero_grad()
        time.sleep(0.05)
        assert not partial(model)  # nobody works on


@pytest.mark.parametrize("call", ["step", "forward"])
@pytest.mark.parametrize("catches", [False, True])
@pytest.mark.parametrize("within", ["step", "forward"])
def test_a_signal_handler_cannot_run_the_pipeline_that_it_interrupts(call, catches, within):
    handled, caught = threading.Event(), []

    def run(name):
        getattr(pipe, name)(*plain.batch(8)[: 1 if name == "forward" else 2])

    def interrupts(x):
        os.kill(os.getpid(), signal.SIGUSR1)
        handled.wait(20)
        return x

    def handler(number, frame):
        try:
            run(call)
        except UsageError as error:
            caught.append(error)
            if not catches:
                raise
        finally:
            handled.set()

    with handling(signal.SIGUSR1, handler), lit(timeout=30) as (pipe, fuse, _):
        fuse.forward_does = at_call(1, interrupts)
        with nullcontext() if catches else pytest.raises(UsageError, match="signal handler"):
            run(within)
        assert len(caught) == 1


def test_ctrl_c_ends_a_script_with_a_note_and_the_step_after_works():
    command = [sys.executable, processes.SCRIPTS / "ending.py", "interrupted"]
    pipe, env = subprocess.PIPE, processes.environment()
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env)
    interrupts = 0
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == "in the stage\n" and (not interrupts or "stepped\n" in lines):
            process.send_signal(signal.SIGINT)
            interrupts += 1
            if interrupts == 2:
                break
    out, err = process.communicate(timeout=40)
    told = "".join(lines) + out
    for words in ("interrupted while", "rank 1 was running 1F0", "stepped"):
        assert words in told
    assert "KeyboardInterrupt" in err
    assert "Fatal" not in err
    assert process.returncode in (-signal.SIGINT, 130, 1)


@pytest.mark.parametrize(
    "situation",
    [
        "an open pipeline",
        "a pipeline that never stepped",
        "a failed step whose error is kept",
        "a stage that still hangs",
        "a step under way on a daemon thread",
    ],
)
def test_a_process_ends_by_itself(situation):
    processes.run_well(1, "ending.py", situation, seconds=40, silent=True)


# --- closing


def test_a_closed_pipeline_refuses_to_step_and_its_threads_end():
    before = ranks_threads()
    model, (x, y) = plain.mlp(6), plain.batch(8)
    pipe = Pipeline(model, OneFOneB(3, 4), mse)
    started = ranks_threads() - before
    assert len(started) == 3
    pipe.close()
    pipe.close()
    assert_end(started)
    for use in (lambda: pipe.step(x, y), lambda: pipe.forward(x), lambda: pipe.verify(x, y)):
        with pytest.raises(UsageError, match="this pipeline is closed: make a new one"):
            use()
    plain.at_once(model, mse, x, y)  # the model is as usable as ever


@pytest.mark.parametrize("failed", [False, True])
def test_a_forgotten_pipelines_threads_end(failed):
    before = ranks_threads()
    fuse = Fuse()
    pipe = Pipeline(model_with(fuse), OneFOneB(3, 4), mse)
    started = ranks_threads() - before
    assert len(started) == 3
    pipe.step(*plain.batch(8))
    if failed:
        fuse.forward_does = fails_forward
        with pytest.raises(StageError):
            pipe.step(*plain.batch(8))
    del pipe
    gc.collect()
    assert_end(started)


def test_an_exception_between_steps_closes_the_pipeline_and_is_passed_on():
    before = ranks_threads()
    pipe = Pipeline(plain.mlp(6), OneFOneB(3, 4), mse)
    started = ranks_threads() - before
    pipe.step(*plain.batch(8))
    with pytest.raises(ZeroDivisionError), pipe:
        _ = 1 / 0
    assert_end(started)


def test_two_threads_may_step_one_pipeline_one_after_the_other():
    model, (x, y) = plain.mlp(6), plain.batch(8)
    expected = plain.gradients(model, mse, x, y, 4)
    with Pipeline(model, OneFOneB(3, 4), mse, timeout=10) as pipe, ThreadPoolExecutor(3) as callers:
        steps = [callers.submit(pipe.step, x, y) for _ in range(60)]
        for step in steps:
            step.result(40)
    torch.testing.assert_close(plain.taken(model), {name: 60 * gradient for name, gradient in expected.items()})


# --- what is refused before anything runs


@pytest.mark.parametrize(
    ("x", "y", "told"),
    [
        (torch.zeros(4, 6), torch.tensor(1.0), r"y has the shape \[\], without a dimension 0"),
        (torch.zeros(3, 6), torch.zeros(3, 6), "a batch of 3 rows cannot fill 4 micro-batches"),
        (torch.zeros(0, 6), torch.zeros(0, 6), "a batch of 0 rows cannot fill 4 micro-batches"),
        (None, torch.zeros(4), "x is missing"),
        (torch.zeros(4, 6), "labels", "y holds no tensor"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(x, y, told):
    with lit() as (pipe, _, _):
        with pytest.raises(BatchError, match=told):
            pipe.step(x, y)
        if "cannot fill" in told:
            with pytest.raises(BatchError, match=told):
                pipe.forward(x)


def test_a_schedule_that_stands_where_the_model_should_is_told_to_change_places():
    schedule = GPipe(2, 2)
    told = r"^Pipeline\(model, schedule, loss_fn\): expected a model first, got (GPipe|Plan)\("
    for first in (schedule, schedule.plan()):
        with pytest.raises(TypeError, match=told):
            Pipeline(first, plain.mlp(2), mse)


def test_an_illegal_plan_is_refused_with_its_faults():
    deadlock = Plan([[F(0, 0), B(0, 0)], [B(0, 1), F(0, 1)]], 2, 1)
    with pytest.raises(ScheduleError) as refused:
        Pipeline(plain.mlp(4), deadlock, mse)
    assert {fault.code for fault in refused.value.faults} == {"unordered"}
    with pytest.raises(ScheduleError, match="missing"):
        Pipeline(plain.mlp(4), Plan([[F(0, 0)]], 1, 1), mse)


def test_what_is_refused_starts_no_thread():
    before = ranks_threads()
    for arguments in ({"devices": ["cpu"]}, {"engine": "mpi"}, {"reduction": "max"}):
        with pytest.raises(PipelabError):
            Pipeline(plain.mlp(4), GPipe(2, 2), mse, **arguments)
    with pytest.raises(EngineError):
        Pipeline(plain.mlp(1), GPipe(2, 2), mse)
    assert ranks_threads() <= before


def test_a_weights_gradient_is_watched_too():
    told = "0B0 on rank 0 made (NaN|infinity): the gradient of 0.weight"
    refused(told, nn.Sequential(plain.root_of_weight(), nn.Linear(6, 6)), Naive(2, 2), batch=4, watch_nan=True)


class DoubledInPlace(torch.autograd.Function):
    """Writes into the gradient that it is given, as PyTorch forbids but nothing prevents."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2)


def test_a_loss_that_writes_into_its_gradient_harms_no_other_microbatch():
    def loss(output, target):
        return DoubledInPlace.apply(mse(output, target))

    x, y = plain.batch(8)
    ours, theirs = plain.mlp(2), plain.mlp(2)
    with Pipeline(ours, GPipe(2, 4), loss) as pipe:
        pipe.step(x, y)
    for micro_x, micro_y in zip(x.chunk(4), y.chunk(4), strict=True):
        (2 * mse(theirs(micro_x), micro_y) / 4).backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_stage_that_writes_into_its_leaf_is_named():
    writes = plain.Made(lambda _, x: nn.functional.relu(x, inplace=True))  # that no module's attribute shows
    refused("a leaf Variable that requires grad", nn.Sequential(nn.Linear(6, 6), writes), Naive(2, 2), batch=4)


def test_the_callers_default_number_of_processor_threads_stays_as_it_was():
    script = """
        import pipelab, torch
        model = pipelab.emulated(2, 0, 0)  # the default is not read before, as the first look at it sets it
        with pipelab.Pipeline(model, pipelab.Naive(2, 2), torch.nn.functional.mse_loss, intra_op_threads=1) as pipe:
            assert torch.get_num_threads() == 2
            pipe.step(torch.ones(2, 1), torch.ones(2, 1))
        print(torch.get_num_threads() == 2)
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (found.stdout.strip(), found.stderr) == ("True", "")


def test_where_memory_ran_out_it_is_freed_and_the_next_step_works():
    held = []

    def out_of_memory(x):
        activation = x * 2
        held.append(weakref.ref(activation))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    with lit() as (pipe, fuse, _):
        fuse.forward_does = out_of_memory
        with pytest.raises(StageError) as caught:
            pipe.step(*plain.batch(8))
        told = str(caught.value)
        assert "1F0 on rank 1 failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB" in told
        assert "test_faults.py" in told
        assert "try: more micro-batches of fewer rows each" in told
        assert [activation() for activation in held] == [None]
