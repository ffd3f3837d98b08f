"""One mistyped number: a single action that stands where another one is missing."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.actions import KINDS, Action, Pair
from pipelab.faults import Fault
from pipelab.placement import NO_RANK
from pipelab.plan import Plan
from pipelab.slip import Slip, names_both, rewritten

__all__ = ["alone_with_its_number"]


def alone_with_its_number(plan: Plan) -> Iterator[Slip]:
    """Try another number for the one action that has the highest: the plan's sizes were read from its actions."""
    named = [
        (rank, at, action)
        for rank, row in enumerate(plan.written)
        for at, item in enumerate(row)
        for action in ((item.forward, item.backward) if isinstance(item, Pair) else (item,))
        if names_both(action)
    ]
    if len(named) < 2:
        return
    by_microbatch = sorted((action.microbatch or 0, index) for index, (*_, action) in enumerate(named))
    (microbatch, _), (highest, index) = by_microbatch[-2:]
    if microbatch < highest:
        yield from _mistyped(plan, *named[index], f"micro-batch {highest}", (plan.stages, microbatch + 1))
    by_stage = sorted((action.stage or 0, index) for index, (*_, action) in enumerate(named))
    (stage, _), (highest, index) = by_stage[-2:]
    if stage < highest:
        yield from _mistyped(plan, *named[index], f"stage {highest}", (stage + 1, plan.microbatches))


def _mistyped(plan: Plan, rank: int, at: int, action: Action, alone: str, sizes: tuple[int, int]) -> Iterator[Slip]:
    """Try what is missing on a rank in the place of an action, in a plan of other sizes."""
    left = Plan([[item for item in row if item is not action] for row in plan.written], *sizes).program
    first, slots = KINDS.index(action.kind) * left.numbering.slots, left.numbering.slots
    missing = [slot for slot in range(slots) if left.rank_of[first + slot] == NO_RANK]
    here = [left.numbering.action(first + slot) for slot in missing if left.placed[slot] in (rank, NO_RANK)]
    meant = [each for each in here if each.stage == action.stage or each.microbatch == action.microbatch]
    if len(meant) == 1:
        message = f"{action} on rank {rank} is the only action of {alone}, and {meant[0]} is missing"
        told = Fault("out-of-range", rank, at, action, message, f"write {meant[0]}")
        rows = rewritten(plan, lambda _rank, _at, each: meant[0] if each is action else each).written
        yield Slip(told, Plan(rows, *sizes, None, plan.name))
