"""Worker threads, in which both engines compute, and the loop in which a caller waits for them.

    caller   do(job) ──── outcomes(...) ──── an outcome, or how long nothing has moved ────┐
                │                                                   ▲                       └ stop, or wait on
    worker      └─ job: computes, sends, receives; may be stuck ────┘

A thread that hangs in PyTorch cannot be interrupted; the caller, who waits here in Python, can.
"""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import torch

from pipelab.plan.fault import line_of

_PAUSE_SECONDS = 0.2
"""How long a caller sleeps at most before it checks for progress, and for an interrupt."""


class Outcome(NamedTuple):
    """The result of a job, or the error that it raised."""

    worker: Worker
    result: Any
    error: BaseException | None


Outcomes: TypeAlias = "queue.SimpleQueue[Outcome]"
Jobs: TypeAlias = "queue.SimpleQueue[tuple[Worker, Callable[[], Any], Outcomes] | weakref.ref[Worker] | None]"


class Worker:
    """A thread that does one job after another, until the worker is ended or nothing refers to it.

    `threads` is how many processor threads each of its operations may use. An `idle` one may still have a job to begin.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._jobs: Jobs = queue.SimpleQueue()
        ready = threading.Event()
        self.idle = threading.Event()
        self.idle.set()
        # The thread does not hold its worker. So it ends even if an interrupt strikes before any caller has the worker.
        # What runs then is no line of Python, in which an interrupt would be lost, as it would in `weakref.finalize`,
        # and in Python's own note of threads that nobody has joined.
        gone = weakref.ref(self, self._jobs.put)
        self.thread = threading.Thread(target=_live, args=(self._jobs, ready, threads, gone), name=name, daemon=True)
        callers = torch.get_num_threads()
        self.thread.start()
        ready.wait()
        torch.set_num_threads(callers)  # the thread changed the default of threads made later

    def do(self, job: Callable[[], Any], done: Outcomes) -> None:
        """Do a job; `done` gets its outcome."""
        self._jobs.put((self, job, done))

    def end(self) -> None:
        """End the thread after its present job."""
        self._jobs.put(None)

    def join(self) -> None:
        """Wait for the end of an idle thread: if Python ended first, the thread could abort the process."""
        if self.idle.is_set() and threading.current_thread() is not self.thread:
            self.thread.join(_PAUSE_SECONDS)
            threading._dangling.discard(self.thread)  # type: ignore[attr-defined]  # noqa: SLF001 - see `__init__`

    def give_up(self) -> None:
        """Make a thread that hangs end at its next line of Python, so that it adds to no gradient later."""
        self.end()
        if self.thread.ident is not None and self.thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident), ctypes.py_object(SystemExit))

    def line(self) -> str:
        """Return the line that the thread runs, of the student's own code if possible: `", at train.py, line 7, …"`."""
        frames = sys._current_frames()  # noqa: SLF001 - the one way to see where a thread is
        frame = frames.get(self.thread.ident or 0)
        return f", at {line_of(traceback.extract_stack(frame))}" if frame else ""


def _live(jobs: Jobs, ready: threading.Event, threads: int, _gone: weakref.ref[Worker]) -> None:
    """Run a worker's thread, until it is ended, or its worker is gone."""
    torch.get_num_threads()  # a thread's first use copies the default; later calls change its own number
    torch.set_num_threads(threads)
    ready.set()
    while isinstance(given := jobs.get(), tuple):
        worker, job, done = given
        worker.idle.clear()
        try:
            outcome = Outcome(worker, job(), None)
        except BaseException as error:  # noqa: BLE001 - a worker must report everything, SystemExit included
            outcome = Outcome(worker, None, error)
        worker.idle.set()
        done.put(outcome)
        del given, worker, job, done, outcome  # an idle worker keeps nothing alive


class Together(queue.SimpleQueue[Outcome]):
    """Outcomes of so many jobs, of which the caller sees the last, or an error: to wake earlier holds up a job."""

    def __init__(self, jobs: int) -> None:
        self._last = repeat(False, jobs - 1)  # noqa: FBT003 - and then true

    def put(self, outcome: Outcome, *_: object) -> None:
        """Pass on the last outcome, or one that is an error."""
        if outcome.error is not None or next(self._last, True):  # in this order, an error is before the last one
            super().put(outcome)


def outcomes(
    done: Outcomes, progress: Callable[[], object], timeout: float | None
) -> Iterator[tuple[Outcome | None, float]]:
    """Yield each outcome as it arrives; in between, `None` and the number of seconds without progress."""
    # Python handles a signal that arrives just before a wait after it: so no wait is long.
    pause = _PAUSE_SECONDS if timeout is None else min(_PAUSE_SECONDS, timeout / 8)
    seen, since = progress(), time.monotonic()
    while True:
        try:
            outcome = done.get(timeout=pause)
        except queue.Empty:
            if seen != (now := progress()):
                seen, since = now, time.monotonic()
            yield None, time.monotonic() - since
        else:
            yield outcome, 0.0
