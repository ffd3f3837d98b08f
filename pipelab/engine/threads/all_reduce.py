"""The all-reduce of a stage's gradients over the ranks that run it (`R`), in one process.

    rank 0 │ … 0B2 ─┐ comes          ┌─ 0R: adds the others' gradients to its own ─┐
    rank 3 │ … 0B3 ──────────┐ comes ┴─ 0R ────────────────────────────────────────┴ goes on

The gradients of the lowest rank are the model's own, `.grad` itself; those of the other ranks are added to it in the
order of the ranks, so that the same step gives the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from pipelab.engine.device.streams import Lane
from pipelab.engine.stage.stage import Stage

__all__ = ["AllReduce", "Meeting", "Seat"]


class Meeting:
    """The ranks of one all-reduce in one run: all of them come, then the lowest adds up.

    Attributes:
        absent: the ranks that have not come yet.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        """Expect these ranks."""
        self.absent = set(ranks)
        self._lock = threading.Lock()
        self._everybody = threading.Event()
        self._done = threading.Event()
        self._signals: list[Any] = []  # what a lane waits for, so that it comes after what the others have launched

    def come(self, rank: int, lane: Lane) -> None:
        """Wait until everybody has come."""
        with self._lock:
            self._signals.append(None if lane.gives is None else lane.gives(None))
            self.absent.discard(rank)
            if not self.absent:
                self._everybody.set()
        self._everybody.wait()
        if lane.takes is not None:
            for signal in list(self._signals):
                lane.takes(signal)

    def finish(self, lane: Lane) -> None:
        """Say that all is added up."""
        self._signals.append(None if lane.gives is None else lane.gives(None))
        self._done.set()

    def wait(self, lane: Lane) -> None:
        """Wait until all is added up."""
        self._done.wait()
        if lane.takes is not None:
            lane.takes(self._signals[-1])

    def open(self) -> None:
        """Let everybody go: the run is stopped."""
        self._everybody.set()
        self._done.set()


class Seat:
    """A rank's door to a meeting: it opens when everybody has come."""

    def __init__(self, meeting: Meeting, rank: int, lane: Lane) -> None:
        """Take a rank's seat."""
        self._meeting = meeting
        self._rank = rank
        self._lane = lane

    def acquire(self) -> None:
        """Come, and wait for the others."""
        self._meeting.come(self._rank, self._lane)

    def locked(self) -> bool:
        """Whether somebody may be waiting."""
        return True

    def release(self) -> None:
        """Let everybody go."""
        self._meeting.open()


class AllReduce:
    """One rank's part in the all-reduce of one stage.

    Attributes:
        group: the ranks that run the stage, the lowest first.
    """

    def __init__(self, rank: int, group: Sequence[int], stages: Sequence[Stage], lane: Lane) -> None:
        """Take the part of `rank`; `stages` are what the ranks of the group run."""
        self.group = group
        self._rank = rank
        self._stages = stages
        self._lane = lane

    def seat(self, meeting: Meeting) -> Seat:
        """Return the rank's door to a meeting of its group."""
        return Seat(meeting, self._rank, self._lane)

    def act(self, _microbatch: int, meeting: Meeting, _kept: dict[int, Any], _loss: Any) -> None:
        """Add up the gradients of all ranks, or wait until the lowest rank has done it."""
        if self._rank == self.group[0]:
            self._add_up()
            meeting.finish(self._lane)
        else:
            meeting.wait(self._lane)

    def _add_up(self) -> None:
        """Add the gradients of the other ranks to the model's own, in the order of the ranks."""
        own, *copies = (list(stage.module.parameters()) for stage in self._stages)
        for parameter, *others in zip(own, *copies, strict=True):
            for other in others:
                gradient, other.grad = other.grad, None
                if gradient is None:
                    continue
                if self._lane.takes is not None:
                    gradient = self._lane.takes(gradient)
                if parameter.grad is None:
                    parameter.grad = gradient
                elif parameter.grad.is_sparse:
                    parameter.grad = parameter.grad + gradient
                else:
                    parameter.grad.add_(gradient)
