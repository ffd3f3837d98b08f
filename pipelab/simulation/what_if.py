"""What one rank's delay costs: a step as it ran, but with one rank as quick as the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from pipelab.errors import UsageError, clean
from pipelab.plan.fault import shorten
from pipelab.plan.order import traverse
from pipelab.trace.trace import Trace
from pipelab.trace.waits import Waits, before_slot, half

__all__ = ["Run", "WhatIf", "what_if"]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A step without the delay of one rank. Made by `what_if`.

    Attributes:
        rank: the rank.
        delay: how much longer its actions took than those of the same kind usually did on the other ranks, added up.
        before: the trace as it was.
        trace: the trace without the delay, simulated.
    """

    rank: int
    delay: float
    before: Trace
    trace: Trace

    @property
    def change(self) -> float:
        """How the makespan changes, as a share of what it was: -0.07 is 7 % less."""
        return self.trace.makespan / self.before.makespan - 1 if self.before.makespan else 0.0

    def __str__(self) -> str:
        """Return the answer in one sentence."""
        unit = f" {clean(self.before.unit)}" if self.before.unit else ""
        return (
            f"without rank {self.rank}'s delay of {self.delay:.4g}{unit}: {self.trace.makespan:.4g}{unit} instead of "
            f"{self.before.makespan:.4g}, {100 * self.change:+.1f} %"
        )


def what_if(trace: Trace, rank: int) -> WhatIf:
    """Return how a step would have gone if one rank had been as quick as the others.

    Each action of the rank that took longer than the median of its kind on the other ranks takes this median. All other
    actions take as long as they did, all values travel as long, and every rank keeps its order. An action's time counts
    from when its rank and its values were there, so a pause before it belongs to it.

    A stage that has more to do than others is a delay too: the answer is then what an even cut would save.

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
    run = Run.of(trace)
    bound, times = trace.plan.bound, dict(run.times)
    stage = bound.codes.stage
    others: dict[str, list[float]] = defaultdict(list)
    # PyTorch splits nothing on the first stage: I is empty, and W all of B.
    unsplit = {code for code in times if run.kind(code) in "IW" and stage[code] == 0 and trace.source == "measured"}
    for code, time in times.items():
        if bound.rank_of[code] != rank and code not in unsplit:
            others[run.kind(code)].append(time)
    usual = {kind: median(found) for kind, found in others.items()}
    delay = 0.0
    for code in bound.rows[rank]:
        kind = run.kind(code)
        if code in times and kind in usual:
            typical = usual[kind]
            if kind == "W" and code in unsplit:
                typical += usual.get("I", 0.0)
            delay += max(0.0, times[code] - typical)
            times[code] = min(times[code], typical)
    return WhatIf(rank, delay, trace, run.again(times, f"{trace.name} without rank {rank}'s delay"))


@dataclass(frozen=True)
class Run:
    """What happened in a trace, so that it can happen again with other times.

    Attributes:
        trace: the trace.
        order: its actions, each after what it needs.
        halves: of each pair that ran as one slot, the code of its forward to that of its backward.
        times: by code, how long the action took since its rank and its values were there; pairs by their forwards.
        travel: by the codes of giver and needer, how long the value travelled.
    """

    trace: Trace
    order: tuple[int, ...]
    halves: Mapping[int, int]
    times: Mapping[int, float]
    travel: Mapping[tuple[int, int], float]

    @classmethod
    def of(cls, trace: Trace) -> Run:
        """Look at what a trace's actions waited for."""
        bound, found = trace.plan.bound, Waits(trace)
        travel = _travel(trace, found.ended)
        times: dict[int, float] = {}
        halves: dict[int, int] = {}
        for rank, row in enumerate(bound.rows):
            for index, code in enumerate(row):
                if half(trace, rank, index) == "lower":
                    halves[row[index - 1]] = code
                    continue
                if bound.codes.kind[code] == "R":
                    there = [each.there for each in found.needs(rank, index)]
                else:
                    slot = row[index : index + 2] if half(trace, rank, index) == "upper" else [code]
                    needs = [(giver, each) for each in slot for _, giver in bound.inputs(each)]
                    there = [found.ended[giver] + travel.get((giver, each), 0.0) for giver, each in needs]
                since = max([_free(trace, rank, index), *there])
                times[code] = max(times.get(code, 0.0), trace.ends[rank][index] - since)
        walk = traverse(bound, atomic_pairs=bool(halves))
        if walk.stuck:  # no trace of pairs that ran as slots is, but a file may say so
            halves, walk = {}, traverse(bound)
        return cls(trace, tuple(walk.order), halves, times, travel)

    def kind(self, code: int) -> str:
        """Return with which actions one is compared."""
        return "pair" if code in self.halves else self.trace.plan.bound.codes.kind[code]

    def again(self, times: Mapping[int, float], name: str) -> Trace:
        """Return the trace with other times of its actions."""
        trace, bound = self.trace, self.trace.plan.bound
        kind, code_of = bound.codes.kind, bound.codes.code
        free = [trace.start] * trace.ranks
        begun: dict[int, float] = {}
        ended: dict[int, float] = {}
        lower = set(self.halves.values())
        for code in self.order:
            if code in lower:
                continue
            reduces = kind[code] == "R"
            ranks = bound.reduces[code] if reduces else [bound.rank_of[code]]
            slot = [code, self.halves[code]] if code in self.halves else [code]
            needs = [] if reduces else [(giver, each) for each in slot for _, giver in bound.inputs(each)]
            there = [ended[giver] + self.travel.get((giver, each), 0.0) for giver, each in needs]
            start = max([*(free[rank] for rank in ranks), *there])
            for each in slot:
                begun[each], ended[each] = start, start + times.get(code, 0.0)
            for rank in ranks:
                free[rank] = ended[code]
        moved = []
        for sent in trace.transfers:
            giver, needer = code_of(sent.giver), code_of(sent.needer)
            left = ended[giver]
            moved.append(replace(sent, start=left, end=left + self.travel[giver, needer], queued=0.0, behind=None))
        starts, ends = ([[times_of[code] for code in row] for row in bound.rows] for times_of in (begun, ended))
        return Trace(trace.plan, starts, ends, trace.unit, transfers=moved, name=name)


def _free(trace: Trace, rank: int, index: int) -> float:
    """Return when the rank had ended what it ran before an action."""
    before = before_slot(trace, rank, index)
    return trace.ends[rank][before] if before >= 0 else trace.start


def _travel(trace: Trace, ended: Mapping[int, float]) -> dict[tuple[int, int], float]:
    """Return how long each value travelled, by the codes of its giver and needer.

    In a measured trace, only values that an idle rank waited for show it. Others travelled as long as these usually do,
    at most until they were used.
    """
    bound = trace.plan.bound
    code_of = bound.codes.code
    idle = {code: _free(trace, rank, index) for rank, row in enumerate(bound.rows) for index, code in enumerate(row)}
    ends = [(code_of(each.giver), code_of(each.needer), each.end) for each in trace.transfers]
    found = {(giver, needer): max(0.0, end - ended[giver]) for giver, needer, end in ends}
    if trace.source == "simulated":
        return found
    seen = [time for (giver, needer), time in found.items() if ended[giver] >= idle[needer]]
    usual = median(seen) if seen else 0.0
    return {
        (giver, needer): time if ended[giver] >= idle[needer] else min(time, usual)
        for (giver, needer), time in found.items()
    }
