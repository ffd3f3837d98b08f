"""Name a deadlock: the cycle of ranks that wait for each other, and the move that would undo it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipelab.faults import Fault
from pipelab.program import Program
from pipelab.repairs import Knot, repair
from pipelab.traversal import Traversal

__all__ = ["deadlocks"]


@dataclass(frozen=True, slots=True)
class _Wait:
    """A stuck rank: at `index` stands `code`, which needs `value`, given by `giver` on rank `on`."""

    rank: int
    index: int
    code: int
    value: int | None
    giver: int
    on: int


def deadlocks(
    program: Program,
    walk: Traversal,
    given: Collection[int] = (),
    excused: Collection[int] = (),
    atomic_pairs: bool = False,
) -> list[Fault]:
    """Return one fault for each cycle among the ranks that a walk left stuck; it was walked with these options."""
    waits = {rank: _wait(program, walk, rank) for rank in walk.stuck}
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
                hint = "list the all-reduces R in the same order on every rank, each after its stage's last gradient"
            else:
                hint = repair(program, _knots(cycle), given, excused)
            faults.append(_fault(program, cycle, hint))
    return faults


def _wait(program: Program, walk: Traversal, rank: int) -> _Wait:
    """Tell what a stuck rank waits for."""
    index = walk.stuck[rank]
    code = program.rows[rank][index]
    value = walk.waits_for[rank]
    if value is None:  # an R waits for a rank that has not come to it
        absent = next(
            other
            for other, row in enumerate(program.rows)
            if code in row and (other not in walk.stuck or program.rows[other][walk.stuck[other]] != code)
        )
        return _Wait(rank, index, code, None, code, absent)
    giver = program.giver(value)
    return _Wait(rank, index, code, value, giver, program.rank_of[giver])


def _knots(cycle: list[_Wait]) -> list[Knot]:
    """Return where a rank is stuck at one action and the rank before it in the cycle waits for a later one."""
    return [
        Knot(wait.rank, wait.index, wait.code, before.giver)
        for before, wait in zip([cycle[-1], *cycle[:-1]], cycle, strict=True)
        if before.giver != wait.code
    ]


def _fault(program: Program, cycle: list[_Wait], hint: str) -> Fault:
    """Explain one cycle, step by step."""
    numbering = program.numbering
    first = cycle[0]
    ranks = [wait.rank for wait in cycle]
    summary = f"rank {ranks[0]} waits for rank {ranks[1 % len(ranks)]}"
    if len(ranks) > 1:
        others = [*ranks[2:], ranks[0]]
        summary += "".join(f", which waits for rank {rank}" for rank in _shortened(others, "…"))
    steps = [f"{_named(program, first)} {_needs(program, first)}"]
    for before, wait in pairwise(cycle):
        if before.giver == wait.code:
            steps.append(f"{_named(program, wait)} {_needs(program, wait)}")
        else:
            action = numbering.action(before.giver)
            position = program.position(wait.rank, program.rows[wait.rank].index(before.giver))
            steps.append(
                f"{action} (rank {wait.rank}, position {position}) comes after {numbering.action(wait.code)}, "
                f"which {_needs(program, wait)}"
            )
    last = cycle[-1].giver
    if last != first.code:
        steps.append(f"{numbering.action(last)} comes after {numbering.action(first.code)} on rank {first.rank}")
    lines = [summary, *(f"  {step}" for step in _shortened(steps, "…"))]
    return Fault(
        "deadlock",
        first.rank,
        program.position(first.rank, first.index),
        numbering.action(first.code),
        "\n".join(lines),
        hint,
    )


def _named(program: Program, wait: _Wait) -> str:
    position = program.position(wait.rank, wait.index)
    return f"{program.numbering.action(wait.code)} (rank {wait.rank}, position {position})"


def _needs(program: Program, wait: _Wait) -> str:
    if wait.value is None:
        return f"needs rank {wait.on} to come to it too"
    return f"needs {program.numbering.value_name(wait.value)}, given by {program.numbering.action(wait.giver)}"


def _shortened(lines: Sequence[object], gap: str, most: int = 8) -> list[object]:
    """Return the lines, the middle left out where there are many."""
    if len(lines) <= most:
        return list(lines)
    return [*lines[: most - 3], gap, *lines[-2:]]
