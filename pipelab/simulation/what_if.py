"""What if? A step as it ran, but with one rank as quick as the others; or a plan whose ranks and actions vary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from math import log, sqrt
from statistics import median
from typing import TYPE_CHECKING, Any

from pipelab.checking.checker import ScheduleLike, as_plan
from pipelab.errors import CostError, UsageError, clean, require_size
from pipelab.plan.actions import HALVES, finite
from pipelab.plan.fault import shorten
from pipelab.plan.order import NOTHING, Network, network_of
from pipelab.plan.plan import Plan
from pipelab.simulation.clock import simulate
from pipelab.simulation.cost import Cost, as_cost
from pipelab.trace.replay import Order, listed
from pipelab.trace.trace import Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A step without the delay of one rank. Made by `what_if`.

    Attributes:
        rank: the rank.
        delay: how much longer its actions took than actions of the same kind usually did on the other ranks, added up.
        before: the trace as it was.
        trace: the trace without the delay, simulated. The rank's noise counts as delay, so it is too short on a busy
            machine.
        noisy: the trace without what the rank's medians are above the others', simulated: the rank's noise stays.
    """

    rank: int
    delay: float
    before: Trace
    trace: Trace
    noisy: Trace

    @property
    def change(self) -> float:
        """How the makespan changes, as a share of what it was: -0.07 is 7 % less."""
        return self.trace.makespan / self.before.makespan - 1 if self.before.makespan else 0.0

    def __str__(self) -> str:
        """Return the answer in one sentence."""
        unit = f" {clean(self.before.unit)}" if self.before.unit else ""
        old = self.before.makespan
        now, noisy = (
            (f"{each.makespan:.4g}{unit}", f"{100 * (each.makespan / old - 1 if old else 0.0):+.1f} %")
            for each in (self.trace, self.noisy)
        )
        stays = f" ({', '.join(noisy)}, if its noise stays)" * (noisy != now)
        delay = f"without rank {self.rank}'s delay of {self.delay:.4g}{unit}"
        return f"{delay}: {now[0]} instead of {old:.4g}, {now[1]}{stays}"


def what_if(trace: Trace, rank: int) -> WhatIf:
    """Return what a step would have been if one rank had been as quick as the others.

    Each action of the rank that took longer than the median of its kind on the other ranks takes this median. All other
    actions take as long as they did, all values travel as long, and every rank keeps its order. An action's time counts
    from when its rank and its values were there, so a pause before it belongs to it.

    So no action gets longer. If a busy machine disturbs all ranks alike, the answer is too good for every rank. The
    result's `noisy` avoids this: it shortens each action of the rank by the difference of the medians, and keeps the
    noise.

    A stage with more work than others is a delay too. Then the answer is what an even cut would save.

    Args:
        trace: a trace, best a measured one.
        rank: the rank.

    Example:
        >>> import pipelab
        >>> slow = pipelab.Cost(forward=[1, 1, 1, 2], backward=[2, 2, 2, 4])
        >>> trace = pipelab.simulate(pipelab.OneFOneB(ranks=4, microbatches=8), slow)
        >>> print(what_if(trace, rank=3))
        without rank 3's delay of 24: 33 instead of 57, -42.1 %
        >>> print(what_if(trace, rank=1))
        without rank 1's delay of 0: 57 instead of 57, +0.0 %

    Raises:
        UsageError: if there is no such rank.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < trace.ranks:
        raise UsageError(f"rank={shorten(rank)}: the trace has ranks 0 to {trace.ranks - 1}")
    where = listed(trace)
    order = Order(trace, {code: number for number, code in enumerate(where)})
    kinds, stages, holders = _actions(trace, where)
    times = order.times
    # A value that was there before the rank was idle waited for it: it travelled as long as others do.
    seen = [times.lags[travel] for travel, idle in order.travels.items() if idle or trace.source == "simulated"]
    usual_lag = median(seen) if seen else 0.0
    for travel, idle in order.travels.items():
        if not idle and trace.source != "simulated":
            times.lags[travel] = min(times.lags[travel], usual_lag)
    order.be_late()
    others: dict[str, list[float]] = defaultdict(list)
    own: dict[tuple[str, int], list[tuple[tuple[int, ...], float]]] = defaultdict(list)
    for slot in order.turns:
        kind = "pair" if len(slot) > 1 else kinds[slot[0]]
        took = sum(times.durations[action] + times.lates[action] for action in slot)
        # PyTorch splits nothing on the first stage: I is empty, and W all of B.
        unsplit = kind in HALVES and stages[slot[0]] == 0 and trace.source == "measured"
        if holders[slot[0]] == rank:
            own[kind, stages[slot[0]]].append((slot, took))
        elif not unsplit:
            others[kind].append(took)
    usual = {kind: median(found) for kind, found in others.items()}
    noisy, delay = deepcopy(times), 0.0
    for (kind, stage), ran in own.items():
        if kind not in usual:
            continue
        whole = kind == "W" and stage == 0 and trace.source == "measured"
        typical = usual[kind] + (usual.get("I", 0.0) if whole else 0.0)
        more = max(0.0, median(took for _, took in ran) - typical)
        for slot, took in ran:
            delay += max(0.0, took - typical)
            for new, time in ((times, min(took, typical)), (noisy, max(0.0, took - more))):
                if time < took:
                    for action in slot:
                        new.durations[action], new.lates[action] = time / len(slot), 0.0
    name = f"{trace.name} without rank {rank}'s delay"
    return WhatIf(rank, delay, trace, order.again(times, name), order.again(noisy, name))


def _actions(trace: Trace, where: Mapping[int, tuple[int, int]]) -> tuple[list[str], list[int], list[int]]:
    bound = trace.plan.bound
    codes = [(bound.rows[rank][index], rank) for rank, index in where.values()]
    kind, stage = bound.codes.kind, bound.codes.stage
    return [kind[code] for code, _ in codes], [stage[code] for code, _ in codes], [rank for _, rank in codes]


# ── Slow ranks and noise: how much longer a plan may take than its costs say ──────────────────────────────────────────

_NUMBERS_AT_ONCE = 1 << 24
"""How many times are held together; more draws run in blocks. A part of the meaning of a seed."""


@dataclass(frozen=True, slots=True)
class Jitter:
    """How long a plan took in many draws. Made by `jitter`.

    Attributes:
        name: the plan's name.
        unit: the unit of all times.
        makespans: the makespan of each draw, in the order of the draws.
        undisturbed: the makespan without slow ranks and noise.
        waits: for each rank, how much longer it was idle than undisturbed, the mean of all draws.
    """

    name: str
    unit: str
    makespans: tuple[float, ...]
    undisturbed: float
    waits: tuple[float, ...]

    @property
    def hurt(self) -> int:
        """The rank that loses most: the one that is idle longest beyond what it was undisturbed."""
        return max(range(len(self.waits)), key=self.waits.__getitem__)

    @property
    def mean(self) -> float:
        """The mean of the makespans."""
        return sum(self.makespans) / len(self.makespans)

    def quantile(self, q: float) -> float:
        """Return the makespan that a share `q` of the draws does not exceed; between two draws, on their line.

        Example:
            >>> Jitter("a plan", "", (3.0, 1.0, 2.0), 1.0, (0.0,)).quantile(0.75)
            2.5

        Raises:
            UsageError: if `q` is not a number from 0 to 1.
        """
        share = finite(q)
        if share is None or share > 1:
            raise UsageError(f"q={shorten(q)}: expected a number from 0 to 1, such as 0.95")
        ordered = sorted(self.makespans)
        below, part = divmod(share * (len(ordered) - 1), 1)
        low, high = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
        return low + part * (high - low)

    def __repr__(self) -> str:
        unit = f" {clean(self.unit)}" if self.unit else ""
        low, middle, high = map(self.quantile, (0.05, 0.5, 0.95))
        return (
            f"<{len(self.makespans)} draws of {clean(self.name)}: makespan {middle:.4g}{unit}, 90% between {low:.4g} "
            f"and {high:.4g}; undisturbed {self.undisturbed:.4g}; rank {self.hurt} waits "
            f"{self.waits[self.hurt]:.4g} more>"
        )


def jitter(
    plan: Plan | ScheduleLike,
    cost: Cost | None = None,
    *,
    spread: float = 0.1,
    slow: Mapping[int, float] | None = None,
    draws: int = 1000,
    seed: int = 0,
) -> Jitter:
    """Simulate a plan many times, with noise on each action's time, and some ranks slower than others.

    Each time is multiplied by its own random factor, log-normal with mean 1 and standard deviation `spread`, so the
    mean work stays the same. The order of the actions stays too. Transfers have no noise, and do not wait for each
    other. A value that comes late delays the rank that waits for it, and one that comes early gains nothing, so the
    mean makespan grows.

    Args:
        plan: the plan or schedule.
        cost: how long actions and transfers take undisturbed; by default forward 1, backward 2 and free transfers.
        spread: the standard deviation of an action's time, as a share of it; 0 for no noise.
        slow: by rank, how many times as long its actions take.
        draws: how many simulations; all run together, with NumPy.
        seed: of the random numbers. The same arguments give the same draws, on the same version of NumPy.

    Example:
        >>> import pipelab
        >>> straggling = pipelab.jitter(pipelab.OneFOneB(4, 8), spread=0, slow={3: 1.2}, draws=1)
        >>> straggling.undisturbed, round(straggling.makespans[0], 1), straggling.hurt
        (33.0, 37.8, 0)
        >>> noisy = pipelab.jitter(pipelab.OneFOneB(8, 64), spread=0.1)
        >>> 213 < noisy.quantile(0.05) < noisy.mean < noisy.quantile(0.95) < 240
        True

    Raises:
        ScheduleError: if the plan has faults.
        UsageError: if a rank in `slow` is none of the plan's, or a number is not possible; if NumPy is not installed.
        CostError: if the cost has a slow-down beside transfers: what happens meanwhile then depends on the draw.
    """
    cost = as_cost(cost)
    plan = as_plan(plan)
    factors = [1.0] * plan.ranks
    for rank, factor in (slow or {}).items():
        number = finite(factor)
        if rank not in range(plan.ranks) or number is None:
            raise UsageError(
                f"slow={shorten(slow)}: expected ranks from 0 to {plan.ranks - 1}, each with a factor of 0 or more, "
                f"such as {{{plan.ranks - 1}: 1.2}}"
            )
        factors[rank] = number
    deviation = finite(spread)
    if deviation is None:
        raise UsageError(f"spread={shorten(spread)}: expected a number, 0 or more, such as 0.1 for 10 %")
    draws = require_size("draws", draws)
    undisturbed = simulate(plan, cost)
    if cost.slowdown > 1:
        raise CostError(f"jitter cannot draw with slowdown={cost.slowdown:g}: use simulate, or slowdown=1")
    try:
        import numpy
    except ImportError as error:
        raise UsageError("jitter draws with NumPy, which is not installed\n  try: pip install numpy") from error
    random = numpy.random.default_rng(seed)
    block = max(1, _NUMBERS_AT_ONCE // plan.bound.codes.always)
    makespans: list[float] = []
    idle = numpy.zeros(plan.ranks)
    for first in range(0, draws, block):
        ends, busy = _drawn(undisturbed.plan, cost, factors, deviation, min(block, draws - first), random)
        makespans += ends.tolist()
        idle += (ends - busy).sum(axis=1)
    before = [undisturbed.makespan - busy for busy in undisturbed.busy]
    waits = tuple(now / draws - then for now, then in zip(idle.tolist(), before, strict=True))
    return Jitter(plan.name, cost.unit, tuple(makespans), undisturbed.makespan, waits)


def _drawn(
    plan: Plan, cost: Cost, factors: list[float], spread: float, draws: int, random: Any
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the makespans of some draws, and by rank and draw, how long it was working."""
    import numpy

    bound, codes = plan.bound, plan.bound.codes
    lasts, delay = cost.lengths(plan)
    paired = cost.pair_times(plan) if bound.pairs else None
    sigma = sqrt(log(1 + spread**2))
    jobs, network = network_of(bound, () if paired is None else bound.pairs)
    noise: dict[int, Any] = {}  # by code: an all-reduce has the same on all of its ranks
    works: list[Any] = []
    for rank, slot in jobs:
        code = slot[0]
        if code >= len(codes.kind) and (move := bound.moves[code - len(codes.kind)]).reduces:
            code = codes.code(move.action)
        group = bound.reduces.get(code, [rank])
        work = paired[codes.slot[code]] if paired is not None and len(slot) > 1 else lasts[code]
        work *= max(factors[each] for each in group)
        if spread and code not in noise:
            noise[code] = numpy.exp(sigma * random.standard_normal(draws) - sigma**2 / 2)
        works.append(work * noise[code] if spread else numpy.full(draws, work))
    if cost.sender == "busy":
        network = _with_held_senders(network)
    starts = network.starts(works, codes.by_need(delay), lambda times: reduce(numpy.maximum, times))
    busy = numpy.zeros((plan.ranks, draws))
    last = numpy.zeros(draws)
    for (rank, slot), start, work in zip(jobs, starts, works, strict=True):
        last = numpy.maximum(last, start + work)
        if slot[0] < len(codes.kind):  # else a move: the rank computes meanwhile
            busy[rank] += work
    return last, busy


def _with_held_senders(network: Network) -> Network:
    """Return a network in which a rank goes on when what it sends has arrived."""
    sends: dict[int, list[int]] = defaultdict(list)
    for before in network.follows:
        for job, what in before:
            if what != NOTHING:
                sends[job].append(what)
    held = (
        [(job, sent) for job, what in before if what == NOTHING for sent in sends[job]] for before in network.follows
    )
    return Network([[*before, *more] for before, more in zip(network.follows, held, strict=True)])
