"""List scheduling: an order from a priority and a memory cap, in simulated time.

Whenever a rank is free, it starts the action with the highest priority among those whose inputs are ready.

A forward takes a place in the rank's memory until its backward releases it, so a cap could end in a deadlock:

    cap 2    rank 0   holds stage 0 of micro-batches 0 and 1      each has to come back for stage 2: no place left
             rank 1   holds stage 1 of micro-batches 0 and 1

Therefore a forward starts only if all micro-batches on their way could still be finished, one after the other (the
banker's algorithm: Dijkstra 1965, EWD 123, section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from pipelab.plan.actions import Action
from pipelab.plan.bound import Program
from pipelab.plan.fault import shorten

__all__ = ["Moment", "Priority", "least_caps", "list_schedule"]

_AT_ONCE = 1 + 1e-9
"""Times that differ by less than this factor are one: sums of the same floats differ by the order of adding."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What a priority may look at besides the action: the state of the rank that chooses.

    Attributes:
        time: when it is, in the cost's unit.
        held: how many stage activations the rank holds.
        last: what the rank ran last; `None` before its first action.
    """

    time: float
    held: int
    last: Action | None


Priority = Callable[[Action, int, Moment], Any]
"""How much a rank likes to run an action now: `(action, rank, moment)` to a number, or a tuple; the largest wins."""


def least_caps(program: Program) -> list[int]:
    """Return, for each rank, the smallest cap that works: what one micro-batch takes on all of its stages there."""
    return [max(needs) for needs in zip(*_needs(program), strict=True)]


def list_schedule(
    program: Program,
    lasts: Sequence[float],
    delays: Sequence[float],
    priority: Priority,
    caps: Sequence[int] | None,
    split: bool,
) -> list[list[Action]]:
    """Return, for each rank, its actions in the order in which it starts them.

    Args:
        program: a plan without actions, for its sizes and its placement.
        lasts: by code, how long an action takes.
        delays: by value, how long it travels to another rank.
        priority: which action a rank starts first; of equals, the lowest micro-batch's, then the last stage's.
        caps: for each rank, how many stage activations it may hold, at least `least_caps`; `None` for any number.
        split: whether backwards are split into `I` and `W`.
    """
    return _Run(program, lasts, delays, priority, _Memory(program, caps), split).rows()


class _Run:
    """A simulation that decides as it goes."""

    def __init__(
        self,
        program: Program,
        lasts: Sequence[float],
        delays: Sequence[float],
        priority: Priority,
        memory: _Memory,
        split: bool,
    ) -> None:
        numbering = self.numbering = program.numbering
        self.placed, self.lasts, self.delays = program.placed, lasts, delays
        self.priority, self.memory, self.split = priority, memory, split
        self.backward = (2 if split else 1) * numbering.slots  # the code of the first B, or I
        ranks = range(len(program.rows))
        self.started: list[list[Action]] = [[] for _ in ranks]
        self.busy = [False for _ in ranks]
        self.forwards: list[dict[int, Action]] = [{} for _ in ranks]  # by code, what has all its inputs
        self.others: list[dict[int, Action]] = [{} for _ in ranks]
        families = [0, self.backward, 3 * numbering.slots] if split else [0, self.backward]
        codes = [first + slot for first in families for slot in range(numbering.slots)]
        self.lacks = {code: len(numbering.needs(code)) for code in codes}  # by code: how many inputs are not there
        self.events: list[tuple[float, bool, int]] = []  # (time, whether the action has ended or gets an input, code)

    def rows(self) -> list[list[Action]]:
        """Let every rank that is free choose, then let time pass until something happens; again and again."""
        everybody = range(len(self.busy))
        for code, inputs in self.lacks.items():
            if not inputs:
                self._offer(code)
        awake: Iterable[int] = everybody
        now = 0.0
        while True:
            for rank in awake:
                if not self.busy[rank]:
                    self._choose(rank, now)
            if not self.events:
                return self.started
            now = self.events[0][0]
            changed: set[int] = set()
            while self.events and self.events[0][0] <= now * _AT_ONCE:
                _, ended, code = heappop(self.events)
                changed.add(self._rank(code))
                if ended:
                    self._end(code, now)
                else:
                    self.lacks[code] -= 1
                    if not self.lacks[code]:
                        self._offer(code)
            awake = sorted(changed) if self.memory.never_stuck else everybody

    def _rank(self, code: int) -> int:
        return self.placed[code % self.numbering.slots]

    def _offer(self, code: int) -> None:
        """Let a rank choose an action from now on."""
        offers = self.forwards if code < self.numbering.slots else self.others
        offers[self._rank(code)][code] = self.numbering.action(code)

    def _choose(self, rank: int, now: float) -> None:
        """Start what the rank likes best, if there is anything that it may start."""
        forwards, others, row = self.forwards[rank], self.others[rank], self.started[rank]
        offers = list(others.items())
        if self.memory.free[rank]:
            offers += forwards.items()
        if not offers:
            return
        moment = Moment(now, self.memory.held[rank], row[-1] if row else None)
        slots, stages = self.numbering.slots, self.numbering.stages
        liked = [
            (self._likes(action, rank, moment), -(code % slots // stages), code % stages, code)
            for code, action in offers
        ]
        for *_, code in _from_the_best(liked):
            if code >= slots:
                row.append(others.pop(code))
            elif self.memory.allows(code // stages, rank):
                row.append(forwards.pop(code))
                self.memory.take(code // stages, rank)
            else:
                continue
            self.busy[rank] = True
            heappush(self.events, (now + self.lasts[code], True, code))
            return

    def _likes(self, action: Action, rank: int, moment: Moment) -> Any:
        """Return how much a rank likes an action.

        Raises:
            ValueError: if that is NaN, or holds it: the order would be arbitrary.
        """
        answer = self.priority(action, rank, moment)
        if _holds_nan(answer):
            when = f"{action} on rank {rank} at time {moment.time:g}"
            raise ValueError(
                f"it returned {shorten(answer)} for {when}, and NaN is neither more nor less than a number"
            )
        return answer

    def _end(self, code: int, now: float) -> None:
        """Free the rank, give up the activation if that was its backward, and send on what was made."""
        slots, stages = self.numbering.slots, self.numbering.stages
        slot = code % slots
        rank = self.placed[slot]
        self.busy[rank] = False
        if code < slots:
            needers = [code + 1] if code % stages < stages - 1 else []
            needers.append(self.backward + slot)
        elif code < 3 * slots:
            needers = [code - 1] if code % stages else []
            if self.split:
                needers.append(3 * slots + slot)
        else:
            needers = []
        if code >= slots and not (self.split and code < 3 * slots):
            self.memory.give_up(slot // stages, rank)
        value = self.numbering.gives[code]
        for needer in needers:
            way = 0.0 if self._rank(needer) == rank else self.delays[value]
            heappush(self.events, (now + way, False, needer))


def _holds_nan(answer: Any) -> bool:
    """Tell whether an answer is NaN, or a tuple or list that holds it."""
    if isinstance(answer, (tuple, list)):
        return any(map(_holds_nan, answer))
    return bool(answer != answer)  # noqa: PLR0124 - true of NaN alone, of whatever type


def _from_the_best(liked: list[tuple[Any, int, int, int]]) -> list[tuple[Any, int, int, int]]:
    """Return what is liked best first.

    Raises:
        TypeError: if a priority returned things that cannot be compared.
    """
    try:
        _ = liked[0][0] < liked[0][0]  # sorting passes over what is equal, such as None twice
        return sorted(liked, reverse=True)
    except TypeError:
        kinds = ", ".join(sorted({type(each[0]).__name__ for each in liked}))
        message = f"it returned {shorten(liked[0][0])}, and such answers ({kinds}) cannot be compared"
        raise TypeError(message) from None


def _needs(program: Program) -> list[list[int]]:
    """Return, for each micro-batch, how many of its stages each rank holds."""
    stages, ranks = program.numbering.stages, range(len(program.rows))
    placed = program.placed
    homes = [placed[first : first + stages] for first in range(0, len(placed), stages)]
    return [[home.count(rank) for rank in ranks] for home in homes]


class _Memory:
    """How many activations every rank holds and may still take, and in which order all on their way can be finished.

    Attributes:
        held: for each rank, how many activations it holds.
        free: and how many more it may take.
        never_stuck: whether a free place is all that a forward needs, because no rank is visited twice and all
            micro-batches go the same way: what is farthest on its way always finds room.
    """

    def __init__(self, program: Program, caps: Sequence[int] | None) -> None:
        numbering, placed = program.numbering, program.placed
        ways = placed[: numbering.stages]
        straight = placed == ways * numbering.microbatches and len(set(ways)) == len(ways)
        self.never_stuck = caps is None or straight
        self.held = [0] * len(program.rows)
        self.free = list(caps or [numbering.slots] * len(program.rows))
        self.needs = _needs(program)  # for each micro-batch, how many places it still has to take, by rank
        self.lent = [[0] * len(program.rows) for _ in self.needs]  # and how many it holds
        self.order: list[int] = []  # micro-batches on their way: in this order, each can be finished

    def allows(self, microbatch: int, rank: int) -> bool:
        """Tell whether a micro-batch may take a place, of which at least one is free."""
        return self.never_stuck or self._turn(microbatch, rank) is not None

    def take(self, microbatch: int, rank: int) -> None:
        """Take a place on a rank, and the turn that leaves everybody else theirs."""
        if not self.never_stuck:
            turn = self._turn(microbatch, rank)
            assert turn is not None
            if turn >= len(self.order) or self.order[turn] != microbatch:
                if microbatch in self.order:
                    self.order.remove(microbatch)
                self.order.insert(turn, microbatch)
        self.held[rank] += 1
        self.free[rank] -= 1
        self.needs[microbatch][rank] -= 1
        self.lent[microbatch][rank] += 1

    def give_up(self, microbatch: int, rank: int) -> None:
        """Give a place back."""
        self.held[rank] -= 1
        self.free[rank] += 1
        self.lent[microbatch][rank] -= 1
        if not self.never_stuck and not any(self.needs[microbatch]) and not any(self.lent[microbatch]):
            self.order.remove(microbatch)

    def _turn(self, microbatch: int, rank: int) -> int | None:
        """Return when a micro-batch would have its turn if it took a place on a rank now; `None` if it must not.

        Everybody before it must do with a place less on this rank. Where one of them could not, it has to be finished
        before that one; whoever comes after it then has no less than before.
        """
        free = self.free[rank] - 1
        for turn, other in enumerate(self.order):
            if other == microbatch:
                return turn
            if self.needs[other][rank] > free:
                return turn if self._finishes(microbatch, turn) else None
            free += self.lent[other][rank]
        return len(self.order)

    def _finishes(self, microbatch: int, turn: int) -> bool:
        """Tell whether a micro-batch can be finished once those before a turn are."""
        before = [self.lent[other] for other in self.order[:turn]]
        return all(
            needs <= free + sum(lent[rank] for lent in before)
            for rank, (needs, free) in enumerate(zip(self.needs[microbatch], self.free, strict=True))
        )
