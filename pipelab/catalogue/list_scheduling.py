"""List scheduling: an order from a priority and a memory cap, in simulated time.

Whenever a rank is free, it starts the action with the highest priority among those whose inputs are ready.

A forward holds an activation until its backward releases it, so a memory cap can end in a deadlock, which is reported:

    cap 2    rank 0   holds stage 0 of micro-batches 0 and 1      both need rank 0 again for stage 2: no room left
             rank 1   holds stage 1 of micro-batches 0 and 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

from pipelab.checking.memory import Memory
from pipelab.errors import UsageError, counted
from pipelab.plan.actions import Action, Kind
from pipelab.plan.bound import BoundPlan
from pipelab.plan.fault import Fault, ScheduleError, shorten

_AT_ONCE = 1 + 1e-9
"""Times that differ by less than this factor are equal: the sum of floats depends on their order."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of the rank that chooses, for a priority.

    Attributes:
        time: the simulated time, in the cost's unit.
        held: how many stage activations the rank holds.
        last: what the rank ran last; `None` before its first action.
    """

    time: float
    held: int
    last: Action | None


Priority = Callable[[Action, int, Moment], Any]
"""How urgent an action is for a rank: `(action, rank, moment)` to a number, or a tuple; the largest runs first."""


def list_schedule(
    bound: BoundPlan,
    lasts: Sequence[float],
    delays: Sequence[float],
    priority: Priority,
    caps: Sequence[int] | None,
    split: bool,
    memory: Memory | None = None,
) -> list[list[Action]]:
    """Return, for each rank, its actions in the order in which it starts them."""
    all_held = [len(bound.rank_of_slot)] * len(bound.computing)
    return _Simulation(bound, lasts, delays, priority, caps or all_held, split, memory if caps else None).rows()


@dataclass
class _Simulation:
    """A simulation in which every free rank chooses its next action."""

    bound: BoundPlan
    lasts: Sequence[float]
    delays: Sequence[float]
    priority: Priority
    caps: Sequence[int]
    split: bool
    memory: Memory | None

    def __post_init__(self) -> None:
        codes, ranks = self.bound.codes, range(len(self.bound.computing))
        self.codes, self.rank_of_slot = codes, self.bound.rank_of_slot
        self.started: list[list[Action]] = [[] for _ in ranks]
        self.busy = [False for _ in ranks]
        self.held = [0 for _ in ranks]
        self.forwards: list[dict[int, Action]] = [{} for _ in ranks]  # by code, those with all their inputs
        self.others: list[dict[int, Action]] = [{} for _ in ranks]
        kinds: tuple[Kind, ...] = ("F", "I", "W") if self.split else ("F", "B")
        # By code, how many inputs are not there yet.
        self.lacks = {code: len(codes.needs(code)) for kind in kinds for code in codes.of_kind[kind]}
        self.events: list[tuple[float, bool, int]] = []  # (time, whether the action has ended or gets an input, code)
        self.room = list(self.caps)
        self.sizes: Sequence[int] = [1] * codes.stages  # of what a forward holds, and what of it waits for `W`
        self.left: Sequence[int] = self.sizes
        if self.memory is not None:
            self._count(self.memory)

    def _count(self, memory: Memory) -> None:
        """Count bytes instead of activations."""
        stages, activations = self.codes.stages, memory.of("activations", self.codes.stages)
        halved = self.split and memory.for_weight_grad is not None
        self.left = memory.of("for_weight_grad", stages) if halved else activations
        self.sizes = list(map(max, activations, self.left))
        gradients, last = memory.of("gradients", stages), self.rank_of_slot[stages - 1 :: stages]
        for rank, cap in enumerate(self.caps):
            mine = self.bound.stages_of.get(rank, set())
            self.room[rank] -= sum(memory.always(self.bound, rank)) + sum(gradients[stage] for stage in mine)
            self.room[rank] -= int(memory.outputs) * last.count(rank)
            if self.room[rank] < (most := max((self.sizes[stage] for stage in mine), default=0)):
                fixed = "weights, gradients, optimizer's state and outputs"
                raise UsageError(
                    f"memory_cap={cap:,} on rank {rank}: beside {fixed}, it has no room for {most:,} bytes"
                )

    def rows(self) -> list[list[Action]]:
        """Let every free rank choose, go to the time of the next event, and repeat."""
        for code, inputs in self.lacks.items():
            if not inputs:
                self._offer(code)
        awake: Iterable[int] = range(len(self.busy))
        now = 0.0
        while True:
            for rank in awake:
                if not self.busy[rank]:
                    self._choose(rank, now)
            if not self.events:
                if any(self.forwards):
                    raise ScheduleError(self._deadlock())
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
            awake = sorted(changed)

    def _rank(self, code: int) -> int:
        return self.rank_of_slot[self.codes.slot[code]]

    def _offer(self, code: int) -> None:
        """Add an action to those that its rank may choose."""
        offers = self.forwards if self.codes.forward[code] else self.others
        offers[self._rank(code)][code] = self.codes.action(code)

    def _choose(self, rank: int, now: float) -> None:
        """Start the most urgent action of a rank, if it may start any."""
        forwards, others, row = self.forwards[rank], self.others[rank], self.started[rank]
        offers = list(others.items())
        room, stages = self.room[rank], self.codes.stage
        offers += [(code, action) for code, action in forwards.items() if self.sizes[stages[code]] <= room]
        if not offers:
            return
        moment = Moment(now, self.held[rank], row[-1] if row else None)
        microbatch, stage = self.codes.microbatch, self.codes.stage
        ranked = [
            (self._urgency(action, rank, moment), -microbatch[code], stage[code], code) for code, action in offers
        ]
        code = _most_urgent(ranked)
        if code in others:
            row.append(others.pop(code))
        else:
            row.append(forwards.pop(code))
            self.held[rank] += 1
            self.room[rank] -= self.sizes[stage[code]]
        self.busy[rank] = True
        heappush(self.events, (now + self.lasts[code], True, code))

    def _urgency(self, action: Action, rank: int, moment: Moment) -> Any:
        """Return how urgent an action is; refuse NaN, with which the order would be arbitrary."""
        answer = self.priority(action, rank, moment)
        if _holds_nan(answer):
            what = f"{shorten(answer)} for {action} on rank {rank} at time {moment.time:g}"
            raise ValueError(f"it returned {what}, and NaN is neither more nor less than a number")
        return answer

    def _deadlock(self) -> list[Fault]:
        """Return a fault for each rank that has forwards to run and no room for their activations."""
        faults = []
        for rank, forwards in enumerate(self.forwards):
            if not forwards:
                continue
            waiting = self.codes.action(min(forwards))
            last: Kind = "W" if self.split else "B"
            releases = [replace(done, kind=last) for done in self.started[rank] if done.traits.forward]
            release = next(each for each in releases if each not in self.started[rank])
            limited = f"rank {rank} holds {counted(self.held[rank], 'activation')} (memory_cap {self.caps[rank]})"
            message = f"{limited}: {waiting} cannot start before {release} releases one, and {release} waits too"
            hint = f"give rank {rank} a memory_cap of more than {self.caps[rank]}, or none"
            faults.append(Fault("deadlock", rank, None, waiting, message, hint))
        return faults

    def _end(self, code: int, now: float) -> None:
        """Free the rank, release the activation if its backward has ended, and send the value on."""
        codes, rank = self.codes, self._rank(code)
        self.busy[rank] = False
        size, left = self.sizes[codes.stage[code]], self.left[codes.stage[code]]
        if codes.releases[code]:
            self.held[rank] -= 1
            self.room[rank] += left if self.split else size
        elif not codes.forward[code]:
            self.room[rank] += size - left
        value = codes.gives[code]
        for needer in codes.needers(value):
            if needer in self.lacks:
                way = 0.0 if self._rank(needer) == rank else self.delays[value]
                heappush(self.events, (now + way, False, needer))


def _holds_nan(answer: Any) -> bool:
    """Return whether an answer is NaN, or a tuple or list that holds it."""
    if isinstance(answer, (tuple, list)):
        return any(map(_holds_nan, answer))
    return bool(answer != answer)  # noqa: PLR0124 - true of NaN alone, of whatever type


def _most_urgent(ranked: list[tuple[Any, int, int, int]]) -> int:
    """Return the code of the most urgent action; refuse answers of a priority that cannot be compared."""
    try:
        _ = ranked[0][0] < ranked[0][0]  # `max` does not compare equal answers, such as None twice
        return max(ranked)[-1]
    except TypeError:
        kinds = ", ".join(sorted({type(each[0]).__name__ for each in ranked}))
        message = f"it returned {shorten(ranked[0][0])}, and such answers ({kinds}) cannot be compared"
        raise TypeError(message) from None
