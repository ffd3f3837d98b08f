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
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from pipelab.engine.torchrun import runtime
from pipelab.errors import EngineError, RankError

__all__ = [
    "AnsweringStore",
    "Outcome",
    "SilentStoreError",
    "Store",
    "Worker",
    "corner",
    "duration",
    "open_store",
    "torchrun_holds_the_store",
]

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


Answer = TypeVar("Answer")

_NO_TIMEOUT = timedelta(days=30)
"""What PyTorch is told where nothing should time out: it wants a number."""
_SHORTEST_SECONDS, _LONGEST_SECONDS = 10.0, 300.0
"""How long a store may take to answer, at least and at most, whatever timeout a pipeline has."""


_LAST_PORT = 65535


class Store(Protocol):
    """What all processes of a job share: torchrun's store, or a corner of it."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it."""

    def check(self, keys: list[str]) -> bool:
        """Tell whether all of these are there."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value if there is none yet; return what is there."""


class SilentStoreError(dist.DistStoreError):
    """The store was asked and does not answer: what holds it hangs, or no network leads to it."""


class AnsweringStore:
    """A store that answers in time or raises: PyTorch's waits for ever where the network is cut.

    Args:
        store: what to ask; this object alone asks it.
        timeout: seconds that an answer may take: 10 at least, and at most 300, which `None` means too.
    """

    def __init__(self, store: Store, timeout: float | None) -> None:
        """Start the thread that asks."""
        self._store = store
        self.seconds = min(max(timeout or _LONGEST_SECONDS, _SHORTEST_SECONDS), _LONGEST_SECONDS)
        self._silent = False
        self._worker = Worker("pipelab-store", threads=1)
        weakref.finalize(self, self._worker.end)

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it."""
        return self._ask(lambda: self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        """Tell whether all of these are there."""
        return self._ask(lambda: self._store.check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value if there is none yet; return what is there."""
        return self._ask(lambda: self._store.compare_set(key, expected, desired))

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        """Return what the store answers.

        Raises:
            SilentStoreError: if it does not answer, or has not answered before: its thread is stuck.
            RuntimeError: what the store itself raises.
        """
        try:
            answer, error = self._worker.do(question).get(timeout=0 if self._silent else self.seconds)
        except queue.Empty:
            self._silent = True
            raise SilentStoreError(f"this job's store has not answered for {self.seconds:g} s") from None
        if error is not None:
            raise error
        found: Answer = answer
        return found


def open_store(rank: int, size: int, timeout: float | None) -> Any:
    """Return the store that all processes share: torchrun's, or that of the process group that is there already.

    Once opened it stays open: where torchrun has none, it lives in the process of rank 0.

    Raises:
        EngineError: if nobody says where it is; or naming what this torch lacks.
        RankError: if rank 0 does not open it.
    """
    if _opened:
        _opened[0].set_timeout(duration(timeout))
    elif dist.is_initialized():
        return runtime.default_store()
    if not _opened and torchrun_holds_the_store():
        meet = dist.rendezvous  # type: ignore[attr-defined]  # its stubs leave it out
        _opened.append(next(iter(meet("env://", timeout=duration(timeout))))[0])
    if not _opened:
        _opened.append(_rank_0s_store(rank, size, timeout))
    return _opened[0]


def store_is_at_hand() -> bool:
    """Tell whether the store can be had without waiting for another process to make a pipeline."""
    return bool(_opened) or dist.is_initialized() or torchrun_holds_the_store()


def torchrun_holds_the_store() -> bool:
    """Tell whether torchrun has started this process, and has a store for it and the others."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


_opened: list[Any] = []
"""The store, once this process has opened it."""


def _rank_0s_store(rank: int, size: int, timeout: float | None) -> Any:
    """Return a store in the process of rank 0: what has started the processes, such as mpirun, has none for them."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal() or int(port) > _LAST_PORT:
        raise EngineError(
            f"MASTER_ADDR={host!r} and MASTER_PORT={port!r} do not say where rank 0 is: a host, and a number up to "
            f"{_LAST_PORT}\n"
            "  try: torchrun, which sets both, or set them to rank 0's host and a free port, the same in every process"
        )
    try:
        # PyTorch would wait here until all have come, and not say who has not.
        store = dist.TCPStore  # type: ignore[attr-defined]  # its stubs leave it out
        return store(host, int(port), size, rank == 0, duration(timeout), wait_for_workers=False, multi_tenant=True)
    except dist.DistError as error:
        if rank == 0:
            raise RankError(f"rank 0 cannot open a store for all processes at {host}:{port}: {error}", 0) from error
        within = "" if timeout is None else f" within {timeout:g} s"
        raise RankError(
            f"rank 0 has opened no store at {host}:{port}{within}, where all processes meet\n"
            "  it made no Pipeline, or failed before, or no network leads there: look at its own output",
            0,
        ) from error


def corner(store: Any, name: str) -> Any:
    """Return a part of a store, in which names are its own, and its own at this attempt of torchrun's to start all."""
    here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")  # on several machines each counts alone
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if here else "0"
    return dist.PrefixStore(f"pipelab/{attempt}/{name}", store)  # type: ignore[attr-defined]  # its stubs leave it out


def duration(timeout: float | None) -> timedelta:
    """Return a number of seconds as PyTorch takes it; `None` is for ever."""
    return _NO_TIMEOUT if timeout is None else timedelta(seconds=timeout)
