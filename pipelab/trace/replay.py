"""Replay a trace with other times: its order as a graph, and the critical path through it.

A trace is a longest path. Each action starts when its rank and all that it needs are there, and maybe later:

    start = max(end before it on its rank, arrival of each value that it needs) + late start

So the order, the durations, the transfers and the late starts say all of a trace's times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING

from pipelab.plan.order import traverse
from pipelab.trace.waits import Waits, half

if TYPE_CHECKING:
    from pipelab.trace.trace import Trace

__all__ = ["Key", "Order", "Path", "Times", "listed", "passed"]

_WORK = 2_000_000
"""How many actions are replayed, roughly, to follow the critical path from some times to others."""

Key = tuple[int, int]
"""An action: its code, and its rank if it is an all-reduce, which runs on several; -1 otherwise."""
Edge = tuple[int, int]
"""A transfer: the numbers of the action that gives the value and of the one that needs it."""
Step = tuple[int, Edge | None]
"""A slot that another follows, -1 for none, and the transfer from it, if there is one."""


def listed(trace: Trace) -> dict[Key, tuple[int, int]]:
    """Return where each action is: its rank and its index there."""
    kind = trace.plan.bound.codes.kind
    return {
        (code, rank if kind[code] == "R" else -1): (rank, index)
        for rank, row in enumerate(trace.plan.bound.rows)
        for index, code in enumerate(row)
    }


@dataclass(frozen=True, slots=True)
class Times:
    """The times of a trace, by action; those of transfers by the numbers of giver and needer."""

    durations: list[float]
    lates: list[float]
    lags: dict[Edge, float]


class Order:
    """Which action follows which in a trace, and how long each takes.

    Attributes:
        slots: the numbers of the actions in each slot: one, or two that overlap. A slot stands after those it follows.
        after: for each slot, what it follows: a slot, and the transfer from there, or `None`. The first is the slot
            before it on its rank, -1 if there is none.
        times: the trace's own times.
    """

    def __init__(self, trace: Trace, number: Mapping[Key, int]) -> None:
        bound = trace.plan.bound
        walk = traverse(bound, atomic_pairs=bool(bound.pairs))
        shares = not walk.stuck  # if pairs that are slots could not run, none of them is one
        self.slots: list[tuple[int, ...]] = []
        self.after: list[list[Step]] = []
        self.times = Times([0.0] * len(number), [0.0] * len(number), {})
        self._trace, self._number, self._where, self._waits = trace, number, listed(trace), Waits(trace)
        self._slot_of: dict[tuple[int, int], int] = {}  # rank and index -> slot
        for code in (walk if shares else traverse(bound)).order:
            reduces = bound.codes.kind[code] == "R"
            places = [self._where[code, rank] for rank in bound.reduces[code]] if reduces else [self._where[code, -1]]
            for rank, index in places:
                part = half(trace, rank, index) if shares else "whole"
                if part != "lower":
                    self._append(rank, [index, index + 1] if part == "upper" else [index])

    def _append(self, rank: int, indices: list[int]) -> None:
        """Append the slot of one action, or of the two halves of a pair."""
        trace, bound = self._trace, self._trace.plan.bound
        row, index = bound.rows[rank], indices[0]
        start, end = trace.starts[rank][index], trace.ends[rank][index]
        after: list[Step] = [(self._slot_of.get((rank, index - 1), -1), None)]
        theres = [trace.ends[rank][index - 1] if index else trace.start]
        if bound.codes.kind[row[index]] == "R":
            mine = [self._number[row[index], rank]]
            for other in bound.reduces[row[index]]:
                _, place = self._where[row[index], other]
                if place and other != rank:
                    after.append((self._slot_of[other, place - 1], None))
                    theres.append(trace.ends[other][place - 1])
        else:
            mine = [self._number[row[each], -1] for each in indices]
            for needer, action in zip(indices, mine, strict=True):
                for need in self._waits.arrivals(row[needer]):
                    giver = self._where[need.giver, -1]
                    edge = None if giver[0] == rank else (self._number[need.giver, -1], action)
                    if edge:
                        self.times.lags[edge] = need.there - need.ended
                    after.append((self._slot_of[giver], edge))
                    theres.append(need.there)
        for action in mine:
            self.times.durations[action] = (end - start) / len(mine)
        self.times.lates[mine[0]] = start - max(theres)
        self._slot_of |= dict.fromkeys(((rank, each) for each in indices), len(self.slots))
        self.slots.append(tuple(mine))
        self.after.append(after)

    def path(self, times: Times) -> Path:
        """Replay the order with other times; return its critical path."""
        ends: list[float] = []
        causes: list[Step] = []
        durations, lates, lags = times.durations, times.lates, times.lags
        for slot, after in zip(self.slots, self.after, strict=True):
            ready, cause = float("-inf"), after[0]
            for each in after:
                giver, edge = each
                there = (ends[giver] if giver >= 0 else 0.0) + (lags[edge] if edge else 0.0)
                if there > ready:
                    ready, cause = there, each
            for action in slot:
                ready += durations[action] + lates[action]
            ends.append(ready)
            causes.append(cause)
        at = max(range(len(ends)), key=ends.__getitem__)
        found = Path(ends[at], [], [])
        while at >= 0:
            found.actions.extend(self.slots[at])
            at, edge = causes[at]
            if edge:
                found.edges.append(edge)
        return found


@dataclass(frozen=True, slots=True)
class Path:
    """A critical path: how long it is, its actions, and the transfers between them."""

    length: float
    actions: list[int]
    edges: list[Edge]

    def taking(self, times: Times) -> float:
        """Return how long the path is with other times."""
        durations, lates = ([each[action] for action in self.actions] for each in (times.durations, times.lates))
        return fsum([*durations, *lates, *(times.lags[edge] for edge in self.edges)])


def passed(order: Order, old: Times, new: Times) -> Iterator[tuple[Path, float]]:
    """Yield the critical paths on the way from some times to others, each with its share of the way.

    On the way, the length of each path changes evenly, so the makespan is the upper edge of straight lines. It is found
    from the lines of the first and of the last path: where they cross, either a third path is longer, and the search
    goes on at both sides of it, or none is.
    """
    replays = max(16, _WORK // len(order.slots))
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

    lags = {edge: lag + way * (new.lags[edge] - lag) for edge, lag in old.lags.items()}
    return Times(mixed(old.durations, new.durations), mixed(old.lates, new.lates), lags)
