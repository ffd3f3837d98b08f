"""The ruler of a text timeline: which column each time has, and which times are left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelab.draw.wording import number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipelab.draw.bars import Lanes
    from pipelab.plan.actions import Kind

__all__ = ["Ruler", "nice_step"]

_LONGEST_CELL = 24
"""The most columns that a usual action takes."""
_SHORTEST_STEP = 8
"""The fewest columns between two ticks."""


@dataclass(frozen=True, slots=True)
class Ruler:
    """Columns of text for a span of time; the middle is left out if there is no room.

        0 ········ head │ gap │ columns - tail ········ columns      (columns of the whole span)

    Attributes:
        scale: columns per unit of time.
        columns: how many columns the whole span would take.
        head: how many of the first columns are drawn.
        gap: the width of the mark for the left-out part; 0 if all is drawn.
        tail: how many of the last columns are drawn.
    """

    scale: float
    columns: int
    head: int
    gap: int
    tail: int

    @classmethod
    def fit(cls, lanes: Sequence[Lanes], ranks: Iterable[int], room: int, squeeze: bool = False) -> Ruler:
        """Choose the widest scale at which everything fits; if there is none, leave the middle out.

        The scales, in this order: a blank after each label; labels side by side; the forwards' labels cut, but the
        others whole, so that their numbers can be read.

        Args:
            lanes: the timelines that share the ruler.
            ranks: the drawn ranks.
            room: how many columns there are.
            squeeze: whether to cut all labels before anything is left out.
        """
        span = max(each.span for each in lanes)
        cells = _usual_cells(lanes, list(ranks))
        cap = _LONGEST_CELL / max((cell.time for cell in cells), default=_LONGEST_CELL)
        # The shortest of the usual actions has room for its label and a blank, or just for its label.
        needed = (max(((cell.label + blank) / cell.time for cell in cells), default=1.0) for blank in (1, 0))
        roomy, tight = (min(cap, each) for each in needed)
        # Side by side, labels with stages run into each other: 0F00F1.
        names_stages = any(each.names_stages for each in lanes)
        scales = [roomy] if names_stages else [roomy, tight]
        elided = scales[-1]
        if cells and span:
            shortest = min(cell.time for cell in cells)
            even = math.floor(room / span * shortest) / shortest  # as many columns for every action of a kind
            for scale, forward in ((even, 1), (room / span, 1.75)):
                if not names_stages and all(cell.is_legible(scale, forward) for cell in cells):
                    scales.append(scale)
            scales += [even] if squeeze else []
        return cls.at(next((scale for scale in scales if scale and _round(span * scale) <= room), elided), lanes, room)

    @classmethod
    def at(cls, scale: float, lanes: Sequence[Lanes], room: int) -> Ruler:
        """Return the ruler of a scale; the middle is left out if there is no room for all."""
        columns = _round(max(each.span for each in lanes) * scale)
        if columns <= room:
            return cls(scale, columns, columns, 0, 0)
        most = max(each.count(rank) for each in lanes for rank in range(each.trace.ranks))
        gap = len(gap_mark(most)) + 2
        tail = max(0, (room - gap) * 2 // 5)
        return cls(scale, columns, max(0, room - gap - tail), gap, tail)

    def column(self, time: float) -> int:
        """Return the column of a time, counting the left-out ones."""
        return _round(time * self.scale)

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """The drawn columns: all, or the first and the last."""
        if not self.gap:
            return ((0, self.columns),)
        return ((0, self.head), (self.columns - self.tail, self.columns))

    def axis(self, unit: str) -> tuple[str, str]:
        """Return the axis as two lines: the ticks, and their times, the first one with the unit.

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
    """Return the mark for a number of left-out actions."""
    return f"┄ {count:,} more ┄"


def nice_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20 … (and 0.5, 0.2 …) that is not below `least`.

    Example:
        >>> nice_step(2.67), nice_step(0.3), nice_step(11)
        (5.0, 0.5, 20.0)
    """
    power = 10.0 ** math.floor(math.log10(least))
    return next((digit * power for digit in (1, 2, 5) if digit * power >= least * (1 - 1e-9)), 10 * power)


@dataclass(frozen=True, slots=True)
class _Cell:
    """A kind of action: the columns of its label, and its usual time."""

    kind: Kind
    label: int
    time: float

    def is_legible(self, scale: float, forward: float) -> bool:
        """Return whether the label fits; a forward, whose order is obvious, needs only `forward` columns."""
        return scale * self.time >= (forward if self.kind == "F" else self.label)


def _usual_cells(lanes: Sequence[Lanes], ranks: Sequence[int]) -> list[_Cell]:
    """Return the usual cell of every kind of action but `R`."""
    return [
        _Cell(kind, each.longest_label(kind), time)
        for each in lanes
        for kind, time in each.typical(rank for rank in ranks if rank < each.trace.ranks).items()
        if kind != "R"
    ]


def _round(column: float) -> int:
    """Return the nearest column, rounding halves up, so that equal whole widths stay equal everywhere."""
    return math.floor(column + 0.5 + 1e-9)
