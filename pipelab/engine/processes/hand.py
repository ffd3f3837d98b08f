"""The thread in which a process sends, receives and computes."""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

__all__ = ["Outcome", "Worker"]

_LEAVING_SECONDS = 5.0
"""How long a process that ends waits for a thread that is still in PyTorch."""
_SETTLING_SECONDS = 0.25
"""How long it then waits for PyTorch's own threads, which let go of tensors a little later than it."""


Outcome: TypeAlias = tuple[Any, BaseException | None]
"""What a job returned, or the error that it raised."""
_Jobs: TypeAlias = "queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Outcome]] | None]"


class Worker:
    """A thread that does one job after another.

    Args:
        name: the thread's name.
        threads: how many processor threads each operation may use.
    """

    def __init__(self, name: str, threads: int) -> None:
        """Start the thread."""
        self._jobs: _Jobs = queue.SimpleQueue()
        idle = threading.Event()
        idle.set()
        arguments = (self._jobs, idle, threads)
        self.thread = threading.Thread(target=_live, args=arguments, name=name, daemon=True)
        _idle[self.thread] = idle
        self.thread.start()

    def do(self, job: Callable[[], Any]) -> queue.SimpleQueue[Outcome]:
        """Do a job; what comes back gets what it returned, or the error that it raised."""
        done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        _idle[self.thread].clear()
        self._jobs.put((job, done))
        return done

    def end(self) -> None:
        """End the thread after its present job."""
        self._jobs.put(None)


_idle: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()
"""For each worker's thread, whether it has nothing to do."""


def _live(jobs: _Jobs, idle: threading.Event, threads: int) -> None:
    """Do one job after another."""
    torch.get_num_threads()  # a thread's first use takes over the default; from then on its own number holds
    torch.set_num_threads(threads)
    while (given := jobs.get()) is not None:
        job, done = given
        try:
            outcome: Outcome = (job(), None)
        except BaseException as error:  # noqa: BLE001 - a worker must report everything, SystemExit included
            outcome = (None, error)
        idle.set()
        done.put(outcome)
        del given, job, done, outcome  # an idle worker holds on to nothing
    idle.set()


@atexit.register
def _leave() -> None:
    """Wait a while for threads that are still in PyTorch when the process ends.

    One that came back while Python is being taken down would abort the process. Most come back soon: the processes that
    they wait for end too, which closes their connections. Where one does not, the process ends here, as failed as its
    pipeline is, after all else that wants to be done at the end. Threads of PyTorch's own, which end with a pipeline
    that is closed, get a moment to let go of what it has just sent where it is not.
    """
    if _leaving:
        return
    _leaving.append(True)
    deadline = time.monotonic() + _LEAVING_SECONDS
    stuck = [idle for idle in list(_idle.values()) if not idle.is_set()]
    for idle in stuck:
        idle.wait(max(0.0, deadline - time.monotonic()))
    if not all(idle.is_set() for idle in stuck):
        atexit._run_exitfuncs()  # noqa: SLF001 - what was registered before this would be left out
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    elif any(thread.is_alive() for thread in list(_idle)):
        time.sleep(_SETTLING_SECONDS)


_leaving: list[bool] = []
"""Whether `_leave` has begun."""
