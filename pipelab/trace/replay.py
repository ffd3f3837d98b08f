"""Replay a trace with other times: its order as a graph, and the critical path through it.

A trace is a longest path. Each action starts when its rank and all that it needs are there, and maybe later:

    start = max(end before it on its rank, arrival of each value that it needs) + late start

So the order, the durations, the transfers and the late starts say all of a trace's times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

from pipelab.plan.order import traverse
from pipelab.trace.trace import Trace
from pipelab.trace.waits import half

_WORK = 2_000_000
"""How many actions are replayed, roughly, to follow the critical path from some times to others."""

Step = tuple[int, int]
"""A turn that another follows and the number of the value that travels between them; -1 where there is none."""


def listed(trace: Trace) -> dict[int, tuple[int, int]]:
    """Return where each action is, its rank and its index there: by its code; an all-reduce is one on each rank.

    Example:
        >>> import pipelab
        >>> list(listed(pipelab.simulate(pipelab.GPipe(ranks=2, microbatches=1))).values())
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    collective = trace.plan.bound.codes.collective
    return {
        code + (rank + 1) * len(collective) if collective[code] else code: (rank, index)
        for rank, row in enumerate(trace.plan.bound.rows)
        for index, code in enumerate(row)
    }


@dataclass(frozen=True, slots=True)
class Times:
    """The times of a trace, by the numbers of its actions.

    Attributes:
        durations: how long each action takes; two that share a turn take half of it each.
        lates: how much later it starts than its rank and all that it needs are there.
        lags: how long values travel: for each action the first that it needs, and the second.
    """

    durations: list[float]
    lates: list[float]
    lags: list[float]


class Order:
    """Which action follows which in a trace, and how long each takes.

    Attributes:
        turns: the numbers of the actions in each turn: one, or two that overlap. A turn stands after those it follows.
        after: for each turn, what it follows; first the turn before it on its rank.
        times: the trace's own times.
        travels: for the number of each value that travels between ranks, whether the rank was idle when it was given.
    """

    def __init__(self, trace: Trace, number: Mapping[int, int]) -> None:
        bound = trace.plan.bound
        codes, count = bound.codes, len(bound.codes.kind)
        walk = traverse(bound, atomic_pairs=bool(bound.pairs))
        shares = not walk.stuck  # if pairs that share a turn could not run, none of them is one
        self.turns: list[tuple[int, ...]] = []
        self.after: list[list[Step]] = []
        self.times = Times([0.0] * len(number), [0.0] * len(number), [0.0] * (2 * len(number)))
        self.travels: dict[int, bool] = {}
        self._trace, self._number = trace, number
        self._arrivals = {(codes.code(each.giver), codes.code(each.needer)): each.end for each in trace.transfers}
        self._made: dict[int, tuple[int, int, int, float]] = {}  # value -> turn, rank, code and end of its giver
        self._begun: list[float] = []
        self._ended: list[float] = []
        self._turn_of = [[-1] * len(row) for row in bound.rows]
        where = listed(trace)
        for code in (walk if shares else traverse(bound)).order:
            if codes.collective[code]:
                places = [where[code + (rank + 1) * count] for rank in bound.reduces[code]]
                for rank, index in places:
                    number_here = number[code + (rank + 1) * count]
                    others = [(other, at - 1) for other, at in places if other != rank and at]
                    self._append(rank, [index], [number_here], [(self._turn_of[other][at], -1) for other, at in others])
                continue
            rank, index = where[code]
            part = half(trace, rank, index) if shares and bound.pairs else "whole"
            if part != "lower":
                self._append_needs(rank, [index, index + 1] if part == "upper" else [index])

        self.be_late()

    def be_late(self) -> None:
        """Give every turn the late start with which it starts when it did, by the present lags."""
        for turn, after, begun in zip(self.turns, self.after, self._begun, strict=True):
            there = [
                (self._ended[before] if before >= 0 else 0.0) + (self.times.lags[travel] if travel >= 0 else 0.0)
                for before, travel in after
            ]
            self.times.lates[turn[0]] = begun - max(there)

    def _append_needs(self, rank: int, indices: list[int]) -> None:
        """Append the turn of one action, or of the two halves of a pair, with the values that they need."""
        bound, numbers = self._trace.plan.bound, []
        codes = bound.codes
        after: list[Step] = []
        free = self._free(rank, indices[0])
        for index in indices:
            code = bound.rows[rank][index]
            numbers.append(self._number[code])
            for which, value in enumerate((codes.first_need[code], codes.second_need[code])):
                if value == codes.always:
                    continue
                turn, source, giver, ended = self._made[value]
                travel = -1
                if source != rank:
                    travel = 2 * numbers[-1] + which
                    self.times.lags[travel] = self._arrivals.get((giver, code), ended) - ended
                    self.travels[travel] = ended >= free
                after.append((turn, travel))
        end = self._trace.ends[rank][indices[0]]
        for index in indices:
            code = bound.rows[rank][index]
            self._made |= dict.fromkeys(codes.all_gives(code), (len(self.turns), rank, code, end))
        self._append(rank, indices, numbers, after)

    def _append(self, rank: int, indices: list[int], numbers: list[int], after: list[Step]) -> None:
        """Append a turn that follows others."""
        index, starts, ends = indices[0], self._trace.starts[rank], self._trace.ends[rank]
        before = self._turn_of[rank][index - 1] if index else -1
        for action in numbers:
            self.times.durations[action] = (ends[index] - starts[index]) / len(numbers)
        self._begun.append(starts[index] - self._trace.start)
        self._ended.append(ends[index] - self._trace.start)
        for each in indices:
            self._turn_of[rank][each] = len(self.turns)
        self.turns.append(tuple(numbers))
        self.after.append([(before, -1), *after])

    def _free(self, rank: int, index: int) -> float:
        """Return when a rank had ended what it ran before an action."""
        return self._trace.ends[rank][index - 1] if index else self._trace.start

    def again(self, times: Times, name: str) -> Trace:
        """Return the trace with other times of its actions and values."""
        trace, bound = self._trace, self._trace.plan.bound
        code = bound.codes.code
        ended, _ = self._replay(times)
        ends = [[trace.start + ended[turn] for turn in row] for row in self._turn_of]
        starts = [
            [
                end - sum(times.durations[action] for action in self.turns[turn])
                for end, turn in zip(row, its, strict=True)
            ]
            for row, its in zip(ends, self._turn_of, strict=True)
        ]
        moved = []
        for sent in trace.transfers:
            needer, value = code(sent.needer), bound.codes.gives[code(sent.giver)]
            left = trace.start + ended[self._made[value][0]]
            end = left + times.lags[2 * self._number[needer] + (bound.codes.first_need[needer] != value)]
            moved.append(replace(sent, start=left, end=end, queued=0.0, behind=None))
        return Trace(trace.plan, starts, ends, trace.unit, transfers=moved, name=name)

    def path(self, times: Times) -> Path:
        """Replay the order with other times; return its critical path."""
        ends, causes = self._replay(times)
        at = max(range(len(ends)), key=ends.__getitem__)
        found = Path(ends[at], [], [])
        while at >= 0:
            found.actions.extend(self.turns[at])
            at, travel = causes[at]
            if travel >= 0:
                found.travels.append(travel)
        return found

    def _replay(self, times: Times) -> tuple[list[float], list[Step]]:
        """Return when each turn ends, and what it had to wait for last."""
        ends: list[float] = []
        causes: list[Step] = []
        durations, lates, lags = times.durations, times.lates, times.lags
        for turn, after in zip(self.turns, self.after, strict=True):
            ready, cause = float("-inf"), after[0]
            for each in after:
                turn_before, travel = each
                there = ends[turn_before] if turn_before >= 0 else 0.0
                if travel >= 0:
                    there += lags[travel]
                if there > ready:
                    ready, cause = there, each
            for action in turn:
                ready += durations[action] + lates[action]
            ends.append(ready)
            causes.append(cause)
        return ends, causes


@dataclass(frozen=True, slots=True)
class Path:
    """A critical path: how long it is, its actions, and the values that travel between them."""

    length: float
    actions: list[int]
    travels: list[int]

    def taking(self, times: Times) -> float:
        """Return how long the path is with other times."""
        durations, lates = ([each[action] for action in self.actions] for each in (times.durations, times.lates))
        return fsum([*durations, *lates, *(times.lags[travel] for travel in self.travels)])


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
    """Return times between those of two traces."""

    def mixed(some: Sequence[float], others: Sequence[float]) -> list[float]:
        return [one + way * (other - one) for one, other in zip(some, others, strict=True)]

    return Times(mixed(old.durations, new.durations), mixed(old.lates, new.lates), mixed(old.lags, new.lags))
