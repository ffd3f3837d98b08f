"""Compare traces, and find what a trace's makespan hangs on."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from pipelab.checking.checker import Draftable
from pipelab.errors import CostError, UsageError
from pipelab.plan.fault import shorten
from pipelab.plan.plan import Plan
from pipelab.simulation.clock import Cost, simulate
from pipelab.trace.trace import Event, Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Comparison", "Row", "compare", "critical_path"]


@dataclass(frozen=True, slots=True)
class Row:
    """One trace's line in a comparison.

    Attributes:
        name: what the trace is called.
        source: `"simulated"` or `"measured"`.
        makespan: from the first start to the last end, in `unit`.
        unit: the unit of time.
        bubble: the idle share of all rank time, from 0 to 1.
        peak_activations: for each rank, the most stage activations held at once.
        peak_share: for each rank, that peak as a share of the whole batch's activations of one rank's share of the
            model: 1.0 is all micro-batches of all its stages. A ZBV's 8 half-stages are not twice a 1F1B's 4.
        busy_share: for each rank, the share of the makespan that it worked.
        spans: for each rank, from its own first start to its own last end, in `unit`.
    """

    name: str
    source: str
    makespan: float
    unit: str
    bubble: float
    peak_activations: tuple[int, ...]
    peak_share: tuple[float, ...]
    busy_share: tuple[float, ...]
    spans: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several traces, as a table and as timelines on one axis. Made by `compare`."""

    traces: tuple[Trace, ...]
    names: tuple[str, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """One line of the table per trace."""
        return tuple(_row(trace, name) for trace, name in zip(self.traces, self.names, strict=True))

    @property
    def shares_axis(self) -> bool:
        """Whether the traces have one unit, and so are drawn on one axis."""
        return len({trace.unit for trace in self.traces}) == 1

    def plot(self) -> Figure:
        """Draw the timelines with matplotlib, one above the other; return the figure."""
        from pipelab.draw import figure

        return figure.plot_comparison(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the comparison; the suffix says as what: `html`, `svg`, `png`, `pdf`, `txt` or `csv`. Return the path.

        In `csv` stands the table, `rows`: a line for each trace; where a figure is per rank, rank after rank.

        Raises:
            FormatError: if the suffix is none of these.
        """
        path = Path(path)
        if path.suffix.lower() == ".csv":
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(field.name for field in fields(Row))
                writer.writerows(map(_cells, self.rows))
            return path
        from pipelab import draw

        return draw.save_comparison(self, path)

    def __str__(self) -> str:
        """Return the table and the timelines as text, without colour."""
        from pipelab.draw import text

        return text.comparison(self, colour=False)

    def _repr_svg_(self) -> str:
        """Return the figure that a notebook shows."""
        from pipelab.draw import figure

        return figure.comparison_svg(self)


def compare(
    *subjects: Trace | Plan | Draftable, names: Sequence[str] | None = None, cost: Cost | None = None
) -> Comparison:
    """Lay traces side by side, simulated or measured; plans and schedules are simulated first.

    Args:
        subjects: traces, plans or schedules, in any mixture.
        names: what to call them; by default, by their plans.
        cost: what plans and schedules are simulated with; by default forward 1, backward 2, transfers nothing.
            `Cost.fit(trace)` predicts with the times of a measured trace.

    Example:
        >>> import pipelab
        >>> both = compare(pipelab.GPipe(4, 8), pipelab.OneFOneB(4, 8), names=["GPipe", "1F1B"])
        >>> [(row.name, row.makespan, row.peak_activations) for row in both.rows]
        [('GPipe', 33.0, (8, 8, 8, 8)), ('1F1B', 33.0, (4, 3, 2, 1))]

    Raises:
        UsageError: if there is nothing to compare, or not one name for each.
        TypeError: if something is no trace, plan or schedule.
        CostError: if there is a cost, but only traces, which have their times.
        ScheduleError: if a plan has faults.
    """
    if not subjects:
        raise UsageError("compare needs at least one trace, plan or schedule")
    if cost is not None and all(isinstance(subject, Trace) for subject in subjects):
        raise CostError("compare got a cost, but only traces, which have their times: simulate the plans with the cost")
    traces = tuple(_trace_of(subject, cost) for subject in subjects)
    if names is None:
        names = [_default_name(trace) for trace in traces]
    if len(names) != len(traces):
        raise UsageError(f"compare got {len(names)} names for {len(traces)} traces")
    return Comparison(traces, tuple(names))


def _trace_of(subject: Trace | Plan | Draftable, cost: Cost | None) -> Trace:
    """Return a trace as it is, and what a plan or schedule would take."""
    if isinstance(subject, Trace):
        return subject
    if isinstance(subject, (Plan, Draftable, type, str)):
        return simulate(subject, cost)
    raise TypeError(
        f"compare takes traces, plans and schedules, one by one, got {shorten(subject)}"
        + (": take its trace" if hasattr(subject, "trace") else "")
    )


def _default_name(trace: Trace) -> str:
    return ", ".join(part for part in (trace.name, trace.source, trace.note) if part)


def _row(trace: Trace, name: str) -> Row:
    makespan = trace.makespan
    program = trace.plan.program
    slots = program.numbering.slots
    forwards = [sum(code < slots for code in row) for row in program.rows]
    return Row(
        name=name,
        source=trace.source,
        makespan=makespan,
        unit=trace.unit,
        bubble=trace.bubble,
        peak_activations=trace.peak_activations,
        peak_share=tuple(
            peak / count if count else 0.0 for peak, count in zip(trace.peak_activations, forwards, strict=True)
        ),
        busy_share=tuple(busy / makespan if makespan else 0.0 for busy in trace.busy),
        spans=trace.spans,
    )


def _cells(row: Row) -> list[str]:
    """Return a row's figures as text, those of all ranks with spaces between."""
    figures = (getattr(row, field.name) for field in fields(row))
    return [" ".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in figures]


def critical_path(trace: Trace) -> tuple[Event, ...]:
    """Return the chain of actions that the makespan hangs on, first to last.

    Walking back from the last action, each step goes to what the action waited for longest: the action before it on
    its rank, or the giver of a value it needs, transfer included.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.OneFOneB(ranks=2, microbatches=2))
        >>> [event.action for event in critical_path(trace)]
        [0F0, 1F0, 1B0, 1F1, 1B1, 0B1]
    """
    program = trace.plan.program
    numbering = program.numbering
    begun: dict[int, float] = {}
    ended: dict[int, float] = {}
    before: dict[tuple[int, int], int] = {}  # (rank, code) -> the code before it
    slots: dict[int, tuple[int, ...]] = {}  # half of a pair that ran as one slot -> both halves
    for rank, row in enumerate(program.rows):
        for index, each in enumerate(row):
            begun[each] = trace.starts[rank][index]
            ended[each] = max(trace.ends[rank][index], ended.get(each, float("-inf")))
            if index:
                previous = before[rank, each] = row[index - 1]
                together = begun[previous] == begun[each] < ended[each] == ended[previous]
                if together and previous in program.pairs:
                    slots[previous] = slots[each] = (previous, each)
    lags = {(transfer.giver, transfer.needer): transfer.end for transfer in trace.transfers}
    path: list[Event] = []
    code = max(ended, key=lambda each: ended[each], default=None)
    while code is not None:
        path.append(Event(program.rank_of[code], numbering.action(code), begun[code], ended[code]))
        arrivals: list[tuple[float, int]] = []
        halves = slots.get(code, (code,))
        for half in halves:
            ranks = program.reduces.get(half, [program.rank_of[half]])
            earlier = [before[rank, half] for rank in ranks if (rank, half) in before]
            arrivals.extend((ended[each], each) for each in earlier)
            for value in numbering.needs(half):
                giver = program.giver(value)
                arrivals.append((lags.get((numbering.action(giver), numbering.action(half)), ended[giver]), giver))
        code = max((arrival for arrival in arrivals if arrival[1] not in halves), default=(0.0, None))[1]
    return tuple(reversed(path))
