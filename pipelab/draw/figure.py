"""Traces on matplotlib axes: lanes, bars, labels, axis and legend."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from functools import cache
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any

from pipelab import files
from pipelab.draw import colours, wording
from pipelab.draw.bars import Bar, Lanes
from pipelab.errors import UsageError, clean
from pipelab.plan.actions import PER_MICROBATCH, Action, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pipelab.simulation.comparison import Comparison
    from pipelab.trace.trace import Trace

    Colours = Mapping[Kind, str]

# ── Labels: which fit into the bars, and at which size ────────────────────────────────────────────────────────────────

_SIZES = (9.0, 8.0, 7.0)
"""The type sizes to try, in points; small axes have the last. What does not fit in that has no label."""
_AIR = 2.0
"""The least difference between a bar's width and its label's, in points."""


def points(ax: Axes) -> float:
    """Return the width of some axes in points."""
    return float(ax.get_window_extent().width / owner(ax).dpi * 72)


def _small(ax: Axes) -> bool:
    """Return whether some axes are narrower than 5 inches: then they have 7 points of type, and one line of title."""
    return points(ax) < _SMALL


def _lane(ax: Axes) -> float:
    """Return the height of a lane in points."""
    high = ax.get_window_extent().height / owner(ax).dpi * 72
    return float(high / max(abs(ax.get_ylim()[0] - ax.get_ylim()[1]), 1))


def _sizes(ax: Axes) -> list[float]:
    """Return the sizes of type that a lane is high enough for, the largest first."""
    return [size for size in _SIZES[2 * _small(ax) :] if size * 1.1 < _lane(ax)]


def inches(lanes: Lanes) -> float:
    """Return the width in inches at which labels of 7 points fit."""
    typical = _typical(lanes)
    if not typical or not lanes.span:
        return 0.0
    wanted = max((text_width(_widest(lanes, kind)) * 7 + _AIR) / time for kind, time in typical.items())
    return wanted * lanes.span / 72


def fitting(lanes: Lanes, bars: Sequence[tuple[int, Bar]], ax: Axes) -> Iterator[tuple[int, Bar, str, float]]:
    """Yield the labels that fit their bars: the rank, the bar, the text and its size.

    All have one size: the largest at which the usual actions of every kind have room for theirs. If there is none,
    labels lose what the colour shows too, the letter and which of two stages, and keep the micro-batch. Labels that
    still do not fit are left out.
    """
    if not lanes.span:
        return
    first, last = ax.get_xlim()
    scale = points(ax) / abs(last - first)  # points per unit of time
    typical = _typical(lanes)
    room = {kind: time * scale - _AIR for kind, time in typical.items()}
    full = {kind: text_width(_widest(lanes, kind)) for kind in typical}
    if lanes.label:
        full |= {bar.action.kind: max(map(text_width, {each.label for _, each in bars})) for _, bar in bars}
    lane, sizes = _lane(ax), _sizes(ax)
    if not sizes:
        return
    whole = [size for size in sizes if all(full[kind] * size <= room[kind] for kind in typical)]
    short = not whole and lanes.most_stages <= 2 and not lanes.label
    number = text_width("0" * len(str(lanes.trace.plan.microbatches - 1)))
    least = min(room.values(), default=0.0) + _AIR / 2
    numbers = [size for size in sizes if short and number * size <= least]
    size = [*whole, *numbers, sizes[-1]][0]
    for rank, bar in bars:
        text = str(bar.action.microbatch) if short and bar.action.microbatch is not None else bar.label
        fits = text_width(text) * size + _AIR / 2 <= (bar.end - bar.start) * scale
        if fits and (bar.half == "whole" or size * 2.2 < lane):
            yield rank, bar, text, size


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

    with warnings.catch_warnings(action="ignore"):  # a letter that the font lacks is a box
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
_STRIPS = 0.3
"""The height of the strips of moves together, which lie above the bars, as a share of the lane."""


def owner(drawing: Axes | Figure) -> Figure:
    """Return the figure of some axes, or the figure itself."""
    figure = drawing.get_figure(root=True)
    assert figure is not None
    return figure


def draw(lanes: Lanes, ax: Axes, name: str, until: float, named: Sequence[Trace]) -> None:
    """Draw one trace; the axis explains the labels of some, and ends at `until`, or later if others share it."""
    trace, lowest, shown = lanes.trace, lanes.trace.ranks - 0.5, ax.get_xlim()[1]
    until = until or 1
    if beside := [each for each in ax.get_shared_x_axes().get_siblings(ax) if each is not ax and each.has_data()]:
        until = max(until, shown)
        for text in (each for other in beside for each in other.texts):  # what fitted still fits
            text.set_fontsize(text.get_fontsize() * shown / until)
    if [each for each in ax.get_shared_y_axes().get_siblings(ax) if each is not ax and each.has_data()]:
        lowest = max(lowest, ax.get_ylim()[0])
    ax.set(xlim=(0, until), ylim=(lowest, -0.5))
    if coarse(trace):
        _boxes([(0, rank, trace.makespan) for rank in range(trace.ranks)], colours.REST, "", ax)
        for rank in range(trace.ranks):
            extent = (0.0, trace.makespan, rank + _BAR / 2, rank - _BAR / 2)
            pixels = strip(lanes, rank, _PIXELS)
            ax.imshow(pixels, extent=extent, aspect="auto", interpolation="nearest", zorder=1)
        ax.set(xlim=(0, until), ylim=(lowest, -0.5))  # pictures set the limits to their own
        _axis(trace, ax, name, "; actions thinner than a pixel are shown mixed")
    else:
        _idle(lanes, ax)
        _bars(lanes, ax)
        _marks(lanes, ax)
        _axis(trace, ax, name, "" if lanes.label else f"; {wording.example(named)[0]}")


def coarse(trace: Trace) -> bool:
    """Return whether a trace is drawn as rows of pixels."""
    return sum(map(len, trace.plan.bound.computing)) > _COARSE_FROM


def _bars(lanes: Lanes, ax: Axes) -> None:
    """Draw every bar, and the labels that fit."""
    from matplotlib.collections import LineCollection, PolyCollection

    bars = [(rank, bar) for rank in range(lanes.trace.ranks) for bar in lanes.bars(rank)]
    count = len(lanes.strips)
    moves = [
        (move, (rank - _BAR / 2 + at * _STRIPS / count, rank - _BAR / 2 + (at + 1) * _STRIPS / count))
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
    labels = [(bar, text, size, _heights(rank, bar, lanes)) for rank, bar, text, size in fitting(lanes, bars, ax)]
    least = _SIZES[-1] * abs(ax.get_xlim()[1] - ax.get_xlim()[0]) / points(ax)  # the time of a letter as wide as high
    for move, place in moves:
        if move.action.traits.gathers and text_width(str(move.action.stage)) * least < move.end - move.start:
            labels.append((move, str(move.action.stage), _SIZES[-1], place))
    for bar, text, size, (top, bottom) in labels:
        ax.text(
            (bar.start + bar.end) / 2,
            (top + bottom) / 2,
            text,
            fontsize=size,
            color=colours.ink(bar.colour),
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
            _boxes(boxes, colours.ground(reason), hatch, ax, bool(lanes.strips) * _STRIPS)
    down = bool(lanes.strips) * _STRIPS / 2
    size = next(iter(_sizes(ax)[-2:]), inf)
    scale = points(ax) / abs(ax.get_xlim()[1] - ax.get_xlim()[0])  # points per unit of time
    for gap in gaps:
        room = (gap.end - gap.start) * scale - 2 * _AIR
        if words := next((each for each in gap.words if text_width(each) * size <= room), ""):
            place = ((gap.start + gap.end) / 2, gap.idle.rank + down)
            style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "clip_on": True, "parse_math": False}
            ax.text(*place, words, fontsize=size, color=colours.ground(gap.idle.reason).ink, gid="idle", **style)


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


def _marks(lanes: Lanes, ax: Axes) -> None:
    """Point at the longest wait, follow the ways of micro-batches, and hold each rank's first sequence of slices."""
    trace, bound = lanes.trace, lanes.trace.plan.bound
    ways, brackets = (wording.ways(trace), wording.brackets(trace)) if not _small(ax) else ({}, [])
    arrows: list[tuple[tuple[float, float], tuple[float, float], str]] = []  # from, to, colour
    if (found := lanes.longest_wait()) is not None:
        gap, giver = found
        rank = bound.rank_of[bound.codes.code(giver.action)]
        down = 1 if gap.idle.rank > rank else -1
        start = (giver.end - min(0.3 * (giver.end - giver.start), 0.02 * lanes.span), rank + down * 0.25 * _BAR)
        end = (gap.end - min(0.1 * (gap.end - gap.start), 0.01 * lanes.span), gap.idle.rank - down * 0.3 * _BAR)
        arrows.append((start, end, colours.WAIT.ink))
    forward = {event.action: event for event in trace.events}
    for m in ways:
        for before, after in pairwise(forward[Action("F", m, stage)] for stage in range(trace.plan.stages)):
            x, x2 = ((each.start + each.end) / 2 - trace.start for each in (before, after))
            y = 0.4 * _BAR * (1 if after.rank > before.rank else -1)
            y2 = y if after.rank == before.rank else -y  # a turn lies on the bars
            arrows.append(((x, before.rank + y), (x2, after.rank + y2), "black"))
    for start, end, ink in arrows:
        style = {"arrowstyle": "-|>", "color": ink, "linewidth": 1, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 8}
        ax.annotate("", end, start, arrowprops=style, annotation_clip=False, gid="idle")
    for rank, size in enumerate(brackets):
        if size:
            x, x2 = trace.starts[rank][0] - trace.start, trace.ends[rank][size - 1] - trace.start
            ax.plot([x, x, x2, x2], [rank - each for each in (0.37, 0.47, 0.47, 0.37)], color="black", linewidth=1)


def _heights(rank: int, bar: Bar, lanes: Lanes) -> tuple[float, float]:
    """Return the upper and lower edge of a bar, below its rank's strips; the axis points down."""
    top, bottom = rank - _BAR / 2 + bool(lanes.strips) * _STRIPS, rank + _BAR / 2
    middle = (top + bottom) / 2
    return (top, middle) if bar.half == "upper" else (middle, bottom) if bar.half == "lower" else (top, bottom)


def _axis(trace: Trace, ax: Axes, name: str, note: str) -> None:
    """Write the title, the ranks and the time axis."""
    from matplotlib.ticker import MaxNLocator

    small = _small(ax)
    size = 7 if small else 10
    if name:
        title = _cut(name, 0.96 * points(ax) / size)  # in pixels, small type is a little wider
        if not small:
            idea, caption, wide = wording.idea(trace), wording.caption(trace), int(points(ax) / 5.6)
            shorter = (textwrap.shorten(idea, most, placeholder="…") for most in range(len(idea), 0, -1))
            fit = (text for each in shorter if len(textwrap.wrap(text := f"{each} {caption}", wide)) < 4)
            title += "\n" + textwrap.fill(next(fit, caption), wide, max_lines=3)
        ax.set_title(title, loc="left", fontsize=size, linespacing=1.4, parse_math=False, pad=4)
    if ax.xaxis.get_tick_params().get("labelbottom", True):
        note = _cut(f"time ({wording.unit(trace)}){note}", points(ax) / size)
        ax.set_xlabel(note, loc="left", parse_math=False, fontsize=size)
    if _lane(ax) > 8:
        names = [f"rank {rank}" for rank in range(trace.ranks)]
        ax.set_yticks(range(trace.ranks), names, fontsize=size if _lane(ax) > 14 else 7)
    else:
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_ylabel("rank", fontsize=size)
    ax.tick_params(axis="x", labelsize=size)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "left", "right"]].set_visible(False)


def _cut(text: str, room: float) -> str:
    """Return a text without its middle, as long as fits a room in sizes of its type."""
    shorter = (wording.cut(text, letters) for letters in range(len(text), 0, -1))
    return next((each for each in shorter if text_width(each) <= room), "")


def _entries(traces: Sequence[Trace], own: Colours, small: bool) -> list[Artist]:
    """Return the entries of a legend: what is drawn."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    words = [(own.get(kind, colours.PALETTE[kind][0]), text) for kind, text in wording.legend(traces).items()]
    words += [(colours.PALETTE["F"][1], paler)] if (paler := wording.example(traces)[1]) else []
    patches: list[Artist] = [Patch(facecolor=colour, label=text) for colour, text in words]
    said = wording.idle([trace for trace in traces if not coarse(trace)])
    for label, ground, hatch in (
        (said.get("wait"), colours.WAIT, ""),
        (said.get("transfer"), colours.WAIT, 2 * colours.HATCHES["transfer"]),
        (said.get("idle"), colours.REST, "//"),
        ("idle" if any(map(coarse, traces)) else None, colours.REST, ""),
    ):
        if label:
            swatch = Patch(facecolor=ground.paper, edgecolor=ground.border, linewidth=0.5, hatch=hatch, label=label)
            patches.append(swatch)
    if arrow := said.get("arrow"):
        patches.append(Line2D([], [], color=colours.WAIT.ink, marker=">", markersize=4, label=arrow))
    marks = wording.marks([trace for trace in traces if not (small or coarse(trace))])
    return patches + [Patch(facecolor="none", label=mark) for mark in marks]


def _columns(patches: Sequence[Artist], room: float, size: float) -> int:
    """Return how many columns a legend may have in so many points."""
    import numpy as np

    widths = [(text_width(str(patch.get_label())) + 1.9) * size for patch in patches]
    fit = (n for n in range(len(widths), 1, -1) if sum(map(max, np.array_split(widths, n))) <= room)
    return next(fit, 1)


def legend(traces: Sequence[Trace], ax: Axes, own: Colours, given: bool = False) -> None:
    """Draw the legend of what is drawn, below the axis's name: outside of given axes, whose legend is hidden."""
    from matplotlib.transforms import ScaledTranslation

    small, patches = _small(ax), _entries(traces, own, _small(ax))
    size, edge, down = (7, _EDGES[True][0], 29) if small else (9, _EDGES[False][0], 36)
    below = ScaledTranslation(0.1 - edge, -down / 72, owner(ax).dpi_scale_trans)
    made = ax.legend(
        handles=patches,
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=ax.transAxes + below,
        ncols=_columns(patches, 72 * owner(ax).get_figwidth() - _AIR, size),
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        columnspacing=0.7,
        handlelength=0.85,
        handletextpad=0.35,
        labelspacing=0.25,
        fontsize=size,
    )
    made.set_visible(not given)


_EDGES = {False: (0.75, 0.3, 0.84, 0.62), True: (0.45, 0.12, 0.22, 0.42)}
"""The margins of a timeline in inches, and of a small one: rank names, nothing, the title, and axis and legend."""
_NARROWEST, _WIDEST, _SMALL = 8.0, 14.0, 360.0
"""How many inches the time may take, and below how many points axes are small."""

WIDTHS = {"beamer": 5.04, "column": 3.25, "page": 6.75}
"""Names of widths in inches: the text of a LaTeX beamer slide, and a column and a page of two columns of a paper."""


def plot(
    trace: Trace,
    ax: Axes | None = None,
    width: float | str | None = None,
    own: Colours | None = None,
    label: Callable[[Action], str] | None = None,
) -> Axes:
    """Draw a trace: rank 0 on top, time from left to right, idle time hatched."""
    given, own = ax is not None, own or {}
    if ax is None:
        ax = _figure([trace], same_axis=False, width=_inches(width), own=own)[1][0]
    name = ", ".join(filter(None, [wording.headline(trace), wording.costs(trace)]))
    draw(Lanes(trace, own, label), ax, "" if width is not None else name, trace.makespan, [trace])
    owner(ax).set_label(f"{name}\n{wording.told(trace)}")
    legend([trace], ax, own, given)
    return ax


def _inches(width: float | str | None) -> float | None:
    """Return a width in inches."""
    if width is None:
        return None
    try:
        found = float(WIDTHS.get(str(width), width))
    except (TypeError, ValueError):
        found = 0.0
    if not 2 <= found <= 40:
        raise UsageError(f"width={width!r}: expected 2 to 40 inches, or {', '.join(map(repr, WIDTHS))}")
    return found


def plot_comparison(
    comparison: Comparison,
    width: float | str | None = None,
    own: Colours | None = None,
    label: Callable[[Action], str] | None = None,
) -> Figure:
    """Draw traces one above the other, on one time axis if their units agree."""
    own = own or {}
    figure, axes = _figure(comparison.traces, comparison.shares_axis, _inches(width), own)
    longest = max(trace.makespan for trace in comparison.traces)
    for trace, name, ax in zip(comparison.traces, comparison.names, axes, strict=True):
        until, named = (longest, comparison.traces) if comparison.shares_axis else (trace.makespan, [trace])
        draw(Lanes(trace, own, label), ax, wording.called(name), until, named)
    figure.set_label(f"Comparison of {', '.join(map(wording.called, comparison.names))}")
    legend(comparison.traces, axes[-1], own)
    return figure


def svg(trace: Trace) -> str:
    """Return a trace's figure as SVG with searchable text."""
    return svg_of(owner(plot(trace)))


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


def _figure(traces: Sequence[Trace], same_axis: bool, width: float | None, own: Colours) -> tuple[Figure, list[Axes]]:
    """Return a figure with one pair of axes per trace, as wide as the labels need and as high as the ranks.

    On one axis, the last has the numbers.
    """
    from matplotlib.figure import Figure

    wide = min(max(*(inches(Lanes(trace)) for trace in traces), _NARROWEST), _WIDEST)
    small = width is not None and 72 * (width - sum(_EDGES[False][:2])) < _SMALL
    left, right, title, axis = _EDGES[small]
    scale = 0.6 if small and len(traces) > 1 else 1
    # Many lanes are lower each.
    lanes = [scale * min(n * min(max(4.8 / max(n, 1), 0.15), 0.36), 12.0) for n in (trace.ranks for trace in traces)]
    if width is not None:
        wide, title = width - left - right, title if len(traces) > 1 else 0.1
    patches = _entries(traces, own, small)
    columns = _columns(patches, 72 * (wide + left + right) - _AIR, 7 if small else 9)
    axis += (0.14 if small else 0.18) * -(-len(patches) // columns)
    high = sum(lanes) + len(traces) * title + (len(traces) if not same_axis else 1) * axis
    if same_axis:
        high += (len(traces) - 1) * 0.1
    figure = Figure(figsize=(left + wide + right, high))
    axes: list[Axes] = []
    top = high
    for at, each in enumerate(lanes):
        top -= title + each
        box = (left / (left + wide + right), top / high, wide / (left + wide + right), each / high)
        axes.append(figure.add_axes(box, sharex=axes[0] if axes and same_axis else None))
        axes[-1].tick_params(labelbottom=not same_axis or at == len(lanes) - 1)
        top -= 0.1 if same_axis else axis
    return figure, axes
