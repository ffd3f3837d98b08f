"""The interpreter lock, which every rank needs between any two of its operations."""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import torch

from pipelab.engine.device.clocks import here
from pipelab.engine.device.streams import Lane
from pipelab.engine.stage.nan_watch import batch_has_nan, refuse_nan
from pipelab.engine.threads.instructions import Run

__all__ = ["Report", "Worker", "quick_switches"]

_SWITCH_SECONDS = 5e-6

_guard = threading.Lock()
_inside = 0
_before = 0.0


@contextmanager
def quick_switches() -> Iterator[None]:
    """Let a thread that wants the interpreter lock have it at once, instead of after Python's usual 5 milliseconds.

    A rank whose backward has ended needs the lock to go on; another rank that is running a forward gives it up and
    takes it back many times in a row, each time too briefly for a sleeping thread to wake up. With a short interval it
    is made to wait for its turn. The setting is the whole process's, so it is put back after the step.
    """
    global _inside, _before  # noqa: PLW0603 - it guards a setting of the process
    with _guard:
        if _inside == 0:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_SECONDS)
        _inside += 1
    try:
        yield
    finally:
        with _guard:
            _inside -= 1
            if _inside == 0:
                sys.setswitchinterval(_before)


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says when it is done with a run, well or not."""

    rank: int
    run: Run
    position: int = 0
    error: BaseException | None = None


class Worker:
    """One rank's thread. It lives as long as the engine and runs one `Run` after another."""

    def __init__(self, rank: int, lane: Lane, threads: int, reports: queue.SimpleQueue[Report]) -> None:
        """Start the thread; `threads` is how many processor threads each of its operations may use."""
        self.rank = rank
        self.lane = lane
        self.jobs: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self.reports = reports
        self.threads = threads
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._live, name=f"pipelab-rank-{rank}", daemon=True)
        self.thread.start()

    def give_up(self) -> None:
        """Make a worker that hangs end at its next line of Python, should it come back: it must add to no gradient."""
        self.jobs.put(None)
        if self.thread.ident is not None and self.thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident), ctypes.py_object(SystemExit))

    def _live(self) -> None:
        torch.get_num_threads()  # a thread's first use takes over the default; from then on its own number holds
        torch.set_num_threads(self.threads)
        self.ready.set()
        with suppress(SystemExit):  # from `give_up`, where it arrives outside of a run
            while (run := self.jobs.get()) is not None:
                self.reports.put(self._attempt(run))
                del run  # an idle worker holds on to nothing

    def _attempt(self, run: Run) -> Report:
        """Run a row, whatever happens; say how it went."""
        try:
            with ExitStack() as stack:
                self.lane.enter(stack)
                run.caller.enter(stack)
                if run.loss is None:
                    stack.enter_context(torch.no_grad())
                self._row(run)
        except BaseException as error:  # noqa: BLE001 - a worker must report everything, SystemExit included
            return Report(self.rank, run, run.phase[self.rank] // 2, error)
        return Report(self.rank, run)

    def _row(self, run: Run) -> None:  # noqa: PLR0912 - the hot loop of every step
        """Run one row. This is the hot loop: at small sizes its own time is what a step costs."""
        rank, row, values, doors, phase = self.rank, run.rows[self.rank], run.values, run.doors, run.phase
        kept, loss, mark, gives, takes = run.kept[rank], run.loss, self.lane.mark, self.lane.gives, self.lane.takes
        caller, begin, end = run.caller, run.begun[rank].append, run.ended[rank].append
        for position, each in enumerate(row):
            # [1] wait for what the action needs
            phase[rank] = 2 * position
            if each.needs is None:
                given = run.inputs[each.microbatch] if each.forward else None
                if takes is not None:
                    given = takes(given)
            else:
                if each.receives:
                    doors[each.needs].acquire()
                if run.stopped:
                    return
                given = values.pop(each.needs)
                if each.receives and takes is not None:
                    given = takes(given)
            if run.stopped:
                return
            if takes is not None and loss is not None and each.forward and each.stage.is_last:
                loss.targets[each.microbatch] = takes(loss.targets[each.microbatch])
            # [2] compute, between two readings of the clock
            phase[rank] = 2 * position + 1
            had_nan = run.watch_nan and batch_has_nan(each.action, each.stage, given)
            here.began = mark()
            begin(here.began)
            if caller.autocast and not each.forward:
                with caller.autocast_off():
                    made = each.act(each.microbatch, given, kept[each.stage.index], loss)
            else:
                made = each.act(each.microbatch, given, kept[each.stage.index], loss)
            end(mark())
            if run.watch_nan:
                refuse_nan(rank, each.action, each.stage, made, run.loss, had_nan=had_nan)
            # [3] hand over what it made
            if each.gives is not None:
                values[each.gives] = gives(made) if each.sends and gives is not None else made
                if each.sends:
                    door = doors[each.gives]
                    if door.locked():
                        door.release()
            elif each.forward:
                run.outputs[each.microbatch] = made
        phase[rank] = 2 * len(row)
