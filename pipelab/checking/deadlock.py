"""Explain a deadlock: the cycle of ranks that wait for each other, and the move that breaks it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, TypeVar

from pipelab.checking.repair import BlockedRank, Repair, repair
from pipelab.plan.actions import Item, Pair
from pipelab.plan.bound import BoundPlan
from pipelab.plan.fault import Code, Fault, Link
from pipelab.plan.order import Traversal
from pipelab.plan.plan import Plan

Head = int | tuple[int, int]
"""Where something may be stuck: a rank, or one of its queues."""
AnyWait = TypeVar("AnyWait", bound="Wait")

_MOST_TRIED = 1_000_000
"""Cycles times actions beyond which further cycles get no repair: each has to be tried out."""
_MOST_KEPT = 20_000
"""How many actions a plan may have whose repaired rows are kept for a picture: objects take longer than codes."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A step of a cycle: what is stuck, and what it waits for.

    Attributes:
        rank: the rank in whose row it is.
        name: what is stuck.
        needs: what that waits for, as the rest of a sentence.
        needed: the name of that.
        on: where that is: a rank, or a queue of transfers and its rank. What is stuck there is the next step.
        place: where what is stuck is in its row, in words.
        needed_place: the same of what it waits for.
    """

    rank: int
    name: str
    needs: str
    needed: str
    on: Head
    place: str = ""
    needed_place: str = ""

    @property
    def here(self) -> str:
        """What is stuck, and its place."""
        return f"{self.name} (rank {self.rank}{self.place})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankWait(Wait):
    """A stuck rank: its action at `index`, `code`, waits for `giver`."""

    index: int
    code: int
    giver: int
    all_reduce: bool


class _Names:
    """The names of actions in a message: if pairs are one slot, both halves have the pair's name."""

    def __init__(self, bound: BoundPlan, atomic_pairs: bool) -> None:
        self.bound = bound
        self.pair_of: dict[int, Pair] = {}
        for row in bound.rows if atomic_pairs else ():
            for forward, backward in pairwise(row):
                if forward in bound.pairs:
                    self.pair_of[forward] = self.pair_of[backward] = Pair(*map(bound.codes.action, (forward, backward)))

    def of(self, code: int) -> Item:
        """Return what runs: an action, or a pair."""
        return self.pair_of.get(code) or self.bound.codes.action(code)

    def place(self, code: int, rank: int) -> str:
        """Return where a code is in a rank's row."""
        return f", position {self.bound.position(rank, self.bound.rows[rank].index(code))}"


def deadlocks(
    bound: BoundPlan,
    walk: Traversal,
    given: Collection[int] = (),
    excused: Collection[int] = (),
    atomic_pairs: bool = False,
) -> list[Fault]:
    """Return one fault for each cycle of ranks that a walk left stuck; the options are the walk's."""
    names = _Names(bound, atomic_pairs)
    waits = {rank: _wait(names, walk, rank) for rank in walk.stuck}
    faults: list[Fault] = []
    for cycle in cycles(sorted(waits), waits.get):
        tried = None
        if atomic_pairs:
            hint = "leave out Cost(pair=...), or yield the halves of one of these pairs one after the other"
        elif any(wait.all_reduce for wait in cycle):
            hint = (
                "list the all-reduces R in the same order on every rank, each after its stage's last gradient; "
                "or list none, and pipelab inserts them"
            )
        elif len(faults) * sum(map(len, bound.rows)) > _MOST_TRIED:
            hint = "fix the cycles before this one, then check again"
        else:
            found = repair(bound, _blocked_ranks(cycle), given, excused)
            hint, tried = found.words, _tried(bound, found)
        first = cycle[0]
        position = bound.position(first.rank, first.index)
        faults.append(cycle_fault("deadlock", cycle, position, names.of(first.code), hint, tried))
    return faults


def cycles(heads: Iterable[Head], wait_of: Callable[[Any], AnyWait | None]) -> list[list[AnyWait]]:
    """Return each cycle of what waits for each other, from its lowest rank on."""
    found: list[list[AnyWait]] = []
    seen: set[Head] = set()
    for head in heads:
        path: dict[Head, AnyWait] = {}
        while head not in seen and (wait := wait_of(head)) is not None:
            seen.add(head)
            path[head] = wait
            head = wait.on  # noqa: PLW2901 - the way goes on from there
        if head in path:
            ring = list(path.values())[list(path).index(head) :]
            lowest = min(range(len(ring)), key=lambda at: ring[at].rank)
            found.append(ring[lowest:] + ring[:lowest])
    return found


def cycle_fault(
    kind: Code, cycle: Sequence[Wait], position: int, action: Item, hint: str, tried: Plan | None = None
) -> Fault:
    """Explain one cycle, step by step: what is stuck first on each rank, and what comes before what it waits for."""
    ranks = [rank for rank, _ in groupby(wait.rank for wait in cycle)]
    ranks = ranks[:-1] if len(ranks) > 1 and ranks[0] == ranks[-1] else ranks
    message = "\n".join([_summary(ranks), *(f"  {step}" for step in _shortened([*_steps(cycle)]))])
    return Fault(kind, cycle[0].rank, position, action, message, hint, cycle=tuple(_links(cycle)), tried=tried)


def _steps(cycle: Sequence[Wait]) -> Iterator[str]:
    """Yield each wait of a cycle in a sentence."""
    first, last = cycle[0], cycle[-1]
    yield f"{first.here} {first.needs}"
    for before, wait in pairwise(cycle):
        if before.needed == wait.name:
            yield f"{wait.here} {wait.needs}"
        else:
            needed = f"{before.needed} (rank {wait.rank}{before.needed_place})"
            yield f"{needed} comes after {wait.name}, which {wait.needs}"
    if last.needed != first.name:
        yield f"{last.needed} comes after {first.name} on rank {first.rank}"


def _links(cycle: Sequence[Wait]) -> Iterator[Link]:
    """Yield the arrows of a picture: from what is stuck to what it needs, and from there back along its row."""
    for wait, after in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        yield Link(wait.rank, wait.name, f"{wait.name} {wait.needs}")
        if wait.needed != after.name:
            words = f"{wait.needed} comes after {after.name} on rank {after.rank}"
            yield Link(after.rank, wait.needed, words)


def _tried(bound: BoundPlan, found: Repair) -> Plan | None:
    if not found.rows or sum(map(len, found.rows)) > _MOST_KEPT:
        return None
    codes, ranks = bound.codes, bound.rank_of_slot
    rows = [list(map(codes.action, row)) for row in found.rows]
    place = (lambda microbatch, stage: ranks[microbatch * codes.stages + stage]) if bound.names_ranks else None
    return Plan(rows, codes.stages, codes.microbatches, place)


def _wait(names: _Names, walk: Traversal, rank: int) -> _RankWait:
    """Return what a stuck rank waits for."""
    bound, index, value = names.bound, walk.stuck[rank], walk.waits_for[rank]
    code = bound.rows[rank][index]
    if value is None:  # an R waits for a rank that has not reached it
        giver = code
        on = next(
            other
            for other in bound.reduces[code]
            if other not in walk.stuck or bound.rows[other][walk.stuck[other]] != code
        )
        needs = f"needs rank {on} to reach it too"
    else:
        giver = bound.giver_of[value]
        on = bound.rank_of[giver]
        itself = names.of(giver) == names.of(code)
        how = "which it gives itself" if itself else f"given by {names.of(giver)}"
        needs = f"needs {bound.codes.value_name(value)}, {how}"
    places = names.place(code, rank), names.place(giver, on)
    return _RankWait(
        rank, str(names.of(code)), needs, str(names.of(giver)), on, *places,
        index=index, code=code, giver=giver, all_reduce=value is None,
    )  # fmt: skip


def _blocked_ranks(cycle: list[_RankWait]) -> list[BlockedRank]:
    """Return the ranks that are stuck at one action while the rank before them in the cycle waits for a later one."""
    return [
        BlockedRank(wait.rank, wait.index, wait.code, before.giver)
        for before, wait in zip([cycle[-1], *cycle[:-1]], cycle, strict=True)
        if before.giver != wait.code
    ]


def _summary(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits for itself"
    others = _shortened([*ranks[2:], ranks[0]])
    return f"rank {ranks[0]} waits for rank {ranks[1]}" + "".join(f", which waits for rank {rank}" for rank in others)


def _shortened(lines: Sequence[object]) -> Sequence[object]:
    """Return the lines, with the middle left out if there are many."""
    return lines if len(lines) <= 8 else [*lines[:5], "…", *lines[-2:]]
