"""What each action of a trace waited for, and what follows from it: the transfers, and the critical path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

from pipelab.plan.bound import BoundPlan
from pipelab.plan.order import network_of
from pipelab.trace.events import Event, Transfer

if TYPE_CHECKING:
    from pipelab.trace.trace import Trace

Half = Literal["whole", "upper", "lower"]


class Wait(NamedTuple):
    """A value that an action needs.

    Attributes:
        giver: the code of the action that gives it; for an `R`, of the last action before it on a rank of its group.
        ended: when that action ended.
        there: when the value arrived.
        transfer: how it came from another rank, if it may have waited behind others; `None` for all other values.
    """

    giver: int
    ended: float
    there: float
    transfer: Transfer | None = None

    def queued(self, free: float) -> float:
        """Return how long a rank that was free since then was idle because the value waited behind another transfer."""
        if self.transfer is None:
            return 0.0
        return max(0.0, self.transfer.start - max(free, self.transfer.start - self.transfer.queued))


def crossings(bound: BoundPlan, ends: Sequence[Sequence[float]], delay: Callable[[int], float]) -> tuple[Transfer, ...]:
    """Return the transfers of a plan: each value that one rank gives and another needs."""
    codes, ended, crossing = bound.codes, _ended(bound, ends), values_between(bound)
    transfers: list[Transfer] = []
    for rank, row in enumerate(bound.computing):
        for code in filter(crossing.__contains__, row):
            giver = bound.giver_of[crossing[code]]
            left = ended[giver]
            there = left + delay(crossing[code])
            transfers.append(Transfer(bound.rank_of[giver], rank, codes.action(giver), codes.action(code), left, there))
    return tuple(transfers)


def values_between(bound: BoundPlan) -> dict[int, int]:
    """Return, by the code of each action that needs a value of another rank, the value: no action needs two."""
    rank_of, giver_of, always = bound.rank_of, bound.giver_of, bound.codes.always
    return {
        code: value
        for code, value in enumerate(bound.codes.comes)
        if value != always and rank_of[code] >= 0 and rank_of[giver_of[value]] != rank_of[code]
    }


def travelled(
    bound: BoundPlan,
    starts: Sequence[Sequence[float]],
    ends: Sequence[Sequence[float]],
    arrived: Sequence[Sequence[float | None]],
) -> dict[int, float]:
    """Return how long each value travelled between ranks, by its number.

    Where it is not known when a value was there: until its action began, if the rank was idle when the value left; else
    until the rank was idle.
    """
    ended, crossing, found = _ended(bound, ends), values_between(bound), {}
    for row, *times in zip(bound.computing, starts, ends, arrived, strict=True):
        free = 0.0
        for code, start, end, known in zip(row, *times, strict=True):
            if code in crossing:
                left = ended[bound.giver_of[crossing[code]]]
                there = known if known is not None and known >= left else start if left >= free else free
                found[crossing[code]] = max(0.0, min(there, start) - left)
            free = end
    return found


def waits(trace: Trace) -> list[list[Wait | None]]:
    """Return, for each rank and each of its actions, what it waited for; `None` if it waited for its own rank."""
    found = Waits(trace)
    return [[found.of(rank, index) for index in range(len(row))] for rank, row in enumerate(trace.plan.bound.computing)]


def critical_path(trace: Trace) -> tuple[Event, ...]:
    """Return the chain of actions that determines the makespan: see `Trace.critical_path`."""
    bound, found = trace.plan.bound, Waits(trace)
    where = {code: (rank, index) for rank, row in enumerate(bound.computing) for index, code in enumerate(row)}
    path: list[Event] = []
    code = max(found.ended, key=found.ended.__getitem__, default=None)
    passed: set[int] = set()  # no trace that was simulated or measured comes twice to an action, but a file may
    while code is not None and code not in passed:
        passed.add(code)
        if code not in where:
            path.append(found.moved[code])
            code = found.before_move(code)
            continue
        rank, index = where[code]
        path.append(Event(rank, bound.codes.action(code), trace.starts[rank][index], found.ended[code]))
        wait, before = found.of(rank, index), before_slot(trace, rank, index)
        code = found.culprit(wait) if wait is not None else bound.computing[rank][before] if before >= 0 else None
    return tuple(reversed(path))


class Waits:
    """What the actions of a trace waited for, computed when asked for."""

    def __init__(self, trace: Trace, for_moves: bool = True) -> None:
        code = trace.plan.bound.codes.code
        self.trace, self.bound = trace, trace.plan.bound
        self.moved: dict[int, Event] = {}  # of an all-reduce beside computing, the one that ends last
        for move, event in zip(self.bound.moves, trace.moves, strict=False):
            self.moved[move.code] = max(self.moved.get(move.code, event), event, key=attrgetter("end"))
        self.ended = _ended(self.bound, trace.ends) | {code: event.end for code, event in self.moved.items()}
        self.travelled = {(code(each.giver), code(each.needer)): each for each in trace.recorded}
        self.slack = 1e-9 * trace.makespan
        self.awaited = self.bound.awaited() if for_moves and trace.moves else {}

    def before_move(self, code: int) -> int | None:
        """Return what a move waited for longest, of what it follows in `network_of`."""
        return max(self._follows[code], key=self.ended.__getitem__, default=None)

    @cached_property
    def _follows(self) -> dict[int, list[int]]:
        """By code, what each job follows."""
        jobs, network = network_of(self.bound, ())
        codes = [code for _, (code,) in jobs]
        return {code: [codes[job] for job, _ in links] for code, links in zip(codes, network.follows, strict=True)}

    def of(self, rank: int, index: int) -> Wait | None:
        """Return the value that arrived last, if it arrived after the rank was free."""
        before = before_slot(self.trace, rank, index)
        free = self.trace.ends[rank][before] if before >= 0 else self.trace.start
        last = max(self.needs(rank, index), key=attrgetter("there"), default=None)
        return last if last is not None and last.there > free + self.slack else None

    def needs(self, rank: int, index: int) -> list[Wait]:
        """Return all values that an action needs, and the other half of its slot, if it has one."""
        row, part = self.bound.computing[rank], half(self.trace, rank, index)
        needs = self._arrivals(row[index])
        if part != "whole":  # a slot starts when both of its halves have what they need
            needs += self._arrivals(row[index + (1 if part == "upper" else -1)])
        return needs

    def culprit(self, wait: Wait) -> int:
        """Return the giver of the first of the transfers that stood one behind the other before this wait ended."""
        giver, transfer, code = wait.giver, wait.transfer, self.bound.codes.code
        passed: set[tuple[int, int]] = set()
        while transfer is not None and transfer.queued > self.slack and transfer.behind is not None:
            ends = code(transfer.behind[0]), code(transfer.behind[1])
            if ends in passed:
                break
            passed.add(ends)
            giver, transfer = ends[0], self.travelled.get(ends)
        return giver

    def _arrivals(self, code: int) -> list[Wait]:
        """Return when each value that an action needs arrived; for an `R`, when each rank of its group was free."""
        if not self.bound.codes.collective[code]:
            moved = [Wait(move, self.ended[move], self.ended[move]) for move in self.awaited.get(code, ())]
            return [self.arrival(value, giver, code) for value, giver in self.bound.inputs(code)] + moved
        rows = ((rank, self.bound.computing[rank]) for rank in self.bound.reduces[code])
        before = ((rank, row, row.index(code) - 1) for rank, row in rows)
        ends = ((row[index], self.trace.ends[rank][index]) for rank, row, index in before if index >= 0)
        return [Wait(code, end, end) for code, end in ends]

    def arrival(self, value: int, giver: int, needer: int) -> Wait:
        """Return when a value was computed and when it arrived."""
        ended, moved = self.ended[giver], self.travelled.get((giver, needer))
        if moved is None and self.bound.rank_of[giver] != self.bound.rank_of[needer]:
            return Wait(giver, ended, ended + self.trace.delay(value))
        return Wait(giver, ended, ended if moved is None else moved.end, moved)

    def lags(self) -> dict[int, float]:
        """Return how long values travelled between ranks, by the code of the action that needs one."""
        lags = {code: self.trace.delay(value) for code, value in values_between(self.bound).items()}
        for (giver, needer), moved in self.travelled.items():
            lags[needer] = moved.end - self.ended[giver]
        return lags


def before_slot(trace: Trace, rank: int, index: int) -> int:
    """Return the index of the action before this one's slot, which the two halves of a pair may share."""
    return index - (2 if half(trace, rank, index) == "lower" else 1)


def _ended(bound: BoundPlan, ends: Sequence[Sequence[float]]) -> dict[int, float]:
    """Return, by code, when an action ended; for an `R`, when it ended on the last of its ranks."""
    ended: dict[int, float] = {}
    for row, times in zip(bound.computing, ends, strict=True):
        ended.update(zip(row, times, strict=True))
    for code, ranks in bound.reduces.items() if not bound.beside else ():
        ended[code] = max(ends[rank][bound.computing[rank].index(code)] for rank in ranks)
    return ended


def half(trace: Trace, rank: int, index: int) -> Half:
    """Return which part of its slot an action fills: half if it shares the slot with the other half of its pair.

    Actions that take no time do not share a slot, because one of them may wait for the other.
    """
    pairs = trace.plan.bound.pairs
    if not pairs:
        return "whole"
    row, starts, ends = trace.plan.bound.computing[rank], trace.starts[rank], trace.ends[rank]
    span = starts[index], ends[index]
    if starts[index] < ends[index]:
        if row[index] in pairs and span == (starts[index + 1], ends[index + 1]):
            return "upper"
        if index and row[index - 1] in pairs and span == (starts[index - 1], ends[index - 1]):
            return "lower"
    return "whole"
