"""Tables as text, files and plots."""

from __future__ import annotations

import csv
import html
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from pipelab.draw import figure, wording
from pipelab.errors import UsageError, clean, require_suffix
from pipelab.files import write
from pipelab.table import Column, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["SUFFIXES", "Column", "Table"]

SUFFIXES = (".csv", ".txt", ".md", ".html", ".png", ".svg", ".pdf")
"""The formats of a table; the last three are its plot."""

_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>pipelab: a table</title>
<style>
  body { font: 15px/1.4 system-ui, sans-serif; margin: 2rem; color-scheme: light dark; }
  table { border-collapse: collapse; margin-bottom: 1rem; }
  td, th { text-align: left; padding: 0.15rem 0.8rem 0.15rem 0; border-bottom: 1px solid #8884; }
</style>
"""
"""What a page with a table begins with."""
_PLOT_WIDTH, _PLOT_HEIGHT = 3.6, 2.8
"""Inches of one plot of a table."""
_STYLES = (("dashed", "--"), ("dotted", ":"))
"""How a plot's further curves are drawn."""


def text(table: Table, width: int = 80) -> str:
    """Return a table as text; see `Table.text`."""
    title = [fill(table.title, width), ""] if table.title else []
    if not table.rows:
        return "\n".join([*title, *table.notes])
    parts = blocks(table)
    if table.across:  # as one, so that the columns of all blocks are below one another
        blank = ("",) * len(parts[0][0])
        parts = [[row for block in parts for row in (*block, blank)][:-1]]
    lines = [line.rstrip() for block in parts for line in wording.columns(block, width, left=_left(table))]
    notes = [fill(note, width, break_on_hyphens=False) for note in table.notes]
    notes += ["\n" + text(each, width) for each in table.below]
    return "\n".join([*title, *lines, *(part for note in notes for part in ("", note))])


def page(table: Table) -> str:
    """Return a table as an element of a page."""
    title, *notes = [f"<p>{html.escape(clean(words))}</p>" if words else "" for words in (table.title, *table.notes)]
    return "\n".join(filter(None, [title, *map(_html_table, blocks(table)), *notes, *map(page, table.below)]))


def save(table: Table, path: str | os.PathLike[str]) -> Path:
    """Write a table; see `Table.save`."""
    path = Path(path)
    suffix = require_suffix(path, "a table", SUFFIXES)
    if suffix in (".png", ".svg", ".pdf"):
        figure.write(plot(table), path)
        return path
    written: dict[str, Callable[[Table], str]] = {
        ".csv": _csv,
        ".txt": lambda table: text(table) + "\n",
        ".md": _markdown,
        ".html": lambda table: f"{_PAGE}{page(table)}\n",
    }
    return write(path, written[suffix](table))


def plot(table: Table) -> Figure:
    """Draw a table; see `Table.plot`."""
    if table.axes is None or not table.rows:
        raise UsageError("this table has nothing to plot: save it as .csv, .md, .html or .txt")
    from matplotlib.figure import Figure

    x, ys = table.axes
    drawing = Figure(figsize=(_PLOT_WIDTH * len(ys), _PLOT_HEIGHT), layout="constrained")
    for place, y in enumerate(ys, start=1):
        _quantity(table, x, y, drawing.add_subplot(1, len(ys), place))
    if table.columns[0].key != x:
        handles, labels = drawing.axes[0].get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=8, frameon=False)
    if table.title:
        drawing.suptitle(fill(table.title, 34 * len(ys)), fontsize="medium", parse_math=False)
    return drawing


def _quantity(table: Table, x: str, y: str, ax: Axes) -> None:
    """Draw one key along the y-axis: a line for each value of the first column, unless that is the x-axis."""
    from matplotlib.ticker import PercentFormatter

    titles = {column.key: column.title for column in table.columns}
    more = list(zip(_STYLES, table.curves.get(y, ()), strict=False))
    _lines(table, x, y, [(style, key) for (_, style), key in more], ax)
    if any(column.key == y and "%" in column.cell(table.rows[0]) for column in table.columns):
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_xticks(list(dict.fromkeys(row[x] for row in table.rows)))
    ax.set_xlabel(titles.get(x, x))
    key_of_styles = ", ".join(f"{word}: {key}" for (word, _), key in more)
    ax.set_ylabel(titles.get(y, y) + (f"\n{key_of_styles}" if more else ""))
    ax.set_ylim(bottom=0)
    ax.spines[["top", "right"]].set_visible(False)


def _lines(table: Table, x: str, y: str, curves: Sequence[tuple[str, str]], ax: Axes) -> None:
    """Draw a line for each value of the first column, and beside it its curves, each a style and a key."""
    side = table.columns[0].key
    for order, name in enumerate(dict.fromkeys(None if side == x else row[side] for row in table.rows)):
        rows = [row for row in table.rows if name is None or row[side] == name]
        # Lines that lie on one another, as GPipe's and 1F1B's step times do, are each narrower than the one below.
        xs, values = _points(rows, x, y)
        (line,) = ax.plot(
            xs,
            values,
            label=name,
            linewidth=max(5.0 - order, 1.0),
            marker="o",
            clip_on=not xs,  # an empty line that is not clipped would take all the room
            markersize=max(8.0 - order, 3.0),
        )
        there = [row for row in rows if row.get(y) is not None]
        for style, key in curves:
            ax.plot(*_points(there, x, key), style, color=line.get_color(), linewidth=1.0)


def _points(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> tuple[list[Any], list[Any]]:
    """Return where a line goes: two lists of the rows that have a value."""
    there = [row for row in rows if row.get(y) is not None]
    return [row[x] for row in there], [row[y] for row in there]


def blocks(table: Table) -> list[list[tuple[str, ...]]]:
    """Return what readers see, as blocks of rows of cells, heads first."""
    if table.across is None:
        heads = tuple(column.title for column in table.columns)
        return [[heads, *(tuple(column.cell(row) for column in table.columns) for row in table.rows)]]
    across = next((column.title for column in table.columns if column.key == table.across), table.across)
    side, *others = [column for column in table.columns if column.key != table.across]
    names = list(dict.fromkeys(row[side.key] for row in table.rows))
    values = list(dict.fromkeys(row[table.across] for row in table.rows))
    found = {(row[side.key], row[table.across]): row for row in table.rows}
    return [
        [
            (column.title, *(f"{across} = {value}" for value in values)),
            *((side.show(name), *(column.cell(found.get((name, value))) for value in values)) for name in names),
        ]
        for column in others
    ]


def _left(table: Table) -> list[int]:
    """Return which columns are set flush left."""
    words = [place for place, column in enumerate(table.columns) if column.left and table.across is None]
    return sorted({0, *words})


def _csv(table: Table) -> str:
    buffer = io.StringIO()
    heads = list(dict.fromkeys(key for row in table.rows for key in row))
    writer = csv.DictWriter(buffer, heads, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _joined(value) for key, value in row.items()} for row in table.rows)
    return buffer.getvalue()


def _markdown(table: Table) -> str:
    parts: list[str] = []
    for heads, *rows in blocks(table):
        rule = tuple("---" if place in _left(table) else "--:" for place in range(len(heads)))
        lines = [heads, rule, *rows]
        escaped = [[re.sub(r"([|<`\[])", r"\\\1", cell) for cell in line] for line in lines]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in escaped))
    return "\n\n".join(filter(None, [table.title, *parts, *table.notes, *map(_markdown, table.below)])) + "\n"


def _joined(value: Any) -> Any:
    """Return a value for one cell of a CSV file: figures per rank with blanks between, no formula of a spreadsheet."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else value


def _html_table(block: list[tuple[str, ...]]) -> str:
    heads, *rows = [[html.escape(cell) for cell in row] for row in block]
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f"<table><thead><tr>{''.join(f'<th>{cell}</th>' for cell in heads)}</tr></thead><tbody>{body}</tbody></table>"
    )
