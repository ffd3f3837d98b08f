"""The ruler of a text timeline: which column each time has, and which times are left out."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from pipelab.draw.wording import number
from pipelab.plan.actions import PER_MICROBATCH, TRAITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipelab.draw.bars import Lanes
    from pipelab.plan.actions import Kind

_LONGEST_CELL = 24
"""The most columns that a usual action takes."""
_SHORTEST_STEP = 8
"""The fewest columns between two ticks."""
_PERIOD = 4
"""The most actions of what repeats in a left-out part: F B, or F I W."""
_PATTERN = 12
"""How many columns its name takes: `: FIW x 999`."""


Window: TypeAlias = tuple[int, int]
"""The first column, and the one after the last."""


@dataclass(frozen=True, slots=True)
class Ruler:
    """Columns of text for a span of time. Where there is no room, it is folded into bands, or its middle is left out.

    Attributes:
        scale: columns per unit of time.
        columns: how many columns the whole span would take.
        bands: the drawn columns of each band: one window, or two if the middle is left out.
        gap: the width of the mark for the left-out part; 0 if all is drawn.
    """

    scale: float
    columns: int
    bands: tuple[tuple[Window, ...], ...]
    gap: int = 0

    @classmethod
    def fit(
        cls, lanes: Sequence[Lanes], ranks: Iterable[int], room: int, squeeze: bool = False, bands: int = 0
    ) -> Ruler:
        """Choose the widest scale at which everything fits; if there is none, fold it, or leave the middle out.

        The scales, in this order: a blank after each label; labels side by side; the forwards' labels cut, but the
        others whole, so that their numbers can be read.

        Args:
            lanes: the timelines that share the ruler.
            ranks: the drawn ranks.
            room: how many columns there are.
            squeeze: whether to cut all labels before anything is left out.
            bands: into how many bands it may be folded.
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
        fitting = next((scale for scale in scales if scale and _round(span * scale) <= room), None)
        folded = cls._folded(roomy, span, room, bands) if fitting is None else None
        return folded or cls.at(fitting or elided, lanes, room)

    @classmethod
    def at(cls, scale: float, lanes: Sequence[Lanes], room: int) -> Ruler:
        """Return the ruler of a scale; the middle is left out if there is no room for all."""
        columns = _round(max(each.span for each in lanes) * scale)
        if columns <= room:
            return cls(scale, columns, (((0, columns),),))
        most = max(each.count(rank) for each in lanes for rank in range(each.trace.ranks))
        gap = len(gap_mark(most)) + 2 + _PATTERN
        tail = max(0, (room - gap) * 2 // 5)
        return cls(scale, columns, (((0, max(0, room - gap - tail)), (columns - tail, columns)),), gap)

    @classmethod
    def _folded(cls, scale: float, span: float, room: int, most: int) -> Ruler | None:
        """Return a ruler with bands of whole ticks; `None` if there would be too many."""
        ruler = cls(scale, _round(span * scale), ())
        step = ruler._step() * scale
        if room < step or ruler.columns > most * (room // step * step):
            return None
        count = math.ceil(ruler.columns / (room // step * step))
        each = math.ceil(ruler.columns / count / step) * step
        ends = [*(_round(each * band) for band in range(count)), ruler.columns]
        return cls(scale, ruler.columns, tuple((window,) for window in pairwise(ends)))

    def column(self, time: float) -> int:
        """Return the column of a time, counting the left-out ones."""
        return _round(time * self.scale)

    def names_here(self, start: int, end: int, window: Window, label: int) -> bool:
        """Return whether an action has its label in a window: of an action on two bands, one part has it.

        Example:
            >>> ruler = Ruler(1, 20, (((0, 10),), ((10, 20),)))
            >>> [ruler.names_here(9, 14, window, label=3) for (window,) in ruler.bands]
            [False, True]
        """
        windows = [each for band in self.bands for each in band if each[0] < end and start < each[1]]
        if len(windows) < 2:
            return True
        parts = [min(end, each[1]) - max(start, each[0]) for each in windows]
        return window == windows[next((at for at, part in enumerate(parts) if part >= label), parts.index(max(parts)))]

    def _step(self) -> float:
        """Return the time between two ticks."""
        step = nice_step(_SHORTEST_STEP / self.scale)
        while step * self.scale < len(number(self.columns // max(self.scale, 1e-300))) + 3:
            step = nice_step(step * 1.01)
        return step

    def axis(self, unit: str, band: int = 0) -> tuple[str, str]:
        """Return the axis of a band as two lines: the ticks, and their times, the first one with the unit.

        Example:
            >>> for line in Ruler(scale=3, columns=33, bands=(((0, 33),),)).axis("ms"):
            ...     print(line)
            ┬──────────────┬──────────────┬──
            0 ms           5              10
        """
        step = self._step()
        ticks, times = [], []
        for first, last in self.bands[band]:
            line, names = ["─"] * (last - first), [" "] * (last - first)
            free = 0
            for count in range(math.ceil(first / self.scale / step), math.floor(last / self.scale / step) + 1):
                column = self.column(count * step) - first
                if not 0 <= column < len(line):
                    continue
                line[column] = "┬"
                name = number(count * step) + (f" {unit}" if count == 0 else "")
                at = max(0, min(column - (len(name) - 1) // 2 if column else 0, len(line) - len(name)))
                if at >= free and at + len(name) <= len(line):
                    names[at : at + len(name)] = name
                    free = at + len(name) + 1
            ticks.append("".join(line))
            times.append("".join(names))
        return ("┄" * self.gap).join(ticks), (" " * self.gap).join(times).rstrip()


def gap_mark(count: int, kinds: str = "") -> str:
    """Return the mark for a number of left-out actions, and how often what nearly all of them repeat is there.

    Example:
        >>> gap_mark(7, "BFBFBFB"), gap_mark(8, "FFFFBBBB")
        ('┄ 7 more: BF x 3 ┄', '┄ 8 more ┄')
    """
    edge = len(kinds) // 10
    middle = kinds[edge : len(kinds) - edge]
    periods = (size for size in range(1, _PERIOD + 1) if middle[size:] == middle[: len(middle) - size])
    if len(middle) <= _PERIOD or not (period := next(periods, 0)):
        return f"┄ {count:,} more ┄"
    runs = re.findall(f"(?:{middle[:period]})+", kinds)
    return f"┄ {count:,} more: {middle[:period]} x {len(max(runs, key=len)) // period:,} ┄"


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
        return scale * self.time >= (forward if TRAITS[self.kind].forward else self.label)


def _usual_cells(lanes: Sequence[Lanes], ranks: Sequence[int]) -> list[_Cell]:
    """Return the usual cell of every kind of action but `R`."""
    return [
        _Cell(kind, each.longest_label(kind), time)
        for each in lanes
        for kind, time in each.typical(rank for rank in ranks if rank < each.trace.ranks).items()
        if kind in PER_MICROBATCH
    ]


def _round(column: float) -> int:
    """Return the nearest column, rounding halves up, so that equal whole widths stay equal everywhere."""
    return math.floor(column + 0.5 + 1e-9)
