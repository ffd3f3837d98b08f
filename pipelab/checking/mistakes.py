"""A slip that may have been made: how it is told, and the plan that was meant."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeGuard, get_args

from pipelab.plan.actions import KINDS, Action, Kind, Pair
from pipelab.plan.binding import NO_RANK, ask, within
from pipelab.plan.bound import BoundPlan
from pipelab.plan.fault import Code, Fault, line_of_function, ranges
from pipelab.plan.plan import Plan

__all__ = [
    "ALL_THERE",
    "OF_PLACE",
    "Slip",
    "alone_with_its_number",
    "chunks_for_stages",
    "counted_from_one",
    "everybodys_actions",
    "forgotten_stages",
    "led_by_a_slip",
    "more_stages",
    "names_both",
    "numbers_swapped",
    "place_swapped",
    "rewritten",
    "standing_twice",
    "too_far",
]

OF_PLACE: tuple[Code, ...] = ("out-of-range", "wrong-rank", "ambiguous-stage")
"""What a slip in a stage, a micro-batch or a placement looks like."""
ALL_THERE: tuple[Code, ...] = (*OF_PLACE, "missing")
"""What is left of none of it where everything stands in its place."""


@dataclass(frozen=True, slots=True)
class Slip:
    """How a slip is told, the plan that was meant, and the kinds of faults of which nothing may be left in it."""

    told: Fault
    meant: Plan
    clears: tuple[Code, ...] = ()


def names_both(action: object) -> TypeGuard[Action]:
    """Tell whether something is an action of one micro-batch on one stage."""
    return isinstance(action, Action) and action.kind in KINDS[:4] and None not in (action.microbatch, action.stage)


def rewritten(plan: Plan, change: Callable[[int, int, Action], Action]) -> Plan:
    """Return the plan with every action changed: `change(rank, position, action)`."""

    def other(rank: int, position: int, item: object) -> object:
        if isinstance(item, Pair):
            halves = (other(rank, position, half) for half in (item.forward, item.backward))
            return Pair(*halves)  # type: ignore[arg-type]  # an action stays an action
        return change(rank, position, item) if isinstance(item, Action) else item

    rows = [[other(rank, at, item) for at, item in enumerate(row)] for rank, row in enumerate(plan.written)]
    return Plan(rows, plan.stages, plan.microbatches, plan.place, plan.name)


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
    left = Plan([[item for item in row if item is not action] for row in plan.written], *sizes).bound
    meant = _one_missing(left, rank, action)
    if meant is not None:
        message = f"{action} on rank {rank} is the only action of {alone}, and {meant} is missing"
        told = Fault("out-of-range", rank, at, action, message, f"write {meant}")
        rows = rewritten(plan, lambda _rank, _at, each: meant if each is action else each).written
        yield Slip(told, Plan(rows, *sizes, None, plan.name))


def standing_twice(plan: Plan, faults: Sequence[Fault]) -> Iterator[Slip]:
    """Try what is missing on a rank in either place of the one action that stands twice, the likelier place first."""
    bound = plan.bound
    again = [fault for fault in bound.faults if fault.code == "duplicate"]
    code = _code_of(bound, again[0]) if len(again) == 1 else None
    if code is None:
        return
    action, lacking = bound.codes.action(code), {fault.rank for fault in faults if fault.code == "missing"}
    places = (_first_place(bound, code, again[0]), again[0])
    tried: list[tuple[bool, Slip]] = []
    for place in places:
        assert place.rank is not None
        meant = _one_missing(bound, place.rank, action) if lacking & {place.rank, None} else None
        if meant is not None:
            other = _with(plan, place, meant)
            disorder = not _ascending(other.bound, place.rank, meant)
            tried.append((disorder, Slip(_told_twice(action, places, place, meant), other)))
    yield from (slip for _, slip in sorted(tried, key=itemgetter(0)))


def _first_place(bound: BoundPlan, code: int, again: Fault) -> Fault:
    """Return the fault of an action that stands twice at the first of its two places."""
    rank = bound.rank_of[code]
    return replace(again, rank=rank, position=bound.position(rank, bound.rows[rank].index(code)))


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


def _code_of(bound: BoundPlan, again: Fault) -> int | None:
    """Return the code of an action of one micro-batch that stands twice, where it can be told."""
    action, codes = again.action, bound.codes
    if not isinstance(action, Action) or action.microbatch is None:
        return None
    if action.stage is not None:
        return codes.code(action)
    meant = [codes.code(replace(action, stage=stage)) for stage in range(codes.stages)]
    here = [code for code in meant if bound.rank_of[code] == again.rank]
    return here[0] if len(here) == 1 else None


def _one_missing(bound: BoundPlan, rank: int, action: Action) -> Action | None:
    """Return the one action of the same kind, and stage or micro-batch, that a rank lacks, if it lacks just one."""
    codes, rank_of_slot = bound.codes, bound.rank_of_slot
    instead: tuple[Kind, ...] = ("I", "W") if action.kind == "B" else ("B",) if action.kind in ("I", "W") else ()
    families = [bound.ranks_of(kind) for kind in (action.kind, *instead)]
    missing = [
        codes.action(code)
        for slot, code in enumerate(codes.of_kind[action.kind])
        if rank_of_slot[slot] in (rank, NO_RANK) and all(family[slot] == NO_RANK for family in families)
    ]
    alike = [each for each in missing if each.stage == action.stage or each.microbatch == action.microbatch]
    return alike[0] if len(alike) == 1 else None


def _with(plan: Plan, place: Fault, meant: Action) -> Plan:
    """Return the plan with another action in one place."""

    def change(rank: int, at: int, action: Action) -> Action:
        return meant if (rank, at, action.kind) == (place.rank, place.position, meant.kind) else action

    return rewritten(plan, change)


def _ascending(bound: BoundPlan, rank: int, action: Action) -> bool:
    """Tell whether a rank runs an action's kind on its stage in the order of the micro-batches."""
    kind, stage = bound.codes.kind, bound.codes.stage
    alike = [code for code in bound.rows[rank] if (kind[code], stage[code]) == (action.kind, action.stage)]
    return alike == sorted(alike)


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
        if not drafted.bound.faults and not drafted.bound.misplaced:
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
    route = plan.bound.route(0)
    held = [[stage for stage, holder in enumerate(route) if holder == rank] for rank in range(plan.ranks)]
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


def numbers_swapped(plan: Plan, faults: Sequence[Fault]) -> Iterator[Slip]:
    """Try `F(m, rank)` for `F(rank, m)`: everywhere, for the kinds that show it, and for those actions that show it."""
    shown = [fault for fault in faults if fault.code in ("out-of-range", "wrong-rank") and names_both(fault.action)]
    right = [fault for fault in shown if _right_if_swapped(plan.bound, fault.rank, fault.action)]
    if right:
        yield Slip(_swap_told(right), rewritten(plan, lambda _rank, _at, action: _turned(action)), OF_PLACE)
    wrong_anyway = {fault.rank for fault in shown if fault not in right}
    right = [fault for fault in right if fault.rank not in wrong_anyway]
    if right:
        kinds = {(fault.rank, fault.action.kind) for fault in right if isinstance(fault.action, Action)}
        places = {(fault.rank, fault.position) for fault in right}

        def of_kinds(rank: int, _: int, action: Action) -> Action:
            return _turned(action) if names_both(action) and (rank, action.kind) in kinds else action

        def in_places(rank: int, position: int, action: Action) -> Action:
            return _turned(action) if (rank, position) in places else action

        yield Slip(_swap_told(right), rewritten(plan, of_kinds))
        yield Slip(_swap_told(right), rewritten(plan, in_places))


def _right_if_swapped(bound: BoundPlan, rank: int | None, action: object) -> bool:
    """Tell whether an action with its numbers the other way round would be right on its rank, and is not there yet."""
    codes = bound.codes
    if not isinstance(action, Action):
        return False
    microbatch, stage = action.stage, action.microbatch
    if not (within(microbatch, codes.microbatches) and within(stage, codes.stages)):
        return False
    meant = Action(action.kind, microbatch, stage)
    code = codes.code(meant)
    right = bound.rank_of_slot[codes.slot[code]] in (rank, NO_RANK)
    instead: tuple[Kind, ...] = ("I", "W") if meant.kind == "B" else ("B",) if meant.kind in ("I", "W") else ()
    there = bound.rank_of[code] == rank or any(
        bound.rank_of[codes.code(replace(meant, kind=kind))] != NO_RANK for kind in instead
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


def _turned(action: Action) -> Action:
    """Return an action with micro-batch and stage the other way round, if it has both."""
    return Action(action.kind, action.stage, action.microbatch) if names_both(action) else action


def place_swapped(plan: Plan) -> Iterator[Slip]:
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
    yield Slip(told, Plan(plan.written, plan.stages, plan.microbatches, meant, plan.name), OF_PLACE)


def everybodys_actions(plan: Plan, faults: Sequence[Fault]) -> Iterator[Slip]:
    """Try each rank's own actions alone, where every rank lists those of all."""
    bound = plan.bound
    shown = next((fault for fault in faults if fault.code == "wrong-rank" and isinstance(fault.action, Action)), None)
    if shown is None or not bound.names_ranks or any(fault.code != "duplicate" for fault in bound.faults):
        return
    if any(row != plan.written[0] for row in plan.written):
        return

    def own(rank: int, item: object) -> bool:
        action = item.forward if isinstance(item, Pair) else item
        if not isinstance(action, Action) or action.microbatch is None or action.stage is None:
            return True
        return bound.route(action.microbatch)[action.stage] == rank

    rows = [[item for item in row if own(rank, item)] for rank, row in enumerate(plan.written)]
    if not all(rows):
        return
    assert shown.rank is not None
    here = sorted(stage for stage, ranks in bound.replicas.items() if shown.rank in ranks)
    message = f"every rank lists the same {len(plan.written[0])} actions, those of all ranks; so {shown.message}"
    hint = (
        f"actions(rank) gives one rank's actions: on rank {shown.rank}, yield those of "
        f"stage{'s' if len(here) > 1 else ''} {ranges(here)} alone"
    )
    meant = Plan(rows, plan.stages, plan.microbatches, plan.place, plan.name)
    yield Slip(replace(shown, message=message, hint=hint), meant, ALL_THERE)


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
    for slip in _slips(plan, faults):
        left = judge(slip.meant)
        if len(left) < len(best[2]) and not any(fault.code in slip.clears for fault in left):
            then = "then the schedule is right" if not left else "what would still be wrong follows"
            best = replace(slip.told, hint=f"{slip.told.hint}; {then}"), slip.meant, left
        if not left:
            break
    return best


def _slips(plan: Plan, faults: Sequence[Fault]) -> Iterator[Slip]:
    """Yield every slip that may have been made."""
    of_place = any(fault.code in OF_PLACE for fault in faults)
    if of_place:
        yield from numbers_swapped(plan, faults)
        yield from place_swapped(plan)
        yield from everybodys_actions(plan, faults)
        yield from more_stages(plan, faults)
        yield from chunks_for_stages(plan, faults)
    yield from forgotten_stages(plan, faults)
    if of_place:
        yield from counted_from_one(plan, faults)
        yield from too_far(plan, faults)
    elif any(fault.code == "missing" for fault in faults) and plan.place is None:
        yield from alone_with_its_number(plan)
    yield from standing_twice(plan, faults)
