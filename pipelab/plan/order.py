"""Walk a plan in an order that respects every dependency, without a clock.

Each rank runs its row until an action needs a value that is not there yet. The rank that gives the value wakes it:

    rank 0 | F0 F1 B0 …        runs F0, F1, then waits for gin(0, 1)
    rank 1 | F0 B0 F1 B1       woken by out(0, 0): runs F0, B0, which wakes rank 0

If no rank can move, the ranks that have not finished are stuck. The order of the walk does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipelab.plan.bound import BoundPlan
from pipelab.plan.codes import ASIDE


@dataclass(slots=True)
class Traversal:
    """A walk through a plan.

    Attributes:
        order: the codes in the order of the walk: in a legal plan, all of them, each `R` once for all its ranks.
        stuck: for each rank that could not finish, the index of the code at which it waits.
        waits_for: for each stuck rank, the value that it needs; `None` if it waits for other ranks at an `R`.
    """

    order: list[int]
    stuck: dict[int, int]
    waits_for: dict[int, int | None]


def traverse(
    bound: BoundPlan, given: Collection[int] = (), excused: Collection[int] = (), atomic_pairs: bool = False
) -> Traversal:
    """Walk through a plan."""
    codes, rows = bound.codes, bound.computing
    collective, first_need, second_need, gives = codes.collective, codes.first_need, codes.second_need, codes.gives
    pairs = bound.pairs if atomic_pairs else frozenset()
    needs_more = codes.more_needs.keys() | pairs
    reduces, there = bound.reduces, at_start(bound, given)
    at = [0] * len(rows)
    order: list[int] = []
    waiting: dict[int, list[int]] = {}  # by value: the ranks that wait for it; several only in a faulty plan
    arrived: dict[int, list[int]] = {}  # by code of an R: the ranks that have come to it
    waits_for: dict[int, int | None] = {}
    awake = list(range(len(rows) - 1, -1, -1))
    while awake:  # the hot loop of every check: a call for each action would double its time
        rank = awake.pop()
        row, index = rows[rank], at[rank]
        length = len(row)
        while index < length:
            code = row[index]
            if reduces and collective[code]:
                arrived.setdefault(code, []).append(rank)
                if len(arrived[code]) < len(reduces[code]):
                    waits_for[rank] = None
                    break
                _pass_together(arrived[code][:-1], at, awake)
                order.append(code)
                index += 1
                continue
            need = first_need[code]
            if there[need]:
                need = second_need[code]
            if needs_more and code in needs_more and there[need]:
                need = absent(bound, code, there)
                if code in pairs and there[need]:  # then its backward comes right after it, without a wait
                    need = absent(bound, row[index + 1], there)
            if not there[need] and code not in excused:
                waits_for[rank] = need
                waiting.setdefault(need, []).append(rank)
                break
            value = gives[code]
            there[value] = 1
            order.append(code)
            index += 1
            if value in waiting:
                awake += waiting.pop(value)
        at[rank] = index
    stuck = {rank: index for rank, index in enumerate(at) if index < len(rows[rank])}
    return Traversal(order, stuck, {rank: waits_for[rank] for rank in stuck})


def at_start(bound: BoundPlan, given: Collection[int]) -> bytearray:
    """Return, by value, whether it is there before any rank has moved."""
    there = bytearray(bound.codes.always + 1)
    there[bound.codes.always] = 1
    # Only the giver's own rank needs these, whose order `check` has looked at.
    for name in ASIDE.intersection(bound.codes.values):
        numbers = bound.codes.of_value(name)
        there[numbers.start : numbers.stop] = b"\1" * len(numbers)
    for value in given:
        there[value] = 1
    return there


def absent(bound: BoundPlan, code: int, there: bytearray) -> int:
    """Return a need of an action that is not there yet; if all are there, the last one."""
    codes = bound.codes
    need = codes.first_need[code]
    if there[need]:
        need = codes.second_need[code]
    if there[need] and code in codes.more_needs:
        need = next((each for each in codes.more_needs[code] if not there[each]), need)
    return need


def _pass_together(ranks: list[int], at: list[int], awake: list[int]) -> None:
    """Move the ranks that wait at an `R` past it, and wake them."""
    for rank in ranks:
        at[rank] += 1
        awake.append(rank)


def units(codes: Iterable[int], pairs: Container[int]) -> list[list[int]]:
    """Return codes one by one, but the two of a pair together, which follow one another."""
    found: list[list[int]] = []
    for code in codes:
        if found and found[-1][-1] in pairs:
            found[-1].append(code)
        else:
            found.append([code])
    return found


NOTHING = -1
"""The number of what travels between two jobs of a `Network` where nothing does."""

Link = tuple[int, int]
"""A job that another one follows, and the number of what travels between them."""


class Network:
    """Jobs by number, each of which begins when all that it follows has ended and has travelled to it.

    Attributes:
        follows: the same.
        order: the jobs in an order in which each comes after those that it follows; without those that wait in a
            circle, or for one that does.

    Example:
        >>> network = Network([[], [(0, 0)], [(0, NOTHING), (1, NOTHING)]])
        >>> network.starts([1, 5, 2])
        [0.0, 1.0, 6.0]
        >>> network.starts([1, 5, 2], lags=[0.5, 0.0])
        [0.0, 1.5, 6.5]
        >>> network.rests([1, 5, 2], lags=[0.5, 0.0])
        [7.5, 2.0, 0.0]
        >>> network.path([1, 5, 2], lags=[0.5, 0.0])
        [(2, -1), (1, 0), (0, -1)]
        >>> Network([[(1, NOTHING)], [(0, NOTHING)], []]).order
        [2]
    """

    def __init__(self, follows: Sequence[Sequence[Link]]) -> None:
        """Find the order."""
        self.follows = follows
        after: list[list[int]] = [[] for _ in follows]
        waiting = [len(each) for each in follows]
        for job, before in enumerate(follows):
            for each, _ in before:
                after[each].append(job)
        self.order = [job for job, count in enumerate(waiting) if not count]
        for job in self.order:  # grows as it is read
            for each in after[job]:
                waiting[each] -= 1
                if not waiting[each]:
                    self.order.append(each)

    def starts(
        self, lasts: Sequence[Any], lags: Sequence[float] = (0.0,), latest: Callable[[list[Any]], Any] = max
    ) -> list[Any]:
        """Return when each job begins at the earliest."""
        starts: list[Any] = [0.0] * len(lasts)
        ends: list[Any] = [0.0] * len(lasts)
        for job in self.order:
            if before := self.follows[job]:
                starts[job] = latest([ends[each] + lags[what] for each, what in before])
            ends[job] = starts[job] + lasts[job]
        return starts

    def rests(self, lasts: Sequence[float], lags: Sequence[float] = (0.0,)) -> list[float]:
        """Return, for each job, how long it takes from its end to the end of all that comes after it."""
        rests = [0.0] * len(lasts)
        for job in reversed(self.order):
            whole = lasts[job] + rests[job]
            for each, what in self.follows[job]:
                rests[each] = max(rests[each], lags[what] + whole)
        return rests

    def path(self, lasts: Sequence[float], lags: Sequence[float] = (0.0,)) -> list[Link]:
        """Return the longest chain of jobs, last to first, each with what travelled to it; of equals, the first one."""
        ends = [start + last for start, last in zip(self.starts(lasts, lags), lasts, strict=True)]
        found: list[Link] = []
        job = max(self.order, key=ends.__getitem__, default=-1)
        while job >= 0:
            before, what = max(self.follows[job], key=lambda link: ends[link[0]] + lags[link[1]], default=(-1, NOTHING))
            found.append((job, what))
            job = before
        return found


Job = tuple[int, tuple[int, ...]]
"""A rank, and the code that it runs, or the two codes of a pair that share a slot."""


def network_of(bound: BoundPlan, pairs: Collection[int]) -> tuple[list[Job], Network]:
    """Return a legal plan's jobs in its own order, and their network.

    The two of a pair are one job if its forward is among `pairs`, and pairs can run so; an `R` is one on each rank of
    its group. A job follows the one before it on its rank (an `R`: on each rank of its group), then the givers of what
    it needs, and the moves that it waits for. What travels from another rank has the code that needs it as its number.
    """
    walk = traverse(bound, atomic_pairs=bool(pairs))
    if walk.stuck:
        walk, pairs = traverse(bound), ()
    made = _Jobs(bound)
    for unit in units(walk.order, pairs):
        made.run(unit)
    made.end()
    return made.jobs, Network(made.follows)


class _Jobs:
    """The jobs of a plan, and what each follows."""

    def __init__(self, bound: BoundPlan) -> None:
        self.bound = bound
        self.jobs: list[Job] = []
        self.follows: list[list[Link]] = []
        self._coming = [iter(row) for row in bound.lists]
        self._awaited = bound.awaited()
        self._latest: dict[int, int] = {}  # by rank, its last job that computes
        self._made: dict[int, int] = {}  # by value, the job that gives it
        self._moved: dict[int, int] = {}  # by code of a move, its job
        self._last: dict[tuple[int, object], int] = {}  # by rank, and by channel or what is moved: its last move
        self._together: dict[int, list[Link]] = {}  # by code of an `R` beside computing, what it follows on all ranks

    def run(self, unit: Sequence[int]) -> None:
        """Add an action or a pair, after the moves before it on its rank; an all-reduce, on each of its ranks."""
        codes, collective = self.bound.codes, self.bound.codes.collective[unit[0]]
        ranks = self.bound.reduces[unit[0]] if collective else [self.bound.rank_of[unit[0]]]
        before = {rank: self._latest[rank] for rank in ranks if rank in self._latest}
        for rank in ranks:
            for code in unit:
                for move in iter(self._coming[rank].__next__, code):
                    self._move(rank, move)
            own_first = sorted(before, key=lambda other: other != rank)
            needs = [link for code in unit for link in self._needs(rank, code)]
            self._latest[rank] = self._add(rank, unit, [*((before[other], NOTHING) for other in own_first), *needs])
        if not collective:
            given = [value for code in unit for value in codes.all_gives(code)]
            self._made |= dict.fromkeys(given, self._latest[ranks[0]])

    def end(self) -> None:
        """Add the moves that come last."""
        for rank, left in enumerate(self._coming):
            for move in left:
                self._move(rank, move)

    def _add(self, rank: int, unit: Sequence[int], after: list[Link]) -> int:
        self.jobs.append((rank, tuple(unit)))
        self.follows.append(after)
        return len(self.jobs) - 1

    def _needs(self, rank: int, code: int) -> Iterator[Link]:
        for value in self.bound.codes.needs(code):
            giver = self._made[value]
            yield giver, NOTHING if self.jobs[giver][0] == rank else code
        for move in self._awaited.get(code, ()):
            yield self._moved[move], NOTHING

    def _move(self, rank: int, code: int) -> None:
        """Add what does not compute. Each channel of a rank does one thing after the other.

        A move follows what comes before it on its rank, on its channel, and of what it moves. An all-reduce begins when
        all ranks of its stage have come to it, and the all-reduce before it is over on each.
        """
        collective = self.bound.codes.collective[code]
        keys = ["all-reduce"] if collective else [self.bound.codes.traits(code).channel, self.bound.what(code)]
        before = {self._last[rank, key] for key in keys if (rank, key) in self._last}
        before |= {self._latest[rank]} if rank in self._latest else set()
        after: list[Link] = [(job, NOTHING) for job in sorted(before)]
        if collective:  # one list for all ranks
            self._together.setdefault(code, []).extend(after)
            after = self._together[code]
        self._moved[code] = self._add(rank, (code,), after)
        self._last |= {(rank, key): self._moved[code] for key in keys}
