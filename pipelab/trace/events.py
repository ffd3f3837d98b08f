"""The parts of a trace: actions and transfers, each with its start and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipelab.plan.actions import Action

MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0, "µs": 1.0, "ns": 1e-3}
"""The units of time that have a name, in microseconds."""


@dataclass(frozen=True, slots=True)
class Event:
    """One action on one rank, from `start` to `end` in the trace's unit."""

    rank: int
    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        """How long the action took."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Transfer:
    """One value on its way from one rank to another.

    Attributes:
        source: the rank that gives it.
        target: the rank that needs it.
        giver: the action that gives it.
        needer: the action that needs it.
        start: when it leaves.
        end: when it arrives.
        queued: how long it was ready but queued behind another transfer; see `simulate`.
        behind: the giver and the needer of that other transfer; `None` if there was none.
    """

    source: int
    target: int
    giver: Action
    needer: Action
    start: float
    end: float
    queued: float = 0.0
    behind: tuple[Action, Action] | None = None


def union(starts: Sequence[float], ends: Sequence[float]) -> float:
    """Return the length of the union of spans, sorted by their starts: overlaps count once."""
    busy, free = 0.0, float("-inf")
    for start, end in zip(starts, ends, strict=True):
        if start >= free:
            busy += end - start
            free = end
        elif end > free:
            busy += end - free
            free = end
    return busy
