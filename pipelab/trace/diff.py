"""Why one trace takes longer than another: the difference of their makespans, action by action.

The times go evenly from the first trace's to the second's, and each change counts for as long as it is on the critical
path.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import fsum
from typing import TYPE_CHECKING, Any, Literal, get_args

from pipelab.display import show
from pipelab.errors import UsageError, counted
from pipelab.plan.actions import KINDS, TRAITS, Action
from pipelab.plan.fault import shorten
from pipelab.trace.events import MICROSECONDS, Transfer
from pipelab.trace.replay import Order, Path, Ran, Times, listed, passed
from pipelab.trace.trace import Trace

if TYPE_CHECKING:
    from pipelab.table import Table

Part = Literal["durations", "transfers", "late starts", "order", "moves"]

PARTS: tuple[Part, ...] = get_args(Part)
"""What makes a makespan longer or shorter; see `Diff`."""


@dataclass(frozen=True, slots=True)
class Change:
    """What changed for one action.

    Attributes:
        action: the action.
        rank: its rank in the second trace.
        moved_from: its rank in the first trace.
        start: when it starts in the first trace, from that trace's start.
        shift: how much later it starts in the second.
        duration: how long it takes in the first trace.
        change: how much longer it takes in the second.
        effects: what it adds to the makespan, by part.
    """

    action: Action
    rank: int
    moved_from: int
    start: float
    shift: float
    duration: float
    change: float
    effects: Mapping[Part, float]

    @property
    def effect(self) -> float:
        """What it adds to the makespan in all."""
        return fsum(self.effects.values())


@dataclass(frozen=True)
class Diff(Sequence[Change]):
    """Two traces of the same actions, compared: one `Change` for each action, the largest effect first.

    The effects of all actions add up to the difference of the makespans. They have five parts:

    - `durations`: actions take longer. The times go evenly from the first trace's to the second's, and each change
      counts for as long as its action is on the critical path.
    - `transfers`: values travel longer, or wait longer behind others; counted for the action that needs them.
    - `late starts`: actions begin later after their rank and all that they need are there.
    - `moves`: what runs beside computing takes longer, or begins later: gathers, offloads, loads, all-reduces.
    - `order`: other actions are on the critical path, because an action follows another one on its rank, or is on
      another rank, or a move is in one plan only. pipelab exchanges the orders, and takes the mean with both traces'
      times; the other parts are then means of both orders.

    Exchanging the traces changes only the signs of the parts. Where several chains of actions are equally long, one of
    them counts.

    Attributes:
        before: the first trace.
        after: the second trace.
        names: what they are called.

    Example:
        >>> import pipelab
        >>> plan = pipelab.OneFOneB(ranks=2, microbatches=4)
        >>> predicted = pipelab.simulate(plan, pipelab.Cost(forward=1, backward=2))
        >>> slower = pipelab.simulate(plan, pipelab.Cost(forward=[1, 1.5], backward=2, latency=0.25))
        >>> found = pipelab.diff(predicted, slower, names=["predicted", "slower"])
        >>> found.parts
        {'durations': 2.0, 'transfers': 0.5}
        >>> print(found.sentence)
        slower is 2.5 units longer than predicted (17.5 instead of 15 units): +2 durations, +0.5 transfers

    Source:
        Sums of changes along a path: Aumann and Shapley, "Values of Non-Atomic Games", 1974; for a reader of machine
        learning, the integrated gradients of Sundararajan, Taly and Yan, arXiv:1703.01365. Order against times: the
        Shapley value of two causes, Shorrocks, "Decomposition procedures for distributional analysis", 2013.
    """

    before: Trace
    after: Trace
    names: tuple[str, str]
    changes: tuple[Change, ...]

    @property
    def longer(self) -> float:
        """How much longer the second makespan is; below 0 if it is shorter."""
        return self.after.makespan - self.before.makespan

    @cached_property
    def parts(self) -> dict[Part, float]:
        """The difference by part; only parts that are not 0."""
        whole = max(self.before.makespan, self.after.makespan)
        sums = {part: fsum(change.effects.get(part, 0.0) for change in self.changes) for part in PARTS}
        return {part: total for part, total in sums.items() if abs(total) > 1e-9 * whole}

    def by(self, key: Literal["rank", "stage", "kind", "microbatch"]) -> dict[int | str, float]:
        """Return the effects' sums for each rank, stage, kind or micro-batch; an all-reduce has no micro-batch.

        Raises:
            UsageError: if the key is another one.
        """
        if key not in ("rank", "stage", "kind", "microbatch"):
            raise UsageError(f"by={shorten(key)}: give rank, stage, kind or microbatch")
        groups: dict[int | str, list[float]] = {}
        for change in self.changes:
            value = change.rank if key == "rank" else getattr(change.action, key)
            groups.setdefault("-" if value is None else value, []).append(change.effect)
        return {value: fsum(groups[value]) for value in sorted(groups, key=lambda each: (isinstance(each, str), each))}

    @property
    def first(self) -> Change | None:
        """The earliest action of the first trace whose start, duration or rank changes by a millionth; or `None`."""
        least = 1e-6 * max(self.before.makespan, self.after.makespan)
        changed = [
            each for each in self if max(abs(each.shift), abs(each.change)) > least or each.rank != each.moved_from
        ]
        return min(changed, key=lambda each: (each.start, each.rank), default=None)

    @property
    def sentence(self) -> str:
        """The difference of the makespans and its parts, in one sentence."""
        return show(self, "sentence")

    @property
    def table(self) -> Table:
        """A row for each action, the largest effect first: `diff.table.save("diff.csv")`."""
        return show(self, "table")

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write the comparison; the suffix is the format. Return the path.

        `html` is a page with both timelines, one over the other, coloured by what changed. `csv`, `md` and `txt`
        have the table.

        Raises:
            FormatError: if the suffix is another one.
        """
        return show(self, "save", path)

    def __len__(self) -> int:
        """Return the number of actions."""
        return len(self.changes)

    def __getitem__(self, index: int) -> Change:  # type: ignore[override]  # no slices
        """Return a change; the first has the largest effect."""
        return self.changes[index]

    def __str__(self) -> str:
        """Return the sentence, and the actions with the largest effects."""
        return show(self, "text")

    def _repr_html_(self) -> str:
        return show(self, "html")


def diff(before: Trace, after: Trace, names: Sequence[str] | None = None) -> Diff:
    """Compare two traces of the same actions, such as a prediction and a measurement; see `Diff`.

    Args:
        before: the first trace.
        after: the second trace.
        names: what to call them; by default, how they differ: their sources, or the names of their plans.

    Example:
        >>> import pipelab
        >>> cost = pipelab.Cost(latency=1)
        >>> gpipe, one = (pipelab.simulate(kind(4, 8), cost) for kind in (pipelab.GPipe, pipelab.OneFOneB))
        >>> print(diff(gpipe, one, names=["GPipe", "1F1B"]).sentence)
        1F1B is 10 units longer than GPipe (49 instead of 39 units): +10 order

    Raises:
        TypeError: if one of them is not a trace.
        UsageError: if their actions or their units differ, or the number of names is not two.
    """
    for each in (before, after):
        if not isinstance(each, Trace):
            raise TypeError(f"diff takes two traces, got {shorten(each)}: simulate schedules and plans first")
    if refusal := why_not(before, after):
        raise UsageError(
            f"these two traces cannot be compared action by action: {refusal}\n"
            "  try: pipelab.compare, which shows them side by side"
        )
    if names is None:
        names = [each.source if before.name == after.name else each.name for each in (before, after)]
        names = names if names[0] != names[1] else ["the first", "the second"]
    if len(names) != 2:
        raise UsageError(f"diff got {counted(len(names), 'name')} for 2 traces")
    return Diff(before, after, (names[0], names[1]), tuple(_changes(before, after)))


def why_not(before: Trace, after: Trace) -> str:
    """Return why two traces cannot be compared action by action; empty if they can."""
    if before.unit != after.unit:
        units = " and ".join(shorten(each.unit) if each.unit else "no name" for each in (before, after))
        return f"they have different units of time ({units}); simulate with the times of the other, and its unit"
    mine, theirs = ({name[:4] for name in listed(each) if TRAITS[name[0]].computes} for each in (before, after))
    if (before.plan.stages, before.plan.microbatches) == (after.plan.stages, after.plan.microbatches):
        lacking = sorted(mine ^ theirs, key=lambda name: (name[3], KINDS.index(name[0]), name))
        if not lacking:
            return ""
        place = f" on rank {lacking[0][3]}" if lacking[0][3] >= 0 else ""
        only = "first" if lacking[0] in mine else "second"
        what = f"{len(lacking)} differ, such as {_action(lacking[0])}{place}, only in the {only}"
    else:
        sizes = [(each.plan.stages, each.plan.microbatches) for each in (before, after)]
        what = " and ".join(f"{counted(many, 'stage')} x {counted(each, 'micro-batch')}" for many, each in sizes)
    return f"they have other actions ({what})"


def in_unit_of(trace: Trace, other: Trace) -> Trace:
    """Return a trace in the unit of another.

    If one of the units has no name that pipelab knows, the times are such that all actions together take as long in
    both traces. The trace's note says which factor it is.
    """
    if trace.unit == other.unit:
        return trace
    if {trace.unit, other.unit} <= MICROSECONDS.keys():
        factor = MICROSECONDS[trace.unit] / MICROSECONDS[other.unit]
    else:
        ours, theirs = (fsum(event.duration for event in each.events) for each in (other, trace))
        if not (ours and theirs):
            raise UsageError("the actions of one of the traces take no time\n  try: the same unit in both")
        factor = ours / theirs

    def scaled(event: Any) -> Any:
        queued = {"queued": event.queued * factor} if isinstance(event, Transfer) else {}
        return replace(event, start=event.start * factor, end=event.end * factor, **queued)

    starts, ends = ([[time * factor for time in row] for row in rows] for rows in (trace.starts, trace.ends))
    transfers, moves = ([*map(scaled, each)] for each in (trace.transfers, trace.moves))
    note = ", ".join(filter(None, (trace.note, f"times of the file x {factor:.6g}")))
    return Trace(trace.plan, starts, ends, other.unit, trace.source, None, transfers, moves, name=trace.name, note=note)


def _action(name: Sequence[Any]) -> Action:
    kind, microbatch, stage, *_ = name
    return Action(kind, None if microbatch < 0 else microbatch, stage)


class _Effects:
    """What each action adds to the makespan, by part; `beside` are the numbers of those that do not compute."""

    def __init__(self, size: int, beside: Collection[int]) -> None:
        self.beside = beside
        self.by_part: dict[Part, list[float]] = {part: [0.0] * size for part in PARTS}

    def add(self, orders: Sequence[Order]) -> None:
        """Add what the way from the first order's times to the second's changes, and what the orders do."""
        old, new = (order.times for order in orders)
        same = (orders[0].turns, orders[0].network.follows) == (orders[1].turns, orders[1].network.follows)
        different = orders[:1] if same else orders
        for order in different:
            for path, share in passed(order, old, new):
                self._add_changes(path, old, new, share / len(different))
        if not same:
            for times, (order, weight) in product((old, new), zip(orders, (-0.5, 0.5), strict=True)):
                self._add_order(order.path(times), times, weight)

    def _add_order(self, path: Path, times: Times, weight: float) -> None:
        """Add what a path's actions take, all of it because of the order."""
        order = self.by_part["order"]
        for action in path.actions:
            order[action] += weight * (times.durations[action] + times.lates[action])
        for travel, action in path.travels:
            order[action] += weight * times.lags[travel]

    def _add_changes(self, path: Path, before: Times, after: Times, weight: float) -> None:
        """Add what changes on a path from some times to others."""
        durations, transfers, late_starts, _, moves = self.by_part.values()
        for action in path.actions:
            beside = action in self.beside
            longer, later = (moves, moves) if beside else (durations, late_starts)
            longer[action] += weight * (after.durations[action] - before.durations[action])
            later[action] += weight * (after.lates[action] - before.lates[action])
        for travel, action in path.travels:
            transfers[action] += weight * (after.lags[travel] - before.lags[travel])


def _seen(trace: Trace, ran: Ran) -> tuple[float, float, int]:
    """Return when an action started, from its trace's start, how long it took, and its rank."""
    return ran.start - trace.start, ran.end - ran.start, ran.rank


def _blame_the_order(orders: Sequence[Order], alone: Sequence[int]) -> None:
    """Let what is in one order only, a move or a transfer, take as long with the other trace's times."""
    old, new = (order.times for order in orders)
    travels = orders[0].travels.keys() ^ orders[1].travels.keys()
    for mine, theirs, where in (
        (old.durations, new.durations, alone),
        (old.lates, new.lates, alone),
        (old.lags, new.lags, travels),
    ):
        for at in where:
            mine[at] = theirs[at] = mine[at] + theirs[at]


def _changes(before: Trace, after: Trace) -> list[Change]:
    """Return what became of each action, the largest effect first."""
    first, second = listed(before), listed(after)
    number = {name: at for at, name in enumerate(second | first)}
    orders = [Order(each, number) for each in (before, after)]
    _blame_the_order(orders, [number[name] for name in first.keys() ^ second.keys()])
    plans = (before.plan.bound, first), (after.plan.bound, second)
    beside = {number[name] for bound, ran in plans for name, each in ran.items() if not bound.computes(each.code)}
    effects = _Effects(len(number), beside)
    effects.add(orders)
    changes: list[Change] = []
    for name, at in number.items():
        begun, took, rank = _seen(after, second[name]) if name in second else _seen(before, first[name])
        start, duration, moved_from = _seen(before, first[name]) if name in first else (begun, took, rank)
        parts = {part: values[at] for part, values in effects.by_part.items() if values[at]}
        changes.append(Change(_action(name), rank, moved_from, start, begun - start, duration, took - duration, parts))
    whole = max(before.makespan, after.makespan, 1e-300)

    def size(value: float) -> float:
        return -round(abs(value) / whole, 9)  # equal sizes in the order of their starts, whatever rounding made of them

    return sorted(changes, key=lambda each: (size(each.effect), size(each.change), size(each.shift), each.start))
