"""Slips in counting: too few stages, numbers from 1, a loop that runs too far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipelab.actions import Action
from pipelab.faults import Fault
from pipelab.placement import within
from pipelab.plan import Plan
from pipelab.slip import ALL_THERE, Slip, names_both, rewritten

__all__ = ["counted_from_one", "more_stages", "too_far"]

_MOST_PER_RANK = 16
"""How many stages per rank a student may have meant."""


def more_stages(plan: Plan, faults: Sequence[Fault]) -> Iterator[Slip]:
    """Try as many stages per rank as the actions name, where a class does not say that it has several."""
    shown = next((fault for fault in faults if fault.code == "out-of-range" and names_both(fault.action)), None)
    named = [fault.action.stage for fault in faults if isinstance(fault.action, Action)]
    highest = max((stage for stage in named if within(stage, _MOST_PER_RANK * plan.ranks)), default=-1)
    if shown is None or highest < plan.stages or plan.place is None:
        return
    per_rank = highest // plan.ranks + 1
    meant = Plan(plan.written, per_rank * plan.ranks, plan.microbatches, plan.place, plan.name)
    hint = f"write stages_per_rank = {per_rank} in the class: stages 0 to {meant.stages - 1}"
    yield Slip(replace(shown, hint=hint), meant, ALL_THERE)


def counted_from_one(plan: Plan, faults: Sequence[Fault]) -> Iterator[Slip]:
    """Try micro-batches, and stages, that are all one less."""

    def earlier(_rank: int, _at: int, action: Action) -> Action:
        return Action(action.kind, _less(action.microbatch), action.stage)

    def lower(_rank: int, _at: int, action: Action) -> Action:
        return Action(action.kind, action.microbatch, _less(action.stage))

    out = [fault for fault in faults if fault.code == "out-of-range" and isinstance(fault.action, Action)]
    late = [fault for fault in out if getattr(fault.action, "microbatch", None) == plan.microbatches]
    high = [fault for fault in out if getattr(fault.action, "stage", None) == plan.stages]
    if late:
        yield _one_too_high(late[0], "micro-batches", plan.microbatches, rewritten(plan, earlier))
    if high:
        yield _one_too_high(high[0], "stages", plan.stages, rewritten(plan, lower))


def _less(number: int | None) -> int | None:
    return number - 1 if type(number) is int else number


def _one_too_high(shown: Fault, what: str, limit: int, meant: Plan) -> Slip:
    message = f"{what} are counted from 1 here, and from 0 everywhere: {shown.message}"
    hint = f"count from 0: range({limit}), not range(1, {limit + 1})"
    return Slip(replace(shown, message=message, hint=hint), meant, ALL_THERE)


def too_far(plan: Plan, faults: Sequence[Fault]) -> Iterator[Slip]:
    """Try the plan without what is out of range: a loop that runs too far."""
    out = [fault for fault in faults if fault.code == "out-of-range" and fault.rank is not None]
    if len(out) < 2:
        return
    places = {(fault.rank, fault.position) for fault in out}
    rows = [[item for at, item in enumerate(row) if (rank, at) not in places] for rank, row in enumerate(plan.written)]
    message = f"{len(out)} actions are too many, a loop runs too far; the first: {out[0].message}"
    hint = f"end the loop earlier: without them, all {plan.microbatches} micro-batches are complete"
    meant = Plan(rows, plan.stages, plan.microbatches, plan.place, plan.name)
    yield Slip(replace(out[0], message=message, hint=hint), meant, ALL_THERE)
