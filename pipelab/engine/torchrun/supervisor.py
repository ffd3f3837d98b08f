"""Run this process's work in a thread, and end it in bounded time if this process or another one fails."""

from __future__ import annotations

import queue
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch.distributed as dist

from pipelab.engine.torchrun.failures import Failure, Failures, PublishedStatus
from pipelab.engine.torchrun.store import communication_thread
from pipelab.engine.worker import Outcome, Outcomes, outcomes
from pipelab.errors import (
    BatchError,
    EngineError,
    LossError,
    PipelabError,
    RankError,
    StageError,
    StepTimeoutError,
    UsageError,
)

Result = TypeVar("Result")

_POLL_SECONDS = 0.2
"""How often a process that lost a connection checks whether another one has failed."""
_PATIENCE_SECONDS = 5.0
"""How long a process waits before it looks for dead ranks, and how often it publishes its status."""
_GRACE_SECONDS = 1.0
"""How long a process that lost a connection looks for the dead rank; how long a dead rank's last values may take."""


@dataclass(frozen=True, slots=True)
class Status:
    """The progress of a piece of work: functions that its supervisor calls while it runs.

    Attributes:
        describe: returns what this process is doing, as in "rank 0 waits …".
        progress: returns something that changes with every progress of the work.
        peer: returns the rank that the work receives from or sends to now, if it does.
        computing: returns whether an action runs, rather than waits.
    """

    describe: Callable[[], str]
    progress: Callable[[], object] = lambda: None
    peer: Callable[[], int | None] = lambda: None
    computing: Callable[[], bool] = lambda: False


class Supervisor:
    """Runs this process's work in a communication thread, and watches the other processes meanwhile.

    Args:
        rank: this process.
        failures: what the processes report to each other.
        timeout: seconds without any progress on this process after which it gives up; `None` waits for ever.
        threads: how many processor threads each operation may use.

    Attributes:
        over: why the pipeline has ended; "" until then.
        abort: ends work that waits for other processes; called once this pipeline has failed.
    """

    def __init__(self, rank: int, failures: Failures, timeout: float | None, threads: int) -> None:
        self.rank = rank
        self.timeout = timeout
        self.over = ""
        self.abort: Callable[[], None] = lambda: None
        self._failures = failures
        self._thread = communication_thread(f"pipelab-rank-{rank}", threads)
        self._calls = 0
        self._end_thread = weakref.finalize(self, self._thread.end)
        # Also runs when the process ends, before its connections close, so that the others know why.
        how = "its script ended, or dropped its pipeline, without closing it"
        self._announce_exit = weakref.finalize(self, failures.announce_exit, how)

    def run(self, work: Callable[[], Result], status: Status) -> Result:
        """Run some work in the communication thread and wait for it; return its result.

        The work may raise a `BatchError` or a `LossError` if all processes do. Any other error ends the pipeline, on
        every process.

        Raises:
            RankError: if another process failed or ended.
            StepTimeoutError: if there was no progress for `timeout` seconds.
            UsageError: if the pipeline is closed, or has failed before.
        """
        if self.over:
            raise UsageError(self.over)
        self._calls += 1
        done: Outcomes = queue.SimpleQueue()
        try:
            self._thread.do(work, done)
            _, found, error = self._wait(done, status)
            if error is not None and not isinstance(error, BatchError | LossError):
                self._explain(error, status)
        except EngineError:
            raise
        except BaseException as interrupt:  # the work's own error, Ctrl-C, or what a signal handler raises
            if not self.over:
                interrupt.add_note(f"interrupted while rank {self.rank} {status.describe()}")
                self._fail(f"rank {self.rank} was interrupted ({type(interrupt).__name__})")
            raise
        if error is not None:
            raise error
        result: Result = found
        return result

    def close(self, error: BaseException | None = None) -> None:
        """End the thread, and report it to the other processes, which may still wait for this one."""
        if not self._end_thread.alive:
            return
        self._end_thread()
        if self.over:
            return
        if error is None:
            self.over = "this pipeline is closed: make a new one, or use it inside its with block"
            self._announce_exit.detach()
            self.abort = lambda: None  # the old one keeps connections alive
            self._failures.announce_exit("it closed its pipeline without this call, which every process must make")
        else:
            self._fail(f"rank {self.rank} is gone: its script raised {error!r}")

    def line(self) -> str:
        """Return the line that the work runs, of the student's own code if possible."""
        return self._thread.line()

    def _wait(self, done: Outcomes, status: Status) -> Outcome:
        """Wait for the work; check the other processes and the clock now and then."""
        patience = _PATIENCE_SECONDS if self.timeout is None else min(_PATIENCE_SECONDS, self.timeout / 2)
        publish_at = time.monotonic() + patience
        for outcome, quiet in outcomes(done, status.progress, self.timeout):
            if outcome is not None:
                return outcome
            if failure := self._failures.first_failure():
                self._stop(failure, status)
            if time.monotonic() >= publish_at:
                self._failures.publish(PublishedStatus(self._calls, status.describe(), status.computing()))
                publish_at = time.monotonic() + patience
            if quiet >= _PATIENCE_SECONDS and (dead := self._failures.find_dead_rank()):
                with suppress(queue.Empty):  # its last messages may still arrive
                    return done.get(timeout=_GRACE_SECONDS)
                self._stop(self._failures.report(*dead), status)
            elif self.timeout is not None and quiet >= self.timeout:
                self._time_out(quiet, status)
        raise AssertionError  # outcomes never end

    def _time_out(self, seconds: float, status: Status) -> NoReturn:
        """Raise a `StepTimeoutError` that names the rank for which all others wait: one that computes, or is silent."""
        message = f"nothing moved on rank {self.rank} for {seconds:.3g} s: it {status.describe()}"
        statuses = {} if status.computing() else self._failures.statuses(self._calls)
        silent = [rank for rank, other in statuses.items() if other is None]
        busy = [(rank, other) for rank, other in statuses.items() if other and other.computing]
        culprit = self.rank
        if silent:
            culprit, names = silent[0], ", ".join(map(str, silent))
            message = f"no sign of rank {names} in this call: not made there, stopped, or cut off\n  {message}"
        elif busy:
            culprit, other = busy[0]
            message = f"rank {culprit} holds up the others: it {other.doing}\n  {message}"
        self._fail(message, culprit)
        raise StepTimeoutError(message)

    def _explain(self, error: BaseException, status: Status) -> NoReturn:
        """Report an error of the work and raise it; if a connection was lost, raise a `RankError` instead."""
        if not _is_lost_connection(error):
            message = str(error) if isinstance(error, PipelabError) else f"{type(error).__name__}: {error}"
            self._fail(message if isinstance(error, StageError) else f"rank {self.rank} failed: {message}")
            raise error
        deadline = time.monotonic() + _GRACE_SECONDS
        while (failure := self._failures.first_failure()) is None:
            if dead := self._failures.find_dead_rank():
                failure = self._failures.report(*dead)
            elif time.monotonic() > deadline:
                rank = status.peer()
                name = "another process" if rank is None else f"rank {rank}"
                lost = f"{name} is gone: a connection to it was lost ({str(error).splitlines()[0]})"
                failure = self._failures.report(-1 if rank is None else rank, lost)
            else:
                time.sleep(_POLL_SECONDS / 8)
        self._stop(failure, status, error)

    def _stop(self, failure: Failure, status: Status, cause: BaseException | None = None) -> NoReturn:
        """End this pipeline for good because another process failed; raise a `RankError`."""
        message = f"{failure.message}\n  rank {self.rank} {status.describe()}"
        self._end(message)
        self._failures.acknowledge(failure)
        self.abort()
        raise RankError(message, failure.rank) from cause

    def _fail(self, message: str, rank: int | None = None) -> None:
        """End this pipeline for good because this process failed, or another one did not answer."""
        self._end(message)
        self._failures.report(self.rank if rank is None else rank, message, alive=True)
        self.abort()

    def _end(self, message: str) -> None:
        self._announce_exit.detach()
        self.over = f"this pipeline has failed: start all processes anew\n  {message}"


def _is_lost_connection(error: BaseException) -> bool:
    """Return whether an error of gloo or NCCL means that a connection is lost."""
    if isinstance(error, PipelabError):
        return False
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo/transport", "NCCL error"))
