"""Ring all-reduces: a table of who sends which chunk to whom, and a picture of what every rank then holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelab.draw import colours
from pipelab.errors import UsageError, counted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pipelab_course.ring.ring import Send

_COLUMNS = 5
"""A table shows so many ranks; of more, the first ones."""
_DRAWN = 6
"""A figure has room for so many ranks."""
_CELL, _GAP = 0.26, 0.42
"""Inches of one chunk of one rank, and between two steps."""


def text(steps: Sequence[Sequence[Send]], chunks: Sequence[int]) -> str:
    """Return the messages as a table: a line for each step, a column for each sender."""
    ranks = len(chunks)
    sizes = " ".join(map(str, chunks if ranks <= _COLUMNS else [*chunks[:_COLUMNS], "…"]))
    head = f"{counted(ranks, 'rank')}, chunks of {sizes} numbers"
    if not steps:
        return f"{head}: nothing is sent"
    shown = range(min(ranks, _COLUMNS))
    more = [f"{ranks - _COLUMNS} more"] if ranks > _COLUMNS else []
    rows = [("step", *(f"rank {rank} to {(rank + 1) % ranks}" for rank in shown), *more)]
    for number, sends in enumerate(steps, 1):
        cells = [f"chunk {send.chunk}: {_held(send, ranks)}" for send in sends[: len(shown)]]
        rows.append((f"{number} {sends[0].phase}", *cells, *("…" for _ in more)))
    payload, scales = (
        [sum(getattr(sends[rank], name) for sends in steps) for rank in shown]
        for name in ("payload_bytes", "scale_bytes")
    )
    totals = [f"{each} + {scale}" if scale else f"{each}" for each, scale in zip(payload, scales, strict=True)]
    rows.append(("bytes", *totals, *("…" for _ in more)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([head, *lines])


def _held(send: Send, ranks: int) -> str:
    """Return the ranks whose numbers are in a message: `2+0`."""
    if len(send.holds) == ranks:
        return "mean"
    return "+".join(map(str, send.holds if len(send.holds) <= 3 else (send.holds[0], "…", send.holds[-1])))


def plot(steps: Sequence[Sequence[Send]], chunks: Sequence[int]) -> Figure:
    """Draw what every rank holds at first and after each step.

    A column is a step, a line is a rank, and a box is a chunk. Each rank has a colour: a chunk has the colours of
    the ranks that are added up in it. A finished chunk has a bold frame; an arrow is a message.
    """
    ranks = len(chunks)
    if ranks > _DRAWN:
        raise UsageError(f"a ring of {ranks} ranks does not fit into a figure, which has room for {_DRAWN}: print it")
    from matplotlib.figure import Figure

    width = ranks * _CELL + _GAP
    drawing = Figure(figsize=(0.7 + (len(steps) + 1) * width, 0.9 + ranks * 2 * _CELL), layout="constrained")
    ax = drawing.add_subplot()
    held = [[{rank} for _ in chunks] for rank in range(ranks)]
    for step in range(len(steps) + 1):
        left = step * width
        for rank, of_rank in enumerate(held):
            for chunk, holds in enumerate(of_rank):
                _box(ax, left + chunk * _CELL, 2 * rank * _CELL, holds, ranks)
        title = "start" if not step else f"{step}\n{steps[step - 1][0].phase}"
        ax.text(left + ranks * _CELL / 2, -0.6 * _CELL, title, ha="center", va="bottom", fontsize=8)
        for send in steps[step] if step < len(steps) else ():
            held[send.receiver][send.chunk] |= {*send.holds}
            tail = (left + (send.chunk + 0.5) * _CELL, (2 * send.sender + 0.5) * _CELL)
            tip = (left + width + (send.chunk + 0.5) * _CELL, (2 * send.receiver + 0.5) * _CELL)
            arrow = {"arrowstyle": "->", "color": "#444444", "lw": 0.8, "shrinkA": 6, "shrinkB": 7, "alpha": 0.8}
            ax.annotate("", tip, tail, arrowprops=arrow)
    for rank in range(ranks):
        ax.text(-0.3 * _CELL, (2 * rank + 0.5) * _CELL, f"rank {rank}", ha="right", va="center", fontsize=8)
    ax.set_xlim(-0.6, (len(steps) + 1) * width)
    ax.set_ylim((2 * ranks - 0.6) * _CELL, -2.2 * _CELL)
    ax.set_aspect("equal")
    ax.axis("off")
    return drawing


def _box(ax: Axes, left: float, top: float, holds: AbstractSet[int], ranks: int) -> None:
    """Draw a chunk: a strip in the colour of each rank that is in it, at the rank's own place."""
    from matplotlib.patches import Rectangle

    strip = _CELL / ranks
    for rank in holds:
        tint = colours.RANKS[rank % len(colours.RANKS)]
        ax.add_patch(Rectangle((left + rank * strip, top), strip, _CELL, facecolor=tint, linewidth=0))
    whole = len(holds) == ranks
    ax.add_patch(Rectangle((left, top), _CELL, _CELL, fill=False, linewidth=1.8 if whole else 0.6))
