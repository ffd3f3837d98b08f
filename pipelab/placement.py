"""Placement: which rank runs a stage, and so what an action without a stage means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

from pipelab.actions import Action, Pair
from pipelab.faults import Fault, shorten, students_line
from pipelab.signatures import misfit

__all__ = ["NO_RANK", "Held", "Place", "ask", "held_by_name", "held_by_placement", "within"]

Place = Callable[[int, int], int]
"""Which rank runs a stage: `(microbatch, stage) -> rank`."""

Held = dict[int, "tuple[int, ...] | int"]
"""For one rank: micro-batch -> its stage there (several: a tuple), for actions that name no stage."""

NO_RANK = -1


def within(number: object, limit: int) -> TypeGuard[int]:
    """Tell whether something is a whole number from 0 to `limit - 1`."""
    return type(number) is int and 0 <= number < limit


def ask(place: Place, stages: int, microbatches: int, ranks: int) -> tuple[list[int], Fault | None]:
    """Return the rank of every slot, asking `place` for each; and the fault if it does not answer with ranks."""
    if fault := misfit("place", place, "microbatch", "stage"):
        return [], fault
    try:
        placed = [place(microbatch, stage) for microbatch in range(microbatches) for stage in range(stages)]
    except Exception as error:  # noqa: BLE001 - a student's code: whatever it raises is told with its line
        message = f"place(microbatch, stage) raised {type(error).__name__}: {error}\n  at {students_line(error, place)}"
        return [], Fault("exception", None, None, None, message, "return a rank for every micro-batch and stage")
    strange = [slot for slot, rank in enumerate(placed) if not within(rank, ranks)]
    if not strange:
        return placed, None
    microbatch, stage = divmod(strange[0], stages)
    others = f", and {len(strange) - 1} more like it" if len(strange) > 1 else ""
    message = (
        f"place({microbatch}, {stage}) returns {shorten(placed[strange[0]])}{others}; "
        f"there are {ranks} ranks, numbered 0 to {ranks - 1}"
    )
    hint = f"return a whole number from 0 to {ranks - 1} for every micro-batch and stage"
    return [], Fault("out-of-range", None, None, None, message, hint)


def held_by_placement(placed: Sequence[int], stages: int, ranks: int) -> list[Held]:
    """Return what each rank holds where a placement says so."""
    held: list[Held] = [{} for _ in range(ranks)]
    for slot, rank in enumerate(placed):
        microbatch, stage = divmod(slot, stages)
        here = held[rank]
        if microbatch in here:
            known = here[microbatch]
            here[microbatch] = (*(known if isinstance(known, tuple) else (known,)), stage)
        else:
            here[microbatch] = stage
    return held


def held_by_name(rows: Sequence[Sequence[object]], stages: int, microbatches: int) -> list[Held]:
    """Return what each rank holds where nothing says so: the stages that its row names, or else stage = rank."""
    held: list[Held] = []
    for rank, row in enumerate(rows):
        halves = (half for item in row for half in ((item.forward, item.backward) if type(item) is Pair else (item,)))
        named = {half.stage for half in halves if isinstance(half, Action) and within(half.stage, stages)}
        choice = (rank,) if not named and rank < stages else tuple(sorted(named))
        held.append(dict.fromkeys(range(microbatches), choice[0] if len(choice) == 1 else choice))
    return held
