"""Tables over numbers of micro-batches: one row per schedule, one column per number."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pipelab.draw import wording
from pipelab.draw.wording import columns
from pipelab.errors import ScheduleError, require_suffix
from pipelab.files import write
from pipelab.simulation.comparison import compare
from pipelab.trace.trace import Trace

__all__ = ["SUFFIXES", "Cell", "Sweep", "Table", "sweep"]

Made = TypeVar("Made")

SUFFIXES = (".csv", ".txt")
"""The formats of a table."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of one schedule with one number of micro-batches.

    Attributes:
        trace: the step.
        loss: the loss of the batch, if it ran on tensors.
    """

    trace: Trace
    loss: float | None = None

    @property
    def peak_share(self) -> float:
        """The largest share of the batch's activations that a rank holds at once."""
        return max(compare(self.trace).rows[0].peak_share, default=0.0)


@dataclass(frozen=True, slots=True)
class Table:
    """The cells of a sweep; a cell is missing if its schedule refuses the size.

    Attributes:
        cells: by schedule and number of micro-batches.
        names: the schedules, in order.
        counts: the numbers of micro-batches, in order.
        refusals: the reasons of schedules that refused a size.
    """

    cells: Mapping[tuple[str, int], Cell]
    names: Sequence[str]
    counts: Sequence[int]
    refusals: Sequence[str] = ()

    def text(self, width: int = 80) -> str:
        """Return a block of rows for each of the step time, the bubble, the memory and the loss."""
        cells = list(self.cells.values())
        if not cells:
            return "\n".join(self.refusals)
        unit = wording.unit(cells[0].trace)
        blocks: dict[str, Callable[[Cell], str]] = {
            f"time of a step, {unit}": lambda cell: wording.number(cell.trace.makespan),
            "bubble": lambda cell: wording.percent(cell.trace.bubble),
            "peak, share of the batch": lambda cell: wording.percents([cell.peak_share]),
        }
        if all(cell.loss is not None for cell in cells):
            blocks["loss"] = lambda cell: f"{cell.loss:.6f}"
        blank = ("",) * (1 + len(self.counts))
        rows = [row for head, shown in blocks.items() for row in (*self._rows(head, shown), blank)]
        lines = [line.rstrip() for line in columns(rows, width)]
        return "\n".join([*lines[:-1], *(["", *self.refusals] if self.refusals else [])])

    def save(self, path: Path) -> Path:
        """Write the table: as `csv`, one line for each cell, or as `txt`; return the path.

        Raises:
            FormatError: if it has another suffix.
        """
        suffix = require_suffix(path, "a table of sizes", SUFFIXES)
        return write(path, self._csv() if suffix == ".csv" else self.text() + "\n")

    def _rows(self, head: str, shown: Callable[[Cell], str]) -> list[tuple[str, ...]]:
        heads = (head, *map(str, self.counts))
        found = [[self.cells.get((name, count)) for count in self.counts] for name in self.names]
        rows = [
            (name, *("-" if cell is None else shown(cell) for cell in row))
            for name, row in zip(self.names, found, strict=True)
        ]
        return [heads, *rows]

    def _csv(self) -> str:
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(("schedule", "microbatches", "step_time", "unit", "bubble", "peak_share", "loss"))
        for (name, count), cell in self.cells.items():
            trace = cell.trace
            loss = "" if cell.loss is None else cell.loss
            writer.writerow((name, count, trace.makespan, trace.unit, trace.bubble, cell.peak_share, loss))
        return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class Sweep(Generic[Made]):
    """The result for every schedule and number, and the reasons of schedules that refused a number."""

    cells: dict[tuple[str, int], Made]
    refusals: list[str]


def sweep(names: Sequence[str], counts: Sequence[int], make: Callable[[str, int], Made]) -> Sweep[Made]:
    """Call `make` for every schedule and number of micro-batches, and collect the refusals.

    Args:
        names: the schedules.
        counts: the numbers of micro-batches.
        make: returns the result for a schedule and a number.

    Raises:
        ScheduleError: if a schedule has faults.
    """
    made: Sweep[Made] = Sweep({}, [])
    for name in names:
        for count in counts:
            try:
                made.cells[name, count] = make(name, count)
            except ScheduleError as error:
                if any(fault.code != "refused" for fault in error.faults):
                    raise
                made.refusals.extend(f"{name} with {count}: {fault.message}" for fault in error.faults)
    return made
