"""Pictures of faults with matplotlib: rows of cells, a cycle as numbered arrows, and what it says below."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pipelab.draw import colours, figure
from pipelab.draw.order import sentences
from pipelab.errors import clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pipelab.draw.order import Arrow, Cell, Drawing

INK, SOFT, RED, GREEN, PAPER = "#1c1c1c", "#5d5d5d", "#b00d1b", "#0f6b2f", "#fffffe"
_VARIABLES = {INK: "var(--text)", SOFT: "var(--soft)", RED: "var(--need)", GREEN: "var(--give)", PAPER: "var(--paper)"}
"""The colours that a page has two of, light and dark. The paper is not quite white, which is also the ink on bars."""
KEY = (
    ("blocked", "red frame: blocked, it waits for what cannot come"),
    ("waiting", "faint: comes after that, so it never starts"),
    ("missing", "dotted: missing"),
    ("struck", "struck out: may not be there"),
    ("over", "dashed frame: more activations than the cap allows"),
    ("moved", "green frame: moved"),
)
_FRAMES: dict[str, tuple[str, float, Literal[":", "-", "--"]]] = {
    "over": (RED, 2.0, "--"),
    "moved": (GREEN, 2.0, "-"),
    "missing": (RED, 1.2, ":"),
    "blocked": (RED, 2.4, "-"),
}
"""The colour of a cell's frame, its width and its line, by what it says."""
_TRANSFER = "#c9c9c9"
_HIGH, _LEFT, _GAP, _LINE = 0.3, 0.75, 0.22, 0.19
"""Inches: the height of a cell, the rank names, what stands for left-out columns, a line of text."""


@dataclass(frozen=True, slots=True)
class _Grid:
    """Where the shown cells of a drawing are, in inches from the top left."""

    drawing: Drawing
    top: float
    cell: float
    pitch: float
    lines: dict[int, int]
    left: dict[int, float]

    @classmethod
    def of(cls, drawing: Drawing, top: float) -> _Grid:
        rows, columns = drawing.view
        cell = drawing.cell
        left: dict[int, float] = {}
        at = _LEFT
        for before, column in zip([-1, *columns], columns, strict=False):
            at += _GAP * (column != before + 1)
            left[column] = at
            at += cell
        pitch = _HIGH + (0.46 if drawing.arrows else 0.1)
        return cls(drawing, top, cell, pitch, {rank: line for line, rank in enumerate(rows)}, left)

    @property
    def width(self) -> float:
        return max(self.left.values(), default=_LEFT) + self.cell + 0.2

    @property
    def height(self) -> float:
        return 0.3 + self.pitch * len(self.lines) + 0.15 * bool(self.drawing.arrows)

    def y(self, rank: int) -> float:
        """Return the upper edge of a row."""
        return self.top + 0.3 + self.pitch * self.lines[rank] + (self.pitch - _HIGH) * 0.7

    def shows(self, place: tuple[int, int]) -> bool:
        return place[0] in self.lines and place[1] in self.left


def plot(drawings: Sequence[Drawing], title: str, words: bool = True) -> Figure:
    """Draw pictures one below the other."""
    from matplotlib.figure import Figure

    grids: list[_Grid] = []
    texts: list[tuple[float, str, str]] = []
    top = 0.12
    wide = max([7.0 if words else 0.0, *(_Grid.of(each, 0).width for each in drawings)])

    def write(text: str, colour: str = INK) -> None:
        nonlocal top
        for line in textwrap.wrap(clean(text), max(40, int(wide / 0.072)), break_on_hyphens=False):
            texts.append((top, line, colour))
            top += _LINE

    if words:
        write(title)
    for drawing in drawings:
        if words:
            top += _LINE / 2
            write(drawing.title, GREEN if drawing.after else RED if drawing.faulty else INK)
        grids.append(_Grid.of(drawing, top))
        top += grids[-1].height + 0.1
        if words:
            for number, sentence in sentences(drawing):
                write(f"{number}. {sentence}" if number else sentence)
            if drawing.hint:
                write(f"try: {drawing.hint}", GREEN)
            write("; ".join(key_of(drawing)), SOFT)
    made = Figure(figsize=(wide, top + 0.05), facecolor=PAPER)
    made.set_label(title or "; ".join(drawing.title for drawing in drawings))
    ax = made.add_axes((0, 0, 1, 1))
    ax.set_xlim(0, wide)
    ax.set_ylim(top + 0.05, 0)
    ax.axis("off")
    for at, line, colour in texts:
        ax.text(0.1, at, line, fontsize=8.5, color=colour, va="top", parse_math=False)
    for grid in grids:
        _draw(grid, ax)
    return made


def key_of(drawing: Drawing) -> list[str]:
    """Return what the looks of a picture's cells mean, and how much of the plan is not shown."""
    rows, columns = drawing.view
    cells = [cell for rank in rows for cell in drawing.rows[rank]]
    there: set[str] = {cell.state for cell in cells}
    there |= {name for name in ("struck", "over", "moved") if any(getattr(cell, name) for cell in cells)}
    key = [words for name, words in KEY if name in there]
    shown = [cell.actions[0] for cell in cells if len(cell.actions) == 1 and cell.position is not None]
    examples = [f"{each} = stage {each.stage}, {each.word}, micro-batch {each.microbatch}" for each in shown[:1]]
    moved = dict.fromkeys(f"{each.kind}: {each.word}" for each in shown if not each.traits.computes)
    key += [*(examples if shown and shown[0].microbatch is not None else []), *moved]
    longest = max(map(len, drawing.rows), default=0)
    if len(columns) < longest:
        key.append(f"{len(columns)} of {longest} columns are shown")
    if len(rows) < len(drawing.rows):
        key.append(f"{len(rows)} of {len(drawing.rows)} ranks are shown")
    return key


def svg(drawing: Drawing) -> str:
    """Return a picture alone as an SVG element for a page, in the page's colours."""
    source = figure.svg_of(plot([drawing], "", words=False))
    source = source[source.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        source = source.replace(colour, variable)
    return source


def _draw(grid: _Grid, ax: Axes) -> None:
    """Draw the cells, the names of rows, and the arrows."""
    drawing = grid.drawing
    small: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "color": SOFT}
    before = -1
    for column, left in grid.left.items():
        if column != before + 1:
            for rank in grid.lines:
                if column < len(drawing.rows[rank]):
                    ax.text(left - _GAP / 2, grid.y(rank) + _HIGH / 2, "…", **small)
        before = column
    for rank in grid.lines:
        name = "no rank" if drawing.unplaced and rank == len(drawing.rows) - 1 else f"rank {rank}"
        ax.text(_LEFT - 0.12, grid.y(rank) + _HIGH / 2, name, ha="right", va="center", fontsize=8.5, color=INK)
        for column, left in grid.left.items():
            if column < len(drawing.rows[rank]):
                _cell(drawing.rows[rank][column], left, grid.y(rank), grid.cell, ax)
    for arrow in drawing.arrows:
        if grid.shows(arrow.start) and grid.shows(arrow.end):
            _arrow(arrow, grid, ax)


def _cell(cell: Cell, left: float, top: float, wide: float, ax: Axes) -> None:
    """Draw one cell: a box, or two for a pair, a frame, and its name."""
    from matplotlib.patches import Rectangle

    fills = _fills(cell)
    pale = cell.state == "waiting"
    for number, fill in enumerate(fills):
        part = _HIGH / len(fills)
        box = Rectangle((left + 0.015, top + number * part), wide - 0.03, part, facecolor=fill, linewidth=0)
        box.set_alpha(0.25 if pale else 1)
        ax.add_patch(box)
    name = "over" if cell.over else "moved" if cell.moved else cell.state
    if name in _FRAMES:
        edge, width, dots = _FRAMES[name]
        frame = Rectangle((left + 0.03, top + 0.015), wide - 0.06, _HIGH - 0.03, fill=False, edgecolor=edge)
        frame.set_linewidth(width)
        frame.set_linestyle(dots)
        frame.set_gid(f"{name} {cell.label}")
        ax.add_patch(frame)
    texts = list(map(str, cell.actions)) if len(fills) > 1 else [cell.label]
    inks = [INK] * len(texts) if pale else [colours.ink(fill) for fill in fills] or [RED]
    for number, (label, ink) in enumerate(zip(texts, inks, strict=True)):
        middle = (left + wide / 2, top + _HIGH * (number + 0.5) / len(texts))
        size = 8 if len(texts) == 1 else 6.5
        ax.text(*middle, label, ha="center", va="center", fontsize=size, color=ink, zorder=4, parse_math=False)
    if cell.struck:
        (line,) = ax.plot([left + 0.04, left + wide - 0.04], [top + 0.04, top + _HIGH - 0.04], color=RED, linewidth=1.6)
        line.set_gid(f"struck {cell.label}")


def _fills(cell: Cell) -> list[str]:
    """Return the colours of a cell, from above: one, two of a pair, none of what is missing."""
    if cell.state == "missing":
        return []
    known = (type(action.microbatch) in (int, type(None)) for action in cell.actions)
    fills = zip(cell.actions, known, strict=True)
    return [colours.of(action) if right else _TRANSFER for action, right in fills] or [_TRANSFER]


def _arrow(arrow: Arrow, grid: _Grid, ax: Axes) -> None:
    """Draw a step of a cycle from one cell to another, with its number on it."""
    from matplotlib.patches import FancyArrowPatch

    (rank, column), (other, end) = arrow.start, arrow.end
    aside = 0.13 * grid.cell
    x, x2 = grid.left[column] + grid.cell / 2, grid.left[end] + grid.cell / 2
    if rank == other:  # over the cycle's first row and under the others, where arrows between rows are fewest
        ranks = {each.start[0] for each in grid.drawing.arrows}
        to_right = 1 if x2 > x else -1
        over = rank == min(ranks) and (len(ranks) > 1 or x2 > x)  # two between the same cells do not cover each other
        x, x2 = x + to_right * aside, x2 - to_right * aside
        y = y2 = grid.y(rank) + _HIGH * (not over)
        rad = (-to_right if over else to_right) * 0.4 / max(abs(x2 - x), 0.1)
        bow = (0.0, -0.4 if over else 0.4)
        at = 0.5
    else:
        down = other > rank
        y, y2 = grid.y(rank) + _HIGH * down, grid.y(other) + _HIGH * (not down)
        x, x2 = x + aside, x2 - aside
        rad = 0.12
        bow = (-rad * (y2 - y), rad * (x2 - x))  # the y axis points down
        at = 0.28  # two arrows that cross have their numbers in different places
    line = FancyArrowPatch((x, y), (x2, y2), connectionstyle=f"arc3,rad={rad}", arrowstyle="-|>", shrinkA=0, shrinkB=0)
    line.set(color=RED, linewidth=1.5, mutation_scale=10, zorder=5)
    line.set_gid(f"arrow {arrow.number}")
    ax.add_patch(line)
    look = {"boxstyle": "circle,pad=0.15", "facecolor": PAPER, "edgecolor": RED, "linewidth": 1.0}
    # The curve's only control point is the middle, moved by `bow`.
    badge = (x + at * (x2 - x) + 2 * at * (1 - at) * bow[0], y + at * (y2 - y) + 2 * at * (1 - at) * bow[1])
    ax.text(*badge, str(arrow.number), ha="center", va="center", fontsize=7, color=RED, bbox=look, zorder=6)
