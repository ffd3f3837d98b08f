"""What a trace is made of: actions and transfers, each with its start and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipelab.plan.actions import Action
from pipelab.plan.bound import Program

__all__ = ["Event", "Transfer", "crossings", "union"]


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
        end: when it is there.
    """

    source: int
    target: int
    giver: Action
    needer: Action
    start: float
    end: float


def union(starts: Sequence[float], ends: Sequence[float]) -> float:
    """Return the length of the union of spans that start one after the other: overlaps count once.

    Example:
        >>> union([0, 1, 6], [4, 5, 7])
        6.0
    """
    busy = 0.0
    free = float("-inf")
    for start, end in zip(starts, ends, strict=True):
        if start >= free:
            busy += end - start
            free = end
        elif end > free:
            busy += end - free
            free = end
    return busy


def crossings(
    program: Program, ends: Sequence[Sequence[float]], delay: Callable[[int], float] | None
) -> tuple[Transfer, ...]:
    """Return the transfers of a plan: each value that a rank needs and another gives.

    Args:
        program: the plan, bound.
        ends: for each rank, when each of its actions ended.
        delay: how long a value travels, by its number; `None` for not at all.
    """
    numbering, rank_of = program.numbering, program.rank_of
    ended = {
        code: end for row, times in zip(program.rows, ends, strict=True) for code, end in zip(row, times, strict=True)
    }
    transfers: list[Transfer] = []
    for rank, row in enumerate(program.rows):
        for code in row:
            for value in numbering.needs(code):
                giver = program.giver(value)
                source = rank_of[giver]
                if source != rank:
                    left = ended[giver]
                    lasts = delay(value) if delay else 0.0
                    transfers.append(
                        Transfer(source, rank, numbering.action(giver), numbering.action(code), left, left + lasts)
                    )
    return tuple(transfers)
