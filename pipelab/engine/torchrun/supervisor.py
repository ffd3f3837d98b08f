"""Say what this process is doing, or waiting for, in words."""

from __future__ import annotations

import math
import queue
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn, TypeVar

import torch.distributed as dist

from pipelab.engine.torchrun.failures import Notice, Notices
from pipelab.engine.torchrun.step_state import Passage
from pipelab.engine.torchrun.store import Outcome, Worker
from pipelab.errors import (
    BatchError,
    EngineError,
    LossError,
    PipelabError,
    PipelineClosedError,
    RankError,
    StageError,
    StepTimeoutError,
)
from pipelab.plan.fault import line_of
from pipelab.plan.plan import Plan

__all__ = ["Doing", "Watch", "doing", "met_rank", "told_before_the_end"]


def doing(plan: Plan, call: str, passage: Passage | None) -> str:
    """Return what this process is doing, as in "rank 0 waits …".

    Args:
        plan: the plan.
        call: the call that it is in, such as `"step(x, y)"`.
        passage: its part of a step, if it is in the middle of one.
    """
    if passage is None:
        return f"waits for all processes in {call}"
    if passage.position >= len(passage.row):
        return f"is done with its part of {call}, and waits for all processes"
    action = passage.row[passage.position]
    place = f"{action} (position {passage.position})"
    if passage.computing:
        return f"was running {place}"
    codes = plan.bound.codes
    giver = _giver(plan, passage)
    if giver is None:
        return f"was about to run {place}"
    rank = plan.bound.rank_of[giver]
    return f"waits, before {place}, for what {codes.action(giver)} on rank {rank} gives"


def met_rank(plan: Plan, passage: Passage | None) -> int | None:
    """Return the rank with which this process exchanges a value now: one that it waits for, or else sends to, say.

    At the end of the row it waits for all that it has sent, to whichever rank: then it is nobody in particular.
    """
    if passage is None or passage.computing or passage.position >= len(passage.row):
        return None
    if not passage.waiting:
        return passage.peer
    giver = _giver(plan, passage)
    return None if giver is None else plan.bound.rank_of[giver]


def _giver(plan: Plan, passage: Passage) -> int | None:
    """Return the code of the action on another rank whose value the next action needs, if there is one."""
    codes, rank_of = plan.bound.codes, plan.bound.rank_of
    code = codes.code(passage.row[passage.position])
    for value in codes.needs(code):
        giver = plan.bound.giver(value)
        if rank_of[giver] != rank_of[code]:
            return giver
    return None


@contextmanager
def told_before_the_end(what: Callable[[], str], for_good: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Have a SIGTERM tell something before it does what it would have done.

    Args:
        what: what to tell; asked for when the signal comes.
        for_good: whether to go on telling afterwards, as the process is about to end; asked for at the end.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is None:
        yield
        return

    def tell(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - Python calls it so
        try:
            words = f"pipelab: told to stop (SIGTERM): {what()}\n"
            with suppress(OSError, RuntimeError, ValueError):  # gone, in the middle of a write, or closed
                errors.write(words)
                errors.flush()
        finally:
            signal.signal(signal.SIGTERM, before)
            signal.raise_signal(signal.SIGTERM)

    errors = sys.stderr  # as it is now: while PyTorch has a traceback written, it collects the text, and that is lost
    before = signal.signal(signal.SIGTERM, tell)
    try:
        yield
    finally:
        if not for_good():
            signal.signal(signal.SIGTERM, before)


Result = TypeVar("Result")

_PAUSE_SECONDS = 0.2
"""How often a process that waits looks whether another one has failed."""

_PATIENCE_SECONDS = 5.0
"""How long a process waits before it looks whether another one has left, or ended without closing its connections."""

_RUMOUR_SECONDS = 1.0
"""How long a process that lost a connection looks for who has gone; and one that misses another, for what it sent."""


@dataclass(frozen=True, slots=True)
class Doing:
    """What a piece of work is, for those who look after it.

    Attributes:
        told: says what this process is doing, as in "rank 0 waits …".
        progress: gives something that changes when the work gets on.
        meets: gives the rank with which the work exchanges a value, if it does.
        together: tells whether all processes are known to have come to the call that the work belongs to.
    """

    told: Callable[[], str]
    progress: Callable[[], object] = lambda: None
    meets: Callable[[], int | None] = lambda: None
    together: Callable[[], bool] = lambda: False


class Watch:
    """Runs this process's work in a thread of its own, and looks after it.

    Args:
        rank: this process.
        notices: what the processes tell each other.
        timeout: seconds without any progress on this process after which it gives up; `None` waits for ever.
        threads: how many processor threads each operation may use.
    """

    def __init__(self, rank: int, notices: Notices, timeout: float | None, threads: int) -> None:
        """Start the worker thread."""
        self.rank = rank
        self.timeout = timeout
        self.over = ""
        self._failed = False
        self._notices = notices
        self._worker = Worker(f"pipelab-rank-{rank}", threads)
        self._calls = 0
        self._closer = weakref.finalize(self, self._worker.end)
        # At the process's end before its connections are gone: others should hear it before they lose one.
        self._leaver = weakref.finalize(self, _leave, notices)

    def attend(self, work: Callable[[], Result], doing: Doing) -> Result:
        """Run some work in the worker thread and wait for it; return what it returns.

        The work may raise a `BatchError` or a `LossError` if all processes do. Any other error ends the pipeline, on
        every process.

        Raises:
            RankError: if another process failed or is gone.
            StepTimeoutError: if nothing moved for `timeout` seconds.
            PipelineClosedError: if the pipeline is closed, or has failed before.
        """
        if self.over:
            raise PipelineClosedError(self.over)
        self._calls += 1
        done = self._worker.do(work)
        try:
            with told_before_the_end(lambda: self._last_words(doing), for_good=lambda: self._failed):
                outcome: tuple[Result, BaseException | None] = self._await(done, doing)
                result, error = outcome
                if error is not None and not isinstance(error, BatchError | LossError):
                    self._fail(error, doing)
        except EngineError:
            raise
        except BaseException as interrupt:  # the worker's own error, Ctrl-C, or what a signal handler raises
            if not self._failed:
                interrupt.add_note(f"interrupted while rank {self.rank} {doing.told()}")
                self._end(f"rank {self.rank} was interrupted ({type(interrupt).__name__})")
            raise
        if error is not None:
            raise error
        return result

    def close(self, error: BaseException | None = None) -> None:
        """End the worker, and tell the others, who may still want something of this process."""
        if not self._closer.alive:
            return
        self._closer()
        if self.over:
            return
        if error is None:
            self.over = "this pipeline is closed: make a new one, or use it inside its with block"
            self._leaver.detach()
            self._notices.leave("it closed its pipeline without this call, which every process must make")
        else:
            self._end(f"rank {self.rank} is gone: its script raised {error!r}")

    def line(self) -> str:
        """Return where the worker is, in the student's own code if it is there."""
        frames = sys._current_frames()  # noqa: SLF001 - the one way to see where a thread is
        frame = frames.get(self._worker.thread.ident or 0)
        return f", at {line_of(traceback.extract_stack(frame))}" if frame else ""

    def _await(self, done: queue.SimpleQueue[Outcome], doing: Doing) -> Outcome:
        """Wait for the worker, looking at the notices and at the clock now and then.

        Raises:
            RankError: if another process has failed.
            StepTimeoutError: if nothing moved for too long.
        """
        pause = _PAUSE_SECONDS if self.timeout is None else min(_PAUSE_SECONDS, self.timeout / 8)
        seen, quiet_since = doing.progress(), time.monotonic()
        told_at = quiet_since + (
            _PATIENCE_SECONDS if self.timeout is None else min(_PATIENCE_SECONDS, self.timeout / 2)
        )
        while True:
            try:
                return done.get(timeout=pause)
            except queue.Empty:
                pass
            if notice := self._notices.news():
                self._hear(notice, doing)
            if time.monotonic() > told_at:
                self._notices.wait(self._calls)
                told_at = math.inf
            quiet = time.monotonic() - quiet_since
            if seen != doing.progress():
                seen, quiet_since = doing.progress(), time.monotonic()
            elif quiet >= _PATIENCE_SECONDS and (gone := self._notices.gone()):
                try:  # what it gave before it left may still be on its way
                    return done.get(timeout=_RUMOUR_SECONDS)
                except queue.Empty:
                    self._hear(self._notices.tell(*gone), doing)
            elif self.timeout is not None and quiet >= self.timeout:
                told = f"nothing moved on rank {self.rank} for {quiet:.3g} s: it {doing.told()}{self._absent(doing)}"
                self._end(told)
                raise StepTimeoutError(told)

    def _fail(self, error: BaseException, doing: Doing) -> NoReturn:
        """Tell everybody of an error in the worker, and raise it; or who is gone, if it is a lost connection.

        Raises:
            RankError: if another process is the cause.
            BaseException: the error, if it is this process's own.
        """
        if not _is_lost_connection(error):
            told = str(error) if isinstance(error, PipelabError) else f"{type(error).__name__}: {error}"
            self._end(told if isinstance(error, StageError) else f"rank {self.rank} failed: {told}")
            raise error
        deadline = time.monotonic() + _RUMOUR_SECONDS
        notice = self._notices.news()
        while notice is None and time.monotonic() < deadline:
            if gone := self._notices.gone():
                notice = self._notices.tell(*gone)
            else:
                time.sleep(_PAUSE_SECONDS / 8)
                notice = self._notices.news()
        if notice is None:
            suspect = doing.meets()
            name = "another process" if suspect is None else f"rank {suspect}"
            lost = f"{name} is gone: a connection to it was lost ({str(error).splitlines()[0]})"
            notice = self._notices.tell(-1 if suspect is None else suspect, lost)
        self._hear(notice, doing, error)

    def _hear(self, notice: Notice, doing: Doing, cause: BaseException | None = None) -> NoReturn:
        """Raise what another process failed of.

        Raises:
            RankError: always.
        """
        told = f"{notice.told}\n  rank {self.rank} {doing.told()}"
        self._leaver.detach()
        self._failed, self.over = True, f"this pipeline has failed: start all processes anew\n  {told}"
        self._notices.hear(notice)
        raise RankError(told, notice.rank) from cause

    def _end(self, told: str) -> None:
        """End this pipeline for good: because of this process."""
        self._leaver.detach()
        self._failed, self.over = True, f"this pipeline has failed: start all processes anew\n  {told}"
        self._notices.tell(self.rank, told, alive=True)

    def _absent(self, doing: Doing) -> str:
        """Say which processes have not told that they wait in this one's call, if any has not.

        A process says so after a while, whatever its worker does: unless the whole process stands still.
        """
        absent = self._notices.absent(self._calls)
        if not absent:
            return ""
        ranks = f"rank {', '.join(map(str, absent))}"
        if doing.together():
            verb, it = ("has", "it is") if len(absent) == 1 else ("have", "they are")
            return (
                f"; {ranks} came to this call and {verb} said nothing since: {it} stopped, cut off, or in C code that "
                "lets no other thread run"
            )
        return f"; {ranks} {'has' if len(absent) == 1 else 'have'} not come to this call"

    def _last_words(self, doing: Doing) -> str:
        """Return what this process knows when it is told to stop.

        Who is gone is noted for those who are told to stop as well: some of them may be gone before the next one looks.
        """
        if self.over:
            return self.over
        notice, gone = self._notices.news(), self._notices.gone()
        if notice is None and gone:
            notice = self._notices.note(*gone)
        known = notice.told if notice else "no other process has said why"
        return f"{known}\n  rank {self.rank} {doing.told()}"


def _leave(notices: Notices) -> None:
    """Tell the others that a pipeline is gone which was not closed: its process ends, or nobody holds it any more."""
    ends = not threading.main_thread().is_alive()
    notices.leave("its script ended" if ends else "it let go of its pipeline, which it did not close")


def _is_lost_connection(error: BaseException) -> bool:
    """Tell whether an error says that the other end of a connection is gone, in the words of gloo or NCCL."""
    if isinstance(error, PipelabError):
        return False
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo/transport", "NCCL error"))
