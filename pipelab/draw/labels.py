"""Which labels fit into the bars of a figure, and at which size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from pipelab.draw import colours
from pipelab.plan.actions import PER_MICROBATCH

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from matplotlib.axes import Axes

    from pipelab.draw.bars import Bar, Gap, Lanes
    from pipelab.plan.actions import Kind

_SIZES = (9.0, 8.0, 7.0, 6.0, 5.0)
"""The type sizes to try, in points; smaller ones are illegible."""
_AIR = 2.0
"""The least difference between a bar's width and its label's, in points."""


@dataclass(frozen=True, slots=True)
class Label:
    """A label that fits: its bar, its text and its size."""

    rank: int
    bar: Bar
    text: str
    size: float


def points(ax: Axes) -> float:
    """Return the width of some axes in points."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    return float(ax.get_window_extent().width / figure.dpi * 72)


def inches(lanes: Lanes) -> float:
    """Return the width in inches at which labels of 7 points fit."""
    typical = _typical(lanes)
    if not typical or not lanes.span:
        return 0.0
    wanted = max((width(_widest(lanes, kind)) * 7 + _AIR) / time for kind, time in typical.items())
    return wanted * lanes.span / 72


def fitting(lanes: Lanes, bars: Iterable[tuple[int, Bar]], ax: Axes) -> Iterator[Label]:
    """Yield the labels that fit their bars.

    All have one size: the largest at which the usual actions of every kind have room for theirs. If there is none,
    labels lose the letter, which the colour shows too, and keep the micro-batch. Labels that still do not fit are left
    out.
    """
    if not lanes.span:
        return
    figure = ax.get_figure(root=True)
    assert figure is not None
    first, last = ax.get_xlim()
    scale = points(ax) / abs(last - first)  # points per unit of time
    typical = _typical(lanes)
    room = {kind: time * scale - _AIR for kind, time in typical.items()}
    full = {kind: width(_widest(lanes, kind)) for kind in typical}
    lane = ax.get_window_extent().height / figure.dpi * 72 / max(lanes.trace.ranks, 1)
    sizes = [size for size in _SIZES if size * 1.1 < lane]
    if not sizes:
        return
    size = next((each for each in sizes if all(full[kind] * each <= room[kind] for kind in typical)), None)
    # Without letter and stage, 2F0 and 6F0 on one rank would be the same.
    short = size is None and not lanes.names_stages
    if size is None:
        number = width("0" * len(str(lanes.trace.plan.microbatches - 1)))
        least = min(room.values(), default=0.0) + _AIR / 2
        size = next((each for each in sizes if short and number * each <= least), sizes[-1])
    for rank, bar in bars:
        text = str(bar.action.microbatch) if short and bar.action.microbatch is not None else bar.label
        fits = width(text) * size + _AIR / 2 <= (bar.end - bar.start) * scale
        if fits and (bar.half == "whole" or size * 2.2 < lane):
            yield Label(rank, bar, text, size)


def in_gaps(gaps: Iterable[Gap], ax: Axes) -> Iterator[tuple[Gap, str, float]]:
    """Yield the idle times that have room for words: the gap, the words, and their size."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    first, last = ax.get_xlim()
    lane = ax.get_window_extent().height / figure.dpi * 72 / max(abs(ax.get_ylim()[0] - ax.get_ylim()[1]), 1)
    size = next((each for each in _SIZES[1:] if each * 1.1 < lane), 0.0)
    for gap in gaps if size else ():
        room = (gap.end - gap.start) * points(ax) / abs(last - first) - 2 * _AIR
        if words := next((each for each in gap.words if width(each) * size <= room), None):
            yield gap, words, size


def _typical(lanes: Lanes) -> dict[Kind, float]:
    typical = lanes.typical(range(lanes.trace.ranks))
    # An all-reduce comes once at the end of a row and does not set the size of the others.
    return {kind: time for kind, time in typical.items() if kind in PER_MICROBATCH}


def _widest(lanes: Lanes, kind: Kind) -> str:
    """Return a label as wide as any of a kind: all digits have one width."""
    length = lanes.longest_label(kind)
    return kind + "0" * (length - 1)


def width(text: str) -> float:
    """Return a text's width in the size of its type: 1.27 for two digits."""
    return sum(map(_letter, text))


@cache
def _letter(letter: str) -> float:
    """Return one letter's width in the size of its type, in matplotlib's own font."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width, _, _ = text_to_path.get_text_width_height_descent(letter, FontProperties(size=100), ismath=False)
    return float(width) / 100


def strip(lanes: Lanes, rank: int, columns: int) -> Any:
    """Return one lane as a row of pixels, `[1, columns, 4]`: red, green, blue, and how much of the pixel is busy.

    Each pixel is the mean colour of the rank's actions in its time, so no bar is lost and none is drawn too wide.

        busy time up to t    ────────╱────╱‾‾‾     of one colour: a line that rises where a bar of it lies;
        pixel edges          |   |   |   |   |     its rise within a pixel is the colour's share there

    Example:
        >>> import pipelab
        >>> from pipelab.draw.bars import Lanes
        >>> lanes = Lanes(pipelab.simulate(pipelab.GPipe(ranks=2, microbatches=1)))    # rank 1: idle, F0, B0, idle
        >>> strip(lanes, 1, 3)[0, :, 3].tolist()
        [0.5, 1.0, 0.0]
    """
    import numpy as np

    edges = np.linspace(0.0, lanes.span, columns + 1)
    spans: dict[str, list[tuple[float, float, float]]] = {}
    for bar in lanes.bars(rank):
        share = 1.0 if bar.half == "whole" else 0.5
        spans.setdefault(bar.colour, []).append((bar.start, bar.end, share))
    pixels = np.zeros((1, columns, 4))
    for colour, found in spans.items():
        starts, ends, shares = np.array(found).T
        times = np.column_stack([starts, ends]).ravel()
        lasting = shares * (ends - starts)
        until = np.cumsum(lasting)
        busy = np.column_stack([until - lasting, until])
        inside = np.diff(np.interp(edges, times, busy.ravel())) * columns / lanes.span
        pixels[0, :, :3] += inside[:, None] * (np.array(colours.channels(colour)) / 255)
        pixels[0, :, 3] += inside
    worked = pixels[..., 3] > 0
    pixels[worked, :3] /= pixels[worked, 3:]
    return np.clip(pixels, 0.0, 1.0)
