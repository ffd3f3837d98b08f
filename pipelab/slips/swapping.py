"""Slips of place: micro-batch and stage the wrong way round, and rows that list the actions of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipelab.plan.actions import Action, Kind, Pair
from pipelab.plan.binding import NO_RANK, ask, within
from pipelab.plan.bound import Program
from pipelab.plan.fault import Fault, line_of_function, ranges
from pipelab.plan.plan import Plan
from pipelab.slips.slip import ALL_THERE, OF_PLACE, Slip, names_both, rewritten

__all__ = ["everybodys_actions", "numbers_swapped", "place_swapped"]


def numbers_swapped(plan: Plan, faults: Sequence[Fault]) -> Iterator[Slip]:
    """Try `F(m, rank)` for `F(rank, m)`: everywhere, for the kinds that show it, and for those actions that show it."""
    shown = [fault for fault in faults if fault.code in ("out-of-range", "wrong-rank") and names_both(fault.action)]
    right = [fault for fault in shown if _right_if_swapped(plan.program, fault.rank, fault.action)]
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
    yield Slip(replace(shown, message=message, hint=hint), meant, ALL_THERE)
