"""What if? A step as it ran, but with one rank as quick as the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from pipelab.errors import UsageError, clean
from pipelab.plan.actions import HALVES
from pipelab.plan.fault import shorten
from pipelab.trace.replay import Name, Order, Ran, Times, listed, order_of
from pipelab.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A step without the delay of one rank. Made by `what_if`.

    Attributes:
        rank: the rank.
        delay: how much longer its actions took than actions of the same kind usually did on the other ranks, added up.
        before: the original trace.
        trace: the trace without the delay, simulated. The rank's noise counts as delay, so it is too short on a busy
            machine.
        noisy: the simulated trace without the difference between the rank's medians and the others': the noise stays.
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
        trace: a trace, usually a measured one.
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
    measured, actions = trace.source != "simulated", listed(trace)
    order = order_of(trace)
    if measured:
        _travel_as_usual(order)
    turns = list(_turns(order, actions))
    usual = _usual((turn for turn in turns if turn.rank != rank), measured)
    own: dict[tuple[str, int], list[_Turn]] = defaultdict(list)
    for turn in turns:
        if turn.rank == rank and turn.kind in usual:
            own[turn.kind, turn.stage].append(turn)
    times, noisy, delay = order.times, deepcopy(order.times), 0.0
    for (kind, stage), ran in own.items():
        whole = measured and kind == "W" and stage == 0
        typical = usual[kind] + (usual.get("I", 0.0) if whole else 0.0)
        more = max(0.0, median(turn.took for turn in ran) - typical)
        for turn in ran:
            delay += max(0.0, turn.took - typical)
            turn.shorten(times, typical)
            turn.shorten(noisy, max(0.0, turn.took - more))
    name = f"{trace.name} without rank {rank}'s delay"
    return WhatIf(rank, delay, trace, order.again(times, name), order.again(noisy, name))


class _Turn(NamedTuple):
    """An action, or a pair in one slot, and how long it took with its late start."""

    rank: int
    kind: str
    stage: int
    actions: tuple[int, ...]
    took: float

    def shorten(self, times: Times, to: float) -> None:
        if to < self.took:
            for action in self.actions:
                times.durations[action], times.lates[action] = to / len(self.actions), 0.0


def _turns(order: Order, actions: Mapping[Name, Ran]) -> Iterator[_Turn]:
    kinds, _, stages, *_ = zip(*actions, strict=True)
    holders, times = [each.rank for each in actions.values()], order.times
    for slot in order.turns:
        took = sum(times.durations[action] + times.lates[action] for action in slot)
        yield _Turn(holders[slot[0]], "pair" if len(slot) > 1 else kinds[slot[0]], stages[slot[0]], slot, took)


def _travel_as_usual(order: Order) -> None:
    """Let a value that was there before its rank was idle, and waited for it, travel as long as others do."""
    lags = order.times.lags
    usual = median([lags[travel] for travel, idle in order.travels.items() if idle] or [0.0])
    for travel, idle in order.travels.items():
        if not idle:
            lags[travel] = min(lags[travel], usual)
    order.be_late()


def _usual(others: Iterable[_Turn], measured: bool) -> dict[str, float]:
    """Return how long each kind of action usually took; on a measured first stage nothing is split, and `W` is `B`."""
    found: dict[str, list[float]] = defaultdict(list)
    for turn in others:
        if not (measured and turn.stage == 0 and turn.kind in HALVES):
            found[turn.kind].append(turn.took)
    return {kind: median(took) for kind, took in found.items()}
