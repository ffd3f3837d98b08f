"""Name a deadlock: the cycle of ranks that wait for each other, and the move that would undo it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter

from pipelab.faults import Fault
from pipelab.program import Program
from pipelab.traversal import Traversal, traverse

__all__ = ["deadlocks"]

_TRIAL_ACTIONS = 200_000
"""How many actions may be walked over in search of a hint that is known to work."""


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
                hint = (
                    "list the all-reduces R in the same order on every rank, each after its stage's last gradient; "
                    "or list none of them, and each is put in its place"
                )
            else:
                hint = _hint(program, cycle, lambda rows: len(_retried(program, rows, given, excused).stuck))
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


def _hint(program: Program, cycle: list[_Wait], still_stuck: Callable[[list[list[int]]], int]) -> str:
    """Return the move that frees most ranks, if possible all: tried out, not guessed.

    Where a rank is stuck at one action and another waits for a later one of its row, either may pass the other.
    """
    total = sum(map(len, program.rows))
    best = (len(program.rows) + 1, "give one rank of the cycle another order")
    tried = 0
    for before, wait in zip([cycle[-1], *cycle[:-1]], cycle, strict=True):
        if before.giver == wait.code:
            continue
        name = _as_yielded(program, wait.rank)
        row = program.rows[wait.rank]
        without_giver = [code for code in row if code != before.giver]
        without_stuck = [code for code in row if code != wait.code]
        after = without_stuck.index(before.giver) + 1
        for verb, changed in (
            ("before", [*without_giver[: wait.index], before.giver, *without_giver[wait.index :]]),
            ("after", [*without_stuck[:after], wait.code, *without_stuck[after:]]),
        ):
            tried += total
            if best[0] <= len(program.rows) and tried > _TRIAL_ACTIONS:
                break
            left = still_stuck([*program.rows[: wait.rank], changed, *program.rows[wait.rank + 1 :]])
            one, other = (before.giver, wait.code) if verb == "before" else (wait.code, before.giver)
            move = f"yield {name(one)} {verb} {name(other)} on rank {wait.rank}"
            if left == 0:
                return move
            best = min(best, (left, move), key=itemgetter(0))
    return f"{best[1]}, then check again"


def _retried(program: Program, rows: list[list[int]], given: Collection[int], excused: Collection[int]) -> Traversal:
    """Walk through the plan with other rows."""
    trial = replace(program, rows=rows, pairs=set(), faults=[], walk=None)
    return traverse(trial, given=given, excused=excused)


def _as_yielded(program: Program, rank: int) -> Callable[[int], str]:
    """Return how a schedule would write an action on this rank: the stage only where it is needed."""
    numbering = program.numbering
    stages = {code % numbering.slots % numbering.stages for code in program.rows[rank]}

    def write(code: int) -> str:
        action = numbering.action(code)
        stage = f", stage={action.stage}" if len(stages) > 1 else ""
        return f"{action.kind}({action.microbatch}{stage})"

    return write
