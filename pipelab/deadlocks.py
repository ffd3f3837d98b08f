"""Name a deadlock: the cycle of ranks that wait for each other, and the move that would undo it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


def deadlocks(program: Program, walk: Traversal) -> list[Fault]:
    """Return one fault for each cycle among the ranks that a walk left stuck."""
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
            cycle = path[path.index(rank) :]
            lowest = cycle.index(min(cycle))
            faults.append(_fault(program, [waits[rank] for rank in cycle[lowest:] + cycle[:lowest]]))
    return faults


def _wait(program: Program, walk: Traversal, rank: int) -> _Wait:
    """Tell what a stuck rank waits for."""
    numbering = program.numbering
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
    giver = next(giver for giver in numbering.givers(value) if program.rank_of[giver] >= 0)
    return _Wait(rank, index, code, value, giver, program.rank_of[giver])


def _fault(program: Program, cycle: list[_Wait]) -> Fault:
    """Explain one cycle, step by step."""
    numbering = program.numbering
    first = cycle[0]
    ranks = [wait.rank for wait in cycle]
    summary = f"rank {ranks[0]} waits for rank {ranks[1 % len(ranks)]}"
    if len(ranks) > 1:
        others = [*ranks[2:], ranks[0]]
        summary += "".join(f", which waits for rank {rank}" for rank in _shortened(others, "…"))
    steps = [f"{_named(program, first)} {_needs(program, first)}"]
    for before, wait in zip(cycle, cycle[1:], strict=False):
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
        _hint(program, cycle),
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


def _hint(program: Program, cycle: list[_Wait]) -> str:
    """Return a move that undoes the cycle; one that makes the whole plan run, where one is found."""
    if any(wait.value is None for wait in cycle):
        return "list the all-reduces R in the same order on every rank, each after its stage's last gradient"
    moves: list[tuple[_Wait, int]] = []
    for before, wait in zip([cycle[-1], *cycle[:-1]], cycle, strict=True):
        if before.giver != wait.code:
            moves.append((wait, before.giver))
    budget = _TRIAL_ACTIONS // max(1, sum(map(len, program.rows)))
    chosen = next((move for move in moves[:budget] if _helps(program, *move)), None)
    if chosen is None:
        chosen = moves[0] if moves else None
    if chosen is None:
        return "give one rank of the cycle another order"
    wait, giver = chosen
    name = _as_yielded(program, wait.rank)
    return f"yield {name(giver)} before {name(wait.code)} on rank {wait.rank}"


def _helps(program: Program, wait: _Wait, giver: int) -> bool:
    """Tell whether moving `giver` right before the action that its rank is stuck at lets everything run."""
    row = list(program.rows[wait.rank])
    row.remove(giver)
    row.insert(wait.index, giver)
    rows = [*program.rows[: wait.rank], row, *program.rows[wait.rank + 1 :]]
    trial = Program(
        program.numbering, rows, program.positions, set(), program.placed, program.rank_of, [], program.names_ranks
    )
    return not traverse(trial).stuck


def _as_yielded(program: Program, rank: int) -> Callable[[int], str]:
    """Return how a schedule would write an action on this rank: the stage only where it is needed."""
    numbering = program.numbering
    stages = {code % numbering.slots % numbering.stages for code in program.rows[rank]}

    def write(code: int) -> str:
        action = numbering.action(code)
        stage = f", stage={action.stage}" if len(stages) > 1 else ""
        return f"{action.kind}({action.microbatch}{stage})"

    return write
