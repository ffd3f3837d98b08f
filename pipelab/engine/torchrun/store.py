"""The store that all processes of a job share, and the threads in which a process waits for it and for the others."""

from __future__ import annotations

import atexit
import os
import queue
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from pipelab.engine.torchrun import runtime
from pipelab.engine.worker import Outcomes, Worker
from pipelab.errors import EngineError, RankError

__all__ = ["AnsweringStore", "SilentStoreError", "communication_thread", "duration", "open_store"]

_EXIT_SECONDS = 5.0
"""How long a process that ends waits for threads that are still in PyTorch."""
_SETTLING_SECONDS = 0.25
"""How long it waits for PyTorch's own threads, which release tensors a little later."""
_NO_TIMEOUT = timedelta(days=30)
"""What PyTorch gets where nothing should time out: it wants a number."""
_SHORTEST_SECONDS, _LONGEST_SECONDS = 10.0, 300.0
"""How long a store may take to answer, at least and at most, whatever timeout a pipeline has."""


_threads: weakref.WeakSet[Worker] = weakref.WeakSet()
"""The threads in which this process communicates."""


def communication_thread(name: str, threads: int) -> Worker:
    """Return a thread for jobs such as sending, receiving, or asking the store; the process's end waits for them."""
    thread = Worker(name, threads)
    _threads.add(thread)
    return thread


@atexit.register
def _wait_for_threads() -> None:
    """Wait a while for threads that are still in PyTorch: one that returns while Python ends would abort the process.

    Most return soon: the processes that they wait for end too, which closes their connections.
    """
    deadline = time.monotonic() + _EXIT_SECONDS
    for each in list(_threads):
        each.idle.wait(max(0.0, deadline - time.monotonic()))
    if any(each.thread.is_alive() for each in list(_threads)):
        time.sleep(_SETTLING_SECONDS)


class SilentStoreError(dist.DistStoreError):
    """The store does not answer: the process that holds it hangs, or no network leads to it."""


class AnsweringStore:
    """A store that answers in time or raises: PyTorch's waits for ever where the network is cut.

    Args:
        store: PyTorch's; only this object may ask it.
        timeout: seconds that an answer may take: 10 at least, and at most 300, which `None` means too.
    """

    def __init__(self, store: Any, timeout: float | None) -> None:
        self._store = store
        self.seconds = min(max(timeout or _LONGEST_SECONDS, _SHORTEST_SECONDS), _LONGEST_SECONDS)
        self._silent = False
        self._thread = communication_thread("pipelab-store", threads=1)
        weakref.finalize(self, self._thread.end)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a method of the store: `set`, `get`, `check` or `compare_set`."""
        return lambda *given: self._ask(partial(getattr(self._store, name), *given))

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Return what the store answers.

        Raises:
            SilentStoreError: if it does not answer, or has not answered before: its thread is stuck.
            RuntimeError: what the store itself raises.
        """
        done: Outcomes = queue.SimpleQueue()
        self._thread.do(question, done)
        try:
            outcome = done.get(timeout=0 if self._silent else self.seconds)
        except queue.Empty:
            self._silent = True
            raise SilentStoreError(f"this job's store has not answered for {self.seconds:g} s") from None
        if outcome.error is not None:
            raise outcome.error
        return outcome.result


_opened: list[Any] = []
"""The store, once this process has opened it. It stays open: without torchrun, it lives in the process of rank 0."""


def open_store(rank: int, size: int, timeout: float | None) -> Any:
    """Return the store that all processes share: torchrun's, or that of the process group that is there already.

    Raises:
        EngineError: if the environment does not say where it is; or naming what this torch lacks.
        RankError: if nobody opens it.
    """
    if _opened:
        _opened[0].set_timeout(duration(timeout))
        return _opened[0]
    if dist.is_initialized():
        return runtime.default_store()
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise EngineError(
            f"MASTER_ADDR={host!r} and MASTER_PORT={port!r} do not say where rank 0 is: torchrun sets both"
        )
    make = dist.TCPStore  # type: ignore[attr-defined]  # PyTorch's stubs leave it out
    holds = rank == 0 and not torchrun_holds_the_store()
    try:
        # PyTorch's own rendezvous would wait here until all have come, and not say who has not.
        store = make(host, int(port), size, holds, duration(timeout), wait_for_workers=False, multi_tenant=True)
    except dist.DistError as error:
        told = "cannot open" if holds else "has not opened"
        raise RankError(f"rank 0 {told} a store at {host}:{port}, where all processes meet: {error}", 0) from error
    _opened.append(store)
    return store


def torchrun_holds_the_store() -> bool:
    """Return whether torchrun has started this process, and has a store for it and the others."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def prefix_store(store: Any, name: str) -> Any:
    """Return a `PrefixStore` with keys of its own, which also differ for each attempt of torchrun to start all."""
    here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")  # on several machines each counts alone
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if here else "0"
    return dist.PrefixStore(f"pipelab/{attempt}/{name}", store)  # type: ignore[attr-defined]  # see above


def duration(timeout: float | None) -> timedelta:
    """Return a number of seconds as PyTorch takes it; `None` is for ever."""
    return _NO_TIMEOUT if timeout is None else timedelta(seconds=timeout)
