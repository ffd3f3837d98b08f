"""The store that all processes of a job share, and the threads in which a process communicates.

PyTorch's calls of a store run in such a thread, because some wait for ever, and not even Ctrl-C ends them.
"""

from __future__ import annotations

import atexit
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch.distributed as dist

from pipelab.engine.torchrun import runtime
from pipelab.engine.worker import Outcomes, Worker, outcomes
from pipelab.errors import EngineError, RankError

_EXIT_SECONDS = 5.0
"""How long a process that ends waits for threads that run PyTorch's code."""
_SETTLING_SECONDS = 0.25
"""How long it waits for PyTorch's own threads, which release tensors a little later."""
_NO_TIMEOUT = timedelta(days=30)
"""PyTorch needs a number."""
_CONNECTING_SECONDS = 2.0
"""How much longer than PyTorch's timeout a connection may take: that one does not cover everything."""
_PARENT_SECONDS = 1.0
"""How often a process looks whether its launcher runs."""
_SHORTEST_SECONDS, _LONGEST_SECONDS = 10.0, 300.0
"""The limits of the time for an answer of the store, whatever timeout a pipeline has."""


_threads: weakref.WeakSet[Worker] = weakref.WeakSet()
"""The threads in which this process communicates."""


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
    for each in list(_threads):
        each.idle.wait(max(0.0, deadline - time.monotonic()))
    if any(each.thread.is_alive() for each in list(_threads)):
        time.sleep(_SETTLING_SECONDS)


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
            return _answer(self._thread, question, self.seconds)
        except SilentStoreError as error:
            self._silent = error
            raise


def _answer(thread: Worker, question: Callable[[], Any], seconds: float | None) -> Any:
    """Ask a store in a thread; return its answer, or raise a `SilentStoreError` after so many seconds."""
    done: Outcomes = queue.SimpleQueue()
    thread.do(question, done)
    for outcome, waited in outcomes(done, lambda: None, seconds):
        if outcome is not None and outcome.error is not None:
            raise outcome.error
        if outcome is not None:
            return outcome.result
        if seconds is not None and waited >= seconds:
            raise SilentStoreError(f"this job's store has not answered for {seconds:g} s")
    raise AssertionError  # outcomes never end


_opened: list[Any] = []
"""The store, once this process has opened it. It stays open: without torchrun, rank 0's process holds it."""


def open_store(rank: int, size: int, timeout: float | None) -> list[Any]:
    """Return two new connections to the store that all processes share: torchrun's, or the present process group's."""
    present: Any = _opened[0] if _opened else runtime.default_store() if dist.is_initialized() else None
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if present is None and not (host and port.isdecimal()):
        raise EngineError(f"MASTER_ADDR={host!r} and MASTER_PORT={port!r} are no address of rank 0: torchrun sets both")
    make: Any = dist.TCPStore  # type: ignore[attr-defined]  # PyTorch's stubs leave it out
    holds = rank == 0 and not torchrun_holds_the_store()
    limit = duration(timeout)

    def connect() -> list[Any]:
        # PyTorch's own rendezvous would wait here for all processes, and not name the missing ones.
        store = present or make(host, int(port), size, holds, limit, wait_for_workers=False, multi_tenant=True)
        if _opened:  # it has the timeout of an earlier pipeline
            store.set_timeout(limit + timedelta(seconds=_CONNECTING_SECONDS))
        stores = [store, store.clone(), store.clone()]
        for each in stores if _opened else ():
            each.set_timeout(limit)
        return stores

    thread = communication_thread("pipelab-connect", threads=1)
    try:
        stores: list[Any] = _answer(thread, connect, None if timeout is None else timeout + _CONNECTING_SECONDS)
    except dist.DistError as error:
        verb = "cannot open" if holds else "has not opened"
        hint = "\n  is torchrun, or rank 0, stopped or gone? has another program, or another job, this port?"
        raise RankError(
            f"rank 0 {verb} a store at {host}:{port}, where all processes meet: {error}{hint}", 0
        ) from error
    finally:
        thread.end()
    if present is None:
        _opened.append(stores[0])
        if torchrun_holds_the_store():
            end_with(os.getppid())
    return stores[1:]


def torchrun_holds_the_store() -> bool:
    """Return whether torchrun has started this process and holds the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def prefix_store(store: Any, name: str) -> Any:
    """Return a `PrefixStore` with a prefix of this job's own, and of torchrun's attempt to start all processes."""
    here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")  # on several machines each counts alone
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if here else "0"
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")  # one store may serve several jobs
    return dist.PrefixStore(f"pipelab/{job}/{attempt}/{name}", store)  # type: ignore[attr-defined]  # see above


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


def duration(timeout: float | None) -> timedelta:
    """Return PyTorch's timeout for a number of seconds; `None` is for ever."""
    return _NO_TIMEOUT if timeout is None else timedelta(seconds=timeout)
