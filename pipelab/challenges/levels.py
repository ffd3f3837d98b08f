"""The levels, what may run next in one, and what an attempt is worth."""

from __future__ import annotations

import tomllib
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from pipelab.catalogue import schedules
from pipelab.checking.checker import check
from pipelab.errors import PipelabError, UsageError, counted
from pipelab.files import teacher
from pipelab.plan.actions import HALVES, TRAITS, Kind
from pipelab.plan.plan import Plan
from pipelab.plan.transfers import Transport
from pipelab.schedule import Schedule, with_gathers
from pipelab.simulation.clock import simulate
from pipelab.simulation.cost import Cost
from pipelab.trace.trace import Trace

INSTEAD: dict[Kind, tuple[Kind, ...]] = {"B": ("I", "W"), "I": ("B",), "W": ("B",)}
"""What excludes an action of the same micro-batch and stage."""


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
        queued: whether the values from a rank to another arrive, and are taken, in the order in which they were sent.
        sharded: whether a rank has room for the weights of one of its stages at a time, where the goal is the fewest
            gathers.
        within: the longest makespan that counts, where the goal is the lowest peak.
        listed: the rows that are given, where the goal is the fewest moves of an action within its row.
        good, par: a first score to reach, and the lowest that is possible, in `unit`.
        hints: three, each says more than the one before.
        lesson: what it shows, in one sentence, for who has reached par.
        source: who found the schedule that reaches par.
    """

    name: str
    title: str
    story: str
    ranks: int
    microbatches: int
    good: float
    par: float
    hints: Sequence[str]
    lesson: str
    source: str
    stages_per_rank: int = 1
    place: str = "loop"
    cap: int | None = None
    split: bool = False
    forward: float | Sequence[float] = 1
    backward: float | Sequence[float] = 2
    latency: float = 0
    queued: bool = False
    sharded: bool = False
    within: float | None = None
    listed: Sequence[str] = ()

    @property
    def unit(self) -> str:
        """What a score counts."""
        units = {"moves": self.listed, "activations": self.within, "gathers": self.sharded}
        return next((unit for unit, given in units.items() if given), "units")

    @property
    def goals(self) -> str:
        """What is to be reached, in one line."""
        return f"good: {self.good:g} {self.unit}; par: {self.par:g}"

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
        cap = f"; at most {counted(self.cap, 'activation')} on a rank" if self.cap else ""
        latency = f", latency {self.latency:g}" if self.latency else ""
        kinds = "F, B, or I and W instead of B" if self.split else "F and B"
        per = f", shared by the rank's {self.stages_per_rank} stages" if self.stages_per_rank > 1 else ""
        times = f"forward {_times(self.forward)}, backward {_times(self.backward)}{per}{latency}"
        within = f"; at most {self.within:g} units" if self.within else ""
        within += "; gathered weights of at most one stage on a rank" * self.sharded
        queue = "; values from a rank to another are taken in the order in which they were sent" * self.queued
        return f"{self.ranks} ranks{stages}, {self.microbatches} micro-batches; {kinds}; {times}{cap}{within}{queue}"

    def score(self, trace: Trace) -> float:
        """Return what an order is worth, in `unit`: the lower, the better."""
        if self.within:
            return max(trace.peak_activations)
        if self.sharded:
            return sum(move.action.traits.gathers for move in with_gathers(trace.plan, 1).bound.moves)
        if not self.listed:
            return trace.makespan
        moves = 0
        for row, listed in zip(trace.plan.rows, self.listed, strict=True):
            kept: list[int] = []  # by length, where the longest run of actions in their listed order can end first
            for at in map(listed.split().index, map(str, row)):
                length = bisect_left(kept, at)
                kept[length : length + 1] = [at]
            moves += len(row) - len(kept)
        return moves

    def rank_of(self, stage: int) -> int:
        """Return which rank holds a stage."""
        turn, rank = divmod(stage, self.ranks)
        return self.ranks - 1 - rank if self.place == "v" and turn % 2 else rank

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What may be placed."""
        return ("F", "B", "I", "W") if self.split else ("F", "B")

    def time(self, kind: Kind, rank: int) -> float:
        """Return how long an action takes on a rank."""
        given = self.forward if TRAITS[kind].forward else self.backward
        whole = given if isinstance(given, (int, float)) else given[rank]
        return whole / self.stages_per_rank / (2 if kind in HALVES else 1)

    @cached_property
    def known(self) -> list[tuple[str, Plan]]:
        """The schedules of the catalogue at these sizes, by name, but those that search."""
        found: list[tuple[str, Plan]] = []
        for name, kind in schedules.items():
            same = kind.stages_per_rank == self.stages_per_rank
            with suppress(TypeError, PipelabError):  # not at these sizes
                if name != "greedy":
                    sizes: dict[str, Any] = {} if same else {"stages_per_rank": self.stages_per_rank}
                    found.append((name, kind(self.ranks, self.microbatches, **sizes).plan()))
        return found

    @property
    def note(self) -> str:
        """What a teacher may add, from the teacher's copy."""
        return str(_answers()[self.name]["note"])

    @cached_property
    def solution(self) -> Plan:
        """An order that reaches par, from the teacher's copy."""
        reference = _answers()[self.name]["reference"]
        if not isinstance(reference, str):
            return Plan.parse(list(reference))
        kind = schedules[reference]
        sizes: dict[str, Any] = {"stages_per_rank": self.stages_per_rank} if self.stages_per_rank > 1 else {}
        if reference == "greedy":
            sizes |= {"memory_cap": self.cap, "cost": self.cost}
        return kind(self.ranks, self.microbatches, **sizes).plan()


def _times(given: float | Sequence[float]) -> str:
    return f"{given:g}" if isinstance(given, (int, float)) else " ".join(f"{each:g}" for each in given)


@cache
def _answers() -> dict[str, dict[str, Any]]:
    return tomllib.loads(teacher("challenges.toml").read_text(encoding="utf-8"))


@cache
def levels() -> dict[str, Level]:
    """Return all levels by name, in order."""
    text = files("pipelab.challenges").joinpath("levels.toml").read_text(encoding="utf-8")
    return {name: Level(name=name, **given) for name, given in tomllib.loads(text).items()}


def level(name: str) -> Level:
    """Return a level by its name or its number, from 1."""
    found = levels()
    if name.isdecimal() and 1 <= int(name) <= len(found):
        return list(found.values())[int(name) - 1]
    if name not in found:
        raise UsageError(f"there is no level {name}: they are {', '.join(found)}, or 1 to {len(found)}")
    return found[name]


def built(name: str) -> str:
    """Say which of the catalogue's schedules an order is; terminal and page say the same."""
    return f"you built {name}: {schedules[name].source}"


@dataclass(frozen=True)
class Attempt:
    """What an order is worth in a level. Made by `judge`.

    Attributes:
        level: the level.
        refusals: why it does not count, in sentences; empty if it does.
        trace: when everything happens, if it counts.
        recognised: the name of the catalogue's schedule that has the same rows, the first if there are several.
        looked_up: whether the catalogue or `optimum` made the order; the same one written by hand counts.
    """

    level: Level
    refusals: Sequence[str]
    trace: Trace | None = None
    recognised: str | None = None
    looked_up: bool = False

    @property
    def score(self) -> float | None:
        """What it is worth in the level's `unit`, if it counts."""
        return None if self.trace is None else self.level.score(self.trace)

    @property
    def reached(self) -> str:
        """`"par"`, `"good"`, `"legal"`, or `"refused"`."""
        score = self.score
        if score is None:
            return "refused"
        return "par" if score <= self.level.par else "good" if score <= self.level.good else "legal"


def judge(level: Level, subject: Plan | Schedule) -> Attempt:
    """Return what an order is worth in a level."""
    plan = subject.draft() if isinstance(subject, Schedule) else subject
    if refusal := _other_sizes(level, plan):
        return Attempt(level, [refusal])
    transport: Transport = "edge" if level.queued else "buffered"
    if faults := check(plan, memory_cap=level.cap, order="at-use", transport=transport):
        return Attempt(level, [str(fault) for fault in faults])
    if refusal := _against_the_rules(level, plan):
        return Attempt(level, [refusal])
    trace = simulate(plan, level.cost, order="at-use", transport=transport)
    if level.within and trace.makespan > level.within:
        return Attempt(level, [f"it takes {trace.makespan:g} units, and the level allows {level.within:g}"])
    known = {known.name: name for name, known in level.known if known.rows == plan.rows}
    if isinstance(subject, Schedule):
        looked_up = type(subject) in schedules.values()
    else:
        looked_up = plan.name in known or plan.name.startswith("best order of ")  # `optimum` names its plans so
    return Attempt(level, [], trace, next(iter(known.values()), None), looked_up)


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
    bound = plan.bound
    listed = [(rank, bound.codes.action(code)) for rank, row in enumerate(bound.computing) for code in row]
    for rank, action in [*listed, *((move.rank, move.action) for move in bound.moves)]:
        if action.kind not in level.kinds:
            return f"{action} on rank {rank}: this level has {'F, B, I and W' if level.split else 'F and B'} only"
        home = level.rank_of(action.stage or 0)
        if home != rank:
            return f"{action} is on rank {rank}: in this level, stage {action.stage} is on rank {home}"
    return None
