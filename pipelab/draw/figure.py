"""Traces on matplotlib axes: lanes, bars, labels, axis and legend."""

from __future__ import annotations

import io
import re
import warnings
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from pipelab import files
from pipelab.draw import colours, wording
from pipelab.draw.bars import Bar, Lanes
from pipelab.errors import UsageError, clean
from pipelab.plan.actions import EVERY_KIND, PER_MICROBATCH, Action, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from pipelab.draw.bars import Bar, Gap, Lanes
    from pipelab.plan.actions import Kind
    from pipelab.simulation.comparison import Comparison
    from pipelab.trace.trace import Trace

# ── Labels: which fit into the bars, and at which size ────────────────────────────────────────────────────────────────

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
    wanted = max((text_width(_widest(lanes, kind)) * 7 + _AIR) / time for kind, time in typical.items())
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
    full = {kind: text_width(_widest(lanes, kind)) for kind in typical}
    lane = ax.get_window_extent().height / figure.dpi * 72 / max(lanes.trace.ranks, 1)
    sizes = [size for size in _SIZES if size * 1.1 < lane]
    if not sizes:
        return
    size = next((each for each in sizes if all(full[kind] * each <= room[kind] for kind in typical)), None)
    # Without letter and stage, 2F0 and 6F0 on one rank would be the same.
    short = size is None and not lanes.names_stages
    if size is None:
        number = text_width("0" * len(str(lanes.trace.plan.microbatches - 1)))
        least = min(room.values(), default=0.0) + _AIR / 2
        size = next((each for each in sizes if short and number * each <= least), sizes[-1])
    for rank, bar in bars:
        text = str(bar.action.microbatch) if short and bar.action.microbatch is not None else bar.label
        fits = text_width(text) * size + _AIR / 2 <= (bar.end - bar.start) * scale
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
        if words := next((each for each in gap.words if text_width(each) * size <= room), None):
            yield gap, words, size


def _typical(lanes: Lanes) -> dict[Kind, float]:
    typical = lanes.typical(range(lanes.trace.ranks))
    # An all-reduce comes once at the end of a row and does not set the size of the others.
    return {kind: time for kind, time in typical.items() if kind in PER_MICROBATCH}


def _widest(lanes: Lanes, kind: Kind) -> str:
    """Return a label as wide as any of a kind: all digits have one width."""
    length = lanes.longest_label(kind)
    return kind + "0" * (length - 1)


def text_width(text: str) -> float:
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


# ── The figure ────────────────────────────────────────────────────────────────────────────────────────────────────────

_COARSE_FROM, _PIXELS = 10_000, 1_600
"""Above so many actions, a lane is a row of so many pixels: viewers are slow with 60,000 shapes."""
_BAR = 0.86
"""The height of a bar, as a share of its lane."""
_STRIP = 0.12
"""The height of a strip of moves, which lies above the bars, as a share of the lane."""


def owner(drawing: Axes | Figure) -> Figure:
    """Return the figure of some axes, or the figure itself."""
    figure = drawing.get_figure(root=True)
    assert figure is not None
    return figure


def height(ranks: int) -> float:
    """Return the height of all lanes in inches; many lanes are lower each."""
    return min(ranks * min(max(4.8 / max(ranks, 1), 0.15), 0.36), 12.0)


def draw(trace: Trace, ax: Axes, name: str, until: float) -> None:
    """Draw the lanes, bars, labels and axis of one trace; the axis ends at `until`."""
    lanes = Lanes(trace)
    ax.set_ylim(trace.ranks - 0.5, -0.5)
    if sum(map(lanes.count, range(trace.ranks))) > _COARSE_FROM:
        _boxes([(0, rank, trace.makespan) for rank in range(trace.ranks)], colours.REST, "", ax)
        for rank in range(trace.ranks):
            extent = (0.0, trace.makespan, rank + _BAR / 2, rank - _BAR / 2)
            pixels = strip(lanes, rank, _PIXELS)
            ax.imshow(pixels, extent=extent, aspect="auto", interpolation="nearest", zorder=1)
        # Pictures set the limits to their own.
        ax.set_ylim(trace.ranks - 0.5, -0.5)
        ax.set_xlim(0, until or 1)
        _axis(trace, ax, name, "; actions thinner than a pixel are shown mixed")
    else:
        ax.set_xlim(0, until or 1)
        _idle(lanes, ax)
        _bars(lanes, ax)
        _arrow(lanes, ax)
        _axis(trace, ax, name)


def _bars(lanes: Lanes, ax: Axes) -> None:
    """Draw every bar, and the labels that fit."""
    from matplotlib.collections import LineCollection, PolyCollection

    bars = [(rank, bar) for rank in range(lanes.trace.ranks) for bar in lanes.bars(rank)]
    moves = [
        (move, (rank - _BAR / 2 + at * _STRIP, rank - _BAR / 2 + (at + 1) * _STRIP))
        for at, strip in enumerate(lanes.strips)
        for rank in range(lanes.trace.ranks)
        for move in lanes.moves(rank, strip)
    ]
    corners: dict[tuple[Kind, str], list[list[tuple[float, float]]]] = {}
    instants: list[tuple[list[tuple[float, float]], str]] = []  # an action without a duration is a line
    for bar, (top, bottom) in [*((bar, _heights(rank, bar, lanes)) for rank, bar in bars), *moves]:
        colour = bar.colour
        if bar.end > bar.start:
            box = [(bar.start, top), (bar.end, top), (bar.end, bottom), (bar.start, bottom)]
            corners.setdefault((bar.action.kind, colour), []).append(box)
        else:
            instants.append(([(bar.start, top), (bar.start, bottom)], colour))
    # The white edge tells neighbours apart; where bars are a hair wide it would hide them.
    room = points(ax) * lanes.trace.ranks / max(len(bars), 1)
    for (kind, colour), boxes in corners.items():
        collection = PolyCollection(boxes, facecolors=colour, edgecolors="white", linewidths=min(0.8, 0.08 * room))
        collection.set_gid(f"{kind} {colour}")
        ax.add_collection(collection, autolim=False)
    if instants:
        lines, ink = zip(*instants, strict=True)
        ax.add_collection(LineCollection(lines, colors=ink, linewidths=1.2), autolim=False)
    for label in fitting(lanes, bars, ax):
        top, bottom = _heights(label.rank, label.bar, lanes)
        ax.text(
            (label.bar.start + label.bar.end) / 2,
            (top + bottom) / 2,
            label.text,
            fontsize=label.size,
            color=colours.ink(label.bar.colour),
            ha="center",
            va="center_baseline",
            clip_on=True,
            parse_math=False,
        )


def _idle(lanes: Lanes, ax: Axes) -> None:
    """Draw each idle time: light, with a border, the hatch of its reason, and its words where they fit."""
    gaps = [gap for rank in range(lanes.trace.ranks) for gap in lanes.gaps(rank)]
    for reason, hatch in colours.HATCHES.items():
        boxes = [(gap.start, gap.idle.rank, gap.end) for gap in gaps if gap.idle.reason == reason]
        if boxes:
            _boxes(boxes, colours.ground(reason), hatch, ax, len(lanes.strips) * _STRIP)
    for gap, words, size in in_gaps(gaps, ax):
        ink = colours.ground(gap.idle.reason).ink
        middle = (gap.start + gap.end) / 2
        style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "clip_on": True, "parse_math": False}
        ax.text(middle, gap.idle.rank, words, fontsize=size, color=ink, gid="idle", **style)


def _boxes(
    spans: Sequence[tuple[float, int, float]], ground: colours.Ground, hatch: str, ax: Axes, strips: float = 0.0
) -> None:
    """Draw idle times of one look, below strips; each is its start, its rank and its end."""
    from matplotlib.collections import PolyCollection

    top, bottom = strips - _BAR / 2, _BAR / 2
    boxes = [[(start, r + top), (end, r + top), (end, r + bottom), (start, r + bottom)] for start, r, end in spans]
    # A hatch has the colour of the edge, so the border is drawn apart.
    for edge, zorder in ((ground.lines, 0.5), (ground.border, 0.6)):
        paper = ground.paper if edge == ground.lines else "none"
        shapes = PolyCollection(boxes, facecolors=paper, edgecolors=edge, linewidths=0.5, zorder=zorder)
        shapes.set_hatch(2 * hatch if edge == ground.lines else "")
        shapes.set_gid("idle" if edge == ground.lines else "border")
        ax.add_collection(shapes, autolim=False)


def _arrow(lanes: Lanes, ax: Axes) -> None:
    """Point at the longest wait, from the action whose value it waits for."""
    if (found := lanes.longest_wait()) is None:
        return
    gap, giver = found
    rank = lanes.trace.plan.bound.rank_of[lanes.trace.plan.bound.codes.code(giver.action)]
    down = 1 if gap.idle.rank > rank else -1
    start = (giver.end - min(0.3 * (giver.end - giver.start), 0.02 * lanes.span), rank + down * 0.25 * _BAR)
    end = (gap.end - min(0.1 * (gap.end - gap.start), 0.01 * lanes.span), gap.idle.rank - down * 0.3 * _BAR)
    style = {"arrowstyle": "-|>", "color": colours.WAIT.ink, "linewidth": 1, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", end, start, arrowprops=style, annotation_clip=False, gid="idle")


def _heights(rank: int, bar: Bar, lanes: Lanes) -> tuple[float, float]:
    """Return the upper and lower edge of a bar, below its rank's strips; the axis points down."""
    top, bottom = rank - _BAR / 2 + len(lanes.strips) * _STRIP, rank + _BAR / 2
    middle = (top + bottom) / 2
    return (top, middle) if bar.half == "upper" else (middle, bottom) if bar.half == "lower" else (top, bottom)


def _axis(trace: Trace, ax: Axes, name: str, note: str = "") -> None:
    """Write the title, the ranks and the time axis."""
    from matplotlib.ticker import MaxNLocator

    if len(name) > 100:
        name = _without_middle(name)
    ax.set_title(f"{name}\n{wording.figures(trace)}", loc="left", fontsize=10, linespacing=1.4, parse_math=False)
    ax.set_xlabel(f"time ({wording.unit(trace)}){note}", loc="left", parse_math=False)
    if trace.ranks <= 40:
        size = 10 if height(trace.ranks) / trace.ranks >= 0.2 else 7
        ax.set_yticks(range(trace.ranks), [f"rank {rank}" for rank in range(trace.ranks)], fontsize=size)
    else:
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_ylabel("rank")
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "left", "right"]].set_visible(False)


def _without_middle(name: str) -> str:
    """Return the start and the end of a long name, cut between words if these are short."""
    start, end = name[:70], name[-27:]
    if " " in start[50:]:
        start = start[: start.rindex(" ")]
    if " " in end[:13]:
        end = end[end.index(" ") + 1 :]
    return f"{start} … {end}"


def _entries(traces: Sequence[Trace], width: float) -> tuple[list[Patch], int]:
    """Return the entries of a legend, and how many of them fit side by side into so many inches."""
    from matplotlib.patches import Patch

    there = {kind for trace in traces for kind in trace.plan.bound.kinds}
    there |= {event.action.kind for trace in traces for event in trace.moves}
    patches = [
        Patch(facecolor=colours.PALETTE[kind][0], label=f"{kind} {Action(kind).word}")
        for kind in EVERY_KIND
        if kind in there
    ]
    for label, ground in (("waits", colours.WAIT), ("not begun, or done", colours.REST)):
        hatch = "" if ground is colours.WAIT else "//"
        patches.append(Patch(facecolor=ground.paper, edgecolor=ground.border, linewidth=0.5, hatch=hatch, label=label))
    widest = max(text_width(str(patch.get_label())) for patch in patches) + 3  # with the swatch and the space
    return patches, max(1, min(len(patches), int(72 * width / (9 * widest))))


def legend(traces: Sequence[Trace], ax: Axes) -> None:
    """Draw the legend of the colours used, below the axis on the right."""
    from matplotlib.transforms import ScaledTranslation

    narrow = owner(ax).get_figwidth() < _NARROW  # then the legend does not fit beside the axis's name
    patches, columns = _entries(traces, owner(ax).get_figwidth())
    below = ScaledTranslation(_RIGHT / 2 if narrow else 0, (-36 if narrow else -20) / 72, owner(ax).dpi_scale_trans)
    ax.legend(
        handles=patches,
        loc="upper right",
        bbox_to_anchor=(1, 0),
        bbox_transform=ax.transAxes + below,
        ncols=columns if narrow else len(patches),
        frameon=False,
        borderaxespad=0,
        columnspacing=1.2,
        handlelength=1.2,
        handletextpad=0.5,
        fontsize=9,
    )


_LEFT, _RIGHT, _TITLE, _AXIS = 0.75, 0.3, 0.55, 0.62
"""The margins of one timeline, in inches: rank names, nothing, two lines of title, axis and legend."""
_NARROWEST, _WIDEST = 8.0, 14.0
"""How many inches the time may take."""
_NARROW = 7.5
"""Figures of fewer inches have the legend below the axis's name, in as many rows as it needs."""


WIDTHS = {"beamer": 5.04, "column": 3.25, "page": 6.75}
"""Names of widths in inches: the text of a LaTeX beamer slide, and a column and a page of two columns of a paper."""


def plot(trace: Trace, ax: Axes | None = None, width: float | str | None = None) -> Axes:
    """Draw a trace: rank 0 on top, time from left to right, idle time hatched."""
    if ax is None:
        ax = _figure([trace], same_axis=False, width=_inches(width))[1][0]
    name = ", ".join(filter(None, [wording.headline(trace), wording.costs(trace)]))
    draw(trace, ax, name, trace.makespan)
    owner(ax).set_label(f"{name}\n{wording.figures(trace)}")
    if width is not None:
        ax.set_title("", loc="left")
    legend([trace], ax)
    return ax


def _inches(width: float | str | None) -> float | None:
    """Return a width in inches."""
    if width is None:
        return None
    found = WIDTHS.get(width) if isinstance(width, str) else width
    if not isinstance(found, (int, float)) or not 2 <= found <= 40:
        raise UsageError(f"width={width!r}: expected 2 to 40 inches, or {', '.join(map(repr, WIDTHS))}")
    return float(found)


def plot_comparison(comparison: Comparison) -> Figure:
    """Draw traces one above the other, on one time axis if their units agree."""
    figure, axes = _figure(comparison.traces, same_axis=comparison.shares_axis)
    longest = max(trace.makespan for trace in comparison.traces)
    for trace, name, ax in zip(comparison.traces, comparison.names, axes, strict=True):
        until = longest if comparison.shares_axis else trace.makespan
        draw(trace, ax, wording.called(name), until)
    figure.set_label(f"Comparison of {', '.join(map(wording.called, comparison.names))}")
    if comparison.shares_axis:
        for ax in axes[:-1]:
            ax.set_xlabel("")
    legend(comparison.traces, axes[-1])
    return figure


def svg(trace: Trace) -> str:
    """Return a trace's figure as SVG with searchable text."""
    return svg_of(owner(plot(trace)))


def comparison_svg(comparison: Comparison) -> str:
    """Return a comparison's figure as SVG."""
    return svg_of(plot_comparison(comparison))


def write(drawing: Axes | Figure, path: Path) -> Path:
    """Write a figure, or the figure of some axes, in the format of the suffix; return the path."""
    buffer = io.BytesIO()
    _save(owner(drawing), buffer, path.suffix.lower().removeprefix("."))
    return files.write(path, buffer.getvalue())


def svg_of(figure: Figure) -> str:
    """Return a figure as SVG."""
    buffer = io.BytesIO()
    _save(figure, buffer, "svg")
    return buffer.getvalue().decode()


def _save(figure: Figure, buffer: io.BytesIO, suffix: str) -> None:
    """Write a figure, the same bytes every time; its label is its title, for those who do not see it."""
    import matplotlib as mpl

    title, _, about = clean(str(figure.get_label()), keep="\n").partition("\n")
    svg_data = {"Date": None, "Title": title, "Description": about}
    metadata = {"svg": svg_data, "pdf": {"CreationDate": None, "Title": title, "Subject": about}}.get(suffix, {})
    with (
        mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pipelab", "pdf.fonttype": 42}),
        warnings.catch_warnings(),
    ):
        # A name may have letters that the font lacks; they show as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(buffer, format=suffix, dpi=160, metadata=metadata)
    if suffix == "svg":
        drawn = _smaller(buffer.getvalue().decode()).encode()
        buffer.seek(0)
        buffer.truncate()
        buffer.write(drawn)


_FONTS = r" font-family: ('DejaVu Sans')[^;\"]*;?"
_ALIKE = r'(<g [^>]*)>((?:\s*<path d="[^"]*") style="([^"]*)"/>(?:\s*<path d="[^"]*" style="\3"/>)*\s*</g>)'
"""A group whose shapes have one style."""


def _smaller(drawn: str) -> str:
    """Return Matplotlib's SVG without what it repeats, a third of the size: nothing of a figure is outside its axes."""
    head, mark, drawn = drawn.replace("<svg ", '<svg role="img" ', 1).partition("</metadata>")
    drawn = re.sub("<[^>]+>", _smaller_tag, drawn).replace("<g ", "<g font-family=\"'DejaVu Sans', sans-serif\" ", 1)
    shared = lambda found: f'{found[1]} style="{found[3]}">' + found[2].replace(f' style="{found[3]}"', "")  # noqa: E731
    return head + mark + re.sub(r"\n +", "\n", re.sub(_ALIKE, shared, drawn))


def _smaller_tag(tag: re.Match[str]) -> str:
    """Return a tag with coordinates of one decimal, short ways around rectangles, and without fonts and clip paths."""
    found = re.sub(r' (clip-path|transform)="(url|rotate\(-0 )[^"]*"', "", re.sub(r"\s+", " ", tag[0]))
    found = re.sub(r' (d|x|y|transform)="[^"]*"', lambda each: re.sub(r"(\.\d)\d+", r"\1", each[0]), found)
    found = re.sub(r"M ([\d.]+ [\d.]+) L ([\d.]+) [\d.]+ L \2 ([\d.]+) L ([\d.]+) \3 z ", r"M\1H\2V\3H\4z", found)
    return re.sub(_FONTS, "", found)


def _figure(traces: Sequence[Trace], same_axis: bool, width: float | None = None) -> tuple[Figure, list[Axes]]:
    """Return a figure with one pair of axes per trace, as wide as the labels need and as high as the ranks."""
    from matplotlib.figure import Figure

    wide = min(max(*(inches(Lanes(trace)) for trace in traces), _NARROWEST), _WIDEST)
    title = _TITLE
    if width is not None:
        wide, title = width - _LEFT - _RIGHT, 0.1
    lanes = [height(trace.ranks) for trace in traces]
    high = sum(lanes) + len(traces) * title + (len(traces) if not same_axis else 1) * _AXIS
    if width is not None and width < _NARROW:  # the legend is below the axis's name
        patches, columns = _entries(traces, width)
        high += 0.2 * -(-len(patches) // columns)
    if same_axis:
        high += (len(traces) - 1) * 0.3  # tick labels between two timelines
    figure = Figure(figsize=(_LEFT + wide + _RIGHT, high))
    axes: list[Axes] = []
    top = high
    for each in lanes:
        top -= title + each
        box = (_LEFT / (_LEFT + wide + _RIGHT), top / high, wide / (_LEFT + wide + _RIGHT), each / high)
        axes.append(figure.add_axes(box, sharex=axes[0] if axes and same_axis else None))
        top -= 0.3 if same_axis else _AXIS
    return figure, axes
