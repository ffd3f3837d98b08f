"""The clock of plans whose transfers wait for each other, and the order of transfers that costs least.

Which backend has which transport depends on its version and on how it was initialised: see docs/wire.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import accumulate
from pathlib import Path

from pipelab.checking.checker import ScheduleLike, as_plan, require_legal, with_excerpt
from pipelab.checking.transfers import Wire, transfer_deadlocks
from pipelab.display import show
from pipelab.errors import UsageError
from pipelab.plan.csv_notation import write_rows
from pipelab.plan.fault import ScheduleError, shorten
from pipelab.plan.plan import Plan
from pipelab.plan.transfers import Lookahead, Lowering, Order, Runtime, Transport, lookaheads, lowered, require_words
from pipelab.simulation.cost import Cost, as_cost
from pipelab.trace.events import Transfer

_NEWEST = "2.15"
"""The newest version of PyTorch whose words pipelab knows."""


@dataclass(frozen=True, slots=True)
class LoweredPlan:
    """A plan with its sends and receives. Made by `lower`.

    Attributes:
        plan: the plan.
        order: in which order its transfers are posted: see `simulate`. If PyTorch's own order is as quick as
            `"by-time"`, it is that.
        rows: for each rank, its actions, sends and receives in PyTorch's notation: `0SEND_F3` sends what `0F3` gives,
            and `1RECV_F3` receives what `1F3` needs.
        values: for the order `"by-time"`, the values that cross, in their order.
    """

    plan: Plan
    order: Order
    rows: tuple[tuple[str, ...], ...]
    values: tuple[int, ...] = ()

    def for_runtime(
        self,
        torch: str | None = None,
        *,
        unshard_lookahead: Lookahead = "full",
        max_outstanding_sends: int | None = None,
    ) -> tuple[tuple[str, ...], ...]:
        """Return the rows as PyTorch's runtime runs them, with all of its words (without `defer_reduce_grad_wait`).

        `0UNSHARD` and `0RESHARD` gather and free the weights of stages that are sharded with FSDP, `0REDUCE_GRAD`
        reduces their gradients; a plan with gathers of its own keeps them. `0WAIT_SEND_F3` waits until a send is over.
        In PyTorch each of these words takes a slot, so a few transfers may be elsewhere than in `rows`.

        Args:
            torch: the version of PyTorch, such as `"2.13"`; by default the installed one, else the newest.
            unshard_lookahead: for how many of its coming stages a rank gathers weights: `"full"`, 3; `"auto"`, at most
                3 but only 2 on rank 0; or one number for each rank. For PyTorch 2.15 and newer.
            max_outstanding_sends: how many sends of a rank may be under way together; by default any number. For
                PyTorch 2.15 and newer. Of a plan with a thousand sends this takes seconds, as in PyTorch.

        Example:
            >>> import pipelab
            >>> low = pipelab.lower(pipelab.OneFOneB(ranks=2, microbatches=1))
            >>> low.for_runtime("2.13")[0]
            ('0UNSHARD', '0F0', '0SEND_F0', '0RECV_B0', '0B0', '0REDUCE_GRAD', '0RESHARD')
            >>> low.for_runtime("2.15")[0][3:7]
            ('0RECV_B0', '0B0', '0WAIT_SEND_F0', '0REDUCE_GRAD')

        Raises:
            UsageError: if a version or a number makes no sense, or if no order of waits keeps to the number of sends.
        """
        version = _version(torch)
        if version < (2, 15) and (unshard_lookahead != "full" or max_outstanding_sends is not None):
            raise UsageError(
                f"torch {'.'.join(map(str, version))} has neither unshard_lookahead nor max_outstanding_sends\n"
                "  try: torch='2.15'"
            )
        if max_outstanding_sends is not None and (type(max_outstanding_sends) is not int or max_outstanding_sends < 0):
            raise UsageError(f"max_outstanding_sends={shorten(max_outstanding_sends)}: expected a whole number or None")
        runtime = Runtime(version >= (2, 15), lookaheads(unshard_lookahead, self.plan.ranks), max_outstanding_sends)
        return lowered(self.plan.bound, self.order, self.values, runtime).words()

    def held_sends(self, max_outstanding_sends: int | None = None) -> tuple[int, ...]:
        """Return, for each rank, the most values that it holds together because it has not waited for their sends.

        As PyTorch's runtime waits, from 2.15 on: for the send of an output after the same stage's backward, for all
        others at the end of the row; with a bound, before a send that would be one too many.

        Args:
            max_outstanding_sends: the bound: see `for_runtime`.

        Example:
            Without a bound, a rank holds every gradient that it has sent until the step ends:

            >>> import pipelab
            >>> low = pipelab.lower(pipelab.OneFOneB(ranks=4, microbatches=16))
            >>> low.held_sends(), low.held_sends(max_outstanding_sends=4)
            ((4, 16, 16, 16), (4, 4, 4, 4))

        Raises:
            UsageError: if no order of waits keeps to the number of sends.
        """
        runtime = Runtime(True, lookaheads("full", self.plan.ranks), max_outstanding_sends)  # noqa: FBT003
        rows = lowered(self.plan.bound, self.order, self.values, runtime).rows
        more = {"SEND": 1, "WAIT_SEND": -1}
        return tuple(max(accumulate((more.get(word, 0) for word, _ in row), initial=0)) for row in rows)

    def to_csv(
        self,
        path: str | os.PathLike[str],
        torch: str | None = None,
        *,
        unshard_lookahead: Lookahead = "full",
        max_outstanding_sends: int | None = None,
    ) -> Path:
        """Write the rows of `for_runtime` in PyTorch's CSV notation (`compute_comms`) and return the path.

        PyTorch's runtime reads it with `_load_csv(path, format="compute_comms")` and runs it as it is, if it could run
        the plan's own file: see `Plan.to_csv`. PyTorch 2.15 refuses the rows of older versions, and the other way
        round.

        Warns:
            UserWarning: as `Plan.to_csv`.
        """
        rows = self.for_runtime(torch, unshard_lookahead=unshard_lookahead, max_outstanding_sends=max_outstanding_sends)
        write_rows(path, self.plan.rows, rows)
        return Path(path)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the rows: as `csv` for the installed PyTorch, see `to_csv`, or as `txt`. Return the path.

        Raises:
            FormatError: if the suffix is another one.
        """
        return show(self, "save", path)

    def __str__(self) -> str:
        """Return the rows, one line per rank."""
        return "\n".join(f"rank {rank} | {' '.join(row)}" for rank, row in enumerate(self.rows))


def _version(torch: str | None) -> tuple[int, ...]:
    if torch is None:
        try:
            torch = metadata.version("torch")
        except metadata.PackageNotFoundError:
            torch = _NEWEST
    numbers = re.match(r"(\d+)\.(\d+)", torch) if isinstance(torch, str) else None
    if numbers is None:
        raise UsageError(f"torch={shorten(torch)}: expected a version of PyTorch, such as '{_NEWEST}'")
    return tuple(map(int, numbers.groups()))


def lower(
    plan: Plan | ScheduleLike, cost: Cost | None = None, *, order: Order = "pytorch", transport: Transport = "buffered"
) -> LoweredPlan:
    """Return a plan with its sends and receives, in the order that PyTorch gives them or in another one.

    Args:
        plan: the plan or schedule.
        cost: how long actions and transfers take, for `"by-time"`; by default forward 1, backward 2, free transfers.
        order: where sends and receives are: see `simulate`.
        transport: for which transport `"by-time"` is to be quick: see `simulate`. If transfers do not queue, pipelab
            chooses the order for one queue for each rank.

    Example:
        >>> import pipelab
        >>> print(pipelab.lower(pipelab.OneFOneB(ranks=2, microbatches=2)))
        rank 0 | 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        rank 1 | 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

        The order `"by-time"` cannot hang, and takes hardly longer than if every value just arrived:

        >>> plan = pipelab.Interleaved1F1B(ranks=8, microbatches=16)
        >>> for transport, order in (("buffered", "pytorch"), ("rank", "pytorch"), ("rank", "by-time")):
        ...     print(transport, order, pipelab.simulate(plan, transport=transport, order=order).makespan)
        buffered pytorch 58.5
        rank pytorch 84.0
        rank by-time 58.5

    Raises:
        ScheduleError: if the plan has faults, or has pairs that only run one half after the other.
        UsageError: if `order` or `transport` is none of the words.
        TypeError: if `cost` is not a `Cost`.
    """
    plan, cost = as_plan(plan).reducing(beside=False), as_cost(cost)
    require_words(order, transport)
    require_legal(plan)
    _refuse(plan, "by-time", "rank")  # a deadlock of transfers can be lowered, to be looked at
    low = _lowering(plan, cost, order, transport)
    return LoweredPlan(plan, low.order, low.words(), tuple(low.by_time))


def on_the_wire(
    plan: Plan, cost: Cost, paired: dict[int, float], order: Order, transport: Transport, sends: int | None = None
) -> tuple[list[float], list[float], list[Transfer]]:
    """Return when each code starts and ends if transfers wait for each other, with at most so many sends under way."""
    _refuse(plan, "by-time", transport)
    low = _lowering(plan, cost, order, transport)
    if sends is not None:
        runtime = Runtime(True, lookaheads("full", plan.ranks), sends)  # noqa: FBT003
        low = lowered(plan.bound, low.order, low.by_time, runtime)
    wire = Wire(low, transport, atomic_pairs=bool(paired))
    if wire.stuck:
        _refuse(plan, order, transport)
    _, starts, ends = _times(wire, plan, cost, paired)
    transfers = [_transfer(wire, value, starts, ends) for value in low.crossings]
    return [starts[job] for job in wire.job], [ends[job] for job in wire.job], transfers


def _transfer(wire: Wire, value: int, starts: Sequence[float], ends: Sequence[float]) -> Transfer:
    """Return the transfer of a value, by the times of all jobs."""
    action, crossings, first = wire.low.bound.codes.action, wire.low.crossings, wire.transfer(0)
    job, crossing, made = wire.transfer(value), crossings[value], ends[wire.made[value]]
    behind = None
    if starts[job] > made:  # behind the transfer before it that ended last
        ahead = (other for other, _ in wire.network.follows[job] if other >= first)
        if (last := max(ahead, key=ends.__getitem__, default=-1)) >= 0:
            behind = action(crossings[last - first].giver), action(crossings[last - first].needer)
    both = action(crossing.giver), action(crossing.needer), starts[job], ends[job]
    return Transfer(crossing.source, crossing.target, *both, starts[job] - made, behind)


def _times(
    wire: Wire, plan: Plan, cost: Cost, paired: dict[int, float] | None = None
) -> tuple[list[float], list[float], list[float]]:
    """Return, for each job of a plan on the wire, how long it lasts, when it starts, and when it ends."""
    lasts, delay = cost.lengths(plan)
    for code, time in (paired or {}).items():
        lasts[code] = time
    lasts += delay[: plan.bound.codes.always]
    starts = wire.network.starts(lasts)
    return lasts, starts, [start + length for start, length in zip(starts, lasts, strict=True)]


def _refuse(plan: Plan, order: Order, transport: Transport) -> None:
    """Raise if a plan's transfers wait for each other; for `"by-time"`, only if pairs need it."""
    faults = [with_excerpt(plan, fault) for fault in transfer_deadlocks(plan.bound, order, transport)]
    if faults:
        raise ScheduleError(faults, f"{plan.name} with order {order}, transport {transport}")


def _lowering(plan: Plan, cost: Cost, order: Order, transport: Transport) -> Lowering:
    """Lower a plan; `"by-time"`, take the best of a few orders."""
    bound = plan.bound
    if order != "by-time":
        return lowered(bound, order)
    if transport == "holding":  # nothing is quicker than a receive that holds only what needs it
        return lowered(bound, "at-use")
    queues: Transport = "rank" if transport == "buffered" else transport
    early = lowered(bound, "pytorch")
    wire = Wire(early, "buffered")
    lasts, starts, _ = _times(wire, plan, cost)
    rests = [rest + last for rest, last in zip(wire.network.rests(lasts), lasts, strict=True)]
    first = wire.transfer(0)
    crossed = [job - first for job in wire.network.order if job - first in early.crossings]
    wanted = {value: starts[early.crossings[value].needer] for value in crossed}
    keys = (wanted.__getitem__, lambda value: starts[first + value], lambda value: -rests[first + value])
    # Each key grows along every chain of needs, and sorting keeps the order of the jobs among equals. So the first
    # value that is left always finds all of its queues free, and can cross.
    tried = [early, *(lowered(bound, "by-time", tuple(sorted(crossed, key=key))) for key in keys)]
    return min(tried, key=lambda low: _makespan(plan, low, queues, cost))


def _makespan(plan: Plan, low: Lowering, transport: Transport, cost: Cost) -> float:
    wire = Wire(low, transport)
    if wire.stuck:
        return float("inf")
    _, _, ends = _times(wire, plan, cost)
    return max((ends[code] for row in plan.bound.computing for code in row), default=0.0)
