"""Run this process's work in a thread, and end it in bounded time if this process or another one fails.

What goes wrong is reported to the other processes through the store that all of them share:

failure        the first failure: which rank, and what happened
status/<rank>  what this process is doing, written every few seconds while it is in a call
exit/<rank>    how this process left: it closed its pipeline, or ended
done/<rank>    this process has read the failure, or has left: it does not need the store any more

PyTorch's calls of a store run in a thread too, because some wait for ever, and not even Ctrl-C ends them.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch.distributed as dist

from pipelab.engine.worker import Outcome, Outcomes, Worker, outcomes
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

_POLL_SECONDS = 0.02
"""How often a process looks whether the others have noticed a failure."""
_PATIENCE_SECONDS = 5.0
"""How long a process waits before it looks for dead ranks, and how often it publishes its status."""
_GRACE_SECONDS = 1.0
"""How long a process that lost a connection looks for the dead rank; how long a dead rank's last values may take."""
_LINGERING_SECONDS = 3.0
"""How long a process that fails waits until the others have read its failure, before it raises."""
_EXIT_SECONDS = 5.0
"""How long a process that ends waits for threads that run PyTorch's code."""
_SETTLING_SECONDS = 0.25
"""How long it waits for PyTorch's own threads, which release tensors a little later."""
_PARENT_SECONDS = 1.0
"""How often a process looks whether its launcher runs."""
_SHORTEST_SECONDS, _LONGEST_SECONDS = 10.0, 300.0
"""The limits of the time for an answer of the store, whatever timeout a pipeline has."""


@dataclass(frozen=True, slots=True)
class Status:
    """The progress of a piece of work: functions that its supervisor calls while it runs."""

    describe: Callable[[], str]  # what this process is doing, as in "rank 0 waits …"
    progress: Callable[[], object] = lambda: None  # changes with every progress of the work
    peer: Callable[[], int | None] = lambda: None  # the rank that the work receives from or sends to now
    computing: Callable[[], bool] = lambda: False  # whether an action runs, rather than waits


class Supervisor:
    """Runs this process's work in a communication thread, and watches the other processes meanwhile.

    After `timeout` seconds without any progress on this process it gives up; `None` waits for ever.
    """

    def __init__(self, rank: int, failures: Failures, timeout: float | None, threads: int) -> None:
        self.rank = rank
        self.timeout = timeout
        self.over = ""  # why the pipeline has ended
        self.abort: Callable[[], None] = lambda: None  # ends work that waits for other processes
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
        if error is not None:
            self._fail(f"rank {self.rank} is gone: its script raised {error!r}")
            return
        self.over = "this pipeline is closed: make a new one, or use it inside its with block"
        self._announce_exit.detach()
        self.abort = lambda: None  # the old one keeps connections alive
        self._failures.announce_exit("it closed its pipeline without this call, which every process must make")

    def line(self) -> str:
        """Return the line that the work runs, of the student's own code if possible."""
        return self._thread.line()

    def _wait(self, done: Outcomes, status: Status) -> Outcome:
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
        busy = [(rank, other.doing) for rank, other in statuses.items() if other and other.computing]
        culprit = self.rank
        if silent:
            culprit, names = silent[0], ", ".join(map(str, silent))
            message = f"no sign of rank {names} in this call: not made there, stopped, or cut off\n  {message}"
        elif busy:
            culprit, doing = busy[0]
            message = f"rank {culprit} holds up the others: it {doing}\n  {message}"
        self._fail(message, culprit)
        raise StepTimeoutError(message)

    def _explain(self, error: BaseException, status: Status) -> NoReturn:
        """Report an error of the work and raise it; if a connection was lost, raise a `RankError` instead."""
        connections = ("gloo/transport", "NCCL error")  # what PyTorch says if it loses one
        lost = isinstance(error, dist.DistError) or any(word in str(error) for word in connections)
        if lost and not isinstance(error, PipelabError):
            self._stop(self._behind_a_lost_connection(error, status), status, error)
        message = str(error) if isinstance(error, PipelabError) else f"{type(error).__name__}: {error}"
        self._fail(message if isinstance(error, StageError) else f"rank {self.rank} failed: {message}")
        raise error

    def _behind_a_lost_connection(self, error: BaseException, status: Status) -> Failure:
        """Return what another rank reports of itself, or which one is dead, or the rank at the connection's end."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() <= deadline:
            if failure := self._failures.first_failure():
                return failure
            if dead := self._failures.find_dead_rank():
                return self._failures.report(*dead)
            time.sleep(_POLL_SECONDS)
        rank = status.peer()
        name = "another process" if rank is None else f"rank {rank}"
        message = f"{name} is gone: a connection to it was lost ({str(error).splitlines()[0]})"
        return self._failures.report(-1 if rank is None else rank, message)

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


# ── What the processes report to each other ───────────────────────────────────────────────────────────────────────────


class Failure(NamedTuple):
    """What happened to a rank (-1 if unknown), and whether its process still runs."""

    rank: int
    message: str
    alive: bool


class PublishedStatus(NamedTuple):
    """In which call a process was a few seconds ago, what it was doing, and whether that was computing, not waiting."""

    call: int
    doing: str
    computing: bool


class Failures:
    """Reports this process's failures to the others, and reads theirs."""

    def __init__(self, store: AnsweringStore, rank: int, everyone: Sequence[dict[str, Any]]) -> None:
        self._store = store
        self._rank = rank
        self._everyone = everyone
        self._others = [other for other in range(len(everyone)) if other != rank]
        self._holds_store = rank == 0 and not torchrun_holds_the_store()

    def first_failure(self) -> Failure | None:
        """Return the first failure; `None` if none is known."""
        try:
            return Failure(*json.loads(self._store.get("failure"))) if self._store.check(["failure"]) else None
        except SilentStoreError as error:
            return Failure(-1, f"{error}: its host, or the network to it, is gone", alive=False)
        except RuntimeError:
            return Failure(0, "the process that holds this job's store is gone: rank 0, or torchrun", alive=False)

    def report(self, rank: int, message: str, *, alive: bool = False) -> Failure:
        """Record that a rank failed, and wait a little until all others have read it; return the first failure."""
        failure = Failure(rank, message, alive)
        with suppress(RuntimeError):  # the store may be gone with the process that held it
            self._store.compare_set("failure", "", json.dumps(failure))  # an earlier failure stays
            failure = self.first_failure() or failure
        self.acknowledge(failure)
        return failure

    def acknowledge(self, failure: Failure) -> None:
        """Record that this process has read a failure, and wait a little until all have.

        When the first process ends, torchrun kills all others, perhaps before they have raised.
        """
        self._finish([rank for rank in self._others if failure.alive or rank != failure.rank])

    def announce_exit(self, how: str) -> None:
        """Record how this process leaves: `"it closed its pipeline"`. A fork of the process records nothing."""
        if os.getpid() == self._everyone[self._rank]["pid"]:
            with suppress(RuntimeError):
                self._store.set(f"exit/{self._rank}", how)
            self._finish(self._others if self._holds_store else [])

    def find_dead_rank(self) -> tuple[int, str] | None:
        """Return a rank that left, or whose process ended, with a message; `None` if none is known."""
        own = self._everyone[self._rank]
        for rank in self._others:
            process = self._everyone[rank]
            with suppress(RuntimeError):
                if self._store.check([f"exit/{rank}"]):
                    return rank, f"rank {rank} is gone: {self._store.get(f'exit/{rank}').decode()}"
            here = all(process[key] == own[key] for key in ("host", "processes"))
            if here and not _runs(process["pid"]):
                return rank, f"rank {rank} is gone: process {process['pid']} on {process['host']} was killed, or ended"
        return None

    def publish(self, status: PublishedStatus) -> None:
        """Record what this process is doing."""
        with suppress(RuntimeError):
            self._store.set(f"status/{self._rank}", json.dumps(status))

    def statuses(self, call: int) -> dict[int, PublishedStatus | None]:
        """Return the status of each other rank in call number `call`; `None` for a rank without one."""
        found: dict[int, PublishedStatus | None] = {}
        with suppress(RuntimeError):
            for rank in self._others:
                key = f"status/{rank}"
                status = PublishedStatus(*json.loads(self._store.get(key))) if self._store.check([key]) else None
                found[rank] = status if status and status.call >= call else None
        return found

    def _finish(self, ranks: Sequence[int]) -> None:
        """Stop using the store; wait a little until these ranks do not need it either."""
        keys = [f"done/{rank}" for rank in ranks]
        deadline = time.monotonic() + _LINGERING_SECONDS
        with suppress(RuntimeError):
            self._store.set(f"done/{self._rank}", "")
            while keys and not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)


def _runs(pid: int) -> bool:
    """Return whether a process of this machine runs: a zombie does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except (OSError, IndexError):  # another user's process, or a system without /proc
        return True
    return state not in "ZX"


# ── The store, and the threads in which a process communicates ────────────────────────────────────────────────────────


class SilentStoreError(dist.DistStoreError):
    """The store does not answer: the process that holds it hangs, or the network is cut."""


class AnsweringStore:
    """A store that answers in time or raises: PyTorch's waits for ever if the network is cut."""

    def __init__(self, store: Any, timeout: float | None) -> None:
        self._store = store
        self.seconds = min(max(timeout or _LONGEST_SECONDS, _SHORTEST_SECONDS), _LONGEST_SECONDS)
        self._silent: SilentStoreError | None = None
        self._thread = communication_thread("pipelab-store", threads=1)
        weakref.finalize(self, self._thread.end)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a method of the store: `set`, `get`, `check` or `compare_set`."""
        return lambda *given: self._ask(partial(getattr(self._store, name), *given))

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Return the store's answer; raise a `SilentStoreError` if it does not answer now, or did not before."""
        if self._silent:
            raise self._silent
        try:
            return answer(self._thread, question, self.seconds)
        except SilentStoreError as error:
            self._silent = error
            raise


def answer(thread: Worker, question: Callable[[], Any], seconds: float | None) -> Any:
    """Ask a store in a thread; return its answer, or raise a `SilentStoreError` after so many seconds."""
    done: Outcomes = queue.SimpleQueue()
    thread.do(question, done)
    for outcome, waited in outcomes(done, lambda: None, seconds):
        if outcome is not None:
            if outcome.error is not None:
                raise outcome.error
            return outcome.result
        if seconds is not None and waited >= seconds:
            raise SilentStoreError(f"this job's store has not answered for {seconds:g} s")
    raise AssertionError  # outcomes never end


def torchrun_holds_the_store() -> bool:
    """Return whether torchrun has started this process and holds the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


_threads: weakref.WeakSet[Worker] = weakref.WeakSet()


def communication_thread(name: str, threads: int) -> Worker:
    """Return a thread for communication; a process that ends waits for it."""
    thread = Worker(name, threads)
    _threads.add(thread)
    return thread


@atexit.register
def _wait_for_threads() -> None:
    """Wait a while for threads in PyTorch's code: one that returns while Python shuts down would abort the process.

    Most return soon, because the processes that they wait for end too.
    """
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in list(_threads):
        thread.idle.wait(max(0.0, deadline - time.monotonic()))
    if any(worker.thread.is_alive() for worker in list(_threads)):
        time.sleep(_SETTLING_SECONDS)


@cache
def end_with(parent: int) -> None:
    """End this process soon after its parent, the launcher: one that was killed has not ended its processes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_SECONDS)
        with suppress(OSError):
            sys.stderr.write("pipelab: the launcher is gone, so this process ends\n")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_EXIT_SECONDS)  # for a script that handles the signal
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="pipelab-launcher", daemon=True).start()
