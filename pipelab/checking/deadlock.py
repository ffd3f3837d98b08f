"""Explain a deadlock: the cycle of ranks that wait for each other, and the move that breaks it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipelab.checking.repair import BlockedRank, Repair, repair
from pipelab.plan.actions import Item, Pair
from pipelab.plan.bound import BoundPlan
from pipelab.plan.fault import Fault, Link
from pipelab.plan.order import Traversal
from pipelab.plan.plan import Plan

__all__ = ["deadlocks", "shortened", "summary"]

_MOST_TRIED = 1_000_000
"""Cycles times actions beyond which further cycles get no repair of their own: each has to be tried out."""
_MOST_KEPT = 20_000
"""How many actions a plan may have whose repaired rows are kept for a picture: objects take longer than codes."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """A stuck rank: its action at `index`, `code`, needs `value`, which `giver` on rank `on` gives."""

    rank: int
    index: int
    code: int
    value: int | None
    giver: int
    on: int


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

    def with_position(self, code: int, rank: int) -> str:
        """Return the name, and where it stands."""
        position = self.bound.position(rank, self.bound.rows[rank].index(code))
        return f"{self.of(code)} (rank {rank}, position {position})"


def deadlocks(
    bound: BoundPlan,
    walk: Traversal,
    given: Collection[int] = (),
    excused: Collection[int] = (),
    atomic_pairs: bool = False,
) -> list[Fault]:
    """Return one fault for each cycle of ranks that a walk left stuck; the options are those of the walk."""
    waits = {rank: _wait(bound, walk, rank) for rank in walk.stuck}
    names = _Names(bound, atomic_pairs)
    faults: list[Fault] = []
    seen: set[int] = set()
    for start in sorted(waits):
        path: list[int] = []
        rank = start
        while rank not in seen and rank in waits:
            seen.add(rank)
            path.append(rank)
            rank = waits[rank].on
        if rank in path:
            ring = path[path.index(rank) :]
            lowest = ring.index(min(ring))
            cycle = [waits[rank] for rank in ring[lowest:] + ring[:lowest]]
            if atomic_pairs:
                hint = "leave out Cost(pair=...), or yield the halves of one of these pairs one after the other"
            elif any(wait.value is None for wait in cycle):
                hint = (
                    "list the all-reduces R in the same order on every rank, each after its stage's last gradient; "
                    "or list none, and pipelab inserts them"
                )
            elif len(faults) * sum(map(len, bound.rows)) > _MOST_TRIED:
                hint = "fix the cycles before this one, then check again"
            else:
                found = repair(bound, _blocked_ranks(cycle), given, excused)
                faults.append(_fault(bound, cycle, found.words, names, _tried(bound, found)))
                continue
            faults.append(_fault(bound, cycle, hint, names))
    return faults


def _tried(bound: BoundPlan, found: Repair) -> Plan | None:
    """Return the plan with a repair, for a picture."""
    if not found.rows or sum(map(len, found.rows)) > _MOST_KEPT:
        return None
    codes, ranks = bound.codes, bound.rank_of_slot
    rows = [list(map(codes.action, row)) for row in found.rows]
    place = (lambda microbatch, stage: ranks[microbatch * codes.stages + stage]) if bound.names_ranks else None
    return Plan(rows, codes.stages, codes.microbatches, place)


def _wait(bound: BoundPlan, walk: Traversal, rank: int) -> _Wait:
    """Return what a stuck rank waits for."""
    index = walk.stuck[rank]
    code = bound.rows[rank][index]
    value = walk.waits_for[rank]
    if value is None:  # an R waits for a rank that has not reached it
        absent = next(
            other
            for other in bound.reduces[code]
            if other not in walk.stuck or bound.rows[other][walk.stuck[other]] != code
        )
        return _Wait(rank, index, code, None, code, absent)
    giver = bound.giver(value)
    return _Wait(rank, index, code, value, giver, bound.rank_of[giver])


def _blocked_ranks(cycle: list[_Wait]) -> list[BlockedRank]:
    """Return the ranks that are stuck at one action while the rank before them in the cycle waits for a later one."""
    return [
        BlockedRank(wait.rank, wait.index, wait.code, before.giver)
        for before, wait in zip([cycle[-1], *cycle[:-1]], cycle, strict=True)
        if before.giver != wait.code
    ]


def _fault(bound: BoundPlan, cycle: list[_Wait], hint: str, names: _Names, tried: Plan | None = None) -> Fault:
    """Explain one cycle, step by step."""
    first, last = cycle[0], cycle[-1]
    steps = [f"{names.with_position(first.code, first.rank)} {_needs(names, first)}"]
    for before, wait in pairwise(cycle):
        if names.of(before.giver) == names.of(wait.code):
            steps.append(f"{names.with_position(wait.code, wait.rank)} {_needs(names, wait)}")
        else:
            giver = names.with_position(before.giver, wait.rank)
            steps.append(f"{giver} comes after {names.of(wait.code)}, which {_needs(names, wait)}")
    if names.of(last.giver) != names.of(first.code):
        steps.append(f"{names.of(last.giver)} comes after {names.of(first.code)} on rank {first.rank}")
    lines = [summary([wait.rank for wait in cycle]), *(f"  {step}" for step in shortened(steps, "…"))]
    position = bound.position(first.rank, first.index)
    message, links = "\n".join(lines), _links(cycle, names)
    return Fault("deadlock", first.rank, position, names.of(first.code), message, hint, cycle=links, tried=tried)


def _links(cycle: list[_Wait], names: _Names) -> tuple[Link, ...]:
    """Return the steps of a cycle one by one: each action that waits, and what comes before the one it waits for."""
    links: list[Link] = []
    for wait, after in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        name, giver, other = (str(names.of(code)) for code in (wait.code, wait.giver, after.code))
        links.append(Link(wait.rank, name, f"{name} {_needs(names, wait)}"))
        if giver != other:
            links.append(Link(after.rank, giver, f"{giver} comes after {other} on rank {after.rank}"))
    return tuple(links)


def summary(ranks: list[int]) -> str:
    """Return which rank waits for which, in one line."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits for itself"
    others = shortened([*ranks[2:], ranks[0]], "…")
    return f"rank {ranks[0]} waits for rank {ranks[1]}" + "".join(f", which waits for rank {rank}" for rank in others)


def _needs(names: _Names, wait: _Wait) -> str:
    if wait.value is None:
        return f"needs rank {wait.on} to reach it too"
    value, giver = names.bound.codes.value_name(wait.value), names.of(wait.giver)
    return f"needs {value}, {'which it gives itself' if giver == names.of(wait.code) else f'given by {giver}'}"


def shortened(lines: Sequence[object], gap: str, most: int = 8) -> list[object]:
    """Return the lines, with the middle left out if there are many."""
    if len(lines) <= most:
        return list(lines)
    return [*lines[: most - 3], gap, *lines[-2:]]
