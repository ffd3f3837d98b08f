"""Tables over numbers of micro-batches: one row per schedule and number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipelab.draw import wording
from pipelab.draw.table import Column, Table
from pipelab.errors import ScheduleError
from pipelab.simulation.comparison import compare
from pipelab.trace.trace import Trace

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of one schedule with one number of micro-batches.

    Attributes:
        trace: the step.
        loss: the loss of the batch, if it ran on tensors.
    """

    trace: Trace
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class Sweep(Generic[Made]):
    """The result for every schedule and number, and the reasons of schedules that refused a number."""

    cells: dict[tuple[str, int], Made]
    refusals: list[str]


def table_of(cells: Mapping[tuple[str, int], Cell], refusals: Sequence[str]) -> Table:
    """Return a table of the cells of a sweep, the numbers of micro-batches side by side."""
    rows = [
        {
            "schedule": name,
            "microbatches": count,
            "step_time": cell.trace.makespan,
            "unit": cell.trace.unit,
            "bubble": cell.trace.bubble,
            "peak_share": max(compare(cell.trace).rows[0].peak_share, default=0.0),
            "loss": cell.loss,
        }
        for (name, count), cell in cells.items()
    ]
    unit = next((wording.unit(cell.trace) for cell in cells.values()), "units")
    columns = [
        Column("schedule"),
        Column("microbatches", "M"),
        Column("step_time", f"time of a step, {unit}", wording.number),
        Column("bubble", show=wording.percent),
        Column("peak_share", "peak, share of the batch", lambda share: wording.percents([share])),
    ]
    if all(cell.loss is not None for cell in cells.values()):
        columns.append(Column("loss", show="{:.6f}".format))
    plots = ("step_time", "bubble", "peak_share")
    return Table(rows, columns, "microbatches", ("microbatches", plots), refusals)


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
