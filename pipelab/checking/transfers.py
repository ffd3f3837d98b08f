"""Walk a plan together with its sends and receives, and explain where they wait for each other in a circle."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

from pipelab.checking.deadlock import shortened, summary
from pipelab.plan.bound import BoundPlan
from pipelab.plan.fault import Fault, Link
from pipelab.plan.transfers import Lowering, Queues, Semantics, Step, inbound, lowered, queues

__all__ = ["Hang", "Walk", "hang", "transfer_deadlocks", "walk"]

_HINT = 'take the order of pipelab.lower(plan, "by-time"), which cannot hang; its to_csv is for PyTorch'
_PAIR_HINT = (
    "yield the halves of one of these pairs one after the other: a pair's receives come before both of its halves, and "
    "its sends after both"
)


@dataclass(slots=True)
class Walk:
    """A walk through a plan and its transfers, without a clock.

    Attributes:
        order: the codes, and `~value` for each transfer, in the order of the walk: every `R` once for all its ranks.
        row_at: for each rank, the index of the code that it has come to.
        queue_at: for each queue, the index of the value that it has come to.
        crossed: the values that have crossed.
        made: the values that are ready to cross, or have crossed.
    """

    order: list[int]
    row_at: list[int]
    queue_at: list[int]
    crossed: set[int]
    made: set[int]


def walk(bound: BoundPlan, wire: Queues, *, atomic_pairs: bool = False) -> Walk:
    """Walk through a legal plan as far as its transfers allow.

    A value crosses when it exists and is first in the queues of both its ends. What a pair gives leaves after both of
    its halves, where its sends stand.

    Args:
        bound: the plan.
        wire: the queues of its transfers.
        atomic_pairs: whether a pair starts only when the inputs of both its halves are there.
    """
    codes, rows = bound.codes, bound.rows
    found = Walk([], [0] * len(rows), [0] * len(wire.values), set(), set())
    needed = inbound(wire.crossings)
    reached: dict[int, list[int]] = {}  # by code of an R: the ranks that have come to it
    awake = list(range(len(rows) - 1, -1, -1))
    while awake:
        rank = awake.pop()
        row = rows[rank]
        while (index := found.row_at[rank]) < len(row):
            code = row[index]
            if codes.kind[code] == "R":
                here = reached.setdefault(code, [])
                if rank not in here:
                    here.append(rank)
                if len(here) < len(bound.reduces[code]):
                    break
                for other in here:
                    found.row_at[other] += 1
                awake += [other for other in here if other != rank]
                found.order.append(code)
                continue
            starts = row[index : index + 2] if atomic_pairs and code in bound.pairs else [code]
            if any(each in needed and needed[each] not in found.crossed for each in starts):
                break
            found.order.append(code)
            found.row_at[rank] += 1
            if code not in bound.pairs:
                item = row[max(index - 1, 0) : index + 1] if index and row[index - 1] in bound.pairs else [code]
                given = [value for value in map(codes.gives.__getitem__, item) if value in wire.crossings]
                found.made.update(given)
                awake += _cross(wire, found, given)
    return found


def _cross(wire: Queues, found: Walk, values: list[int]) -> list[int]:
    """Let those of some values cross that can, and then those that stood behind them; return the ranks they reach."""
    reached: list[int] = []
    while values:
        value = values.pop()
        if value not in found.made or any(_first(wire, found, queue) != value for queue in wire.ends[value]):
            continue
        found.crossed.add(value)
        found.order.append(~value)
        reached.append(wire.crossings[value].target)
        for queue in wire.ends[value]:
            found.queue_at[queue] += 1
            following = _first(wire, found, queue)
            if following is not None:
                values.append(following)
    return reached


def _first(wire: Queues, found: Walk, queue: int) -> int | None:
    """Return the value that is first in a queue; `None` if all have crossed."""
    values, at = wire.values[queue], found.queue_at[queue]
    return values[at] if at < len(values) else None


def transfer_deadlocks(bound: BoundPlan, semantics: Semantics) -> list[Fault]:
    """Return one fault for each cycle of sends, receives and actions that wait for each other, in a legal plan.

    Example:
        >>> from pipelab import Plan
        >>> fault, = transfer_deadlocks(Plan.parse("0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1").bound, "deferred")
        >>> print(fault.message)
        rank 0 waits for rank 1, which waits for rank 0
          rank 0 stands before 0SEND_F1; rank 1 comes to 1RECV_F1 only after 1SEND_B0
          rank 1 stands before 1SEND_B0; rank 0 comes to 0RECV_B0 only after 0SEND_F1
    """
    hung = hang(bound, semantics)
    return [] if hung is None else hung.faults()


def hang(bound: BoundPlan, semantics: Semantics) -> Hang | None:
    """Return where a legal plan and its transfers stand still; `None` if they do not."""
    if semantics == "arrive":
        return None
    if bound.pairs:  # may hang without any queue, and then has no order in which it does not
        low = lowered(bound, "deferred")
        wire = queues(low, "arrive")
        hung = Hang(low, wire, walk(bound, wire), _PAIR_HINT)
        if hung.stuck:
            return hung
    if semantics == "by-time":  # one order for all ranks: the first of the values left can always cross
        return None
    low = lowered(bound, semantics)
    wire = queues(low, semantics)
    hung = Hang(low, wire, walk(bound, wire), _HINT)
    return hung if hung.stuck else None


class _Place(NamedTuple):
    """Where something stands still: a rank's row, or one of its queues."""

    rank: int
    queue: int | None


class Hang:
    """A walk that is stuck, and why, in words."""

    def __init__(self, low: Lowering, wire: Queues, found: Walk, hint: str) -> None:
        """Keep the walk, and what to do if it is stuck."""
        self.low, self.bound, self.wire, self.found, self.hint = low, low.bound, wire, found, hint
        self.needed = inbound(wire.crossings)

    @property
    def stuck(self) -> bool:
        """Whether some rank has not come to the end of its row."""
        return self.found.row_at != list(map(len, self.bound.rows))

    def has_run(self, step: Step) -> bool:
        """Return whether a step of a lowered row is over."""
        word, numbers = step
        if word != "run":
            return numbers[0] in self.found.crossed
        return all(self._index[code] < self.found.row_at[self.bound.rank_of[code]] for code in numbers)

    def blocks(self, rank: int, step: Step) -> bool:
        """Return whether a rank stands before a step: its next item, or the first transfer in one of its queues."""
        word, numbers = step
        if word != "run":
            ends = self.wire.ends[numbers[0]]
            return any(self.wire.rank[queue] == rank and self._left(queue) == numbers[0] for queue in ends)
        return not self.has_run(step) and self._code(rank) in numbers

    @cached_property
    def _index(self) -> dict[int, int]:
        return {code: index for row in self.bound.rows for index, code in enumerate(row)}

    def faults(self) -> list[Fault]:
        """Return one fault for each cycle."""
        faults: list[Fault] = []
        seen: set[_Place] = set()
        for rank, row in enumerate(self.bound.rows):
            path: list[_Place] = []
            place = _Place(rank, None)
            if self.found.row_at[rank] == len(row):
                continue
            while place not in seen:
                seen.add(place)
                path.append(place)
                place = self._waits_for(place)
            if place in path:
                ring = path[path.index(place) :]
                lowest = ring.index(min(ring, key=lambda each: each.rank))
                faults.append(self._fault(ring[lowest:] + ring[:lowest]))
        return faults

    def _waits_for(self, place: _Place) -> _Place:
        """Return what a place waits for."""
        if place.queue is not None:
            value = self._first(place.queue)
            other = next((queue for queue in self.wire.ends[value] if self._first(queue) != value), None)
            if other is not None:
                return _Place(self.wire.rank[other], other)
            return _Place(self.wire.crossings[value].source, None)
        code = self._code(place.rank)
        if self.bound.codes.kind[code] == "R":
            ranks = self.bound.reduces[code]
            return _Place(next(rank for rank in ranks if not self._has_reached(rank, code)), None)
        queue = self.wire.ends[self.needed[code]][1]
        return _Place(place.rank, queue)

    def _fault(self, ring: list[_Place]) -> Fault:
        steps = [self._step(place, after) for place, after in pairwise([*ring, ring[0]])]
        ranks = [rank for rank, _ in groupby(place.rank for place in ring)]
        ranks = ranks[:-1] if len(ranks) > 1 and ranks[0] == ranks[-1] else ranks
        first = ring[0]
        code = self._code(first.rank) if first.queue is None else self._end(first.queue, self._first(first.queue))
        position = self.bound.position(first.rank, self.bound.rows[first.rank].index(code))
        message = "\n".join([summary(ranks), *(f"  {step}" for step in shortened(steps, "…"))])
        links = tuple(link for place, after in pairwise([*ring, ring[0]]) for link in self._links(place, after))
        action = self.bound.codes.action(code)
        return Fault("transfer-deadlock", first.rank, position, action, message, self.hint, cycle=links)

    def _links(self, place: _Place, after: _Place) -> list[Link]:
        """Return what a place waits for, step by step: up to what the next place waits for."""
        if place.queue is None:
            code = self._code(place.rank)
            name = str(self.bound.codes.action(code))
            if after.queue is None:
                theirs = str(self.bound.codes.action(self._code(after.rank)))
                wait = Link(place.rank, name, f"{name} needs rank {after.rank} to reach it too")
                return [wait, Link(after.rank, name, f"{name} comes after {theirs} on rank {after.rank}")]
            wanted, first = (self._word(after.queue, each) for each in (self.needed[code], self._first(after.queue)))
            wait = Link(place.rank, name, f"{name} needs {wanted}")
        else:
            value = self._first(place.queue)
            name = self._word(place.queue, value)
            if after.queue is None:
                wanted, first = self._giver(value), str(self.bound.codes.action(self._code(after.rank)))
                if self._code(after.rank) in self._item(value):
                    wanted = first
                wait = Link(place.rank, name, f"{name} needs {self._giver(value)}")
            else:
                wanted, first = (self._word(after.queue, each) for each in (value, self._first(after.queue)))
                wait = Link(place.rank, name, f"{name} has to meet {wanted}")
        before = [] if wanted == first else [Link(after.rank, wanted, f"{wanted} comes after {first}")]
        return [wait, *before]

    def _step(self, place: _Place, after: _Place) -> str:
        """Return what a place waits for, in words."""
        if place.queue is None:
            code = self._code(place.rank)
            where = f"{self.bound.codes.action(code)} (rank {place.rank})"
            if after.queue is None:
                return f"{where} needs rank {after.rank} to reach it too"
            value, first = self.needed[code], self._first(after.queue)
            behind = "" if value == first else f", which stands behind {self._word(after.queue, first)}"
            return f"{where} needs {self._word(after.queue, value)}{behind}"
        value = self._first(place.queue)
        stands = f"rank {place.rank} stands before {self._word(place.queue, value)}"
        if after.queue is None:
            return f"{stands}, which needs {self._giver(value)}"
        theirs, before = self._word(after.queue, value), self._word(after.queue, self._first(after.queue))
        return f"{stands}; rank {after.rank} comes to {theirs} only after {before}"

    def _left(self, queue: int) -> int | None:
        return _first(self.wire, self.found, queue)

    def _first(self, queue: int) -> int:
        first = self._left(queue)
        assert first is not None, "what a rank still waits for stands in a queue"
        return first

    def _code(self, rank: int) -> int:
        return self.bound.rows[rank][self.found.row_at[rank]]

    def _has_reached(self, rank: int, code: int) -> bool:
        return self.found.row_at[rank] < len(self.bound.rows[rank]) and self._code(rank) == code

    def _giver(self, value: int) -> str:
        """Return what has to end before a value can cross: an action, or the pair of which it is a half."""
        return self.low.word(("run", self._item(value)))

    def _item(self, value: int) -> tuple[int, ...]:
        """Return the codes of the action or pair that gives a value."""
        crossing = self.wire.crossings[value]
        items = (numbers for word, numbers in self.low.rows[crossing.source] if word == "run")
        return next(item for item in items if crossing.giver in item)

    def _end(self, queue: int, value: int) -> int:
        """Return the action at a queue's end of a transfer."""
        crossing = self.wire.crossings[value]
        return crossing.giver if self.wire.rank[queue] == crossing.source else crossing.needer

    def _word(self, queue: int, value: int) -> str:
        """Return a queue's end of a transfer in PyTorch's notation."""
        sends = self.wire.rank[queue] == self.wire.crossings[value].source
        return self.low.word(("SEND" if sends else "RECV", (value,)))
