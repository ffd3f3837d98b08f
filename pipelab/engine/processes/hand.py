"""The thread in which a process sends, receives and computes."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Worker"]

_LEAVING_SECONDS = 5.0
"""How long a process that ends waits for a thread that is still in PyTorch."""


class Worker:
    """A thread that does one job after another.

    Args:
        name: the thread's name.
        threads: how many processor threads each operation may use.
    """

    def __init__(self, name: str, threads: int) -> None:
        """Start the thread."""
        self.done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        idle = threading.Event()
        arguments = (self._jobs, self.done, idle, threads)
        self.thread = threading.Thread(target=_live, args=arguments, name=name, daemon=True)
        _idle[self.thread] = idle
        self.thread.start()

    def do(self, job: Callable[[], Any]) -> None:
        """Do a job; `done` gets what it returned, or the error that it raised."""
        _idle[self.thread].clear()
        self._jobs.put(job)

    def end(self) -> None:
        """End the thread after its present job."""
        self._jobs.put(None)


_idle: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()
"""For each worker's thread, whether it has nothing to do."""


def _live(jobs: queue.SimpleQueue[Any], done: queue.SimpleQueue[Any], idle: threading.Event, threads: int) -> None:
    """Do one job after another."""
    torch.get_num_threads()  # a thread's first use takes over the default; from then on its own number holds
    torch.set_num_threads(threads)
    while (job := jobs.get()) is not None:
        try:
            outcome: tuple[Any, BaseException | None] = (job(), None)
        except BaseException as error:  # noqa: BLE001 - a worker must report everything, SystemExit included
            outcome = (None, error)
        idle.set()
        done.put(outcome)
        del job, outcome  # an idle worker holds on to nothing
    idle.set()


@atexit.register
def _leave() -> None:
    """Wait a while for threads that are still in PyTorch when the process ends.

    One that comes back while Python is being taken down would end the process with an abort. It comes back soon: the
    processes that it waits for end too, which closes their connections.
    """
    deadline = time.monotonic() + _LEAVING_SECONDS
    for idle in list(_idle.values()):
        idle.wait(max(0.0, deadline - time.monotonic()))
