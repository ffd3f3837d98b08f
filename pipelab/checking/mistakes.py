"""The commonest mistakes: if one of them explains many faults, pipelab reports it instead of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, get_args

from pipelab.plan.actions import PER_MICROBATCH, Action, Pair
from pipelab.plan.binding import NO_RANK, ask, within
from pipelab.plan.codes import GIVERS
from pipelab.plan.fault import Code, Fault, line_of_function, ranges
from pipelab.plan.plan import Plan

_OF_PLACE: tuple[Code, ...] = ("out-of-range", "wrong-rank", "ambiguous-stage")
"""The faults that a wrong stage, micro-batch or placement causes."""
_OF_STAGES: tuple[Code, ...] = (*_OF_PLACE, "missing", "duplicate", "exception")
"""The faults that a missing `stages_per_rank` causes."""
_ALL_BUT_THE_CAP = tuple(code for code in get_args(Code) if code != "memory-cap")
_TRIED_PER_RANK = (2, 3, 4)
_MOST_SLOTS = 1 << 12
"""The largest plan, in ranks times micro-batches, for which pipelab tries other numbers of stages."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake that the author may have made.

    Attributes:
        fault: the fault that reports it.
        meant: the plan without it.
        clears: the kinds of faults that it explains: if `meant` has one of them, this was not the mistake.
    """

    fault: Fault
    meant: Plan
    clears: tuple[Code, ...]


def main_mistake(
    plan: Plan, faults: Sequence[Fault], judge: Callable[[Plan], list[Fault]]
) -> tuple[Fault | None, Plan, list[Fault]]:
    """Return the mistake that explains most faults, if there is one; the plan that was meant; and its faults."""
    best: tuple[Fault | None, Plan, list[Fault]] = (None, plan, list(faults))
    for mistake in _mistakes(plan, faults):
        left = judge(mistake.meant)
        if len(left) < len(best[2]) and not any(fault.code in mistake.clears for fault in left):
            then = "then the schedule is right" if not left else "what would still be wrong follows"
            best = replace(mistake.fault, hint=f"{mistake.fault.hint}; {then}"), mistake.meant, left
        if not left:
            break
    return best


def _mistakes(plan: Plan, faults: Sequence[Fault]) -> Iterator[Mistake]:
    of_place = any(fault.code in _OF_PLACE for fault in faults)
    if of_place:
        yield from _numbers_swapped(plan, faults)
        yield from _place_swapped(plan)
    if any(fault.code in _OF_STAGES for fault in faults):
        yield from _stages_forgotten(plan, faults)
    if of_place:
        yield from _counted_from_one(plan, faults)
    yield from _old_notation(plan, faults)


# F(rank, m) for F(m, rank)


def _numbers_swapped(plan: Plan, faults: Sequence[Fault]) -> Iterator[Mistake]:
    """Swap micro-batch and stage of every action, then only of the actions that are then right on their rank."""
    shown = [fault for fault in faults if fault.code in ("out-of-range", "wrong-rank")]
    shown = [fault for fault in shown if _right_if_swapped(plan, fault.rank, fault.action)]
    if shown:
        places = {(fault.rank, fault.position) for fault in shown}
        fault = _swap_fault(shown)
        yield Mistake(fault, _rewritten(plan, lambda _, action: _swapped(action)), _OF_PLACE)
        yield Mistake(fault, _rewritten(plan, lambda at, each: _swapped(each) if at in places else each), _OF_PLACE)


def _names_both(action: object) -> TypeGuard[Action]:
    return (
        isinstance(action, Action) and action.kind in PER_MICROBATCH and None not in (action.microbatch, action.stage)
    )


def _swapped(action: Action) -> Action:
    return Action(action.kind, action.stage, action.microbatch) if _names_both(action) else action


def _right_if_swapped(plan: Plan, rank: int | None, action: object) -> bool:
    """Return whether an action with its numbers swapped would be right on its rank, and is not there yet."""
    if not (_names_both(action) and within(action.stage, plan.microbatches) and within(action.microbatch, plan.stages)):
        return False
    meant, bound = _swapped(action), plan.bound
    code = bound.codes.code(meant)
    if bound.rank_of_slot[bound.codes.slot[code]] not in (rank, NO_RANK) or bound.rank_of[code] == rank:
        return False
    instead = {kind for value in meant.traits.gives for kind in GIVERS[value]} - {meant.kind}
    return all(bound.rank_of[bound.codes.code(replace(meant, kind=kind))] == NO_RANK for kind in instead)


def _swap_fault(shown: Sequence[Fault]) -> Fault:
    """Return the first of the faults that a swap explains; its message says where the others are."""
    first = shown[0]
    assert isinstance(first.action, Action)
    message = first.message
    if len(shown) > 1:
        kinds = {fault.action.kind for fault in shown if isinstance(fault.action, Action)}
        ranks = sorted({fault.rank for fault in shown if fault.rank is not None})
        message = (
            f"on rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}, micro-batch and stage of "
            f"{' and '.join(sorted(kinds, key=PER_MICROBATCH.index))} are swapped; the first: {message}"
        )
    meant = _swapped(first.action)
    hint = (
        f"it is {meant.kind}(microbatch, stage): did you swap them? "
        f"{meant.kind}({meant.microbatch}, {meant.stage}), in text {meant}, is right on rank {first.rank}"
    )
    return replace(first, message=message, hint=hint)


# place(stage, microbatch) for place(microbatch, stage)


def _place_swapped(plan: Plan) -> Iterator[Mistake]:
    """Call `place` with its two arguments swapped."""
    place = plan.place
    where = line_of_function(place)
    if place is None or where is None:  # there is none, or it is pipelab's
        return

    def meant(microbatch: int, stage: int) -> int:
        return place(stage, microbatch)

    if ask(meant, plan.stages, plan.microbatches, plan.ranks)[1] is None:
        message = f"the two parameters of place are swapped: pipelab calls place(microbatch, stage)\n  at {where}"
        hint = f"write def place({'self, ' * hasattr(place, '__self__')}microbatch, stage)"
        fault = Fault("wrong-rank", None, None, None, message, hint)
        sizes = plan.stages, plan.microbatches, meant
        yield Mistake(fault, Plan(plan.written, *sizes, plan.name, plan.after, plan.forwards_only), _OF_PLACE)


# No stages_per_rank in the class


def _stages_forgotten(plan: Plan, faults: Sequence[Fault]) -> Iterator[Mistake]:
    """Ask the schedule for its plan with several stages per rank, if its class does not set their number."""
    schedule: Any = getattr(plan.place, "__self__", None)
    if getattr(type(schedule), "stages_per_rank", None) != 1 or schedule.stages_per_rank != 1:
        return
    if plan.ranks * plan.microbatches > _MOST_SLOTS:
        return
    many = f"that causes {len(faults)} faults; the first:" if len(faults) > 1 else "so"
    message = f"{type(schedule).__name__} has one stage on each of {plan.ranks} ranks, and {many} {faults[0].message}"
    for per_rank in _TRIED_PER_RANK:
        meant = _drafted(schedule, per_rank)
        if meant is not None and not meant.bound.faults and not meant.bound.misplaced:
            hint = f"write stages_per_rank = {per_rank} in the class: stages 0 to {meant.stages - 1}"
            yield Mistake(replace(faults[0], message=message, hint=hint), meant, _ALL_BUT_THE_CAP)


def _drafted(schedule: Any, stages_per_rank: int) -> Plan | None:
    """Return a schedule's plan with another number of stages per rank, if it can write one."""
    try:
        other = copy.copy(schedule)
        other.stages_per_rank = stages_per_rank
        plan = other.draft()
    except Exception:  # noqa: BLE001 - a student's code: whatever it raises, this is not what was meant
        return None
    return plan if isinstance(plan, Plan) else None


# range(1, M + 1) for range(M)


def _counted_from_one(plan: Plan, faults: Sequence[Fault]) -> Iterator[Mistake]:
    """Lower every micro-batch by one, then every stage."""
    numbers = (("microbatch", "micro-batches", plan.microbatches), ("stage", "stages", plan.stages))
    for field, what, limit in numbers:
        late = (fault for fault in faults if fault.code == "out-of-range" and isinstance(fault.action, Action))
        first = next((fault for fault in late if getattr(fault.action, field) == limit), None)
        if first is not None:
            message = f"{what} are counted from 1 here, but pipelab counts from 0: {first.message}"
            hint = f"count from 0: range({limit}), not range(1, {limit + 1})"
            meant = _rewritten(plan, lambda _, action, field=field: _lowered(action, field))  # type: ignore[misc]
            yield Mistake(replace(first, message=message, hint=hint), meant, (*_OF_PLACE, "missing"))


def _lowered(action: Action, field: str) -> Action:
    number = getattr(action, field)
    return replace(action, **{field: number - 1}) if type(number) is int else action  # type: ignore[arg-type]


# B, W for I, W


def _old_notation(plan: Plan, faults: Sequence[Fault]) -> Iterator[Mistake]:
    """Read each `B` that has a `W` as `I`, as papers and PyTorch before 2.6 wrote it."""
    items = [item for row in plan.written for item in row if isinstance(item, Action | Pair)]
    halves = {(each.stage, each.microbatch) for each in items if isinstance(each, Action) and each.kind == "W"}
    repeated = [fault for fault in faults if fault.code == "duplicate" and getattr(fault.action, "kind", "") == "W"]
    today = any(isinstance(each, Pair) or each.kind == "I" for each in items)
    if repeated and len(repeated) == len(halves) and not today:
        message = f"B is the input's gradient here, as in papers and in PyTorch before 2.6: {repeated[0].message}"
        fault = replace(repeated[0], message=message, hint="write I for B; for BW, write B")

        def meant(_: tuple[int, int], action: Action) -> Action:
            split = action.kind == "B" and (action.stage, action.microbatch) in halves
            return replace(action, kind="I") if split else action

        yield Mistake(fault, _rewritten(plan, meant), ("duplicate",))


def _rewritten(plan: Plan, change: Callable[[tuple[int, int], Action], Action]) -> Plan:
    """Return the plan with every action changed: `change((rank, position), action)`."""

    def other(at: tuple[int, int], item: object) -> object:
        if isinstance(item, Pair):
            return Pair(change(at, item.forward), change(at, item.backward))
        return change(at, item) if isinstance(item, Action) else item

    rows = [[other((rank, at), item) for at, item in enumerate(row)] for rank, row in enumerate(plan.written)]
    return plan.with_rows(rows, plan.name)
