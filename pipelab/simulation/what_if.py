"""What if? A step as it ran, but with one rank as quick as the others."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass
from statistics import median

from pipelab.errors import UsageError, clean
from pipelab.plan.actions import HALVES
from pipelab.plan.fault import shorten
from pipelab.trace.replay import Order, listed
from pipelab.trace.trace import Trace


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
    actions = listed(trace)
    order = Order(trace, {name: number for number, name in enumerate(actions)})
    kinds, _, stages, *_ = zip(*actions, strict=True)
    holders = [each.rank for each in actions.values()]
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
