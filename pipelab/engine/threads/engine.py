"""The threads engine: one persistent worker thread per rank, in one process.

    caller    step ──────────────────────────────── wait ── Result
                 │ Run to every worker                 ▲ one report per worker
    worker 0     └─ F0 F1 ·· B0 ·· B1 ─────────────────┤
    worker 1     └─ ·· F0 B0 F1 B1 ────────────────────┘

A worker takes its row's instructions one by one: it waits at the door of the value that it needs, computes, reads the
clock before and after, and opens the door of what it gives. Whatever goes wrong in one worker opens all doors;
everybody sees that the run is stopped and reports back.
"""

from __future__ import annotations

import queue
import sys
import time
import traceback
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from pipelab.engine.device.streams import Lane, begin, finish
from pipelab.engine.stage.caller import PLAIN, CallerContext
from pipelab.engine.stage.errors import PARTIAL, stage_error
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.stage import Stage
from pipelab.engine.threads.instructions import Run, instructions
from pipelab.engine.threads.worker import Report, Worker, quick_switches
from pipelab.errors import PipelineClosedError, StageError, StepTimeoutError
from pipelab.plan.fault import line_of
from pipelab.plan.plan import Plan

__all__ = ["ThreadsEngine"]

_PAUSE_SECONDS = 0.2
"""How long the caller sleeps at most before it looks whether anything moves, or whether it was interrupted."""

_GRACE_SECONDS = 5.0
"""How long workers may take to come back once a run has been stopped, before they are given up."""


class ThreadsEngine:
    """Runs a legal plan on stages, one worker thread per rank.

    Args:
        plan: the plan.
        runners: by stage and rank, what runs the stage there.
        lanes: what each rank runs on.
        timeout: seconds without any progress after which a run is stopped; `None` waits for ever.
        intra_op_threads: how many processor threads each operation on a CPU rank may use.
    """

    def __init__(
        self,
        plan: Plan,
        runners: Mapping[tuple[int, int], Stage],
        lanes: Sequence[Lane],
        timeout: float | None,
        intra_op_threads: int,
    ) -> None:
        """Start the workers."""
        self.plan = plan
        self.lanes = list(lanes)
        self.timeout = timeout
        self.rows = instructions(plan.program, runners, lanes, backward=True)
        self.forward_rows = instructions(plan.program, runners, lanes, backward=False)
        self._threads = intra_op_threads
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._start(range(plan.ranks))
        self._closer = weakref.finalize(self, _dismiss, self._workers)

    def _start(self, ranks: Iterable[int]) -> None:
        """Start a worker for each of these ranks."""
        callers = torch.get_num_threads()
        for rank in ranks:
            self._workers[rank : rank + 1] = [Worker(rank, self.lanes[rank], self._threads, self._reports)]
        for worker in self._workers:
            worker.ready.wait()
        torch.set_num_threads(callers)  # every worker set its own number as the default of threads made later

    @property
    def thread_ids(self) -> list[int]:
        """The operating system's number of each rank's thread."""
        return [worker.thread.native_id or 0 for worker in self._workers]

    @property
    def labels(self) -> list[str]:
        """What each rank runs on, and in which thread."""
        return [f"{lane.runs_on}, thread {thread}" for lane, thread in zip(self.lanes, self.thread_ids, strict=True)]

    def run(
        self, inputs: list[Any], loss: Loss | None, *, watch_nan: bool = False, caller: CallerContext = PLAIN
    ) -> Run:
        """Run all micro-batches; return the run, its values complete.

        Raises:
            LossError: if the loss does not average as it is said to.
            StageError: if a stage or the loss raised; the original error is the cause.
            StepTimeoutError: if nothing moved for `timeout` seconds.
            PipelineClosedError: if the engine was closed.
            KeyboardInterrupt: if the caller was interrupted; the workers are stopped first.
        """
        if not self._closer.alive:
            raise PipelineClosedError("this pipeline is closed: make a new one, or use it inside its with block")
        if loss is not None:
            loss.require()
        rows = self.forward_rows if loss is None else self.rows
        run = Run(rows, inputs, loss, watch_nan, caller)
        run.clocks = begin(self.lanes)
        outstanding = set(range(len(self._workers)))
        try:
            with quick_switches():
                for worker in self._workers:
                    worker.jobs.put(run)
                failure = self._collect(run, outstanding)
        except StepTimeoutError:
            raise
        except BaseException as interrupt:  # Ctrl-C, or whatever the caller's signal handler raises
            interrupt.add_note(self._where(run, "interrupted while"))
            self._halt(run, outstanding)
            raise
        if failure is not None:
            self._halt(run, outstanding)
            raise self._explained(failure)
        finish(self.lanes, [run.outputs, [] if loss is None else loss.values])
        return run

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002 - nobody else need know of it
        """End the worker threads."""
        self._closer()

    def _collect(self, run: Run, outstanding: set[int]) -> Report | None:
        """Wait until every worker has reported well, or return the first bad report.

        Raises:
            StepTimeoutError: if nothing moved for `timeout` seconds.
        """
        # A signal that arrives just before a wait is noticed after it: so no wait is long.
        pause = _PAUSE_SECONDS if self.timeout is None else min(_PAUSE_SECONDS, self.timeout / 8)
        seen = list(run.phase)
        quiet_since = time.monotonic()
        while outstanding:
            try:
                report = self._reports.get(timeout=pause)
            except queue.Empty:
                now = time.monotonic()
                if seen != run.phase:
                    seen, quiet_since = list(run.phase), now
                elif self.timeout is not None and now - quiet_since >= self.timeout:
                    message = self._where(run, f"nothing moved for {now - quiet_since:.3g} s:")
                    self._halt(run, outstanding)
                    if outstanding:
                        message += (
                            f"\n  rank {', '.join(map(str, sorted(outstanding)))} did not come back within "
                            f"{_GRACE_SECONDS:g} s more and was given up: an operation that ends later may still add "
                            "to gradients, so make a new pipeline before you trust them"
                        )
                    raise StepTimeoutError(message) from None
                continue
            if report.run is not run:
                continue  # a worker that was given up long ago has come back
            outstanding.discard(report.rank)
            if report.error is not None:
                return report
            quiet_since = time.monotonic()
        return None

    def _halt(self, run: Run, outstanding: set[int]) -> None:
        """Stop a run, wait a while for its workers, and replace those that do not come back."""
        run.stop()
        deadline = time.monotonic() + _GRACE_SECONDS
        while outstanding and (left := deadline - time.monotonic()) > 0:
            try:
                report = self._reports.get(timeout=left)
            except queue.Empty:
                break
            if report.run is run:
                outstanding.discard(report.rank)
        for rank in outstanding:
            self._workers[rank].give_up()
        self._start(outstanding)
        run.values.clear()
        run.kept.clear()
        with suppress(RuntimeError):  # a GPU that failed may say so here once more
            finish(self.lanes)  # what the ranks have launched goes on: the caller's zero_grad() must come after it

    def _explained(self, report: Report) -> BaseException:
        """Return a worker's error with its place: rank, stage, action."""
        error = report.error
        assert error is not None
        partial = _has_added(report.run)
        if isinstance(error, StageError):
            if partial:
                error.add_note(PARTIAL)
            return error
        instruction = report.run.rows[report.rank][min(report.position, len(report.run.rows[report.rank]) - 1)]
        action = instruction.action
        where = (report.rank, instruction.stage.index, action.microbatch, self.lanes[report.rank].runs_on)
        return stage_error(error, str(action), *where, partial=partial)

    def _where(self, run: Run, lead: str) -> str:
        """Return what every rank was doing, or waiting for."""
        return "\n".join([lead, *(f"  rank {rank} {self._doing(run, rank)}" for rank in range(len(run.rows)))])

    def _doing(self, run: Run, rank: int) -> str:
        position, computing = divmod(run.phase[rank], 2)
        if position >= len(run.rows[rank]):
            return "is done"
        program = self.plan.program
        instruction = run.rows[rank][position]
        action = instruction.action
        place = f"{action} (stage {instruction.stage.index}, position {position})"
        if computing:
            frames = sys._current_frames()  # noqa: SLF001 - the one way to see where a thread is
            frame = frames.get(self._workers[rank].thread.ident or 0)
            return f"was running {place}" + (f", at {line_of(traceback.extract_stack(frame))}" if frame else "")
        if instruction.needs is None or not instruction.receives:
            return f"was about to run {place}"
        if instruction.meets is not None:
            absent = ", ".join(map(str, sorted(run.meetings[action].absent)))
            return f"waits, before {place}, for rank {absent} to come to it too"
        giver = program.giver(instruction.needs)
        return (
            f"waits, before {place}, for {program.numbering.value_name(instruction.needs)}, "
            f"given by {program.numbering.action(giver)} on rank {program.rank_of[giver]}"
        )


def _has_added(run: Run) -> bool:
    """Tell whether an action has begun, in a run that has stopped, that adds to the gradients of parameters."""
    begun = (row[: (phase + 1) // 2] for row, phase in zip(run.rows, run.phase, strict=True))
    return any(each.action.kind in "BWR" for row in begun for each in row)


def _dismiss(workers: list[Worker]) -> None:
    for worker in workers:
        worker.jobs.put(None)
