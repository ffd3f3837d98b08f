"""One slip that many faults come from: found by trying out what was meant.

A student who writes `F(rank, m)` for `F(m, rank)`, or `place(self, stage, microbatch)`, makes one mistake; a list of a
hundred faults would hide it. So what may have been meant is checked as a plan of its own: if less is wrong with it, the
slip is told first, and after it only what would still be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from pipelab.actions import KINDS, Action, Kind, Pair
from pipelab.faults import Code, Fault, line_of_function, ranges
from pipelab.placement import NO_RANK, ask, within
from pipelab.plan import Plan
from pipelab.program import Program

__all__ = ["led_by_a_slip"]

_OF_PLACE: tuple[Code, ...] = ("out-of-range", "wrong-rank", "ambiguous-stage")
"""What a slip in a stage, a micro-batch or a placement looks like."""
_ALL_THERE: tuple[Code, ...] = (*_OF_PLACE, "missing")
"""What is left of none of it where everything stands in its place."""
_MOST_PER_RANK = 16
"""How many stages per rank a student may have meant."""


@dataclass(frozen=True, slots=True)
class _Slip:
    """How a slip is told, the plan that was meant, and the kinds of faults of which nothing may be left in it."""

    told: Fault
    meant: Plan
    clears: tuple[Code, ...] = ()


def led_by_a_slip(
    plan: Plan, faults: Sequence[Fault], judge: Callable[[Plan], list[Fault]]
) -> tuple[Fault | None, Plan, list[Fault]]:
    """Return the slip that explains the most faults, if any does, the plan that was meant, and what is wrong with it.

    Args:
        plan: what is wrong.
        faults: all that is wrong with it.
        judge: returns the faults of another plan.
    """
    best: tuple[Fault | None, Plan, list[Fault]] = (None, plan, list(faults))
    if any(fault.code in _OF_PLACE for fault in faults):
        slips = _slips(plan, faults)
    elif any(fault.code == "missing" for fault in faults) and plan.place is None:
        slips = _alone(plan)
    else:
        return best
    for slip in slips:
        left = judge(slip.meant)
        if len(left) < len(best[2]) and not any(fault.code in slip.clears for fault in left):
            then = "then the schedule is right" if not left else "what would still be wrong follows"
            best = replace(slip.told, hint=f"{slip.told.hint}; {then}"), slip.meant, left
        if not left:
            break
    return best


def _slips(plan: Plan, faults: Sequence[Fault]) -> Iterator[_Slip]:
    """Yield every slip that may have been made."""
    yield from _numbers_swapped(plan, faults)
    yield from _place_swapped(plan)
    yield from _everybodys_actions(plan, faults)
    yield from _more_stages(plan, faults)
    yield from _counted_from_one(plan, faults)
    yield from _too_far(plan, faults)


def _numbers_swapped(plan: Plan, faults: Sequence[Fault]) -> Iterator[_Slip]:
    """Try `F(m, rank)` for `F(rank, m)`: everywhere, for the kinds that show it, and for those actions that show it."""
    shown = [
        fault for fault in faults if fault.code in ("out-of-range", "wrong-rank") and _can_be_swapped(fault.action)
    ]
    right = [fault for fault in shown if _right_if_swapped(plan.program, fault.rank, fault.action)]
    if right:
        yield _Slip(_swap_told(right), _rewritten(plan, lambda _rank, _at, action: _turned(action)), _OF_PLACE)
    wrong_anyway = {fault.rank for fault in shown if fault not in right}
    right = [fault for fault in right if fault.rank not in wrong_anyway]
    if right:
        kinds = {(fault.rank, fault.action.kind) for fault in right if isinstance(fault.action, Action)}
        places = {(fault.rank, fault.position) for fault in right}

        def of_kinds(rank: int, _: int, action: Action) -> Action:
            return _turned(action) if _can_be_swapped(action) and (rank, action.kind) in kinds else action

        def in_places(rank: int, position: int, action: Action) -> Action:
            return _turned(action) if (rank, position) in places else action

        yield _Slip(_swap_told(right), _rewritten(plan, of_kinds))
        yield _Slip(_swap_told(right), _rewritten(plan, in_places))


def _can_be_swapped(action: object) -> TypeGuard[Action]:
    """Tell whether something is an action of one micro-batch on one stage."""
    return isinstance(action, Action) and action.kind in KINDS[:4] and None not in (action.microbatch, action.stage)


def _right_if_swapped(program: Program, rank: int | None, action: object) -> bool:
    """Tell whether an action with its numbers the other way round would be right on its rank, and is not there yet."""
    numbering = program.numbering
    if not isinstance(action, Action):
        return False
    microbatch, stage = action.stage, action.microbatch
    if not (within(microbatch, numbering.microbatches) and within(stage, numbering.stages)):
        return False
    meant = Action(action.kind, microbatch, stage)
    code = numbering.code(meant)
    right = program.placed[code % numbering.slots] in (rank, NO_RANK)
    instead: tuple[Kind, ...] = ("I", "W") if meant.kind == "B" else ("B",) if meant.kind in ("I", "W") else ()
    there = program.rank_of[code] == rank or any(
        program.rank_of[numbering.code(replace(meant, kind=kind))] != NO_RANK for kind in instead
    )
    return right and not there


def _swap_told(shown: Sequence[Fault]) -> Fault:
    """Return the first of the faults that a swap explains, and how many more there are."""
    first = shown[0]
    action = first.action
    assert isinstance(action, Action)
    message = first.message
    if len(shown) > 1:
        kinds = {fault.action.kind for fault in shown if isinstance(fault.action, Action)}
        ranks = sorted({fault.rank for fault in shown if fault.rank is not None})
        message = (
            f"on rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}, micro-batch and stage of "
            f"{' and '.join(sorted(kinds, key='FBIW'.index))} are the wrong way round; the first: {message}"
        )
    kind, microbatch, stage = action.kind, action.stage, action.microbatch
    hint = (
        f"it is {kind}(microbatch, stage): did you swap them? "
        f"{kind}({microbatch}, {stage}), in text {Action(kind, microbatch, stage)}, is right on rank {first.rank}"
    )
    return replace(first, message=message, hint=hint)


def _rewritten(plan: Plan, change: Callable[[int, int, Action], Action]) -> Plan:
    """Return the plan with every action changed: `change(rank, position, action)`."""

    def other(rank: int, position: int, item: object) -> object:
        if isinstance(item, Pair):
            halves = (other(rank, position, half) for half in (item.forward, item.backward))
            return Pair(*halves)  # type: ignore[arg-type]  # an action stays an action
        return change(rank, position, item) if isinstance(item, Action) else item

    rows = [[other(rank, at, item) for at, item in enumerate(row)] for rank, row in enumerate(plan.written)]
    return Plan(rows, plan.stages, plan.microbatches, plan.place, plan.name)


def _turned(action: Action) -> Action:
    """Return an action with micro-batch and stage the other way round, if it has both."""
    return Action(action.kind, action.stage, action.microbatch) if _can_be_swapped(action) else action


def _place_swapped(plan: Plan) -> Iterator[_Slip]:
    """Try `place(microbatch, stage)` for `place(stage, microbatch)`."""
    place = plan.place
    where = None if place is None else line_of_function(place)
    if place is None or where is None:  # nobody's, or our own
        return

    def meant(microbatch: int, stage: int) -> int:
        return place(stage, microbatch)

    if ask(meant, plan.stages, plan.microbatches, plan.ranks)[1] is not None:
        return
    told = Fault(
        "wrong-rank",
        None,
        None,
        None,
        f"place has its two parameters the wrong way round: pipelab calls place(microbatch, stage)\n  at {where}",
        f"write def place({'self, ' * hasattr(place, '__self__')}microbatch, stage)",
    )
    yield _Slip(told, Plan(plan.written, plan.stages, plan.microbatches, meant, plan.name), _OF_PLACE)


def _everybodys_actions(plan: Plan, faults: Sequence[Fault]) -> Iterator[_Slip]:
    """Try each rank's own actions alone, where every rank lists those of all."""
    program = plan.program
    shown = next((fault for fault in faults if fault.code == "wrong-rank" and isinstance(fault.action, Action)), None)
    if shown is None or not program.names_ranks or any(fault.code != "duplicate" for fault in program.faults):
        return
    if any(row != plan.written[0] for row in plan.written):
        return

    def own(rank: int, item: object) -> bool:
        action = item.forward if isinstance(item, Pair) else item
        if not isinstance(action, Action) or action.microbatch is None or action.stage is None:
            return True
        return program.placed[action.microbatch * plan.stages + action.stage] == rank

    rows = [[item for item in row if own(rank, item)] for rank, row in enumerate(plan.written)]
    if not all(rows):
        return
    assert shown.rank is not None
    here = sorted({slot % plan.stages for slot, placed in enumerate(program.placed) if placed == shown.rank})
    message = f"every rank lists the same {len(plan.written[0])} actions, those of all ranks; so {shown.message}"
    hint = (
        f"actions(rank) gives one rank's actions: on rank {shown.rank}, yield those of "
        f"stage{'s' if len(here) > 1 else ''} {ranges(here)} alone"
    )
    meant = Plan(rows, plan.stages, plan.microbatches, plan.place, plan.name)
    yield _Slip(replace(shown, message=message, hint=hint), meant, _ALL_THERE)


def _more_stages(plan: Plan, faults: Sequence[Fault]) -> Iterator[_Slip]:
    """Try as many stages per rank as the actions name, where a class does not say that it has several."""
    shown = next((fault for fault in faults if fault.code == "out-of-range" and _can_be_swapped(fault.action)), None)
    named = [fault.action.stage for fault in faults if isinstance(fault.action, Action)]
    highest = max((stage for stage in named if within(stage, _MOST_PER_RANK * plan.ranks)), default=-1)
    if shown is None or highest < plan.stages or plan.place is None:
        return
    per_rank = highest // plan.ranks + 1
    meant = Plan(plan.written, per_rank * plan.ranks, plan.microbatches, plan.place, plan.name)
    hint = f"write stages_per_rank = {per_rank} in the class: stages 0 to {meant.stages - 1}"
    yield _Slip(replace(shown, hint=hint), meant, _ALL_THERE)


def _counted_from_one(plan: Plan, faults: Sequence[Fault]) -> Iterator[_Slip]:
    """Try micro-batches, and stages, that are all one less."""

    def earlier(_rank: int, _at: int, action: Action) -> Action:
        return Action(action.kind, _less(action.microbatch), action.stage)

    def lower(_rank: int, _at: int, action: Action) -> Action:
        return Action(action.kind, action.microbatch, _less(action.stage))

    out = [fault for fault in faults if fault.code == "out-of-range" and isinstance(fault.action, Action)]
    late = [fault for fault in out if getattr(fault.action, "microbatch", None) == plan.microbatches]
    high = [fault for fault in out if getattr(fault.action, "stage", None) == plan.stages]
    if late:
        yield _one_too_high(late[0], "micro-batches", plan.microbatches, _rewritten(plan, earlier))
    if high:
        yield _one_too_high(high[0], "stages", plan.stages, _rewritten(plan, lower))


def _less(number: int | None) -> int | None:
    return number - 1 if type(number) is int else number


def _one_too_high(shown: Fault, what: str, limit: int, meant: Plan) -> _Slip:
    message = f"{what} are counted from 1 here, and from 0 everywhere: {shown.message}"
    hint = f"count from 0: range({limit}), not range(1, {limit + 1})"
    return _Slip(replace(shown, message=message, hint=hint), meant, _ALL_THERE)


def _too_far(plan: Plan, faults: Sequence[Fault]) -> Iterator[_Slip]:
    """Try the plan without what is out of range: a loop that runs too far."""
    out = [fault for fault in faults if fault.code == "out-of-range" and fault.rank is not None]
    if len(out) < 2:
        return
    places = {(fault.rank, fault.position) for fault in out}
    rows = [[item for at, item in enumerate(row) if (rank, at) not in places] for rank, row in enumerate(plan.written)]
    message = f"{len(out)} actions are too many, a loop runs too far; the first: {out[0].message}"
    hint = f"end the loop earlier: without them, all {plan.microbatches} micro-batches are complete"
    meant = Plan(rows, plan.stages, plan.microbatches, plan.place, plan.name)
    yield _Slip(replace(out[0], message=message, hint=hint), meant, _ALL_THERE)


def _alone(plan: Plan) -> Iterator[_Slip]:
    """Try another number for the one action that has the highest: the plan's sizes were read from its actions."""
    named = [
        (rank, at, action)
        for rank, row in enumerate(plan.written)
        for at, item in enumerate(row)
        for action in ((item.forward, item.backward) if isinstance(item, Pair) else (item,))
        if _can_be_swapped(action)
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


def _mistyped(plan: Plan, rank: int, at: int, action: Action, alone: str, sizes: tuple[int, int]) -> Iterator[_Slip]:
    """Try what is missing on a rank in the place of an action, in a plan of other sizes."""
    left = Plan([[item for item in row if item is not action] for row in plan.written], *sizes).program
    first, slots = KINDS.index(action.kind) * left.numbering.slots, left.numbering.slots
    missing = [slot for slot in range(slots) if left.rank_of[first + slot] == NO_RANK]
    here = [left.numbering.action(first + slot) for slot in missing if left.placed[slot] in (rank, NO_RANK)]
    meant = [each for each in here if each.stage == action.stage or each.microbatch == action.microbatch]
    if len(meant) == 1:
        message = f"{action} on rank {rank} is the only action of {alone}, and {meant[0]} is missing"
        told = Fault("out-of-range", rank, at, action, message, f"write {meant[0]}")
        rows = _rewritten(plan, lambda _rank, _at, each: meant[0] if each is action else each).written
        yield _Slip(told, Plan(rows, *sizes, None, plan.name))
