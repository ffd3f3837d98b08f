"""The clock of a plan whose transfers occupy their senders, or slow down the work beside them.

Everything happens in the order of time here: how fast an action runs depends on what travels meanwhile, from ranks that
the plan's order says nothing about.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from pipelab.plan.order import units
from pipelab.plan.plan import Plan
from pipelab.simulation.cost import Cost

Times = tuple[list[float], list[float], list[float]]


def contended(plan: Plan, cost: Cost, paired: list[float] | None) -> Times:
    """Return the start and end of every code of a legal plan, and the travel time of every value."""
    clock = _Clock(plan, cost, paired)
    clock.run()
    return clock.begun, clock.ended, clock.delay


@dataclass(slots=True)
class _Rank:
    """What a rank does.

    Attributes:
        row: its slots, each one action or the two halves of a pair.
        at: which slot is next, or running.
        running: whether that slot runs.
        left: how much of its work was left when it was last looked at.
        seen: when that was.
        moving: how many values that this rank sends or receives are under way.
        sends: how many of them the rank must wait for.
        change: how often its speed changed, so that an end that was foreseen at another speed is not believed.
    """

    row: list[list[int]]
    at: int = 0
    running: bool = False
    left: float = 0.0
    seen: float = 0.0
    moving: int = 0
    sends: int = 0
    change: int = 0


class _Clock:
    """What is known at a moment: the ranks, and what comes next."""

    def __init__(self, plan: Plan, cost: Cost, paired: list[float] | None) -> None:
        self.bound, self.cost, self.paired = plan.bound, cost, paired
        self.lasts, self.delay = cost.lengths(plan)
        self.begun, self.ended = [0.0] * len(self.lasts), [0.0] * len(self.lasts)
        self.events: list[tuple[float, bool, int, int]] = []
        pairs = self.bound.pairs if paired is not None else frozenset()
        self.ranks = [_Rank(units(row, pairs)) for row in self.bound.rows]
        # By value that crosses, the rank that needs it; by code, how many such values are not there yet. Of what a rank
        # gives itself, its row's order takes care.
        self.target: dict[int, int] = {}
        self.missing: dict[int, int] = {}
        for rank, row in enumerate(self.bound.rows):
            for code in row:
                crossing = [value for value, giver in self.bound.inputs(code) if self.bound.rank_of[giver] != rank]
                self.target |= dict.fromkeys(crossing, rank)
                self.missing[code] = len(crossing)

    def run(self) -> None:
        """Let every rank start, and go from event to event: (time, whether a slot ends, rank or value, change)."""
        for rank in range(len(self.ranks)):
            self._start(rank, 0.0)
        while self.events:
            now, ends, what, change = heappop(self.events)
            if ends:
                if self.ranks[what].change == change:
                    self._end(what, now)
            else:
                self._arrive(what, now)

    def _start(self, number: int, now: float) -> None:
        """Start a rank's next slot, if it is free and all inputs are there; an `R` with its whole group."""
        rank, codes = self.ranks[number], self.bound.codes
        if not self._free(rank):
            return
        slot = rank.row[rank.at]
        group = self.bound.reduces[slot[0]] if codes.collective[slot[0]] else [number]
        members = [self.ranks[each] for each in group]
        if not all(self._free(each) and each.row[each.at] == slot for each in members):
            return
        if any(self.missing[code] for code in slot):
            return
        work = self.lasts[slot[0]]
        if len(slot) > 1 and self.paired is not None:
            work = self.paired[codes.slot[slot[0]]]
        for code in slot:
            self.begun[code] = now
        for each, member in zip(group, members, strict=True):
            member.running, member.left, member.seen = True, work, now
            self._foresee(each, now)

    def _free(self, rank: _Rank) -> bool:
        return not (rank.running or rank.sends) and rank.at < len(rank.row)

    def _speed(self, rank: _Rank) -> float:
        """Return how much longer than alone a rank's work takes now; communication does not slow down an `R`."""
        reduces = self.bound.codes.collective[rank.row[rank.at][0]]
        return self.cost.slowdown if rank.moving and not reduces else 1.0

    def _foresee(self, number: int, now: float) -> None:
        rank = self.ranks[number]
        rank.change += 1
        heappush(self.events, (now + rank.left * self._speed(rank), True, number, rank.change))

    def _end(self, number: int, now: float) -> None:
        """End a rank's slot: what it gives leaves."""
        rank, codes = self.ranks[number], self.bound.codes
        slot = rank.row[rank.at]
        rank.running, rank.at = False, rank.at + 1
        for code in slot:
            self.ended[code] = now
            if codes.collective[code]:
                continue
            value = codes.gives[code]
            if value not in self.target:
                continue
            rank.sends += self.cost.sender == "busy"
            heappush(self.events, (now + self.delay[value], False, value, number))
            self._move(value, number, 1, now)
        self._start(number, now)

    def _arrive(self, value: int, now: float) -> None:
        for needer in self.bound.codes.needers(value):
            if needer in self.missing and self.bound.rank_of[needer] == self.target[value]:
                self.missing[needer] -= 1
        source = self.bound.rank_of[self.bound.giver_of[value]]
        self.ranks[source].sends -= self.cost.sender == "busy"
        self._move(value, source, -1, now)
        self._start(source, now)
        self._start(self.target[value], now)

    def _move(self, value: int, source: int, more: int, now: float) -> None:
        """Count a transfer at both its ends; work that runs there goes on at another speed."""
        for number in (source, self.target[value]) if self.delay[value] else ():
            rank = self.ranks[number]
            before = self._speed(rank) if rank.running else 1.0
            rank.moving += more
            if rank.running and self._speed(rank) != before:
                rank.left -= (now - rank.seen) / before
                rank.seen = now
                self._foresee(number, now)
