"""The levels, what may run next in one, and what an attempt is worth."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from pipelab.catalogue import schedules
from pipelab.checking.checker import check
from pipelab.errors import PipelabError, UsageError
from pipelab.plan.actions import HALVES, TRAITS, Action, Kind
from pipelab.plan.codes import Codes
from pipelab.plan.order import NOTHING, Link, Network
from pipelab.plan.plan import Plan
from pipelab.schedule import Schedule
from pipelab.simulation.clock import simulate
from pipelab.simulation.cost import Cost
from pipelab.trace.trace import Trace

_KINDS: dict[bool, tuple[Kind, ...]] = {False: ("F", "B"), True: ("F", "B", "I", "W")}
"""What may be placed by hand, without and with split backwards."""
_INSTEAD: dict[Kind, tuple[Kind, ...]] = {"B": ("I", "W"), "I": ("B",)}
"""What may not follow any more for the same micro-batch and stage."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level, as `levels.toml` states it.

    Attributes:
        name: what `pipelab challenge` calls it.
        title: a few words.
        story: what is given, and what is wanted.
        ranks, microbatches, stages_per_rank: its sizes.
        place: `"loop"`, where stage `s` is on rank `s mod P`, or `"v"`, where the stages go down the ranks and back up.
        cap: how many activations a rank may hold; `None` for any number.
        split: whether backwards may be split into `I` and `W`.
        forward, backward: how long a rank takes for a micro-batch: one number, or one for each rank. `I` and `W` are
            half of a backward each.
        latency: how long a value is on its way.
        good, par: a first makespan to reach, and the shortest that is possible.
        hints: three, each says more than the one before.
        reference: a schedule of the catalogue that reaches par, or its rows.
        source: who found the schedule.
        teacher: what a teacher may add.
    """

    name: str
    title: str
    story: str
    ranks: int
    microbatches: int
    good: float
    par: float
    hints: Sequence[str]
    reference: str | Sequence[str]
    source: str
    teacher: str
    stages_per_rank: int = 1
    place: str = "loop"
    cap: int | None = None
    split: bool = False
    forward: float | Sequence[float] = 1
    backward: float | Sequence[float] = 2
    latency: float = 0

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.ranks * self.stages_per_rank

    @cached_property
    def cost(self) -> Cost:
        """The costs, for `simulate`."""
        return Cost(forward=self.forward, backward=self.backward, latency=self.latency)

    @property
    def given(self) -> str:
        """The sizes and rules in one line."""
        stages = f", {self.stages_per_rank} stages each" if self.stages_per_rank > 1 else ""
        cap = f"; at most {self.cap} activations on a rank" if self.cap else ""
        latency = f", latency {self.latency:g}" if self.latency else ""
        kinds = "F, B, or I and W instead of B" if self.split else "F and B"
        per = f", shared by the rank's {self.stages_per_rank} stages" if self.stages_per_rank > 1 else ""
        times = f"forward {_times(self.forward)}, backward {_times(self.backward)}{per}{latency}"
        return f"{self.ranks} ranks{stages}, {self.microbatches} micro-batches; {kinds}; {times}{cap}"

    def rank_of(self, stage: int) -> int:
        """Return which rank holds a stage."""
        turn, rank = divmod(stage, self.ranks)
        return self.ranks - 1 - rank if self.place == "v" and turn % 2 else rank

    @cached_property
    def solution(self) -> Plan:
        """An order that reaches par."""
        if not isinstance(self.reference, str):
            return Plan.parse(list(self.reference))
        kind = schedules[self.reference]
        sizes: dict[str, Any] = {"stages_per_rank": self.stages_per_rank} if self.stages_per_rank > 1 else {}
        if self.reference == "greedy":
            sizes |= {"memory_cap": self.cap, "cost": self.cost}
        return kind(self.ranks, self.microbatches, **sizes).plan()


def _times(given: float | Sequence[float]) -> str:
    return f"{given:g}" if isinstance(given, (int, float)) else " ".join(f"{each:g}" for each in given)


@cache
def levels() -> dict[str, Level]:
    """Return all levels by name, in order.

    Example:
        >>> len(levels()), levels()["fill"].par
        (12, 15)
    """
    text = files("pipelab.challenges").joinpath("levels.toml").read_text(encoding="utf-8")
    return {name: Level(name=name, **given) for name, given in tomllib.loads(text).items()}


def level(name: str) -> Level:
    """Return a level by its name or its number, from 1.

    Raises:
        UsageError: if there is none.
    """
    found = levels()
    if name.isdecimal() and 1 <= int(name) <= len(found):
        return list(found.values())[int(name) - 1]
    if name not in found:
        raise UsageError(f"there is no level {name}: they are {', '.join(found)}, or 1 to {len(found)}")
    return found[name]


@dataclass(frozen=True)
class Attempt:
    """What an order is worth in a level. Made by `judge`.

    Attributes:
        level: the level.
        refusals: why it does not count, in sentences; empty if it does.
        trace: when everything happens, if it counts.
        recognised: the name of the catalogue's schedule that has the same rows, if there is one.
    """

    level: Level
    refusals: Sequence[str]
    trace: Trace | None = None
    recognised: str | None = None

    @property
    def makespan(self) -> float | None:
        """How long it takes, if it counts."""
        return None if self.trace is None else self.trace.makespan

    @property
    def reached(self) -> str:
        """`"par"`, `"good"`, `"legal"`, or `"refused"`."""
        if self.makespan is None:
            return "refused"
        return "par" if self.makespan <= self.level.par else "good" if self.makespan <= self.level.good else "legal"


def judge(level: Level, subject: Plan | Schedule) -> Attempt:
    """Return what an order is worth in a level.

    Args:
        level: the level.
        subject: a plan, or a schedule of the level's sizes.

    Example:
        >>> import pipelab
        >>> found = judge(levels()["four"], pipelab.OneFOneB(4, 8))
        >>> found.reached, found.makespan, found.recognised
        ('par', 33.0, '1f1b')
        >>> judge(levels()["four"], pipelab.GPipe(4, 8)).refusals[0].splitlines()[0]
        'memory-cap: 0F4 would be activation 5 in flight on rank 0 (cap 4)'
    """
    plan = subject.draft() if isinstance(subject, Schedule) else subject
    if refusal := _other_sizes(level, plan):
        return Attempt(level, [refusal])
    if faults := check(plan, memory_cap=level.cap):
        return Attempt(level, [str(fault) for fault in faults])
    if refusal := _against_the_rules(level, plan):
        return Attempt(level, [refusal])
    return Attempt(level, [], simulate(plan, level.cost), _recognised(level, plan))


def _other_sizes(level: Level, plan: Plan) -> str | None:
    for what, has, wants in (
        ("ranks", plan.ranks, level.ranks),
        ("micro-batches", plan.microbatches, level.microbatches),
        ("stages", plan.stages, level.stages),
    ):
        if has != wants:
            hint = "\n  try: stages_per_rank = 2 in the class" if what == "stages" else ""
            return f"it has {has} {what}, and the level has {wants}{hint}"
    return None


def _against_the_rules(level: Level, plan: Plan) -> str | None:
    """Return what `check` would not mind."""
    for rank, row in enumerate(plan.bound.rows):
        for code in row:
            action = plan.bound.codes.action(code)
            if action.kind not in _KINDS[level.split]:
                return f"{action} on rank {rank}: this level has {'F, B, I and W' if level.split else 'F and B'} only"
            home = level.rank_of(action.stage or 0)
            if home != rank:
                return f"{action} is on rank {rank}: in this level, stage {action.stage} is on rank {home}"
    return None


def _recognised(level: Level, plan: Plan) -> str | None:
    """Return the name of the first schedule in the catalogue with the same rows."""
    for name, kind in schedules.items():
        options = {} if kind.stages_per_rank == level.stages_per_rank else {"stages_per_rank": level.stages_per_rank}
        try:
            if name != "greedy" and kind(level.ranks, level.microbatches, **options).plan().rows == plan.rows:
                return name
        except (TypeError, PipelabError):  # not at these sizes
            continue
    return None


@dataclass(frozen=True)
class Board:
    """A level in which some actions have been placed. Made by `board`.

    Attributes:
        placed: for each rank, its actions in order, with the time of each one's start and end.
        ready: for each rank, what it may run next and when it would begin: of each kind and stage, the first
            micro-batch.
    """

    placed: list[dict[str, tuple[float, float]]]
    ready: list[dict[str, float]]


def board(level: Level, rows: Sequence[Sequence[str]]) -> Board:
    """Return when what has been placed happens, and what each rank may run next.

    Args:
        level: the level.
        rows: what has been placed so far, rank by rank, such as `[["0F0"], [], []]`.

    Example:
        >>> found = board(levels()["fill"], [["0F0"], [], []])
        >>> found.placed[0]
        {'0F0': (0.0, 1.0)}
        >>> found.ready
        [{'0F1': 1.0}, {'1F0': 1.0}, {}]

    Raises:
        FormatError: if a word is not an action.
        UsageError: if a word is not in the level, or has been placed before what it needs.
    """
    codes = Codes(level.stages, level.microbatches)
    listed = [[_code(codes, word) for word in row] for row in rows]
    spans, there, free = _run(level, codes, listed)
    begun = {code for row in listed for code in row}
    begun |= {codes.sibling(code, kind) for code in begun for kind in _INSTEAD.get(codes.kind[code], ())}
    ready = []
    for rank, row in enumerate(listed):
        held = sum(codes.holds[code] - codes.releases[code] for code in row)
        full = level.cap is not None and held >= level.cap
        first: dict[tuple[str, int], int] = {}
        for kind in _KINDS[level.split]:
            for code in () if full and TRAITS[kind].in_flight > 0 else codes.of_kind[kind]:
                here = level.rank_of(codes.stage[code]) == rank
                if here and code not in begun and there.keys() >= set(codes.needs(code)):
                    first.setdefault((kind, codes.stage[code]), code)
        begins = {code: _start(level, codes, code, rank, there, free[rank]) for code in first.values()}
        ready.append({str(codes.action(code)): begin for code, begin in begins.items()})
    return Board([{str(codes.action(code)): spans[code] for code in row} for row in listed], ready)


def _code(codes: Codes, word: str) -> int:
    action = Action.parse(word)
    if (
        action.traits.collective
        or (action.stage or 0) >= codes.stages
        or (action.microbatch or 0) >= codes.microbatches
    ):
        raise UsageError(f"{word} is not in this level: {codes.stages} stages, {codes.microbatches} micro-batches")
    return codes.code(action)


def _start(level: Level, codes: Codes, code: int, rank: int, there: dict[int, tuple[float, int]], free: float) -> float:
    """Return when an action can begin; `there` has each value's time and rank."""
    needed = [there[value] for value in codes.needs(code)]
    return max([free, *(end + (level.latency if home != rank else 0) for end, home in needed)])


def _run(
    level: Level, codes: Codes, rows: list[list[int]]
) -> tuple[dict[int, tuple[float, float]], dict[int, tuple[float, int]], list[float]]:
    """Return when each action runs, when and where each value was made, and when each rank is free."""
    rank_of = {code: rank for rank, row in enumerate(rows) for code in row}
    number = {code: at for at, code in enumerate(rank_of)}
    giver = {codes.gives[code]: code for code in rank_of}
    follows: list[list[Link]] = []
    for rank, row in enumerate(rows):
        for before, code in zip([None, *row], row, strict=False):
            givers = [giver.get(value, code) for value in codes.needs(code)]  # without a giver, it waits for itself
            links = [(number[each], NOTHING if rank_of[each] == rank else 0) for each in givers]
            follows.append(links if before is None else [(number[before], NOTHING), *links])
    network = Network(follows)
    stuck = [code for code, at in number.items() if at not in set(network.order)]
    if stuck:
        raise UsageError(f"{codes.action(stuck[0])} has been placed before what it needs")
    lasts = [_length(level, codes.kind[code], rank) for code, rank in rank_of.items()]
    starts = network.starts(lasts, [level.latency, 0.0])
    spans = {code: (starts[at], starts[at] + lasts[at]) for code, at in number.items()}
    there = {value: (spans[code][1], rank_of[code]) for value, code in giver.items()}
    return spans, there, [spans[row[-1]][1] if row else 0.0 for row in rows]


def _length(level: Level, kind: Kind, rank: int) -> float:
    """Return how long an action takes."""
    given = level.forward if TRAITS[kind].forward else level.backward
    time = given if isinstance(given, (int, float)) else given[rank]
    return time / level.stages_per_rank / (2 if kind in HALVES else 1)
