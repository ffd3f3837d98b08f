"""Tables of results: rows as dicts, shown as text, saved for a report, and plotted."""

from __future__ import annotations

import csv
import html
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from pipelab.draw import figure, wording
from pipelab.errors import UsageError, clean, require_suffix
from pipelab.files import write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".csv", ".txt", ".md", ".tex", ".html", ".png", ".svg", ".pdf")
"""The formats of a table; the last three are its plot."""

_TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "…": r"\dots{}"}
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


@dataclass(frozen=True, slots=True)
class Column:
    """How readers see the values under one key of a table's rows.

    Attributes:
        key: the key in each row, and the column's name in a CSV file.
        head: the heading; by default, the key.
        show: returns a value as text.
        left: whether its cells are words that are set flush left, as in the first column, not figures.
    """

    key: str
    head: str = ""
    show: Callable[[Any], str] = str
    left: bool = False

    @property
    def title(self) -> str:
        """The heading."""
        return self.head or self.key

    def cell(self, row: Mapping[str, Any] | None) -> str:
        """Return a row's value as text; `-` if there is none. What the row's `marked` names ends in `*`."""
        value = None if row is None else row.get(self.key)
        if row is None or value is None:
            return "-"
        return clean(self.show(value)) + "*" * (self.key in row.get("marked", ()))


@dataclass(frozen=True, slots=True)
class Table:
    """A table of results.

    `rows` are plain dicts, so `pandas.DataFrame(table.rows)` works. A notebook shows the table, and `print` its text.
    A row's `marked`, if it has one, holds the keys of figures that readers see with a `*`, which a note explains.

    Attributes:
        rows: one dict for each row. A row may have more values than the columns show.
        columns: the columns that readers see, in order. A CSV file has every key of the rows.
        across: the key whose values become separate columns, as numbers of micro-batches do. The text then has one
            block for each further column, with the first column's values down its side.
        axes: what `plot` draws: the key along the x-axis, and for each plot a key along its y-axis. There is one line
            for each value of the first column, unless that is the x-axis itself.
        notes: sentences below the table.
        title: a line above the table and its plot: what it shows, and the setting. A CSV file has none, so its rows
            should hold the setting too.
        curves: for a key along the y-axis, one or two more keys whose values `plot` adds as thin lines.

    Example:
        >>> rows = [
        ...     {"schedule": "gpipe", "m": 2, "step": 30.0},
        ...     {"schedule": "gpipe", "m": 4, "step": 25.0},
        ...     {"schedule": "1f1b", "m": 2, "step": 30.0},
        ... ]
        >>> columns = [Column("schedule"), Column("m"), Column("step", "time of a step, ms", wording.number)]
        >>> print(Table(rows, columns))
        schedule  m  time of a step, ms
        gpipe     2                  30
        gpipe     4                  25
        1f1b      2                  30
        >>> print(Table(rows, columns, across="m"))
        time of a step, ms  m = 2  m = 4
        gpipe                  30     25
        1f1b                   30      -
    """

    rows: Sequence[Mapping[str, Any]]
    columns: Sequence[Column]
    across: str | None = None
    axes: tuple[str, Sequence[str]] | None = None
    notes: Sequence[str] = ()
    curves: Mapping[str, Sequence[str]] = field(default_factory=dict)
    title: str = ""

    def __post_init__(self) -> None:
        """Show every key of the rows where no columns are named."""
        if not self.columns and self.rows:
            object.__setattr__(self, "columns", [Column(key) for key in self.rows[0]])

    def text(self, width: int = 80) -> str:
        """Return the table as text, in lines of at most `width` characters if its cells allow."""
        title = [fill(self.title, width), ""] if self.title else []
        if not self.rows:
            return "\n".join([*title, *self.notes])
        blocks = self._blocks()
        if self.across:  # as one, so that the columns of all blocks are below one another
            blank = ("",) * len(blocks[0][0])
            blocks = [[row for block in blocks for row in (*block, blank)][:-1]]
        lines = [line.rstrip() for block in blocks for line in wording.columns(block, width, left=self._left())]
        notes = [fill(note, width, break_on_hyphens=False) for note in self.notes]
        return "\n".join([*title, *lines, *(part for note in notes for part in ("", note))])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the table; the suffix is the format. Return the path.

        `csv` has all values in full, one line for each row; `txt`, `md`, `tex` and `html` have what readers see (`tex`
        needs the package booktabs); `png`, `svg` and `pdf` are the plot.

        Raises:
            FormatError: if the suffix is another one.
            UsageError: if there is nothing to plot.
        """
        path = Path(path)
        suffix = require_suffix(path, "a table", SUFFIXES)
        if suffix in (".png", ".svg", ".pdf"):
            figure.write(self.plot(), path)
            return path
        written: dict[str, Callable[[], str]] = {
            ".csv": self._csv,
            ".txt": lambda: self.text() + "\n",
            ".md": self._markdown,
            ".tex": self._tex,
            ".html": lambda: f"{_PAGE}{self._repr_html_()}\n",
        }
        return write(path, written[suffix]())

    def plot(self) -> Figure:
        """Draw the table with matplotlib, one plot for each quantity; return the figure.

        Raises:
            UsageError: if the table names no `axes`, or has no rows.
        """
        if self.axes is None or not self.rows:
            raise UsageError("this table has nothing to plot: save it as .csv, .md, .tex, .html or .txt")
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter

        x, ys = self.axes
        side = self.columns[0].key
        titles = {column.key: column.title for column in self.columns}
        drawing = Figure(figsize=(_PLOT_WIDTH * len(ys), _PLOT_HEIGHT), layout="constrained")
        # Lines that lie on one another, as GPipe's and 1F1B's step times do, are each narrower than the one below.
        for place, y in enumerate(ys, start=1):
            ax = drawing.add_subplot(1, len(ys), place)
            more = self.curves.get(y, ())
            for order, name in enumerate(dict.fromkeys(None if side == x else row[side] for row in self.rows)):
                points = [row for row in self.rows if name is None or row[side] == name]
                points = [row for row in points if row.get(y) is not None]
                (line,) = ax.plot(
                    [row[x] for row in points],
                    [row[y] for row in points],
                    label=name,
                    linewidth=max(5.0 - order, 1.0),
                    marker="o",
                    clip_on=not points,  # an empty line that is not clipped would take all the room
                    markersize=max(8.0 - order, 3.0),
                )
                for (_, style), key in zip(_STYLES, more, strict=False):
                    added = [row for row in points if row.get(key) is not None]
                    xs, values = [row[x] for row in added], [row[key] for row in added]
                    ax.plot(xs, values, style, color=line.get_color(), linewidth=1.0)
            if any(column.key == y and "%" in column.cell(self.rows[0]) for column in self.columns):
                ax.yaxis.set_major_formatter(PercentFormatter(1.0))
            ax.set_xticks(list(dict.fromkeys(row[x] for row in self.rows)))
            ax.set_xlabel(titles.get(x, x))
            key_of_styles = ", ".join(f"{word}: {key}" for (word, _), key in zip(_STYLES, more, strict=False))
            ax.set_ylabel(titles.get(y, y) + (f"\n{key_of_styles}" if more else ""))
            ax.set_ylim(bottom=0)
            ax.spines[["top", "right"]].set_visible(False)
            if place == 1 and side != x:
                drawing.legend(loc="outside lower center", ncols=8, frameon=False)
        if self.title:
            drawing.suptitle(fill(self.title, 34 * len(ys)), fontsize="medium", parse_math=False)
        return drawing

    def __str__(self) -> str:
        """Return the table as text."""
        return self.text()

    def _repr_html_(self) -> str:
        title, *notes = [f"<p>{html.escape(clean(text))}</p>" if text else "" for text in (self.title, *self.notes)]
        return "\n".join(filter(None, [title, *map(_html_table, self._blocks()), *notes]))

    def _blocks(self) -> list[list[tuple[str, ...]]]:
        """Return what readers see, as blocks of rows of cells, heads first."""
        if self.across is None:
            heads = tuple(column.title for column in self.columns)
            return [[heads, *(tuple(column.cell(row) for column in self.columns) for row in self.rows)]]
        across = next((column.title for column in self.columns if column.key == self.across), self.across)
        side, *others = [column for column in self.columns if column.key != self.across]
        names = list(dict.fromkeys(row[side.key] for row in self.rows))
        values = list(dict.fromkeys(row[self.across] for row in self.rows))
        found = {(row[side.key], row[self.across]): row for row in self.rows}
        return [
            [
                (column.title, *(f"{across} = {value}" for value in values)),
                *((side.show(name), *(column.cell(found.get((name, value))) for value in values)) for name in names),
            ]
            for column in others
        ]

    def _left(self) -> list[int]:
        words = [place for place, column in enumerate(self.columns) if column.left and self.across is None]
        return sorted({0, *words})

    def _csv(self) -> str:
        buffer = io.StringIO()
        heads = list(dict.fromkeys(key for row in self.rows for key in row))
        writer = csv.DictWriter(buffer, heads, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _joined(value) for key, value in row.items()} for row in self.rows)
        return buffer.getvalue()

    def _markdown(self) -> str:
        parts: list[str] = []
        for heads, *rows in self._blocks():
            rule = tuple("---" if place in self._left() else "--:" for place in range(len(heads)))
            lines = [heads, rule, *rows]
            escaped = [[re.sub(r"([|<`\[])", r"\\\1", cell) for cell in line] for line in lines]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in escaped))
        return "\n\n".join(filter(None, [self.title, *parts, *self.notes])) + "\n"

    def _tex(self) -> str:
        parts = [r"% \usepackage{booktabs}", *([_tex_cell(self.title)] if self.title else [])]
        for heads, *rows in self._blocks():
            first, *lines = [" & ".join(map(_tex_cell, line)) + r" \\" for line in (heads, *rows)]
            sides = "".join("l" if place in self._left() else "r" for place in range(len(heads)))
            begin = rf"\begin{{tabular}}{{{sides}}}"
            parts.append("\n".join([begin, r"\toprule", first, r"\midrule", *lines, r"\bottomrule", r"\end{tabular}"]))
        return "\n\n".join([*parts, *map(_tex_cell, self.notes)]) + "\n"


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


def _tex_cell(text: str) -> str:
    return re.sub(r"[\\~^…&%$#_{}]", lambda found: _TEX.get(found[0], "\\" + found[0]), text)
