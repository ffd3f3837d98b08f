"""Check that a plan holds every action exactly once and on its rank; `check` does this before it looks at the order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial

from pipelab.checking.repair import as_yielded
from pipelab.plan.actions import Kind
from pipelab.plan.binding import NO_RANK
from pipelab.plan.bound import BoundPlan
from pipelab.plan.codes import PER_MICROBATCH
from pipelab.plan.fault import Fault, ranges

__all__ = ["complete", "misplaced", "missing"]

_KINDS: dict[str, tuple[Kind, ...]] = {
    "forward": ("F",),
    "backward": ("B",),
    "backward in halves": ("I", "W"),
    "input gradient (I)": ("I",),
    "weight gradient (W)": ("W",),
}
"""What a stage may lack, and the kinds of action that provide it."""


def complete(bound: BoundPlan) -> bool:
    """Return whether every stage has its forwards and backwards; for a plan with `F` and `B` only, that is quick."""
    every = len(bound.rank_of_slot)
    absent = [bound.ranks_of(kind).count(NO_RANK) for kind in PER_MICROBATCH]
    return (absent == [0, 0, every, every] and not bound.written_reduces) or not missing(bound)[0]


def misplaced(bound: BoundPlan) -> list[Fault]:
    """Find actions that are on another rank than the placement says."""
    faults = _misplaced_reduces(bound) if bound.reduces else []
    if not bound.misplaced:
        return faults
    codes = bound.codes
    verb = "is placed on" if bound.names_ranks else "went forward on"
    for rank, row in enumerate(bound.rows):
        for index, code in enumerate(row):
            right = rank if codes.kind[code] == "R" else bound.rank_of_slot[codes.slot[code]]
            if right not in (rank, NO_RANK):
                action = codes.action(code)
                what = f"micro-batch {action.microbatch} of stage {action.stage}"
                message = f"{action} is on rank {rank}, but {what} {verb} rank {right}"
                hint = f"move {action} to rank {right}, or override place(microbatch, stage)"
                faults.append(Fault("wrong-rank", rank, bound.position(rank, index), action, message, hint))
    return faults


def _misplaced_reduces(bound: BoundPlan) -> list[Fault]:
    """Find all-reduces on ranks that do not hold the stage."""
    faults: list[Fault] = []
    replicas = bound.replicas
    for code, listers in bound.reduces.items():
        action = bound.codes.action(code)
        group = replicas[bound.codes.stage[code]]
        holders = f"ranks {ranges(group)} do" if len(group) > 1 else f"rank {ranges(group)} does"
        for rank in listers:
            if group and rank not in group:
                position = bound.position(rank, bound.rows[rank].index(code))
                message = f"{action} is on rank {rank}, which does not hold stage {action.stage}: {holders}"
                hint = f"remove {action} from rank {rank}"
                faults.append(Fault("wrong-rank", rank, position, action, message, hint))
    return faults


def missing(bound: BoundPlan) -> tuple[list[Fault], set[int]]:
    """Find actions that no rank lists; return the faults, and the values that no action gives."""
    codes = bound.codes
    lacking: dict[tuple[int, str], list[int]] = defaultdict(list)
    values: set[int] = set()
    both: list[Fault] = []
    for slot, ranks in enumerate(zip(*map(bound.ranks_of, PER_MICROBATCH), strict=True)):
        forward, backward, inputs, weights = (rank != NO_RANK for rank in ranks)
        full = backward and not (inputs or weights)
        split = inputs and weights and not backward
        if forward and (full or split):
            continue
        code = codes.of_kind["F"][slot]
        microbatch, stage = codes.microbatch[code], codes.stage[code]
        if not forward:
            lacking[stage, "forward"].append(microbatch)
            values.add(codes.gives[code])
        if backward and (inputs or weights):
            both.append(_repeated_backward(bound, codes.sibling(code, "I" if inputs else "W")))
        elif not backward and inputs != weights:
            lacking[stage, "weight gradient (W)" if inputs else "input gradient (I)"].append(microbatch)
        elif not backward and not inputs:
            lacking[stage, "backward"].append(microbatch)
        if not backward and not inputs:
            values.add(codes.gives[codes.sibling(code, "B")])
    name = cache(partial(as_yielded, bound))  # one look at all placements for each rank, not for each fault
    faults = [
        _missing_fault(bound, stage, what, microbatches, name)
        for (stage, what), microbatches in sorted(lacking.items())
    ]
    return both + faults + _missing_reduces(bound), values


def _missing_reduces(bound: BoundPlan) -> list[Fault]:
    """Find all-reduces that some ranks of the group list and others do not."""
    faults: list[Fault] = []
    replicas = bound.replicas if bound.reduces else {}
    for code, listers in bound.reduces.items():
        stage = bound.codes.stage[code]
        group = replicas[stage]
        inside = [rank for rank in listers if rank in group]
        for rank in group:
            if inside and rank not in inside:
                message = f"{stage}R is on rank {inside[0]} but not on rank {rank}, which holds stage {stage} too"
                hint = f"on rank {rank}, yield R(stage={stage}) after the stage's last gradient; or on no rank"
                faults.append(Fault("missing", rank, None, None, message, hint))
    return faults


def _repeated_backward(bound: BoundPlan, half: int) -> Fault:
    codes = bound.codes
    action, rank = codes.action(half), bound.rank_of[half]
    whole = codes.sibling(half, "B")
    full = codes.action(whole)
    message = (
        f"{action} on rank {rank} repeats a part of {full} on rank {bound.rank_of[whole]}: "
        "B is the input gradient and the weight gradient at once"
    )
    position = bound.position(rank, bound.rows[rank].index(half))
    return Fault("duplicate", rank, position, action, message, f"keep either {full}, or an I and a W")


def _missing_fault(
    bound: BoundPlan, stage: int, what: str, microbatches: list[int], name: Callable[[int | None], Callable[[int], str]]
) -> Fault:
    ranks = sorted({bound.route(microbatch)[stage] for microbatch in microbatches})
    known = [rank for rank in ranks if rank != NO_RANK]
    where = f" (rank{'s' if len(known) > 1 else ''} {ranges(known)})" if known else ""
    many = len(microbatches) > 1
    kinds = _KINDS["backward in halves" if what == "backward" and _is_split(bound, stage) else what]
    write = name(known[0] if known else None)
    actions = " and ".join(write(bound.codes.table[kind][microbatches[0]][stage]) for kind in kinds)
    more = f"{',' * (len(kinds) - 1)} and so on" if many else ""
    lacking = f"micro-batches {ranges(microbatches)} have" if many else f"micro-batch {microbatches[0]} has"
    message = f"{lacking} no {what} on stage {stage}{where}"
    hint = f"{f'on rank {known[0]}, ' if known else ''}yield {actions}{more}"
    return Fault("missing", known[0] if known else None, None, None, message, hint)


def _is_split(bound: BoundPlan, stage: int) -> bool:
    """Return whether a stage's backwards are all in halves; if it has none, whether the plan's are."""
    for first, step in ((stage, bound.codes.stages), (0, 1)):
        whole, *halves = (bound.ranks_of(kind)[first::step] for kind in PER_MICROBATCH[1:])
        if any(len(listed) > listed.count(NO_RANK) for listed in (whole, *halves)):
            return whole.count(NO_RANK) == len(whole)
    return False
