"""Look after this process's part of a pipeline, so that it always ends, and always says why.

    caller's thread   attend ── waits, looks at the store, at the clock and at signals ── result, or an error by name
                        │                                                               ▲
    worker thread       └─ sends, receives and computes; may be stuck in PyTorch ───────┘

What is stuck in a receive cannot be interrupted; the caller can. So everything that communicates runs in a thread of
its own. Whoever fails writes it into the store that all processes share, under one key: the first one to write is told
by everybody.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

from pipelab.engine.processes.absence import Store, gone
from pipelab.engine.processes.hand import Worker
from pipelab.errors import (
    BatchError,
    EngineError,
    PipelabError,
    PipelineClosedError,
    RankError,
    StageError,
    StepTimeoutError,
)
from pipelab.faults import line_of

__all__ = ["Watch"]

Result = TypeVar("Result")

_PAUSE_SECONDS = 0.2
"""How often a process that waits looks whether another one has failed."""

_HEARING_SECONDS = 3.0
"""How long a process that fails waits for the others to hear of it, before it raises and perhaps ends."""

_PATIENCE_SECONDS = 5.0
"""How long a process waits before it looks whether another one has left, or ended without closing its connections."""

_RUMOUR_SECONDS = 1.0
"""How long a process that lost a connection waits for the other end's own word."""


class Watch:
    """Runs this process's work in a thread of its own, and looks after it.

    Args:
        rank: this process.
        everyone: what every process told of itself.
        store: the store that all processes share.
        timeout: seconds without any progress on this process after which it gives up; `None` waits for ever.
        threads: how many processor threads each operation may use.
    """

    def __init__(
        self, rank: int, everyone: Sequence[dict[str, Any]], store: Store, timeout: float | None, threads: int
    ) -> None:
        """Start the worker thread."""
        self.rank = rank
        self.everyone = everyone
        self.timeout = timeout
        self.over: str | None = None
        self._store = store
        self._worker = Worker(f"pipelab-rank-{rank}", threads)
        self._closer = weakref.finalize(self, self._worker.end)

    def attend(
        self,
        work: Callable[[], Result],
        doing: Callable[[], str],
        progress: Callable[[], object] = lambda: None,
        waits_for: Callable[[], int | None] = lambda: None,
    ) -> Result:
        """Run some work in the worker thread and wait for it; return what it returns.

        Args:
            work: what to do. It may raise a `BatchError` if all processes do; any other error ends the pipeline.
            doing: what this process is doing, as in "this process … {doing}", for messages.
            progress: something that changes when the work gets on.
            waits_for: the rank that the work waits for, if it can be known.

        Raises:
            RankError: if another process failed or is gone.
            StepTimeoutError: if nothing moved for `timeout` seconds.
            PipelineClosedError: if the pipeline is closed, or has failed before.
        """
        if self.over is not None:
            raise PipelineClosedError(self.over)
        self._worker.do(work)
        try:
            with self._obeying_only_after_telling(doing):
                result, error = self._await(doing, progress)
        except EngineError:
            raise
        except BaseException as interrupt:  # Ctrl-C, or whatever the caller's signal handler raises
            self._announce(self.rank, f"rank {self.rank} was interrupted ({type(interrupt).__name__})")
            self.over = "this pipeline was interrupted in the middle of a step: start all processes anew"
            interrupt.add_note(f"interrupted while it {doing()}")
            raise
        if error is not None and not isinstance(error, BatchError):
            self._fail(error, doing, waits_for())
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]  # a queue holds anything

    def close(self, error: BaseException | None = None) -> None:
        """End the worker, and tell the others, who may still want something of this process."""
        if not self._closer.alive:
            return
        self._closer()
        if self.over is None:
            self.over = "this pipeline is closed: make a new one, or use it inside its with block"
            if error is not None:
                self._announce(self.rank, f"rank {self.rank} is gone: its script raised {error!r}")
            with contextlib.suppress(RuntimeError):  # the store may be gone with the process that held it
                self._store.set(f"left/{self.rank}", "it closed its pipeline")

    def _await(self, doing: Callable[[], str], progress: Callable[[], object]) -> tuple[Any, BaseException | None]:
        """Wait for the worker, looking at the store and at the clock now and then.

        Raises:
            RankError: if another process has failed.
            StepTimeoutError: if nothing moved for too long.
        """
        pause = _PAUSE_SECONDS if self.timeout is None else min(_PAUSE_SECONDS, self.timeout / 8)
        seen, quiet_since = progress(), time.monotonic()
        while True:
            try:
                return self._worker.done.get(timeout=pause)
            except queue.Empty:
                news = self._news()
            if news is not None:
                self._hear(news, doing)
            now = time.monotonic()
            if seen != progress():
                seen, quiet_since = progress(), now
            elif now - quiet_since >= _PATIENCE_SECONDS and (lost := gone(self._store, self.rank, self.everyone)):
                self._announce(*lost)
                self._hear(self._news() or {"rank": lost[0], "told": lost[1]}, doing)
            elif self.timeout is not None and now - quiet_since >= self.timeout:
                told = f"nothing moved on rank {self.rank} for {now - quiet_since:.3g} s: it {doing()}{self._line()}"
                self._announce(self.rank, told)
                self.over = told
                raise StepTimeoutError(told)

    def _fail(self, error: BaseException, doing: Callable[[], str], waits_for: int | None) -> None:
        """Tell everybody of an error in the worker, and raise it; or who is gone, if it is a lost connection.

        Raises:
            RankError: if another process is the cause.
            BaseException: the error, if it is this process's own.
        """
        if not _is_lost_connection(error):
            told = str(error) if isinstance(error, StageError) else repr(error)
            self._announce(self.rank, f"rank {self.rank} failed: {told}")
            self.over = f"this pipeline has failed: start all processes anew\n  {error}"
            raise error
        deadline = time.monotonic() + _RUMOUR_SECONDS
        while (news := self._news()) is None and time.monotonic() < deadline:
            lost = gone(self._store, self.rank, self.everyone)
            if lost is not None:
                self._announce(*lost)
            else:
                time.sleep(_PAUSE_SECONDS / 8)
        if news is None:
            suspect = -1 if waits_for is None else waits_for
            name = "another process" if suspect < 0 else f"rank {suspect}"
            self._announce(suspect, f"{name} is gone: a connection to it was lost ({str(error).splitlines()[0]})")
            news = self._news() or {"rank": suspect, "told": f"{name} is gone"}
        self._hear(news, doing, error)

    def _hear(self, news: dict[str, Any], doing: Callable[[], str], cause: BaseException | None = None) -> None:
        """Raise what another process failed of.

        Raises:
            RankError: always.
        """
        told = f"{news['told']}\n  rank {self.rank} {doing()}"
        self.over = f"this pipeline has failed: start all processes anew\n  {told}"
        with contextlib.suppress(RuntimeError):
            self._store.set(f"heard/{self.rank}", "")
        raise RankError(told, news["rank"]) from cause

    def _news(self) -> dict[str, Any] | None:
        """Return what the first process that failed said; `None` if all is well."""
        try:
            if not self._store.check(["failed"]):
                return None
            found: dict[str, Any] = json.loads(self._store.get("failed"))
        except RuntimeError:
            told = "the process that holds the store of this job is gone: rank 0, or torchrun itself"
            return {"rank": 0, "told": told}
        return found

    def _announce(self, rank: int, told: str) -> None:
        """Say which rank failed, unless another one has been named before, and wait until everybody knows."""
        try:
            self._store.set(f"heard/{self.rank}", "")
            self._store.compare_set("failed", "", json.dumps({"rank": rank, "told": told}))
            deadline = time.monotonic() + _HEARING_SECONDS
            others = [each for each in range(len(self.everyone)) if each not in (self.rank, rank)]
            while time.monotonic() < deadline:
                if all(self._store.check([f"heard/{each}"]) for each in others):
                    return
                time.sleep(_PAUSE_SECONDS / 8)
        except RuntimeError:  # the store went with the process that held it
            return

    def _line(self) -> str:
        """Return where the worker is, in the student's own code if it is there."""
        frame = sys._current_frames().get(self._worker.thread.ident or 0)  # noqa: SLF001 - the one way to see where a thread is
        return "" if frame is None else f", at {line_of(traceback.extract_stack(frame))}"

    @contextlib.contextmanager
    def _obeying_only_after_telling(self, doing: Callable[[], str]) -> Iterator[None]:
        """Let a SIGTERM end this process as ever, but only after it has said what it was waiting for.

        When one process dies, torchrun sends the others this signal, often before they have noticed.
        """
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is None:
            yield
            return

        def tell(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - Python calls it so
            news = self._news() or gone_or_stopped(self)
            print(  # noqa: T201 - there may be no other chance
                f"pipelab: rank {self.rank} was told to stop (SIGTERM): {news['told']}\n  rank {self.rank} {doing()}",
                file=sys.stderr,
                flush=True,
            )
            signal.signal(signal.SIGTERM, before)
            signal.raise_signal(signal.SIGTERM)

        before = signal.signal(signal.SIGTERM, tell)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def _is_lost_connection(error: BaseException) -> bool:
    """Tell whether an error says that the other end of a connection is gone, in the words of gloo or NCCL."""
    if isinstance(error, PipelabError):
        return False
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo/transport", "NCCL error"))


def gone_or_stopped(watch: Watch) -> dict[str, Any]:
    """Return who is gone, if anybody is; else that nobody failed, as far as this process knows."""
    lost = gone(watch._store, watch.rank, watch.everyone)  # noqa: SLF001 - one module
    return {"told": lost[1] if lost else "no other process has said why"}
