"""The clock of a plan whose sends and receives stand in queues, and the order of them that costs least.

PyTorch's runtime runs all communication of a rank in one queue, and the two ends of a transfer hold both queues until
they have met: see PyTorch's issues 172668 and 188833, its pull requests 165664, 172833 and 178815, and torchtitan's
issue 2209. So a value that is ready may stand behind one that is not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from pipelab.checking.checker import ScheduleLike, as_plan, require_legal, with_excerpt
from pipelab.checking.transfers import Walk, transfer_deadlocks, walk
from pipelab.errors import ScheduleError, UsageError
from pipelab.plan.bound import BoundPlan
from pipelab.plan.csv_notation import write_rows
from pipelab.plan.fault import shorten
from pipelab.plan.plan import Plan
from pipelab.plan.transfers import SEMANTICS, Lowering, Queues, Semantics, in_order, inbound, lowered, queues
from pipelab.simulation.cost import Cost
from pipelab.trace.events import Transfer
from pipelab.trace.trace import Trace

__all__ = ["LoweredPlan", "lower", "on_the_wire"]


@dataclass(frozen=True, slots=True)
class LoweredPlan:
    """A plan with its sends and receives, as a runtime runs it. Made by `lower`.

    Attributes:
        plan: the plan.
        transfers: how its transfers are ordered: see `Cost.transfers`.
        rows: for each rank, its actions, sends and receives in PyTorch's notation: `0SEND_F3` sends what `0F3` gives,
            and `1RECV_F3` receives what `1F3` needs.
        written: the rows as `to_csv` writes them, with the words with which PyTorch's runtime unshards stages (FSDP)
            and scales gradients.
    """

    plan: Plan
    transfers: Semantics
    rows: tuple[tuple[str, ...], ...]
    written: tuple[tuple[str, ...], ...]

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write the rows in PyTorch's CSV notation (`compute_comms`) and return the path.

        PyTorch's runtime reads it with `_load_csv(path, format="compute_comms")` and runs it as it is, if it could run
        the plan's own file: see `Plan.to_csv`. It then inserts nothing, so the file has the words in `written` too.

        Warns:
            UserWarning: as `Plan.to_csv`.
        """
        write_rows(path, self.plan.rows, self.written)
        return Path(path)

    def __str__(self) -> str:
        """Return the rows, one line per rank."""
        return "\n".join(f"rank {rank} | {' '.join(row)}" for rank, row in enumerate(self.rows))


def lower(
    plan_or_schedule: Plan | ScheduleLike, transfers: Semantics = "pytorch", cost: Cost | None = None
) -> LoweredPlan:
    """Return a plan with its sends and receives, in the order that PyTorch gives them or in another one.

    Args:
        plan_or_schedule: the plan or schedule.
        transfers: the order: see `Cost.transfers`. `"arrive"`, `"two-way"` and `"per-peer"` have PyTorch's.
        cost: how long actions and transfers take, for `"by-time"`; by default forward 1, backward 2, free transfers.

    Example:
        >>> import pipelab
        >>> print(pipelab.lower(pipelab.OneFOneB(ranks=2, microbatches=2), "pytorch"))
        rank 0 | 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        rank 1 | 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

        The order `"by-time"` cannot hang, and takes hardly longer than if every value just arrived:

        >>> plan = pipelab.Interleaved1F1B(ranks=8, microbatches=16)
        >>> for transfers in ("arrive", "pytorch", "by-time"):
        ...     print(transfers, pipelab.simulate(plan, pipelab.Cost(transfers=transfers)).makespan)
        arrive 58.5
        pytorch 84.0
        by-time 58.5

    Raises:
        ScheduleError: if the plan has faults, or has pairs that only run one half after the other.
        UsageError: if `transfers` is none of those words.
    """
    plan = as_plan(plan_or_schedule)
    if transfers not in SEMANTICS:
        raise UsageError(f"transfers={shorten(transfers)}: expected {', '.join(SEMANTICS[:-1])} or {SEMANTICS[-1]}")
    require_legal(plan)
    _refuse(plan, "by-time")  # a deadlock of transfers can be lowered, to be looked at
    low = _lowering(plan, replace(cost or Cost(), transfers=transfers))
    written = [[low.word(step) for step in row] for row in low.rows]
    rows = [[low.word(step) for step in row if step[0] in ("run", "SEND", "RECV")] for row in low.rows]
    return LoweredPlan(plan, transfers, tuple(map(tuple, rows)), tuple(map(tuple, written)))


def on_the_wire(plan: Plan, cost: Cost, paired: list[float] | None) -> Trace:
    """Return the trace of a legal plan whose transfers stand in queues.

    Raises:
        ScheduleError: if sends and receives wait for each other in a circle.
    """
    _refuse(plan, "by-time")
    bound = plan.bound
    wire = queues(_lowering(plan, cost), cost.transfers)
    found = walk(bound, wire, atomic_pairs=paired is not None)
    if found.row_at != list(map(len, bound.rows)):
        _refuse(plan, cost.transfers)
    times = _clock(plan, wire, found, cost, paired)
    as_run = cost.first_stage == "as-run" and "I" in bound.kinds
    return Trace(
        plan,
        [[times.begun[code] for code in row] for row in bound.rows],
        [[times.ended[code] for code in row] for row in bound.rows],
        cost.unit,
        transfers=[times.transfer(bound, wire, value) for value in wire.crossings],
        note=", ".join(["stage 0 as run"] * as_run + [f"transfers {cost.transfers}"]),
    )


def _refuse(plan: Plan, transfers: Semantics) -> None:
    """Raise if a plan's transfers wait for each other; `"by-time"` looks only at what pairs need."""
    faults = [with_excerpt(plan, fault) for fault in transfer_deadlocks(plan.bound, transfers)]
    if faults:
        raise ScheduleError(faults, f"{plan.name} with transfers {transfers}")


@dataclass(frozen=True, slots=True)
class _Times:
    """When everything happens: actions by code; values when made, when they leave, arrive, and behind which others."""

    begun: list[float]
    ended: list[float]
    made: dict[int, float]
    left: dict[int, float]
    there: dict[int, float]
    behind: dict[int, int]

    def transfer(self, bound: BoundPlan, wire: Queues, value: int) -> Transfer:
        """Return how a value crossed."""
        crossing, action = wire.crossings[value], bound.codes.action
        other = wire.crossings[self.behind[value]] if value in self.behind else None
        return Transfer(
            crossing.source,
            crossing.target,
            action(crossing.giver),
            action(crossing.needer),
            self.left[value],
            self.there[value],
            self.left[value] - self.made[value],
            None if other is None else (action(other.giver), action(other.needer)),
        )


def _clock(plan: Plan, wire: Queues, found: Walk, cost: Cost, paired: list[float] | None) -> _Times:
    """Give every action and every transfer of a walk its time; `paired` as in the clock without queues."""
    bound, codes = plan.bound, plan.bound.codes
    lasts, delay = cost.lengths(plan)
    free = [0.0] * len(bound.rows)
    busy: list[tuple[float, int]] = [(0.0, -1)] * len(wire.values)  # by queue: until when, and with which value
    needed = inbound(wire.crossings)
    forward_of = _forward_of(bound)
    backward_of = {forward: backward for backward, forward in forward_of.items()}
    times = _Times([0.0] * len(lasts), [0.0] * len(lasts), {}, {}, {}, {})
    for step in found.order:
        if step < 0:
            value = ~step
            start = times.made[value]
            for queue in wire.ends[value]:
                until, other = busy[queue]
                if until > start:
                    start, times.behind[value] = until, other
            times.left[value], times.there[value] = start, start + delay[value]
            for queue in wire.ends[value]:
                busy[queue] = times.there[value], value
            continue
        code = step
        group = bound.reduces[code] if codes.kind[code] == "R" else [bound.rank_of[code]]
        if paired is not None and code in forward_of:
            start, end = times.begun[forward_of[code]], times.ended[forward_of[code]]
        else:
            slot = [code, backward_of[code]] if paired is not None and code in backward_of else [code]
            arrived = [times.there[needed[each]] for each in slot if each in needed]
            start = max([free[rank] for rank in group] + arrived)
            end = start + (paired[codes.slot[code]] if paired is not None and len(slot) > 1 else lasts[code])
        times.begun[code], times.ended[code] = start, end
        for rank in group:
            free[rank] = end
        if code not in bound.pairs and codes.kind[code] in "FBI":  # what a pair gives leaves after both halves
            for each in (code, forward_of.get(code, code)):
                times.made[codes.gives[each]] = end
    return times


def _lowering(plan: Plan, cost: Cost) -> Lowering:
    """Lower a plan; `"by-time"`, take the best of a few orders."""
    if cost.transfers != "by-time":
        return lowered(plan.bound, cost.transfers)
    bound = plan.bound
    wire = queues(lowered(bound, "arrive"), "arrive")
    found = walk(bound, wire)
    times = _clock(plan, wire, found, cost, None)
    crossed = [~step for step in found.order if step < 0]
    wanted = {value: times.begun[wire.crossings[value].needer] for value in crossed}
    left = _time_left(plan, wire, found, cost)
    keys: list[Callable[[int], float]] = [wanted.__getitem__, times.made.__getitem__, lambda value: -left[value]]
    # Each key grows along every chain of needs, and sorting keeps the order of the walk among equals. So the first
    # value that is left always finds both its queues free, and can cross.
    tried = [lowered(bound, "pytorch"), *(in_order(bound, sorted(crossed, key=key)) for key in keys)]
    return min(tried, key=lambda low: _makespan(plan, low, cost))


def _makespan(plan: Plan, low: Lowering, cost: Cost) -> float:
    wire = queues(low, "by-time")
    return max(_clock(plan, wire, walk(plan.bound, wire), cost, None).ended, default=0.0)


def _time_left(plan: Plan, wire: Queues, found: Walk, cost: Cost) -> dict[int, float]:
    """Return, for each value, the longest chain of work and transfers from its leaving to the end of the plan."""
    bound, codes = plan.bound, plan.bound.codes
    lasts, delay = cost.lengths(plan)
    forward_of = _forward_of(bound)
    after = [0.0] * len(bound.rows)  # by rank: from the start of the next action in its row
    tail = [0.0] * len(lasts)  # by code: from its own start
    left: dict[int, float] = {}
    for step in reversed(found.order):
        if step < 0:
            left[~step] = delay[~step] + tail[wire.crossings[~step].needer]
            continue
        group = bound.reduces[step] if codes.kind[step] == "R" else [bound.rank_of[step]]
        onward = [after[rank] for rank in group]
        if step not in bound.pairs and codes.kind[step] in "FBI":
            given = (codes.gives[each] for each in (step, forward_of.get(step, step)))
            onward += [left[value] for value in given if value in left]
        tail[step] = lasts[step] + max(onward)
        for rank in group:
            after[rank] = tail[step]
    return left


def _forward_of(bound: BoundPlan) -> dict[int, int]:
    """Return, by the backward of a pair, its forward."""
    return {after: before for row in bound.rows for before, after in pairwise(row) if before in bound.pairs}
