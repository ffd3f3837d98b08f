"""Timelines as text, for terminals, logs and tests."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from dataclasses import dataclass
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, TypeAlias

from pipelab.draw import colours, wording
from pipelab.draw.bars import Bar, Lanes
from pipelab.draw.wording import columns, number
from pipelab.plan.actions import PER_MICROBATCH, TRAITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pipelab.draw.bars import Gap
    from pipelab.plan.actions import Kind
    from pipelab.simulation.comparison import Comparison
    from pipelab.trace.trace import Trace

# ── The ruler: which column each time has, and which times are left out ───────────────────────────────────────────────

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
        """Return whether an action has its label in a window: of an action on two bands, one part has it."""
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
        """Return the axis of a band as two lines: the ticks, and their times, the first one with the unit."""
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
    """Return the mark for a number of left-out actions, and how often what nearly all of them repeat is there."""
    edge = len(kinds) // 10
    middle = kinds[edge : len(kinds) - edge]
    periods = (size for size in range(1, _PERIOD + 1) if middle[size:] == middle[: len(middle) - size])
    if len(middle) <= _PERIOD or not (period := next(periods, 0)):
        return f"┄ {count:,} more ┄"
    runs = re.findall(f"(?:{middle[:period]})+", kinds)
    return f"┄ {count:,} more: {middle[:period]} x {len(max(runs, key=len)) // period:,} ┄"


def nice_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20 … (and 0.5, 0.2 …) that is not below `least`."""
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
    return [
        _Cell(kind, each.longest_label(kind), time)
        for each in lanes
        for kind, time in each.typical(rank for rank in ranks if rank < each.trace.ranks).items()
        if kind in PER_MICROBATCH
    ]


def _round(column: float) -> int:
    """Return the nearest column, rounding halves up, so that equal whole widths stay equal everywhere."""
    return math.floor(column + 0.5 + 1e-9)


# ── The timeline ──────────────────────────────────────────────────────────────────────────────────────────────────────

PLAIN_WIDTH = 120
"""The width of text that goes to a file or a pipe."""
_ALL_RANKS = 16
"""Up to so many ranks, each has a line; with more, only the first and the last have."""
_FIRST_RANKS, _LAST_RANKS = 8, 4
_SCREEN = 64
"""The most lines of a timeline that is folded into bands."""
_MOST_WORDS = 256
"""Up to so many actions on a rank, its idle times are said in words."""
_SHORT = "▏"
"""Stands for one action or several, each shorter than a character."""


def timeline(trace: Trace, width: int | None = None, colour: bool | None = None) -> str:
    """Return a timeline: one line per rank, time from left to right, `·` where a rank is idle.

    Every action is drawn to scale; one that is shorter than a character is a thin line. A timeline that is too wide is
    drawn smaller as long as the numbers can be read. Then it is folded into bands, one below the other. Where these
    would be more than a screen, its middle is left out: a count is there, and what repeats, such as `FB x 253`.

    Example:
        >>> import pipelab
        >>> print(timeline(pipelab.simulate(pipelab.OneFOneB(ranks=2, microbatches=3)), width=100, colour=False))
        1F1B · 2 ranks, 3 micro-batches, simulated
        A step takes 12 units. The ranks idle 25.0 % of it (the bubble); rank 1 limits it. Rank 0 holds up
        to 2 activations (by rank: 2 1).
        rank 0 │F0 F1 ··r1··B0─── F2 B1─── ···B2───
        rank 1 │···F0 B0─── F1 B1─── F2 B2─── ······
                ┬──────────────┬──────────────┬─────
                0 units        5              10
        F2 = forward of micro-batch 2; B backward; · wait (r1: rank 1), not begun, done
    """
    width, colour = _terminal(width, colour)
    lanes = Lanes(trace)
    gutter = _gutter([lanes])
    ranks, room = _drawn(trace), width - gutter
    ruler = Ruler.fit([lanes], ranks, room, bands=_SCREEN // (len(ranks) + 3))
    lines = [*_wrapped(wording.headline(trace), width), *wrap(wording.caption(trace), width)]
    for band in range(len(ruler.bands)):
        lines += [*[""] * (band > 0), *_rows(lanes, ruler, gutter, colour, band)]
        lines += _axis(ruler, gutter, wording.unit(trace), band)
    return "\n".join([*lines, *_legend(lines, [trace], width)])


def _wrapped(head: str, width: int) -> list[str]:
    """Break a headline after its commas, and between words only if a part is too long."""
    glued = ", ".join(
        part.replace(" ", "\N{NO-BREAK SPACE}") if len(part) < width else part for part in head.split(", ")
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrap(glued, width)]


def comparison(comparison: Comparison, width: int | None = None, colour: bool | None = None) -> str:
    """Return several traces: a table of their figures, then their timelines, on one axis if their units agree."""
    width, colour = _terminal(width, colour)
    lines = [*columns(wording.table(comparison), width), ""]
    traces = [Lanes(trace) for trace in comparison.traces]
    gutter = _gutter(traces)
    ranks = _drawn(max(comparison.traces, key=lambda trace: trace.ranks))
    shared = comparison.shares_axis
    if not shared:
        units = ", ".join(dict.fromkeys(wording.unit(trace) for trace in comparison.traces))
        lines += [f"The units of time differ ({units}), so every timeline has its own scale.", ""]
    room = width - gutter
    common = Ruler.fit(traces, ranks, room, squeeze=True)
    whole = shared and not common.gap
    for lanes, name in zip(traces, comparison.names, strict=True):
        ruler = common
        if not whole:  # short timelines are still drawn whole
            ruler = Ruler.at(common.scale, [lanes], room) if shared else Ruler.fit([lanes], ranks, room)
        caption = wrap(wording.caption(lanes.trace), width)
        lines += [wording.called(name), *caption, *_rows(lanes, ruler, gutter, colour)]
        if not whole:
            lines += [*_axis(ruler, gutter, wording.unit(lanes.trace)), ""]
    if whole:
        lines += _axis(common, gutter, wording.unit(comparison.traces[0]))
    return "\n".join([*lines, *_legend(lines, comparison.traces, width)]).rstrip()


def _terminal(width: int | None, colour: bool | None) -> tuple[int, bool]:
    """Return the width and whether to use colours; what is `None` follows standard output."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    if width is None:
        known = terminal or os.environ.get("COLUMNS")
        width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns if known else PLAIN_WIDTH
    if colour is None:
        colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return max(width, 40), colour


def _gutter(traces: Sequence[Lanes]) -> int:
    """Return the width of the names before the timeline, of ranks and strips: `rank 12 │`."""
    names = [f"rank {lanes.trace.ranks - 1}" for lanes in traces] + [name for lanes in traces for name in lanes.strips]
    return max(map(len, names)) + 2


def _drawn(trace: Trace) -> list[int]:
    """Return the ranks that have a line: all, or the first and the last."""
    ranks = list(range(trace.ranks))
    return ranks if trace.ranks <= _ALL_RANKS else ranks[:_FIRST_RANKS] + ranks[-_LAST_RANKS:]


def _rows(lanes: Lanes, ruler: Ruler, gutter: int, colour: bool, band: int = 0) -> Iterator[str]:
    """Yield a line for each drawn rank, and below it one for each channel on which moves run beside computing."""
    codes = lanes.trace.plan.bound.codes
    before = -1
    for rank in _drawn(lanes.trace):
        if rank != before + 1:
            yield f"{'┆':>{gutter}} {rank - before - 1:,} more ranks"
        before = rank
        (_, cut, row), *rest = (_lane(lanes, ruler, rank, window, colour) for window in ruler.bands[band])
        for first, _, tail in rest:
            kinds = "".join(codes.kind[code] for code in lanes.trace.plan.bound.computing[rank][cut:first])
            mark = gap_mark(first - cut, kinds) if first > cut else "┄"
            row += f" {mark:┄^{ruler.gap - 2}} {tail}"
        yield f"{f'rank {rank}':<{gutter - 1}}│{row}".rstrip()
        for strip in lanes.strips:
            parts = (_strip(lanes.moves(rank, strip), ruler, window, colour) for window in ruler.bands[band])
            yield f"{strip:>{gutter - 2}} │{(' ' * ruler.gap).join(parts)}".rstrip()


def _lane(lanes: Lanes, ruler: Ruler, rank: int, window: tuple[int, int], colour: bool) -> tuple[int, int, str]:
    """Draw one rank within a window of columns; return the first and last of its actions there, and the text."""
    begin, end = window
    stop = min(end, ruler.column(lanes.span))  # on a shared axis, a lane ends with its own trace
    first = lanes.since(rank, (begin - 0.5) / ruler.scale) if begin else 0
    last = max(first, lanes.until(rank, (end - 0.5) / ruler.scale) if end < ruler.columns else lanes.count(rank))
    row = ["·"] * (stop - begin)
    short = _draw_bars(row, lanes.bars(rank, first, last), ruler, window, colour)
    if lanes.count(rank) <= _MOST_WORDS:
        _say_gaps(row, lanes.gaps(rank), ruler, begin)
    for place in short:
        if place < len(row) and row[place] == "·":
            row[place] = _SHORT
    return first, last, "".join(row) + " " * (end - max(stop, begin))


def _strip(moves: Iterable[Bar], ruler: Ruler, window: Window, colour: bool) -> str:
    """Draw moves within a window of columns; one that is too short to be written is a thin line."""
    bars, (begin, end) = [*moves], window
    row = [" "] * (end - begin)
    _draw_bars(row, bars, ruler, window, colour)
    for place in (ruler.column(bar.start) - begin for bar in bars):
        if 0 <= place < len(row) and row[place] == " ":
            row[place] = _SHORT
    return "".join(row)


def _draw_bars(row: list[str], bars: Iterable[Bar], ruler: Ruler, window: Window, colour: bool) -> list[int]:
    """Write actions into the row of a window; return where those are that are too short to be written."""
    begin = at = window[0]
    stop = begin + len(row)
    short = []
    for labels, bar in _labelled(bars):
        first, last = ruler.column(bar.start), ruler.column(bar.end)
        start, until = max(at, first), min(stop, last)
        text = "─" * max(0, until - start)
        if ruler.names_here(first, last, window, len("&".join(labels))):
            text = pair_cell(*labels, until - start) if len(labels) == 2 else cell(labels[0], until - start)
        if text:
            row[start - begin : until - begin] = [_painted(text, bar) if colour else text, *[""] * (len(text) - 1)]
            at = until
        elif bar.end > bar.start and first >= begin:
            short.append(start - begin)
    return short


def _labelled(bars: Iterable[Bar]) -> Iterator[tuple[tuple[str, ...], Bar]]:
    """Yield each action with its label, and both of a pair that shares a slot as one, with two labels."""
    waiting: tuple[str, ...] = ()
    for bar in bars:
        if bar.half == "upper":
            waiting = (bar.label,)
        else:
            yield (*waiting, bar.label), bar
            waiting = ()


def _say_gaps(row: list[str], gaps: Iterable[Gap], ruler: Ruler, begin: int) -> None:
    """Write the words of idle times into a row that begins at a column, where there is room."""
    for gap in gaps:
        start, until = ruler.column(gap.start) - begin, ruler.column(gap.end) - begin
        words = next((each for each in gap.words if len(each) + 2 <= until - start), None)
        if words and start >= 0 and until <= len(row) and set(row[start:until]) == {"·"}:
            row[start:until] = f"{words:·^{until - start}}"


def cell(label: str, width: int) -> str:
    """Return one action's cell: its label, then a line to its end; cut where the label does not fit."""
    if width <= 0:
        return ""
    if width > len(label):
        return f"{label:─<{width - 1}} "
    if width == len(label):
        return label
    kind = label.lstrip("0123456789")[:1]
    # Half a number would name another action: B10 is not cut to B1.
    return kind + "…" * (width - 1)


def pair_cell(forward: str, backward: str, width: int) -> str:
    """Return the cell of two actions that share a slot."""
    both = f"{forward}&{backward}"
    kinds = "&".join(label.lstrip("0123456789")[:1] for label in (forward, backward))
    return cell(next((text for text in (both, kinds) if len(text) <= width), "&"), width)


def _painted(text: str, bar: Bar) -> str:
    paper = bar.colour
    front = 231 if colours.ink(paper) == "#FFFFFF" else 16
    return f"\x1b[38;5;{front};48;5;{colours.ansi(paper)}m{text}\x1b[0m"


def _legend(lines: Sequence[str], traces: Sequence[Trace], width: int) -> list[str]:
    """Explain the letters, what idle time is drawn, and the mark of short actions, if there is one."""
    letters = wording.legend(traces) | {"F": wording.example(traces)[0]}
    idle = [words for what, words in wording.idle(traces).items() if what != "arrow"]
    short = [f"{_SHORT} actions too short to be drawn"] if any(_SHORT in line for line in lines) else []
    return wrap("; ".join([*letters.values(), *[f"· {', '.join(idle)}"] * bool(idle), *short]), width)


def _axis(ruler: Ruler, gutter: int, unit: str, band: int = 0) -> list[str]:
    return [" " * gutter + line for line in ruler.axis(unit, band) if line]
