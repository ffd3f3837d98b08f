"""Tables of results: rows as dicts, shown as text, saved for a report, and plotted."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelab.display import show
from pipelab.errors import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        below: more tables, shown after the notes; a CSV file and the plot leave them out.

    Example:
        >>> rows = [
        ...     {"schedule": "gpipe", "m": 2, "step": 30.0},
        ...     {"schedule": "gpipe", "m": 4, "step": 25.0},
        ...     {"schedule": "1f1b", "m": 2, "step": 30.0},
        ... ]
        >>> columns = [Column("schedule"), Column("m"), Column("step", "time of a step, ms", "{:g}".format)]
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
    below: Sequence[Table] = ()

    def __post_init__(self) -> None:
        """Show every key of the rows where no columns are named."""
        if not self.columns and self.rows:
            object.__setattr__(self, "columns", [Column(key) for key in self.rows[0]])

    def text(self, width: int = 80) -> str:
        """Return the table as text, in lines of at most `width` characters if its cells allow."""
        return show(self, "text", width)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the table; the suffix is the format. Return the path.

        `csv` has all values in full, one line for each row; `txt`, `md` and `html` have what readers see;
        `png`, `svg` and `pdf` are the plot.

        Raises:
            FormatError: if the suffix is another one.
            UsageError: if there is nothing to plot.
        """
        return show(self, "save", path)

    def plot(self) -> Figure:
        """Draw the table with matplotlib, one plot for each quantity; return the figure.

        Raises:
            UsageError: if the table names no `axes`, or has no rows.
        """
        return show(self, "figure")

    def __str__(self) -> str:
        """Return the table as text."""
        return self.text()

    def _repr_html_(self) -> str:
        return show(self, "html")
