"""Why ranks were idle: every idle time of a trace with its reason, and their sums."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from pipelab.display import show
from pipelab.plan.actions import Action
from pipelab.trace.waits import Wait, Waits, before_slot

if TYPE_CHECKING:
    from pipelab.table import Table
    from pipelab.trace.trace import Trace

Reason = Literal["fill", "wait", "behind another transfer", "transfer", "channel", "order", "all-reduce", "drain"]

REASONS: tuple[Reason, ...] = get_args(Reason)
"""Why a rank is idle, in the order in which they follow one another: each idle moment has exactly one reason."""

MEANINGS: dict[Reason, str] = {
    "fill": "The rank has not begun yet.",
    "wait": "A value that it needs is not computed yet.",
    "behind another transfer": "The value is computed, and its transfer waits for others.",
    "transfer": "The value is on its way.",
    "channel": "Its weights are being gathered, or its activation is on its way back.",
    "order": "All values are there: the machine was late, or busy with something that the trace does not show.",
    "all-reduce": "Another rank has not reached the all-reduce yet; or its own still runs, beside computing.",
    "drain": "The rank has done all of its actions.",
}
"""What each reason means."""

WAITS: tuple[Reason, ...] = ("wait", "behind another transfer", "transfer")
"""The reasons that wait for another action's value."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A time in which a rank did nothing, for one reason.

    Attributes:
        rank: the rank.
        start: when it began, in the trace's unit.
        end: when it ended.
        reason: one of `REASONS`.
        needer: the action that the rank ran next; `None` after its last one.
        giver: the action whose value came last, or which kept another rank from an all-reduce; `None` if there is none.
    """

    rank: int
    start: float
    end: float
    reason: Reason
    needer: Action | None = None
    giver: Action | None = None

    @property
    def duration(self) -> float:
        """How long it was."""
        return self.end - self.start


def idle_times(trace: Trace) -> tuple[Idle, ...]:
    """Return every idle time, rank by rank, in order. Their sum is the ranks' makespans without their busy times."""
    found = Waits(trace)
    return tuple(idle for rank in range(trace.ranks) for idle in _of_rank(trace, found, rank))


def _of_rank(trace: Trace, found: Waits, rank: int) -> Iterator[Idle]:
    """Yield the idle times of one rank."""
    free = trace.start
    for index, (start, end) in enumerate(zip(trace.starts[rank], trace.ends[rank], strict=True)):
        if start > free:
            yield from _before(trace, found, rank, index, free)
        free = max(free, end)
    for reduce in [move for move in trace.moves if move.rank == rank and move.action.traits.computes][-1:]:
        if reduce.end > free:
            yield Idle(rank, free, reduce.end, "all-reduce", reduce.action)
            free = reduce.end
    if trace.end > free:
        yield Idle(rank, free, trace.end, "drain" if trace.starts[rank] else "fill")


def _before(trace: Trace, found: Waits, rank: int, index: int, free: float) -> Iterator[Idle]:
    """Yield the idle times before an action, from when its rank was free: each reason lasts until its time."""
    action, start = trace.plan.bound.codes.action, trace.starts[rank][index]
    needer, begun = action(trace.plan.bound.computing[rank][index]), free
    for reason, time, causes in _reasons(trace, found, rank, index):
        until = min(time, start)
        if until > free:
            last = max(causes, key=lambda need: need.there, default=None)
            giver = action(last.giver) if last is not None and last.there > begun else None
            yield Idle(rank, free, until, reason, needer, giver)
            free = until


def _reasons(trace: Trace, found: Waits, rank: int, index: int) -> list[tuple[Reason, float, list[Wait]]]:
    """Return why an action may have waited, in order: until when, and for what."""
    bound, start, every = trace.plan.bound, trace.starts[rank][index], found.needs(rank, index)
    values = [need for need in every if bound.computes(need.giver)]
    moves = [need for need in every if not bound.computes(need.giver)]
    there = max((need.there for need in values), default=-inf)
    if before_slot(trace, rank, index) < 0:
        return [("fill", start, every)]
    if bound.codes.collective[bound.computing[rank][index]]:
        return [("all-reduce", there, values), ("order", start, values)]
    left = [need.transfer.start for need in values if need.transfer]
    return [
        ("wait", max((need.ended for need in values), default=-inf), values),
        ("behind another transfer", max(left, default=-inf), values),
        ("transfer", there, values),
        ("channel", max((need.there for need in moves), default=-inf), moves),
        ("order", start, values),
    ]


@dataclass(frozen=True)
class Ledger(Sequence[Mapping[Reason, float]]):
    """Where the time of every rank went: work, and idle time by reason, in the trace's unit.

    `ledger[rank]` is a dict from reason to time, with the reasons that the rank has; the times add up to the makespan
    without the rank's busy time.

    Attributes:
        work: for each rank, how long it was busy.
        idle: for each rank, its idle time by reason.
        makespan: of the trace.
        unit: of all times.

    Example:
        >>> import pipelab
        >>> ledger = pipelab.simulate(pipelab.OneFOneB(ranks=4, microbatches=8)).ledger
        >>> ledger[1]
        {'fill': 1.0, 'wait': 6.0, 'drain': 2.0}
        >>> print(ledger)
        rank  work  fill  wait  drain  idle  idle share
        0       24     -     9      -     9      27.3 %
        1       24     1     6      2     9      27.3 %
        2       24     2     3      4     9      27.3 %
        3       24     3     -      6     9      27.3 %
        all     96     6    18     12    36      27.3 %
        <BLANKLINE>
        4 ranks x 33 = 132 = work 96 + fill 6 + wait 18 + drain 12
    """

    work: tuple[float, ...]
    idle: tuple[dict[Reason, float], ...]
    makespan: float
    unit: str = ""

    @classmethod
    def of(cls, trace: Trace) -> Ledger:
        """Return a trace's ledger."""
        idle: list[dict[Reason, float]] = [{} for _ in range(trace.ranks)]
        for each in trace.idle:
            idle[each.rank][each.reason] = idle[each.rank].get(each.reason, 0.0) + each.duration
        return cls(trace.busy, tuple(idle), trace.makespan, trace.unit)

    @property
    def total(self) -> dict[Reason, float]:
        """The idle time of all ranks together, by reason."""
        return {
            reason: sum(row.get(reason, 0.0) for row in self.idle)
            for reason in REASONS
            if any(reason in row for row in self.idle)
        }

    @property
    def table(self) -> Table:
        """A row for each rank and one for all, as a table."""
        return show(self, "table")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the table; the suffix is the format: see `Table.save`. Return the path."""
        return self.table.save(path)

    def __len__(self) -> int:
        """Return the number of ranks."""
        return len(self.idle)

    def __getitem__(self, rank: int) -> dict[Reason, float]:  # type: ignore[override]  # no slices
        """Return a rank's idle time by reason."""
        return self.idle[rank]

    def __str__(self) -> str:
        """Return the sum in one line, and the table."""
        return str(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()
