"""The ruler under a text timeline: which column a time has, and which times are left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelab.draw.wording import number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipelab.draw.lanes import Lanes

__all__ = ["Ruler", "nice_step"]

_LONGEST_CELL = 24
"""How many columns a usual action takes at most, however short the others are."""
_SHORTEST_STEP = 8
"""How many columns lie between two ticks, at least."""


@dataclass(frozen=True, slots=True)
class Ruler:
    """Columns of text for a span of time, its middle left out where there is no room.

        0 ········ head │ gap │ columns - tail ········ columns      (columns of the whole span)

    Attributes:
        scale: columns per unit of time.
        columns: how many columns the whole span would take.
        head: how many of the first ones are drawn.
        gap: how many columns the mark for what is left out takes; 0 where nothing is.
        tail: how many of the last ones are drawn.
    """

    scale: float
    columns: int
    head: int
    gap: int
    tail: int

    @classmethod
    def fit(cls, lanes: Sequence[Lanes], ranks: Iterable[int], room: int, squeeze: bool = False) -> Ruler:
        """Choose the scale: labels with a blank after them, else labels side by side, else the middle is left out.

        Args:
            lanes: what will share the ruler.
            ranks: the ranks that are drawn.
            room: how many columns there are.
            squeeze: whether to cut labels before anything is left out: what shares an axis is best seen whole.
        """
        span = max(each.span for each in lanes)
        cells = _shortest(lanes, list(ranks))
        cap = _LONGEST_CELL / max((time for _, time in cells), default=_LONGEST_CELL)
        # What the shortest of the usual actions gets: its label and a blank, or just its label.
        roomy, tight = (
            min(cap, max(((label + blank) / time for label, time in cells), default=1.0)) for blank in (1, 0)
        )
        # Side by side, labels with stages run into each other: 0F00F1.
        scales = [roomy] if any(each.names_stages for each in lanes) else [roomy, tight]
        if squeeze and cells and span:
            shortest = min(time for _, time in cells)
            scales.append(math.floor(room / span * shortest) / shortest)
        for scale in scales:
            columns = _round(span * scale)
            if scale and columns <= room:
                return cls(scale, columns, columns, 0, 0)
        most = max(each.count(rank) for each in lanes for rank in range(each.trace.ranks))
        gap = len(gap_mark(most)) + 2
        tail = max(0, (room - gap) * 2 // 5)
        return cls(roomy, _round(span * roomy), max(0, room - gap - tail), gap, tail)

    def column(self, time: float) -> int:
        """Return the column of a time, as if nothing were left out."""
        return _round(time * self.scale)

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """The columns that are drawn: all of them, or the first and the last."""
        if not self.gap:
            return ((0, self.columns),)
        return ((0, self.head), (self.columns - self.tail, self.columns))

    def axis(self, unit: str) -> tuple[str, str]:
        """Return the axis in two lines: ticks, and their times; the unit stands beside the first.

        Example:
            >>> for line in Ruler(scale=3, columns=33, head=33, gap=0, tail=0).axis("ms"):
            ...     print(line)
            ┬──────────────┬──────────────┬──
            0 ms           5              10
        """
        step = nice_step(_SHORTEST_STEP / self.scale)
        while step * self.scale < len(number(self.columns // max(self.scale, 1e-300))) + 3:
            step = nice_step(step * 1.01)
        ticks, times = [], []
        for first, last in self.windows:
            line, names = ["─"] * (last - first), [" "] * (last - first)
            free = 0
            for count in range(math.ceil(first / self.scale / step), math.floor(last / self.scale / step) + 1):
                column = self.column(count * step) - first
                if not 0 <= column < len(line):
                    continue
                line[column] = "┬"
                name = number(count * step) + (f" {unit}" if count == 0 else "")
                at = max(0, min(column - (len(name) - 1) // 2 if count else 0, len(line) - len(name)))
                if at >= free and at + len(name) <= len(line):
                    names[at : at + len(name)] = name
                    free = at + len(name) + 1
            ticks.append("".join(line))
            times.append("".join(names))
        return ("┄" * self.gap).join(ticks), (" " * self.gap).join(times).rstrip()


def gap_mark(count: int) -> str:
    """Return what stands where actions of a rank are left out."""
    return f"┄ {count:,} more ┄"


def nice_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20 … (and 0.5, 0.2 …) that is not below `least`.

    Example:
        >>> nice_step(2.67), nice_step(0.3), nice_step(11)
        (5.0, 0.5, 20.0)
    """
    power = 10.0 ** math.floor(math.log10(least))
    return next((digit * power for digit in (1, 2, 5) if digit * power >= least * (1 - 1e-9)), 10 * power)


def _shortest(lanes: Sequence[Lanes], ranks: Sequence[int]) -> list[tuple[int, float]]:
    """Return, for every kind of action but `R`, the characters of its label and how long it usually takes."""
    return [
        (each.longest_label(kind), time)
        for each in lanes
        for kind, time in each.typical(rank for rank in ranks if rank < each.trace.ranks).items()
        if kind != "R"
    ]


def _round(column: float) -> int:
    """Return the nearest column, halves up: an action of a whole number of columns has it everywhere."""
    return math.floor(column + 0.5 + 1e-9)
