"""Workers: one thread per rank, which runs its row of a step."""

from __future__ import annotations

import ctypes
import queue
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch

from pipelab.engine.clock import here
from pipelab.engine.finite import batch_has_nan, refuse_nan
from pipelab.engine.lanes import Lane
from pipelab.engine.run import Run

__all__ = ["Report", "Worker"]


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
                run.around.enter(stack)
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
        around, begin, end = run.around, run.begun[rank].append, run.ended[rank].append
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
            if around.autocast and not each.forward:
                with around.autocast_off():
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
