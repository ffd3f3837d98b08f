"""Replay a trace with other times: its order as a graph, and the critical path through it.

A trace is a longest path. Each action starts when its rank and all that it needs are there, and maybe later:

    start = max(end before it on its rank, arrival of each value that it needs) + late start

So the order, the durations, the transfers and the late starts say all of a trace's times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import fsum
from typing import NamedTuple

from pipelab.plan.actions import Kind
from pipelab.plan.order import NOTHING, network_of
from pipelab.trace.events import Event
from pipelab.trace.trace import Trace
from pipelab.trace.waits import half

_WORK = 2_000_000
"""How many actions are replayed, roughly, to follow the critical path from some times to others."""


class Ran(NamedTuple):
    """An action of a trace: the rank that ran it, its code in the trace's plan, and its times."""

    rank: int
    code: int
    start: float
    end: float


Name = tuple[Kind, int, int, int, int]
"""An action in any trace: kind, micro-batch, stage; of what several ranks may run, the rank; which one of several."""


def order_of(trace: Trace) -> Order:
    """Return the order of a trace, its actions numbered as `listed` lists them."""
    return Order(trace, {name: number for number, name in enumerate(listed(trace))})


def listed(trace: Trace) -> dict[Name, Ran]:
    """Return all actions of a trace, each all-reduce once for each of its ranks, and each move."""
    bound, codes = trace.plan.bound, trace.plan.bound.codes
    found: dict[Name, Ran] = {}
    for rank in range(trace.ranks):
        for code, start, end in trace.ran(rank):
            alone = bound.computes(code) and not codes.collective[code]
            about = codes.kind[code], codes.microbatch[code], codes.stage[code], -1 if alone else rank
            often = next(often for often in count() if (*about, often) not in found)
            found[(*about, often)] = Ran(rank, code, start, end)
    return found


@dataclass(frozen=True, slots=True)
class Times:
    """The times of a trace.

    Attributes:
        durations: how long each action takes, by its number; two that share a turn take half of it each.
        lates: how much later it starts than its rank and all that it needs are there, by its number.
        lags: how long a value travels to each action, by its code. The last is 0, where none does.
    """

    durations: list[float]
    lates: list[float]
    lags: list[float]


class Order:
    """Which action follows which in a trace, and how long each takes.

    Attributes:
        turns: the numbers of the actions in each turn: one, or two that overlap. A turn comes after those it follows.
        network: what each turn follows, and what travels between them.
        number_of: by code of an action to which a value travels, its number.
        times: the trace's own times.
        travels: for each action to which a value travels, by code, whether its rank was idle when it was given.
    """

    def __init__(self, trace: Trace, number: Mapping[Name, int]) -> None:
        bound, codes = trace.plan.bound, trace.plan.bound.codes
        rows = enumerate(bound.computing if bound.pairs else ())
        shared = {code for rank, row in rows for at, code in enumerate(row) if half(trace, rank, at) == "upper"}
        jobs, self.network = network_of(bound, shared)
        ran = {(each.rank, each.code): (number[name], each) for name, each in listed(trace).items()}
        self.number_of = {code: at for (_, code), (at, _) in ran.items()}
        self.turns: list[tuple[int, ...]] = []
        self.times = Times([0.0] * len(number), [0.0] * len(number), codes.by_need([0.0] * (codes.always + 1)))
        self.travels: dict[int, bool] = {}
        self._trace, self._jobs = trace, jobs
        self._spans: list[tuple[float, float]] = []
        self._turn_of = {code: turn for turn, (_, slot) in enumerate(jobs) for code in slot}
        arrivals = {(codes.code(each.giver), codes.code(each.needer)): each.end for each in trace.transfers}
        free = [trace.start] * trace.ranks
        for (rank, slot), before in zip(jobs, self.network.follows, strict=True):
            numbers = tuple(ran[rank, code][0] for code in slot)
            _, _, start, end = ran[rank, slot[0]][1]
            for turn, what in before:
                if what != NOTHING:
                    ended = trace.start + self._spans[turn][1]
                    arrived = arrivals.get((bound.giver_of[codes.comes[what]], what), ended)
                    self.times.lags[what], self.travels[what] = arrived - ended, ended >= free[rank]
            for action in numbers:
                self.times.durations[action] = (end - start) / len(numbers)
            self.turns.append(numbers)
            self._spans.append((start - trace.start, end - trace.start))
            free[rank] = end if bound.computes(slot[0]) else free[rank]
        self.be_late()

    def be_late(self) -> None:
        """Give every turn the late start with which it starts when it did, by the present lags."""
        lags = self.times.lags
        for turn, before, (begun, _) in zip(self.turns, self.network.follows, self._spans, strict=True):
            there = max((self._spans[giver][1] + lags[what] for giver, what in before), default=0.0)
            self.times.lates[turn[0]] = begun - there

    def again(self, times: Times, name: str) -> Trace:
        """Return the trace with other times of its actions and values."""
        trace, bound, codes = self._trace, self._trace.plan.bound, self._trace.plan.bound.codes
        lasts = self._lasts(times)
        ended = [
            trace.start + start + last
            for start, last in zip(self.network.starts(lasts, times.lags), lasts, strict=True)
        ]
        spans: dict[tuple[int, int], tuple[float, float]] = {}
        for turn, (rank, slot), end in zip(self.turns, self._jobs, ended, strict=True):
            span = end - sum(times.durations[action] for action in turn), end
            spans |= {(rank, code): span for code in slot}
        starts, ends = (
            [[spans[rank, code][side] for code in row] for rank, row in enumerate(bound.computing)] for side in (0, 1)
        )
        transfers = []
        for sent in trace.transfers:
            left = ended[self._turn_of[codes.code(sent.giver)]]
            end = left + times.lags[codes.code(sent.needer)]
            transfers.append(replace(sent, start=left, end=end, queued=0.0, behind=None))
        moves = [Event(move.rank, move.action, *spans[move.rank, move.code]) for move in bound.moves if trace.moves]
        return Trace(trace.plan, starts, ends, trace.unit, transfers=transfers, moves=moves, name=name)

    def path(self, times: Times) -> Path:
        """Replay the order with other times; return its critical path."""
        lasts = self._lasts(times)
        chain = self.network.path(lasts, times.lags)
        length = fsum(time for turn, what in chain for time in (lasts[turn], times.lags[what]))
        actions = [action for turn, _ in chain for action in self.turns[turn]]
        return Path(length, actions, [(what, self.number_of[what]) for _, what in chain if what != NOTHING])

    def work_without_slack(self) -> list[float]:
        """Return, by rank, how long it works on what could not end later without a longer step."""
        works = [0.0] * self._trace.ranks
        rests = self.network.rests(self._lasts(self.times), self.times.lags)
        for (rank, slot), (start, end), rest in zip(self._jobs, self._spans, rests, strict=True):
            without = end + rest >= self._trace.makespan * (1 - 1e-6)
            works[rank] += (end - start) * (self._trace.plan.bound.computes(slot[0]) and without)
        return works

    def _lasts(self, times: Times) -> list[float]:
        """Return how long each turn takes, its late start included."""
        return [sum(times.durations[each] + times.lates[each] for each in turn) for turn in self.turns]


@dataclass(frozen=True, slots=True)
class Path:
    """A critical path: how long it is, its actions, and to which of them, by code and number, a value travels."""

    length: float
    actions: list[int]
    travels: list[tuple[int, int]]

    def taking(self, times: Times) -> float:
        """Return how long the path is with other times."""
        durations, lates = ([each[action] for action in self.actions] for each in (times.durations, times.lates))
        return fsum([*durations, *lates, *(times.lags[travel] for travel, _ in self.travels)])


def passed(order: Order, old: Times, new: Times) -> Iterator[tuple[Path, float]]:
    """Yield the critical paths on the way from some times to others, each with its share of the way.

    On the way, the length of each path changes evenly, so the makespan is the upper edge of straight lines. It is found
    from the lines of the first and of the last path: where they cross, either a third path is longer, and the search
    goes on at both sides of it, or none is.
    """
    replays = max(16, _WORK // len(order.turns))
    todo = [((0.0, order.path(old)), (1.0, order.path(new)))]
    while todo:
        (begin, left), (end, right) = todo.pop(0)
        lines = [(path.taking(old), path.taking(new)) for path in (left, right)]
        slopes = [last - first for first, last in lines]
        turn = slopes[1] - slopes[0]
        slack = 1e-12 * max(left.length, right.length)
        if turn > slack and replays > 0:
            cross = (lines[0][0] - lines[1][0]) / turn
            if begin < cross < end:
                replays -= 1
                middle = order.path(_between(old, new, cross))
                if middle.length > lines[0][0] + cross * slopes[0] + slack:
                    todo += [((begin, left), (cross, middle)), ((cross, middle), (end, right))]
                    continue
        # The two paths' shares of the way, so that together they change as much as the makespan.
        way = end - begin
        share = ((right.length - left.length) / way - slopes[0]) / turn if turn > slack else 0.5
        share = min(max(share, 0.0), 1.0)
        yield left, way * (1 - share)
        yield right, way * share


def _between(old: Times, new: Times, way: float) -> Times:
    """Return times between the times of two traces."""

    def mixed(some: Sequence[float], others: Sequence[float]) -> list[float]:
        return [one + way * (other - one) for one, other in zip(some, others, strict=True)]

    return Times(mixed(old.durations, new.durations), mixed(old.lates, new.lates), mixed(old.lags, new.lags))
