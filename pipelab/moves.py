"""Moves of actions within rows: what they make of the rows, and how they are said in few words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter

from pipelab.plan.bound import Program

__all__ = ["Block", "as_yielded", "merged", "parts_of", "rows_after", "told"]

_MOST_PARTS = 3
"""How many moves, or rows of moves alike, a hint names."""
_MOST_RANKS = 2
"""On how many ranks."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some actions that a rank should yield before another one."""

    rank: int
    moved: tuple[int, ...]
    before: int


def rows_after(program: Program, blocks: Iterable[Block]) -> list[list[int]]:
    """Return the rows with the blocks moved."""
    before: dict[int, tuple[int, ...]] = {}
    for block in blocks:
        before[block.before] = (*before.get(block.before, ()), *block.moved)
    moved = {code for codes in before.values() for code in codes}
    if not moved:
        return program.rows
    return [
        [each for code in row if code not in moved for each in (*before.get(code, ()), code)] for row in program.rows
    ]


def merged(blocks: Iterable[Block], rank: int) -> Block:
    """Return one rank's blocks as one, at the place of the first."""
    mine = [block for block in blocks if block.rank == rank]
    return Block(rank, tuple(code for block in mine for code in block.moved), mine[0].before)


def told(parts: list[tuple[int, str]]) -> str:
    """Return moves in words; nothing where they are too many to be read."""
    if len(parts) > _MOST_PARTS or len({rank for rank, _ in parts}) > _MOST_RANKS:
        return ""
    if len(parts) == 1:
        ((rank, text),) = parts
        return f"yield {text} on rank {rank}"
    by_rank = groupby(parts, key=itemgetter(0))
    return "; ".join(f"on rank {rank}, yield {', '.join(text for _, text in group)}" for rank, group in by_rank)


def parts_of(program: Program, blocks: Sequence[Block]) -> list[tuple[int, str]]:
    """Return (rank, words) for each block, or for many blocks in a row that differ by a steady step."""
    names = {rank: as_yielded(program, rank) for rank in {block.rank for block in blocks}}
    steps = [_step(program, *pair) for pair in pairwise(blocks)] + [None]
    parts: list[tuple[int, str]] = []
    first = 0
    while first < len(blocks):
        last = first
        while steps[last] is not None and steps[last] == steps[first]:
            last += 1
        alike = blocks[first : last + 1] if last - first >= 2 else blocks[first : first + 1]
        one, *more = (_words(program, block, names[block.rank]) for block in (*alike[:2], *alike[2:][-1:]))
        parts.append((alike[0].rank, f"{one}, {more[0]}, and so on to {more[1]}" if more else one))
        first += len(alike)
    return parts


def _step(program: Program, one: Block, other: Block) -> int | None:
    """Return by how many micro-batches one block is another further on; `None` if it is not."""
    if one.rank != other.rank or len(one.moved) != len(other.moved):
        return None
    pairs = zip((*one.moved, one.before), (*other.moved, other.before), strict=True)
    steps = {_further(program, *pair) for pair in pairs}
    return steps.pop() if len(steps) == 1 else None


def _further(program: Program, one: int, other: int) -> int | None:
    """Return by how many micro-batches an action is another of its kind and stage further on; `None` if it is not."""
    a, b = program.numbering.action(one), program.numbering.action(other)
    if (a.kind, a.stage) != (b.kind, b.stage) or a.microbatch is None or b.microbatch is None:
        return None
    return b.microbatch - a.microbatch


def _words(program: Program, block: Block, name: Callable[[int], str]) -> str:
    """Return `F(1) to F(7) before B(0)`."""
    runs: list[list[int]] = []
    for code in block.moved:
        if runs and _further(program, runs[-1][-1], code) == 1:
            runs[-1].append(code)
        else:
            runs.append([code])
    words: list[str] = []
    for run in runs:
        words.extend([f"{name(run[0])} to {name(run[-1])}"] if len(run) > 2 else map(name, run))
    *most, last = words
    return f"{' and '.join([', '.join(most)] * bool(most) + [last])} before {name(block.before)}"


def as_yielded(program: Program, rank: int | None) -> Callable[[int], str]:
    """Return how a schedule would write an action on this rank: the stage only where it is needed."""
    numbering = program.numbering
    stages = {slot % numbering.stages for slot, placed in enumerate(program.placed) if placed == rank}
    if rank is not None:
        stages |= {code % numbering.slots % numbering.stages for code in program.rows[rank]}

    def write(code: int) -> str:
        action = numbering.action(code)
        stage = f", stage={action.stage}" if len(stages) != 1 else ""
        if action.microbatch is None:
            return f"R({stage.removeprefix(', ')})"
        return f"{action.kind}({action.microbatch}{stage})"

    return write
