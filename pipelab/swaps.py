"""The slip that `F(rank, m)` is for `F(m, rank)`: micro-batch and stage the wrong way round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from pipelab.actions import Action, Kind
from pipelab.faults import Fault
from pipelab.placement import NO_RANK, within
from pipelab.program import Program

__all__ = ["with_swap_hints"]


def with_swap_hints(program: Program, faults: Sequence[Fault]) -> list[Fault]:
    """Return faults, with the hint to swap where all that is wrong on a rank would be right the other way round."""
    meant: dict[int, list[Action | None]] = defaultdict(list)
    for fault in faults:
        if fault.rank is not None and fault.code in ("out-of-range", "wrong-rank"):
            meant[fault.rank].append(_swapped(program, fault.rank, fault.action))
    swaps = {rank: iter(actions) for rank, actions in meant.items() if None not in actions}
    return [
        replace(fault, hint=_hint(next(swaps[fault.rank]), fault.rank))
        if fault.rank in swaps and fault.code in ("out-of-range", "wrong-rank")
        else fault
        for fault in faults
    ]


def _swapped(program: Program, rank: int, action: object) -> Action | None:
    """Return an action with its numbers the other way round, if it is then right on its rank and not there yet."""
    numbering = program.numbering
    if not isinstance(action, Action):
        return None
    microbatch, stage = action.stage, action.microbatch
    if not (within(microbatch, numbering.microbatches) and within(stage, numbering.stages)):
        return None
    meant = Action(action.kind, microbatch, stage)
    code = numbering.code(meant)
    right = program.placed[code % numbering.slots] in (rank, NO_RANK)
    instead: tuple[Kind, ...] = ("I", "W") if meant.kind == "B" else ("B",) if meant.kind in ("I", "W") else ()
    there = program.rank_of[code] == rank or any(
        program.rank_of[numbering.code(replace(meant, kind=kind))] != NO_RANK for kind in instead
    )
    return meant if right and not there else None


def _hint(meant: Action | None, rank: int) -> str:
    assert meant is not None
    kind = meant.kind
    return (
        f"it is {kind}(microbatch, stage): did you swap them? "
        f"{kind}({meant.microbatch}, {meant.stage}), in text {meant}, is right on rank {rank}"
    )
