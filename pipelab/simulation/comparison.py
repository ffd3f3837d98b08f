"""Compare traces, simulated or measured, as a table and as timelines."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipelab.checking.checker import ScheduleLike
from pipelab.display import show
from pipelab.errors import CostError, UsageError, counted
from pipelab.plan.actions import TRAITS, Action, Kind
from pipelab.plan.fault import shorten
from pipelab.plan.plan import Plan
from pipelab.plan.transfers import Order, Transport
from pipelab.simulation.bounds import lower_bound
from pipelab.simulation.clock import simulate
from pipelab.simulation.cost import Cost
from pipelab.trace.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Row:
    """One trace's line in a comparison.

    Attributes:
        name: what the trace is called.
        source: `"simulated"` or `"measured"`.
        makespan: from the first start to the last end, in `unit`.
        unit: the unit of time.
        bubble: the idle share of all rank time, from 0 to 1.
        peak_activations: for each rank, the most stage activations held at any time.
        peak_share: for each rank, that peak as a share of the whole batch's activations of one rank's share of the
            model: 1.0 is all micro-batches of all its stages. A ZBV's 8 half-stages are not twice a 1F1B's 4.
        busy_share: for each rank, the share of the makespan that it worked.
        spans: for each rank, the time from its first start to its last end, in `unit`.
        bound: a time that no order of the same actions can undercut, in `unit`; `None` if it was not asked for.
        bare_bound: that time without recomputations.
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
    bound: float | None = None
    bare_bound: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several traces, as a table and as timelines on one axis. Made by `compare`."""

    traces: tuple[Trace, ...]
    names: tuple[str, ...]
    bounds: tuple[tuple[float, ...], ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """One line of the table per trace."""
        return tuple(_row(*each) for each in zip(self.traces, self.names, self.bounds, strict=True))

    @property
    def shares_axis(self) -> bool:
        """Whether all traces have the same unit, so that they are drawn on one axis."""
        return len({trace.unit for trace in self.traces}) == 1

    def plot(
        self,
        *,
        width: float | Literal["beamer", "column", "page"] | None = None,
        colours: Mapping[Kind, str] | None = None,
        label: Callable[[Action], str] | None = None,
    ) -> Figure:
        """Draw the timelines with matplotlib, one above the other; return the figure. See `Trace.plot`."""
        return show(self, "figure", width, colours, label)

    def save(
        self, path: str | os.PathLike[str], *, width: float | Literal["beamer", "column", "page"] | None = None
    ) -> Path:
        """Write the comparison; the suffix is the format. Return the path.

        `html`, `svg`, `png`, `pdf` and `txt` hold table and timelines. `md` holds the table as readers see it. `csv`
        has all values of `rows` in full: one line per trace, and blanks between the figures of a cell. The `width` of a
        figure is as in `Trace.save`.

        Raises:
            FormatError: if the suffix is another one.
            UsageError: if the width is not from 2 to 40 inches, or if the format has no width.
        """
        return show(self, "save", path, width)

    def __str__(self) -> str:
        """Return the table and the timelines as text, without colour."""
        return show(self, "text")

    def _repr_html_(self) -> str:
        return show(self, "html")

    def _repr_svg_(self) -> str:
        return show(self, "svg")


def compare(
    *subjects: Trace | Plan | ScheduleLike,
    names: Sequence[str] | None = None,
    cost: Cost | None = None,
    order: Order = "pytorch",
    transport: Transport = "buffered",
    bound: bool = False,
) -> Comparison:
    """Show traces side by side, simulated or measured; plans and schedules are simulated first.

    Args:
        subjects: traces, plans or schedules, in any mixture.
        names: what to call them; by default, their plans' names.
        cost: the cost for simulating plans and schedules; by default forward 1, backward 2 and free transfers.
            `Cost.fit(trace)` predicts with the times of a measured trace.
        order: in which order ranks post their sends and receives: see `simulate`.
        transport: which transfers wait for each other: see `simulate`.
        bound: whether the table says how far each makespan is above its `lower_bound`, and above the `bare` one.

    Example:
        >>> import pipelab
        >>> both = compare(pipelab.GPipe(4, 8), pipelab.OneFOneB(4, 8), names=["GPipe", "1F1B"])
        >>> [(row.name, row.makespan, row.peak_activations) for row in both.rows]
        [('GPipe', 33.0, (8, 8, 8, 8)), ('1F1B', 33.0, (4, 3, 2, 1))]
        >>> compare(pipelab.DelayedBackward(4, 8), bound=True).rows[0].bound
        33.0

    Raises:
        UsageError: if there is nothing to compare, or if the number of names is wrong.
        TypeError: if a subject is not a trace, a plan or a schedule.
        CostError: if there are costs or transfers, but only traces, which have their own times.
        ScheduleError: if a plan has faults.
    """
    if not subjects:
        raise UsageError("compare needs at least one trace, plan or schedule")
    traces = tuple(_trace_of(subject, cost, order, transport) for subject in subjects)
    if traces == subjects and (cost is not None or (order, transport) != ("pytorch", "buffered")):
        raise CostError("compare got costs or transfers, but traces have their own times: simulate their plans")
    if names is None:
        names = [", ".join(filter(None, (trace.name, trace.source, trace.note))) for trace in traces]
    if len(names) != len(traces):
        raise UsageError(f"compare got {counted(len(names), 'name')} for {counted(len(traces), 'trace')}")
    return Comparison(traces, tuple(names), tuple(_bounds(trace) if bound else () for trace in traces))


def _trace_of(subject: Trace | Plan | ScheduleLike, cost: Cost | None, order: Order, transport: Transport) -> Trace:
    if isinstance(subject, Trace):
        return subject
    if isinstance(subject, (Plan, ScheduleLike, type, str)):
        return simulate(subject, cost, order=order, transport=transport)
    raise TypeError(
        f"compare takes traces, plans and schedules, one by one, got {shorten(subject)}"
        + (": take its trace" if hasattr(subject, "trace") else "")
    )


def _bounds(trace: Trace) -> tuple[float, float]:
    """Return a trace's bound, and the one without recomputations: the same if its plan has none."""
    bound, recomputes = lower_bound(trace), any(TRAITS[kind].again for kind in trace.plan.bound.codes.kinds)
    return bound, lower_bound(trace, bare=True) if recomputes else bound


def _row(trace: Trace, name: str, bounds: tuple[float, ...]) -> Row:
    makespan, peaks, codes = trace.makespan, trace.peak_activations, trace.plan.bound.codes
    forwards = [sum(codes.forward[code] for code in row) for row in trace.plan.bound.computing]
    peak_share = tuple(peak / count if count else 0.0 for peak, count in zip(peaks, forwards, strict=True))
    busy = tuple(time / makespan if makespan else 0.0 for time in trace.busy)
    return Row(name, trace.source, makespan, trace.unit, trace.bubble, peaks, peak_share, busy, trace.spans, *bounds)
