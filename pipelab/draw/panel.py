"""One trace on matplotlib axes: lanes, bars, labels, axis and legend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelab.draw import coarse, colours, labels, wording
from pipelab.draw.lanes import Bar, Lanes
from pipelab.plan.actions import KINDS, Action, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pipelab.trace.trace import Trace

__all__ = ["draw", "height", "legend", "owner"]

_COARSE_FROM, _PIXELS = 10_000, 1_600
"""From so many actions on, a lane is a row of so many pixels: no viewer likes 60,000 shapes."""
_BAR = 0.86
"""The height of a bar, as a share of its lane."""


def owner(drawing: Axes | Figure) -> Figure:
    """Return the figure that everything belongs to."""
    figure = drawing.get_figure(root=True)
    assert figure is not None
    return figure


def height(ranks: int) -> float:
    """Return the inches that all lanes take: less for each where there are many."""
    return min(ranks * min(max(4.8 / max(ranks, 1), 0.15), 0.36), 12.0)


def draw(trace: Trace, ax: Axes, name: str, until: float) -> None:
    """Draw the lanes, bars, labels and axis of one trace; the axis ends at `until`."""
    lanes = Lanes(trace)
    _idle(trace, ax)
    ax.set_ylim(trace.ranks - 0.5, -0.5)
    if sum(map(lanes.count, range(trace.ranks))) > _COARSE_FROM:
        for rank in range(trace.ranks):
            extent = (0.0, trace.makespan, rank + _BAR / 2, rank - _BAR / 2)
            pixels = coarse.strip(lanes, rank, _PIXELS)
            ax.imshow(pixels, extent=extent, aspect="auto", interpolation="nearest", zorder=1)
        # Pictures set the limits to their own.
        ax.set_ylim(trace.ranks - 0.5, -0.5)
        ax.set_xlim(0, until or 1)
        _axis(trace, ax, name, "; actions thinner than a pixel are shown mixed")
    else:
        ax.set_xlim(0, until or 1)
        _bars(lanes, ax)
        _axis(trace, ax, name)


def _bars(lanes: Lanes, ax: Axes) -> None:
    """Draw every bar, and the labels that fit."""
    from matplotlib.collections import LineCollection, PolyCollection

    bars = [(rank, bar) for rank in range(lanes.trace.ranks) for bar in lanes.bars(rank)]
    corners: dict[tuple[Kind, str], list[list[tuple[float, float]]]] = {}
    instants: list[tuple[list[tuple[float, float]], str]] = []  # what takes no time is a line
    for rank, bar in bars:
        top, bottom = _heights(rank, bar)
        colour = colours.of(bar.action)
        if bar.end > bar.start:
            box = [(bar.start, top), (bar.end, top), (bar.end, bottom), (bar.start, bottom)]
            corners.setdefault((bar.action.kind, colour), []).append(box)
        else:
            instants.append(([(bar.start, top), (bar.start, bottom)], colour))
    # The white edge tells neighbours apart; where bars are a hair wide it would hide them.
    room = labels.points(ax) * lanes.trace.ranks / max(len(bars), 1)
    for (kind, colour), boxes in corners.items():
        collection = PolyCollection(boxes, facecolors=colour, edgecolors="white", linewidths=min(0.8, 0.08 * room))
        collection.set_gid(f"{kind} {colour}")
        ax.add_collection(collection, autolim=False)
    if instants:
        lines, ink = zip(*instants, strict=True)
        ax.add_collection(LineCollection(lines, colors=ink, linewidths=1.2), autolim=False)
    for label in labels.fitting(lanes, bars, ax):
        top, bottom = _heights(label.rank, label.bar)
        ax.text(
            (label.bar.start + label.bar.end) / 2,
            (top + bottom) / 2,
            label.text,
            fontsize=label.size,
            color=colours.ink(colours.of(label.bar.action)),
            ha="center",
            va="center_baseline",
            clip_on=True,
            parse_math=False,
        )


def _idle(trace: Trace, ax: Axes) -> None:
    """Lay a hatched strip under every lane: what no bar covers is idle."""
    from matplotlib.collections import PolyCollection

    span = trace.makespan
    strips = [
        [(0, rank - _BAR / 2), (span, rank - _BAR / 2), (span, rank + _BAR / 2), (0, rank + _BAR / 2)]
        for rank in range(trace.ranks)
    ]
    idle = PolyCollection(
        strips, facecolors=colours.IDLE, edgecolors=colours.IDLE_LINES, hatch="////", linewidths=0.5, zorder=0.5
    )
    idle.set_gid("idle")
    ax.add_collection(idle, autolim=False)


def _heights(rank: int, bar: Bar) -> tuple[float, float]:
    """Return the upper and lower edge of a bar; the axis points down."""
    top, bottom = rank - _BAR / 2, rank + _BAR / 2
    return (top, rank) if bar.half == "upper" else (rank, bottom) if bar.half == "lower" else (top, bottom)


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


def legend(traces: Sequence[Trace], ax: Axes) -> None:
    """Explain the colours that were used, below the axis on the right."""
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    there: set[Kind] = set()
    for trace in traces:
        numbering = trace.plan.program.numbering
        there.update({numbering.kind(code) for row in trace.plan.program.rows for code in row})
    patches = [
        Patch(facecolor=colours.PALETTE[kind][0], label=f"{kind} {Action(kind).word}")
        for kind in KINDS
        if kind in there
    ]
    patches.append(Patch(facecolor=colours.IDLE, edgecolor=colours.IDLE_LINES, hatch="////", label="idle"))
    below = ScaledTranslation(0, -20 / 72, owner(ax).dpi_scale_trans)
    ax.legend(
        handles=patches,
        loc="upper right",
        bbox_to_anchor=(1, 0),
        bbox_transform=ax.transAxes + below,
        ncols=len(patches),
        frameon=False,
        borderaxespad=0,
        columnspacing=1.2,
        handlelength=1.2,
        handletextpad=0.5,
        fontsize=9,
    )
