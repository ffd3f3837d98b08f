"""Bind actions to stages: find the rank of each stage, and the reason if an item cannot be bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import product
from typing import TypeGuard

from pipelab.errors import FormatError
from pipelab.plan.actions import EVERY_KIND, PER_MICROBATCH, TRAITS, Action, halves_of, whole
from pipelab.plan.codes import Codes
from pipelab.plan.fault import Code, Fault, Unreadable, misfit, raised, shorten

Place = Callable[[int, int], int]
"""Which rank runs a stage: `(microbatch, stage) -> rank`."""

After = Callable[[int, int], Iterable[int]]
"""Which micro-batches of the same sequence come before one on a stage: `(microbatch, stage) -> micro-batches`."""

StagesOfRank = dict["int | None", "tuple[int, ...] | int"]
"""For one rank: micro-batch -> its stage there (several: a tuple), for actions without a stage; an `R` takes all."""

NO_RANK = -1


def within(number: object, limit: int) -> TypeGuard[int]:
    """Return whether `number` is a whole number from 0 to `limit - 1`."""
    return type(number) is int and 0 <= number < limit


def ask(place: Place, stages: int, microbatches: int, ranks: int) -> tuple[list[int], Fault | None]:
    """Return the rank for every micro-batch and stage; or the fault, if `place` does not return ranks."""
    if fault := misfit("place", place, "microbatch", "stage"):
        return [], fault
    try:
        rank_of_slot = [place(microbatch, stage) for microbatch in range(microbatches) for stage in range(stages)]
        if not set(map(type, rank_of_slot)) <= {int}:
            rank_of_slot = list(map(whole, rank_of_slot))
    except Exception as error:  # noqa: BLE001 - a student's code: whatever it raises is reported with its line
        hint = "return a rank for every micro-batch and stage"
        return [], raised("place(microbatch, stage)", error, place, hint)
    if set(map(type, rank_of_slot)) <= {int} and set(rank_of_slot) <= set(range(ranks)):
        return rank_of_slot, None
    answers = zip(_visits(stages, microbatches), rank_of_slot, strict=True)
    strange = [(visit, rank) for visit, rank in answers if not within(rank, ranks)]
    (microbatch, stage), answer = strange[0]
    others = f", and {len(strange) - 1} more like it" if len(strange) > 1 else ""
    there = f"there are {ranks} ranks, numbered 0 to {ranks - 1}"
    message = f"place({microbatch}, {stage}) returns {shorten(answer)}{others}; {there}"
    hint = f"return a whole number from 0 to {ranks - 1} for every micro-batch and stage"
    return [], Fault("out-of-range", None, None, None, message, hint)


def require_slices(after: After, codes: Codes, rank_of_slot: Sequence[int]) -> Fault | None:
    """Let a slice need the slices before it on its stage, and their backwards its own; or return what is wrong.

    A forward reads what earlier slices keep there: keys and values of attention. Their gradients come back from the
    later slices. So all slices of a sequence must be on one rank:

        F(m,s) needs out(e,s)    B(e,s), I(e,s) need gin(m,s)    for each e of after(m,s)
    """
    if fault := misfit("after", after, "microbatch", "stage"):
        return fault
    forward, out, gradient = codes.table["F"], codes.of_value("out(m,s)"), codes.of_value("gin(m,s)")
    for microbatch, stage in _visits(codes.stages, codes.microbatches):
        asked, slot = f"after({microbatch}, {stage})", codes.slot[forward[microbatch][stage]]
        try:
            before = [whole(each) for each in after(microbatch, stage)]
        except Exception as error:  # noqa: BLE001 - a student's code: whatever it raises is reported with its line
            return raised(asked, error, after, "return a list of micro-batches, empty for none")
        for each in before:
            if not within(each, microbatch):
                message = f"{asked} names micro-batch {shorten(each)}, which is not an earlier slice"
                hint = "name only micro-batches with lower numbers, from 0 on: slices are numbered in their order"
                return Fault("out-of-range", None, None, None, message, hint)
            earlier = codes.slot[forward[each][stage]]
            ranks = rank_of_slot[earlier], rank_of_slot[slot]
            if ranks[0] != ranks[1]:
                message = f"{asked} names micro-batch {each}, whose stage {stage} is on rank {ranks[0]}, not {ranks[1]}"
                return Fault("wrong-rank", None, None, None, message, "place all slices of a sequence on one rank")
            for kind in codes.per_microbatch:
                if TRAITS[kind].forward:
                    codes.require(codes.of_kind[kind][slot], out[earlier])
                elif TRAITS[kind].backward:
                    codes.require(codes.of_kind[kind][earlier], gradient[slot])
    return None


def _visits(stages: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """Return every (micro-batch, stage), in the order of `rank_of_slot`."""
    return product(range(microbatches), range(stages))


def stages_by_placement(rank_of_slot: Sequence[int], codes: Codes, ranks: int) -> list[StagesOfRank]:
    """Return the stages of each rank according to a placement."""
    by_rank: list[StagesOfRank] = [{} for _ in range(ranks)]
    for microbatch, first in enumerate(range(0, len(rank_of_slot), codes.stages)):
        for rank, stages in _met(tuple(rank_of_slot[first : first + codes.stages])).items():
            by_rank[rank][microbatch] = stages
    return by_rank


@lru_cache(maxsize=1)  # most micro-batches take the same route
def _met(route: Sequence[int]) -> dict[int, tuple[int, ...] | int]:
    """Return, by rank, the stages that a micro-batch meets there."""
    found: dict[int, tuple[int, ...] | int] = {}
    for stage, rank in enumerate(route):
        found[rank] = (*_several(found[rank]), stage) if rank in found else stage
    return found


def _several(known: tuple[int, ...] | int) -> tuple[int, ...]:
    return known if isinstance(known, tuple) else (known,)


def stages_by_name(rows: Sequence[Sequence[object]], codes: Codes) -> list[StagesOfRank]:
    """Return the stages of each rank without a placement: those that its row names, or else stage = rank.

    Only for the micro-batches that the row names: all others could be many more.
    """
    by_rank: list[StagesOfRank] = []
    for rank, row in enumerate(rows):
        halves = [half for item in row for half in halves_of(item) if isinstance(half, Action)]
        named = {half.stage for half in halves if type(half.stage) is int and 0 <= half.stage < codes.stages}
        microbatches = {0, *(half.microbatch for half in halves if type(half.microbatch) is int)}  # 0 for an R
        choice = (rank,) if not named and rank < codes.stages else tuple(sorted(named))
        by_rank.append(dict.fromkeys(microbatches, choice[0] if len(choice) == 1 else choice))
    return by_rank


Refusal = tuple[Code, str, str]
"""Why an item cannot be bound: the fault's code, message and hint."""


def bind_action(rank: int, position: int, item: object, codes: Codes, stages_of_rank: StagesOfRank) -> Action | Refusal:
    """Return an item of a rank's row as an action with a stage and all its numbers in range; or why that fails."""
    if not isinstance(item, Action) or item.kind not in EVERY_KIND:
        message = f"rank {rank}, position {position} holds {_described(item)}, not an action"
        return "not-an-action", message, _meant(item)
    if refusal := _refused_microbatch(rank, item, codes.microbatches):
        return refusal
    stage = item.stage
    if stage is None:
        choices = _choices(item, stages_of_rank)
        if len(choices) != 1:
            return _which_stage(rank, item, choices)
        stage = choices[0]
    if not within(stage, codes.stages):
        code, message, hint = _out_of_range(rank, item, f"stage {shorten(stage)}", codes.stages)
        choices = _choices(item, stages_of_rank)
        only = f"leave the stage out, as rank {rank} has only stage {choices[0]}; or " if len(choices) == 1 else ""
        return code, message, only + hint
    return Action(item.kind, item.microbatch, stage)


def _refused_microbatch(rank: int, item: Action, microbatches: int) -> Refusal | None:
    """Return why an action's micro-batch is not one of the plan's; `None` if it is."""
    if item.traits.collective and item.microbatch is not None:
        number = shorten(item.microbatch)
        kind, word = item.kind, item.word
        article = "an" if word[0] in "aeiou" else "a"
        message = f"{shorten(item)} on rank {rank} names micro-batch {number}; {article} {word} concerns all of them"
        return "out-of-range", message, f"yield {kind}(), or {kind}(stage) if the rank has several stages"
    if item.traits.collective or within(item.microbatch, microbatches):
        return None
    return _out_of_range(rank, item, f"micro-batch {_described(item.microbatch, int)}", microbatches)


def _out_of_range(rank: int, item: Action, number: str, limit: int) -> Refusal:
    message = f"{shorten(item)} on rank {rank} names {number}; there are {limit}, numbered 0 to {limit - 1}"
    return "out-of-range", message, f"use a whole number from 0 to {limit - 1}"


def _meant(item: object) -> str:
    """Return the hint for an item that is not an action: the action that was meant, if that is clear."""
    if isinstance(item, str):
        with suppress(FormatError, ValueError):  # the latter: a text without a word
            first, *others = [written(Action.parse(word)) for word in item.replace(",", " ").split()]
            if not others:
                return f"yield {first}, an action, not its text"
            return f"yield {first}, then {others[0]}{' and so on' * (len(others) > 1)}: actions, not their text"
    if isinstance(item, (tuple, list)) and 2 <= len(item) <= 3 and all(type(number) is int for number in item[1:]):
        kind = getattr(item[0], "__name__", item[0])
        if isinstance(kind, str) and kind in PER_MICROBATCH:
            return f"yield {written(Action(kind, *item[1:]))}, not a {type(item).__name__} of its parts"
    if isinstance(item, Iterator) or (
        isinstance(item, (tuple, list)) and item and all(isinstance(each, Action) for each in item)
    ):
        return "use yield from, which yields one action at a time"
    return "yield F(m) or B(m); I(m), W(m), R() and F(m) & B(n) if the schedule splits or overlaps"


def written(action: Action) -> str:
    """Return an action as a schedule writes it."""
    stage = "" if action.stage is None else f"{', ' * (action.microbatch is not None)}stage={action.stage}"
    return f"{action.kind}({'' if action.microbatch is None else action.microbatch}{stage})"


def _choices(item: Action, stages_of_rank: StagesOfRank) -> tuple[int, ...]:
    """Return the stages that an action without a stage could mean."""
    if not item.traits.collective:
        return _several(stages_of_rank.get(item.microbatch, ()))
    return tuple(sorted({stage for known in stages_of_rank.values() for stage in _several(known)}))


def _which_stage(rank: int, item: Action, choices: tuple[int, ...]) -> Refusal:
    """Return why an action without a stage is a mistake on a rank that has no stage, or several."""
    if not choices:
        whose = "the model" if item.microbatch is None else f"micro-batch {item.microbatch}"
        message = f"{item} on rank {rank}: no stage of {whose} is placed there"
        return "wrong-rank", message, "move it to a rank that the placement names, or override place(microbatch, stage)"
    examples = [Action(item.kind, item.microbatch, stage) for stage in choices[:2]]
    in_python, in_text = " or ".join(map(written, examples)), " or ".join(map(str, examples))
    message = f"{item} on rank {rank} could mean stage {', '.join(map(str, choices[:-1]))} or {choices[-1]}"
    return "ambiguous-stage", message, f"name the stage: {in_python} in Python, {in_text} in text"


def _described(item: object, expected: type = Action) -> str:
    """Return an item that is not what pipelab expects, in words."""
    if isinstance(item, Unreadable):
        return f"{item.text}, a {item.kind}"
    if callable(item) and getattr(item, "__module__", "") == "pipelab.plan.actions":
        name = getattr(item, "__name__", "F")
        return f"the function {name} itself ({name}(m) makes an action)"
    return shorten(item) if isinstance(item, expected) else f"{shorten(item)}, a {type(item).__name__}"
