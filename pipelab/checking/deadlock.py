"""Explain a deadlock: the cycle of ranks that wait for each other, and the move that breaks it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, TypeVar

from pipelab.checking.repair import BlockedRank, Repair, repair
from pipelab.plan.actions import Item, Pair
from pipelab.plan.bound import BoundPlan
from pipelab.plan.fault import Code, Fault, Link
from pipelab.plan.order import Traversal, units
from pipelab.plan.plan import Plan

Head = int | tuple[int, int]
"""Where something may be stuck: a rank, or one of its queues."""
AnyWait = TypeVar("AnyWait", bound="Wait")

_MOST_TRIED = 1_000_000
"""Cycles times actions beyond which further cycles get no repair: each has to be tried out."""
_PAIRS_HINT = "leave out Cost(pair=...), or yield the halves of one of these pairs one after the other"
_REDUCES_HINT = (
    "list the all-reduces R in the same order on every rank, each after its stage's last gradient; "
    "or list none, and pipelab inserts them"
)
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
    """A stuck rank: its action `code` waits for `giver`; at an all-reduce, for another rank to reach it too."""

    code: int
    giver: int


def deadlocks(
    plan: Plan,
    walk: Traversal,
    given: Collection[int] = (),
    excused: Collection[int] = (),
    atomic_pairs: bool = False,
) -> list[Fault]:
    """Return one fault for each cycle of ranks that a walk left stuck; the options are the walk's."""
    bound = plan.bound
    name = _names(bound, atomic_pairs)
    stuck = {rank: bound.computing[rank][index] for rank, index in walk.stuck.items()}
    waits = {rank: _wait(bound, name, stuck, rank, walk.waits_for[rank]) for rank in stuck}
    faults: list[Fault] = []
    for cycle in cycles(sorted(waits), waits.get):
        if atomic_pairs:
            found = Repair(_PAIRS_HINT, [])
        elif any(bound.codes.collective[wait.code] for wait in cycle):
            found = Repair(_REDUCES_HINT, [])
        elif len(faults) * sum(map(len, bound.computing)) > _MOST_TRIED:
            found = Repair("fix the cycles before this one, then check again", [])
        else:
            found = repair(bound, _blocked_ranks(cycle), given, excused)
        rank, tried = cycle[0].rank, _tried(plan, found)
        position = bound.position(rank, walk.stuck[rank])
        faults.append(cycle_fault("deadlock", cycle, position, name(cycle[0].code), found.words, tried))
    return faults


def _names(bound: BoundPlan, atomic_pairs: bool) -> Callable[[int], Item]:
    """Return how a message calls an action: if pairs are one slot, both halves have the pair's name."""
    pair_of: dict[int, Pair] = {}
    for halves in (units(row, bound.pairs) for row in bound.computing if atomic_pairs):
        pair_of |= {code: Pair(*map(bound.codes.action, both)) for both in halves if len(both) > 1 for code in both}
    return lambda code: pair_of.get(code) or bound.codes.action(code)


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


def _tried(plan: Plan, found: Repair) -> Plan | None:
    """Return the plan with repaired rows, in which each action keeps the moves about it."""
    if not found.rows or sum(map(len, found.rows)) > _MOST_KEPT:
        return None
    action, rows = plan.bound.codes.action, []
    for rank, row in enumerate(found.rows):
        moves = plan.bound.with_moves(rank)
        rows.append([action(each) for code in row for each in moves[code]])
    return plan.with_rows(rows, plan.name)


def _wait(
    bound: BoundPlan, name: Callable[[int], Item], stuck: Mapping[int, int], rank: int, value: int | None
) -> _RankWait:
    """Return the wait of a rank, which is stuck at an action that lacks a value."""
    code = stuck[rank]
    if value is None:  # an R waits for a rank that has not reached it
        giver = code
        on = next(other for other in bound.reduces[code] if stuck.get(other) != code)
        needs = f"needs rank {on} to reach it too"
    else:
        giver = bound.giver_of[value]
        on = bound.rank_of[giver]
        how = "which it gives itself" if name(giver) == name(code) else f"given by {name(giver)}"
        needs = f"needs {bound.codes.value_words(value)}, {how}"
    places = _place(bound, rank, code), _place(bound, on, giver)
    return _RankWait(rank, str(name(code)), needs, str(name(giver)), on, *places, code=code, giver=giver)


def _place(bound: BoundPlan, rank: int, code: int) -> str:
    return f", position {bound.position(rank, bound.computing[rank].index(code))}"


def _blocked_ranks(cycle: list[_RankWait]) -> list[BlockedRank]:
    """Return the ranks that are stuck at one action while the rank before them in the cycle waits for a later one."""
    return [
        BlockedRank(wait.rank, wait.code, before.giver)
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
