"""Slips in counting: stages that a class does not say it has, numbers from 1, chunks, a loop that runs too far."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

from pipelab.plan.actions import Action
from pipelab.plan.binding import within
from pipelab.plan.fault import Code, Fault, line_of_function, ranges
from pipelab.plan.plan import Plan
from pipelab.slips.slip import ALL_THERE, Slip, names_both, rewritten

__all__ = ["chunks_for_stages", "counted_from_one", "forgotten_stages", "more_stages", "too_far"]

_MOST_PER_RANK = 16
"""How many stages per rank a student may have meant."""
_TRIED_PER_RANK = (2, 3, 4)
"""How many are tried where no number says it."""
_MOST_SLOTS = 1 << 12
"""The ranks times micro-batches of a plan for which a schedule is asked for others."""
_OF_COLLAPSE: tuple[Code, ...] = (*ALL_THERE, "duplicate", "exception")
"""What it looks like where several stages have become one."""
_NONE_OF_ITS_OWN = tuple(code for code in get_args(Code) if code != "memory-cap")
"""What is left of none of it in a schedule that is right by itself, whatever cap it is checked against."""


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


def forgotten_stages(plan: Plan, faults: Sequence[Fault]) -> Iterator[Slip]:
    """Ask the schedule for its plan with several stages per rank, where its class says nothing of them."""
    schedule: Any = getattr(plan.place, "__self__", None)
    if getattr(type(schedule), "stages_per_rank", None) != 1 or schedule.stages_per_rank != 1:
        return
    if plan.ranks * plan.microbatches > _MOST_SLOTS:
        return
    if not any(fault.code in _OF_COLLAPSE for fault in faults):
        return
    many = f"{len(faults)} faults come of it; the first:" if len(faults) > 1 else "so"
    message = f"{type(schedule).__name__} has one stage on each of {plan.ranks} ranks, and {many} {faults[0].message}"
    for per_rank in _TRIED_PER_RANK:
        drafted = _drafted(schedule, per_rank)
        if drafted is None:
            continue
        hint = f"write stages_per_rank = {per_rank} in the class: stages 0 to {drafted.stages - 1}"
        if not drafted.program.faults and not drafted.program.misplaced:
            yield Slip(replace(faults[0], message=message, hint=hint), drafted, _NONE_OF_ITS_OWN)
        elif line_of_function(drafted.place) is None:  # the default placement
            meant = Plan(drafted.written, drafted.stages, drafted.microbatches, None, drafted.name)
            if places := _shared_out(meant, per_rank):
                hint += f"; and a place(self, microbatch, stage) there that returns {places}"
                yield Slip(replace(faults[0], message=message, hint=hint), meant, _NONE_OF_ITS_OWN)


def _drafted(schedule: Any, stages_per_rank: int) -> Plan | None:
    """Return a schedule's plan with other stages per rank, if it can write one."""
    try:
        other = copy.copy(schedule)
        other.stages_per_rank = stages_per_rank
        plan = other.draft()
    except Exception:  # noqa: BLE001 - a student's code: whatever it raises, this is not what was meant
        return None
    return plan if isinstance(plan, Plan) else None


def _shared_out(plan: Plan, per_rank: int) -> str:
    """Return which rank has which stages, in words, if every rank has as many of its own; else nothing."""
    holders = plan.replicas
    held = [[stage for stage, ranks in holders.items() if ranks == (rank,)] for rank in range(plan.ranks)]
    if any(len(stages) != per_rank for stages in held):
        return ""
    words = [f"rank {rank} for stages {ranges(stages)}" for rank, stages in enumerate(held)]
    return ", ".join(words[:2]) + ", and so on" * (len(words) > 2)


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


def chunks_for_stages(plan: Plan, faults: Sequence[Fault]) -> Iterator[Slip]:
    """Try stages that are numbered within each rank, where it has several."""
    shown = next((fault for fault in faults if fault.code == "wrong-rank" and names_both(fault.action)), None)
    per_rank = plan.stages // plan.ranks
    if shown is None or shown.rank is None or not isinstance(shown.action, Action):
        return
    kind, microbatch, chunk = shown.action.kind, shown.action.microbatch, shown.action.stage
    if per_rank < 2 or chunk is None or not within(chunk, per_rank):
        return
    placed = plan.program.placed[: plan.stages]
    held = [[stage for stage, holder in enumerate(placed) if holder == rank] for rank in range(plan.ranks)]
    if any(len(stages) != per_rank for stages in held):
        return

    def through(rank: int, _at: int, action: Action) -> Action:
        number = action.stage
        return replace(action, stage=held[rank][number]) if number is not None and within(number, per_rank) else action

    message = (
        f"stages are numbered within each rank here, 0 to {per_rank - 1}, and through the whole model everywhere, 0 to "
        f"{plan.stages - 1}: {shown.message}"
    )
    example = f"{kind}({microbatch}, {held[shown.rank][chunk]}) on rank {shown.rank} for its chunk {chunk}"
    if all(stage % plan.ranks == rank for rank, stages in enumerate(held) for stage in stages):
        hint = f"write rank + {plan.ranks} * chunk, such as {example}"
    else:
        first, second = (" and ".join([ranges(stages[:-1]), str(stages[-1])]) for stages in held[:2])
        hint = f"rank 0 has stages {first}, rank 1 stages {second}: write {example}"
    yield Slip(replace(shown, message=message, hint=hint), rewritten(plan, through), ALL_THERE)


def _less(number: int | None) -> int | None:
    return number - 1 if type(number) is int else number


def _one_too_high(shown: Fault, what: str, limit: int, meant: Plan) -> Slip:
    message = f"{what} are counted from 1 here, and from 0 everywhere: {shown.message}"
    hint = f"count from 0: range({limit}), not range(1, {limit + 1})"
    return Slip(replace(shown, message=message, hint=hint), meant, ALL_THERE)


def too_far(plan: Plan, faults: Sequence[Fault]) -> Iterator[Slip]:
    """Try the plan without what is out of range: a loop that runs too far."""
    out = [fault for fault in faults if fault.code == "out-of-range" and fault.rank is not None]
    stages = [getattr(fault.action, "stage", None) for fault in out]
    if len(out) < 2 or not all(stage is None or within(stage, plan.stages) for stage in stages):
        return
    places = {(fault.rank, fault.position) for fault in out}
    rows = [[item for at, item in enumerate(row) if (rank, at) not in places] for rank, row in enumerate(plan.written)]
    ends, advice = _beyond([getattr(fault.action, "microbatch", 0) for fault in out], plan.microbatches)
    message = f"{len(out)} actions are too many, {ends}; the first: {out[0].message}"
    hint = f"{advice}: without them, all {plan.microbatches} micro-batches are complete"
    meant = Plan(rows, plan.stages, plan.microbatches, plan.place, plan.name)
    yield Slip(replace(out[0], message=message, hint=hint), meant, ALL_THERE)


def _beyond(numbers: Sequence[object], limit: int) -> tuple[str, str]:
    """Return at which end loops run beyond the micro-batches, and what to do about it."""
    early = [type(number) is int and number < 0 for number in numbers]
    if all(early):
        return "a loop begins below 0", "leave out numbers below 0"
    if any(early):
        ends = f"loops run beyond micro-batches 0 to {limit - 1} at either end"
        return ends, f"leave out what is below 0 or above {limit - 1}; of a warm-up, by min({limit}, ...)"
    return "a loop runs too far", "end the loop earlier"
