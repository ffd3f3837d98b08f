"""The threads engine: one persistent worker thread per rank, in one process.

    caller    step ──────────────────────────────── wait ── StepState
                 │ a job for every worker              ▲ one outcome per worker
    worker 0     └─ F0 F1 ·· B0 ·· B1 ─────────────────┤
    worker 1     └─ ·· F0 B0 F1 B1 ────────────────────┘

A worker runs its row's instructions one by one: it waits until the value that it needs is ready, computes, reads the
clock before and after, and marks its own value as ready. An error in one worker stops the step: all workers stop
waiting, and report to the caller.

An all-reduce of gradients over the ranks of a stage (`R`) is a barrier and a sum:

    rank 0 │ … 0B2 ─┐ meets          ┌─ 0R: adds the others' gradients to its own ─┐
    rank 3 │ … 0B3 ──────────┐ meets ┴─ 0R ────────────────────────────────────────┴ goes on

The gradients of the lowest rank are the model's own, `.grad` itself; the other ranks' are added to it in the
order of the ranks, so that the same step gives the same bits.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from pipelab.engine.device import RankStream, begin, finish, rank_devices, rank_streams
from pipelab.engine.emulation import emulate_all_reduce
from pipelab.engine.engine import Act, Engine, RankState, Settings, StepState, describe, run_action
from pipelab.engine.model.split import Stages
from pipelab.engine.stage.autograd import CallerContext
from pipelab.engine.stage.errors import stage_error
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.replicas import Runners, accumulate
from pipelab.engine.stage.stage import Stage
from pipelab.engine.stage.streams import Streams
from pipelab.engine.stage.updates import add_optimizers
from pipelab.engine.worker import Outcome, Outcomes, Together, Worker, outcomes
from pipelab.errors import StepTimeoutError, UsageError
from pipelab.plan.actions import Action
from pipelab.plan.bound import BoundPlan
from pipelab.plan.plan import Plan

_GRACE_SECONDS = 5.0
"""How long workers may run on once a step has been stopped, before the engine replaces them."""


class ThreadsEngine(Engine):
    """Runs a legal plan on stages, one worker thread per rank."""

    def __init__(self, plan: Plan, stages: Stages, settings: Settings) -> None:
        if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            warnings.warn(
                f"each of the {os.environ['WORLD_SIZE']} processes runs all ranks of this pipeline in threads: with "
                "engine='torch' each runs one rank",
                stacklevel=3,
            )
        self.plan, self.forwards, self.stages = plan, plan.forwards(), stages
        self.timeout = settings.timeout
        self.devices = rank_devices(settings.devices, plan.ranks)
        on = [each.device for each in self.devices]
        self.runners = Runners(stages.modules, plan.replicas, on, settings.replicated_buffers)
        self.stage_devices = [on[ranks[0]] for _, ranks in sorted(plan.replicas.items())]
        self.local_stages = range(plan.stages)
        stages.place(self.stage_devices)
        if settings.optimizer is not None:
            add_optimizers(self.runners, stages.modules, plan.bound, settings.optimizer)
        for (stage, _), runner in self.runners.of.items():
            runner.recomputed = {*plan.bound.listed("C", stage)}
        self.streams = rank_streams(self.devices)
        self.random = Streams(stages.named, on)
        self._rows = instructions(plan.bound, self.runners.of, self.streams)
        self._forward_rows = instructions(self.forwards.bound, self.runners.of, self.streams)
        self.intra_op_threads = settings.intra_op_threads or max(1, torch.get_num_threads() // plan.ranks)
        self._workers: list[Worker] = []
        self.labels: list[str] = []
        self._start(range(plan.ranks))
        self._closer = weakref.finalize(self, _end, self._workers)

    def _start(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            worker = Worker(f"pipelab-rank-{rank}", self.intra_op_threads)
            self._workers[rank : rank + 1] = [worker]
            self.labels[rank : rank + 1] = [f"{self.devices[rank]}, thread {worker.thread.native_id or 0}"]

    def run(
        self, inputs: list[Any], loss: Loss | None, caller: CallerContext, *, learning: bool, watch_nan: bool
    ) -> ThreadsStep:
        """Run all micro-batches; return the step, its values complete."""
        if not self._closer.alive:
            raise UsageError("this pipeline is closed: make a new one, or use it inside its with block")
        plan, rows = (self.plan, self._rows) if learning else (self.forwards, self._forward_rows)
        step = ThreadsStep(plan, inputs, loss, watch_nan, caller, rows=rows)
        step.begin(self.streams)
        step.clocks = begin(self.streams)
        late = {worker: rank for rank, worker in enumerate(self._workers) if not worker.idle.is_set()}
        if late:  # a step before was interrupted twice
            self._replace(late, _GRACE_SECONDS)
        done: Outcomes = Together(len(self._workers))
        running: dict[Worker, int] = {}
        try:
            step.streams = self.random.begin(self.stages.modules, lambda: self.runners.modules)
            with quick_switches():
                for rank, worker in enumerate(self._workers):
                    running[worker] = rank
                    worker.do(partial(copy_context().run, run_row, step, rank), done)
                last = self._wait(step, done, running)
        except StepTimeoutError:
            raise
        except BaseException as interrupt:  # Ctrl-C, or whatever the caller's signal handler raises
            step.stop()
            interrupt.add_note(self._status(step, "interrupted while"))
            if remark := self._halt(step, running, _GRACE_SECONDS):
                interrupt.add_note(remark)
            raise
        if (error := last.error) is not None:
            rank = self._workers.index(last.worker)
            del last  # the error must not hold itself: with it, it would hold the step's tensors
            remark = self._halt(step, running, _GRACE_SECONDS)
            state = step.ranks[rank]
            action = state.actions[min(state.position, len(state.actions) - 1)]
            raise stage_error(error, action, rank, self.devices[rank], remark)
        finish(self.streams, [step.outputs, [] if loss is None else loss.values])
        self.random.end()
        return step

    @contextmanager
    def watched_by(self, watch: Watch) -> Iterator[None]:
        """Return a context in which steps call `watch` after each action."""
        rows, self._rows = self._rows, with_watch(self._rows, watch)
        try:
            yield
        finally:
            self._rows = rows

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002 - no other process need know of it
        """End the worker threads."""
        self._closer()

    def _wait(self, step: ThreadsStep, done: Outcomes, running: dict[Worker, int]) -> Outcome:
        """Wait until every worker has done its row, and return an outcome: the first that is an error, if any is."""
        moved = lambda: [(each.position, each.computing) for each in step.ranks]  # noqa: E731 - it reads best in place
        for outcome, quiet in outcomes(done, moved, self.timeout):
            if outcome is not None:
                return outcome
            if self.timeout is not None and quiet >= self.timeout:
                message = self._status(step, f"nothing moved for {quiet:.3g} s:")
                remark = self._halt(step, running, min(_GRACE_SECONDS, self.timeout / 10))
                raise StepTimeoutError(f"{message}\n  {remark}" if remark else message)
        raise AssertionError  # outcomes never end

    def _halt(self, step: ThreadsStep, running: dict[Worker, int], grace: float) -> str:
        """Stop a step, wait a while for its workers, and replace those that do not come back; return what to know."""
        step.stop()
        given_up = self._replace(running, grace)
        step.values.clear()
        for each in step.ranks:
            each.kept.clear()
        with suppress(RuntimeError):  # a GPU that failed may say so here once more
            finish(self.streams)  # what the ranks have launched goes on: the caller's zero_grad() must come after
        if not given_up:
            return step.left
        return (
            f"rank {', '.join(map(str, given_up))} did not come back and was given up: an operation that ends later "
            "may still add to gradients, so make a new pipeline before you trust them"
        )

    def _replace(self, running: dict[Worker, int], grace: float) -> list[int]:
        """Wait a while for workers, and replace those that do not come back; return their ranks."""
        deadline = time.monotonic() + grace
        given_up = []
        for worker, rank in running.items():
            if not worker.idle.wait(max(0.0, deadline - time.monotonic())):  # a worker that never got its job is idle
                worker.give_up()
                given_up.append(rank)
        self._start(given_up)
        return sorted(given_up)

    def _status(self, step: ThreadsStep, lead: str) -> str:
        lines = [lead]
        for state, worker in zip(step.ranks, self._workers, strict=True):
            action = state.actions[state.position] if state.position < len(state.actions) else None
            barrier = None if action is None else step.barriers.get(action)
            absent = barrier.absent if barrier is not None else ()
            lines.append(f"  rank {state.rank} {describe(self.plan, state, worker.line(), absent)}")
        return "\n".join(lines)


def _end(workers: list[Worker]) -> None:
    for worker in workers:
        worker.end()
    for worker in workers:
        worker.join()


# ── In the workers ────────────────────────────────────────────────────────────────────────────────────────────────────


_SWITCH_SECONDS = 5e-6

_guard = threading.Lock()
_inside = 0
_before = 0.0


@contextmanager
def quick_switches() -> Iterator[None]:
    """Let a thread that wants the interpreter lock have it immediately, instead of after Python's usual 5 milliseconds.

    A rank whose backward has ended needs the lock to go on; another rank that is running a forward gives it up and
    takes it back many times in a row, each time too briefly for a sleeping thread to wake up. With a short interval it
    has to wait for its turn. The setting is the whole process's, so it is restored after the step.
    """
    global _inside, _before  # noqa: PLW0603 - it guards a setting of the process
    with _guard:
        if _inside == 0:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_SECONDS)
        _inside += 1
    try:
        yield
    finally:
        with _guard:
            _inside -= 1
            if _inside == 0:
                sys.setswitchinterval(_before)


def run_row(step: ThreadsStep, rank: int) -> None:  # noqa: PLR0912 - one loop, so that no call is between actions
    """Run one rank's row. This is the hot loop: at small sizes its own time is what a step costs."""
    mine, values, ready, loss = step.ranks[rank], step.values, step.ready, step.loss
    stream = mine.stream
    send, receive = stream.send, stream.receive
    with ExitStack() as stack:
        if receive is not None:
            stream.enter(stack)
        step.caller.enter(stack)
        if step.plan.forwards_only:
            stack.enter_context(torch.no_grad())
        for each in step.rows[rank]:
            # [1] wait for what the action needs
            if each.needs is not None:
                if each.receives:
                    ready[each.needs].acquire()
                if step.stopped:
                    return
                given = values.pop(each.needs)
                if each.receives and receive is not None:
                    given = receive(given)
            elif each.all_reduce is not None:
                given = step.barriers[each.action]
                try:
                    given.meet(rank, stream)
                except threading.BrokenBarrierError:
                    return
            else:
                given = step.inputs[each.microbatch] if each.forward else None
                if receive is not None:
                    given = receive(given)
            if step.stopped:
                return
            if receive is not None and loss is not None and each.forward and each.stage.is_last:
                loss.targets[each.microbatch] = receive(loss.targets[each.microbatch])
            if each.forward:
                each.stage.receive_keywords(each.microbatch, receive)
            # [2] compute, between two readings of the clock
            made = run_action(step, mine, each.stage, each.action, each.act, each.microbatch, given)
            # [3] pass on the value
            if each.gives is not None:
                values[each.gives] = send(made) if each.sends and send is not None else made
                if each.sends:
                    lock = ready[each.gives]
                    if lock.locked():
                        lock.release()
            elif each.forward:
                step.outputs[each.microbatch] = made


# ── A plan's actions as the workers run them ──────────────────────────────────────────────────────────────────────────


Watch = Callable[[int, Stage, Action, dict[int, Any], Any], None]
"""Called on a rank's thread after each of its actions: with rank, stage, action, what the stage keeps, and output."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """What a worker does for one action."""

    action: Action
    forward: bool
    microbatch: int  # which micro-batch; -1 for an all-reduce
    stage: Stage
    act: Act
    needs: int | None = None  # the value it starts from; `None` for the batch's rows, the loss, or what was kept
    receives: bool = False  # whether another rank gives that value
    gives: int | None = None  # the value it computes, by number; `None` if it is not needed
    sends: bool = False  # whether another rank needs it
    all_reduce: AllReduce | None = None  # the all-reduce in which it takes part


Rows = Sequence[Sequence[Instruction]]
"""Every rank's instructions."""


@dataclass(slots=True)
class ThreadsStep(StepState):
    """One step of all ranks, and the values between them."""

    rows: Rows = ()  # every rank's instructions
    values: dict[int, Any] = field(default_factory=dict)  # by number, the values under way
    ready: dict[int, threading.Lock] = field(default_factory=dict)  # released when the value is there
    barriers: dict[Action, Barrier] = field(default_factory=dict)  # for each all-reduce, where its ranks meet
    stopped: bool = False  # whether all ranks should stop

    def begin(self, streams: Sequence[RankStream]) -> None:
        """Lock what has to be waited for."""
        for each in chain.from_iterable(self.rows):
            if each.receives and each.needs is not None:
                lock = self.ready[each.needs] = threading.Lock()
                lock.acquire()
            elif each.all_reduce is not None and each.action not in self.barriers:
                self.barriers[each.action] = Barrier(each.all_reduce.group)
        self.ranks = [
            RankState(rank, [each.action for each in row], stream, {each.stage.index: {} for each in row})
            for rank, (row, stream) in enumerate(zip(self.rows, streams, strict=True))
        ]

    def stop(self) -> None:
        """Make every worker stop at its next action, and release those that wait."""
        self.stopped = True
        for barrier in self.barriers.values():
            barrier.abort()
        for lock in self.ready.values():
            if lock.locked():
                with suppress(RuntimeError):  # its giver released it just now
                    lock.release()


def instructions(bound: BoundPlan, runners: Mapping[tuple[int, int], Stage], streams: Sequence[RankStream]) -> Rows:
    """Return every rank's instructions for a legal plan."""
    codes = bound.codes
    rows: list[list[Instruction]] = []
    for rank, row in enumerate(bound.computing):
        listed: list[Instruction] = []
        for code in row:
            action = codes.action(code)
            assert action.stage is not None
            runner = runners[action.stage, rank]
            if codes.collective[code]:
                group = bound.replicas[action.stage]
                part = AllReduce(rank, group, [runners[action.stage, each] for each in group], streams[rank])
                listed.append(Instruction(action, False, -1, runner, part.act, all_reduce=part))  # noqa: FBT003
            else:
                act = runner.evaluate if codes.forwards_only else getattr(runner, action.traits.method)
                listed.append(_of_a_slot(bound, code, action, rank, runner, act))
        rows.append(listed)
    return rows


def _of_a_slot(bound: BoundPlan, code: int, action: Action, rank: int, stage: Stage, act: Act) -> Instruction:
    """Return what a rank does for one micro-batch.

    A forward takes `out` of the stage before and gives its own; `B` and `I` take `gin` of the stage after, likewise.
    What `W` needs its own `I` has kept, and what it gives stays on the rank.
    """
    codes = bound.codes
    need, value = codes.comes[code], codes.gives[code]
    inner = need != codes.always
    onward = [needer for needer in codes.needers(value) if codes.stage[needer] != action.stage]
    return Instruction(
        action,
        bool(codes.forward[code]),
        codes.microbatch[code],
        stage,
        act,
        needs=need if inner else None,
        receives=inner and bound.rank_of[bound.giver_of[need]] != rank,
        gives=value if onward else None,
        sends=any(bound.rank_of_slot[codes.slot[needer]] != rank for needer in onward),
    )


def with_watch(rows: Rows, watch: Watch) -> Rows:
    """Return the same instructions, with a call of `watch` at the end of each."""

    def act(rank: int, each: Instruction, microbatch: int, given: Any, kept: dict[int, Any], loss: Any) -> Any:
        made = each.act(microbatch, given, kept, loss)
        watch(rank, each.stage, each.action, kept, made)
        return made

    return [[replace(each, act=partial(act, rank, each)) for each in row] for rank, row in enumerate(rows)]


# ── The all-reduce ────────────────────────────────────────────────────────────────────────────────────────────────────


class Barrier:
    """Where the ranks of one all-reduce meet in one step: before the sum, and after it."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.absent = set(ranks)  # those that have not arrived
        self._barrier = threading.Barrier(len(ranks))
        self._launched: list[Any] = []  # events of the ranks' kernels, for which all their streams wait

    def meet(self, rank: int, stream: RankStream) -> None:
        """Wait for all ranks."""
        if stream.send is not None:
            self._launched.append(stream.send(None))
        self.absent.discard(rank)
        self._barrier.wait()
        if stream.receive is not None:
            for event in list(self._launched):
                stream.receive(event)

    def abort(self) -> None:
        """Release all ranks: the step is stopped."""
        self._barrier.abort()


class AllReduce:
    """One rank's part in the all-reduce of one stage, which the ranks of a group run, the lowest first."""

    def __init__(self, rank: int, group: Sequence[int], stages: Sequence[Stage], stream: RankStream) -> None:
        self.group = group
        self._rank = rank
        self._stages = stages
        self._stream = stream

    def act(self, _microbatch: int, barrier: Barrier, _kept: dict[int, Any], _loss: Any) -> None:
        """Add up the gradients of all ranks, or wait until the lowest rank has done it."""
        if self._rank == self.group[0]:
            self._add_up()
            emulate_all_reduce(self._stages[0].module)
        barrier.meet(self._rank, self._stream)

    def _add_up(self) -> None:
        own, *copies = (list(stage.module.parameters()) for stage in self._stages)
        for parameter, *others in zip(own, *copies, strict=True):
            for other in others:
                gradient, other.grad = other.grad, None
                if gradient is None:
                    continue
                if self._stream.receive is not None:
                    gradient = self._stream.receive(gradient)
                accumulate(parameter, gradient)
