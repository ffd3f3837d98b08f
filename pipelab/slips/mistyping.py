"""One mistyped number: an action that stands where another one is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

from pipelab.plan.actions import KINDS, Action, Kind, Pair
from pipelab.plan.binding import NO_RANK
from pipelab.plan.bound import Program
from pipelab.plan.fault import Fault
from pipelab.plan.plan import Plan
from pipelab.slips.slip import Slip, names_both, rewritten

__all__ = ["alone_with_its_number", "standing_twice"]


def alone_with_its_number(plan: Plan) -> Iterator[Slip]:
    """Try another number for the one action that has the highest, where the plan's size was read from its actions."""
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
    if microbatch < highest and "microbatches" in plan.inferred:
        yield from _mistyped(plan, *named[index], f"micro-batch {highest}", (plan.stages, microbatch + 1))
    by_stage = sorted((action.stage or 0, index) for index, (*_, action) in enumerate(named))
    (stage, _), (highest, index) = by_stage[-2:]
    if stage < highest and "stages" in plan.inferred:
        yield from _mistyped(plan, *named[index], f"stage {highest}", (stage + 1, plan.microbatches))


def _mistyped(plan: Plan, rank: int, at: int, action: Action, alone: str, sizes: tuple[int, int]) -> Iterator[Slip]:
    """Try what is missing on a rank in the place of an action, in a plan of other sizes."""
    left = Plan([[item for item in row if item is not action] for row in plan.written], *sizes).program
    meant = _one_missing(left, rank, action)
    if meant is not None:
        message = f"{action} on rank {rank} is the only action of {alone}, and {meant} is missing"
        told = Fault("out-of-range", rank, at, action, message, f"write {meant}")
        rows = rewritten(plan, lambda _rank, _at, each: meant if each is action else each).written
        yield Slip(told, Plan(rows, *sizes, None, plan.name))


def standing_twice(plan: Plan, faults: Sequence[Fault]) -> Iterator[Slip]:
    """Try what is missing on a rank in either place of the one action that stands twice, the likelier place first."""
    program = plan.program
    again = [fault for fault in program.faults if fault.code == "duplicate"]
    code = _code_of(program, again[0]) if len(again) == 1 else None
    if code is None:
        return
    action, lacking = program.numbering.action(code), {fault.rank for fault in faults if fault.code == "missing"}
    places = (_first_place(program, code, again[0]), again[0])
    tried: list[tuple[bool, Slip]] = []
    for place in places:
        assert place.rank is not None
        meant = _one_missing(program, place.rank, action) if lacking & {place.rank, None} else None
        if meant is not None:
            other = _with(plan, place, meant)
            disorder = not _ascending(other.program, place.rank, meant)
            tried.append((disorder, Slip(_told_twice(action, places, place, meant), other)))
    yield from (slip for _, slip in sorted(tried, key=itemgetter(0)))


def _first_place(program: Program, code: int, again: Fault) -> Fault:
    """Return the fault of an action that stands twice at the first of its two places."""
    rank = program.rank_of[code]
    return replace(again, rank=rank, position=program.position(rank, program.rows[rank].index(code)))


def _told_twice(action: Action, places: tuple[Fault, Fault], place: Fault, meant: Action) -> Fault:
    """Return how it is told that an action stands in two places, and what was meant in one of them."""
    one, other = places
    where = f"on rank {one.rank}, position {one.position}, and on rank {other.rank}, position {other.position}"
    which = f"on rank {place.rank}"
    if one.rank == other.rank:
        where = f"twice on rank {one.rank}, at positions {one.position} and {other.position}"
        which = f"at position {place.position}"
    message = f"{action} stands {where}, and {meant} is missing"
    return replace(place, message=message, hint=f"write {meant} for the one {which}")


def _code_of(program: Program, again: Fault) -> int | None:
    """Return the code of an action of one micro-batch that stands twice, where it can be told."""
    action, numbering = again.action, program.numbering
    if not isinstance(action, Action) or action.microbatch is None:
        return None
    if action.stage is not None:
        return numbering.code(action)
    codes = [numbering.code(replace(action, stage=stage)) for stage in range(numbering.stages)]
    here = [code for code in codes if program.rank_of[code] == again.rank]
    return here[0] if len(here) == 1 else None


def _one_missing(program: Program, rank: int, action: Action) -> Action | None:
    """Return the one action of the same kind, and stage or micro-batch, that a rank lacks, if it lacks just one."""
    numbering, slots = program.numbering, program.numbering.slots
    instead: tuple[Kind, ...] = ("I", "W") if action.kind == "B" else ("B",) if action.kind in ("I", "W") else ()
    families = [program.rank_of[KINDS.index(kind) * slots :] for kind in (action.kind, *instead)]
    missing = [
        numbering.action(KINDS.index(action.kind) * slots + slot)
        for slot in range(slots)
        if program.placed[slot] in (rank, NO_RANK) and all(family[slot] == NO_RANK for family in families)
    ]
    alike = [each for each in missing if each.stage == action.stage or each.microbatch == action.microbatch]
    return alike[0] if len(alike) == 1 else None


def _with(plan: Plan, place: Fault, meant: Action) -> Plan:
    """Return the plan with another action in one place."""

    def change(rank: int, at: int, action: Action) -> Action:
        return meant if (rank, at, action.kind) == (place.rank, place.position, meant.kind) else action

    return rewritten(plan, change)


def _ascending(program: Program, rank: int, action: Action) -> bool:
    """Tell whether a rank runs an action's kind on its stage in the order of the micro-batches."""
    first, stages = KINDS.index(action.kind) * program.numbering.slots, program.numbering.stages
    codes = [
        code
        for code in program.rows[rank]
        if first <= code < first + program.numbering.slots and code % program.numbering.slots % stages == action.stage
    ]
    return codes == sorted(codes)
