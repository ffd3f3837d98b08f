"""Whether a plan holds everything exactly once, each on its rank: what `check` asks before it asks about order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial

from pipelab.checking.repair import as_yielded
from pipelab.plan.binding import NO_RANK
from pipelab.plan.bound import Program
from pipelab.plan.fault import Fault, ranges

__all__ = ["complete", "misplaced", "missing"]


def complete(program: Program) -> bool:
    """Tell whether there are as many forwards and backwards as there must be, which is quick to see."""
    slots, rank_of = program.numbering.slots, program.rank_of
    absent = [rank_of[start : start + slots].count(-1) for start in range(0, 4 * slots, slots)]
    if absent == [0, 0, slots, slots] and not program.written_reduces:
        return True
    return not missing(program)[0]


def misplaced(program: Program) -> list[Fault]:
    """Find what runs on another rank than the placement says."""
    faults = _strangers(program) if program.reduces else []
    if not program.misplaced:
        return faults
    numbering = program.numbering
    slots, placed = numbering.slots, program.placed
    for rank, row in enumerate(program.rows):
        for index, code in enumerate(row):
            right = placed[code % slots] if code < 4 * slots else rank
            if right not in (rank, -1):
                action = numbering.action(code)
                faults.append(
                    Fault(
                        "wrong-rank",
                        rank,
                        program.position(rank, index),
                        action,
                        f"{action} is on rank {rank}, but micro-batch {action.microbatch} of stage {action.stage} "
                        f"{'is placed on' if program.names_ranks else 'went forward on'} rank {right}",
                        f"move {action} to rank {right}, or override place(microbatch, stage)",
                    )
                )
    return faults


def _strangers(program: Program) -> list[Fault]:
    """Find all-reduces on ranks that do not hold the stage."""
    faults: list[Fault] = []
    replicas = program.replicas
    for code, listers in program.reduces.items():
        action = program.numbering.action(code)
        assert action.stage is not None
        group = replicas[action.stage]
        faults.extend(
            Fault(
                "wrong-rank",
                rank,
                program.position(rank, program.rows[rank].index(code)),
                action,
                f"{action} is on rank {rank}, which does not hold stage {action.stage}: "
                f"rank{'s' if len(group) > 1 else ''} {ranges(group)} {'do' if len(group) > 1 else 'does'}",
                f"remove {action} from rank {rank}",
            )
            for rank in listers
            if group and rank not in group
        )
    return faults


def missing(program: Program) -> tuple[list[Fault], set[int]]:
    """Find what no rank lists; return the faults, and the values that nobody gives."""
    numbering, rank_of = program.numbering, program.rank_of
    slots, stages = numbering.slots, numbering.stages
    lacking: dict[tuple[int, str], list[int]] = defaultdict(list)
    values: set[int] = set()
    both: list[Fault] = []
    for slot in range(slots):
        forward, backward, inputs, weights = (rank_of[kind * slots + slot] >= 0 for kind in range(4))
        full = backward and not (inputs or weights)
        split = inputs and weights and not backward
        if forward and (full or split):
            continue
        microbatch, stage = divmod(slot, stages)
        if not forward:
            lacking[stage, "forward"].append(microbatch)
            values.add(slot)
        if backward and (inputs or weights):
            both.append(_twice_backward(program, slot, inputs))
        elif not backward and inputs != weights:
            lacking[stage, "weight gradient (W)" if inputs else "input gradient (I)"].append(microbatch)
        elif not backward and not inputs:
            lacking[stage, "backward"].append(microbatch)
        if not backward and not inputs:
            values.add(slots + slot)
    name = cache(partial(as_yielded, program))  # one look at all placements for each rank, not for each fault
    faults = [
        _missing_fault(program, stage, what, microbatches, name)
        for (stage, what), microbatches in sorted(lacking.items())
    ]
    return both + faults + _left_out(program), values


def _left_out(program: Program) -> list[Fault]:
    """Find all-reduces that some ranks of the group list and others do not."""
    faults: list[Fault] = []
    replicas = program.replicas if program.reduces else {}
    for code, listers in program.reduces.items():
        action = program.numbering.action(code)
        assert action.stage is not None
        group = replicas[action.stage]
        inside = [rank for rank in listers if rank in group]
        faults.extend(
            Fault(
                "missing",
                rank,
                None,
                None,
                f"{action} is on rank {inside[0]} but not on rank {rank}, which holds stage {action.stage} too",
                f"on rank {rank}, yield R(stage={action.stage}) after the stage's last gradient; or on no rank",
            )
            for rank in group
            if inside and rank not in inside
        )
    return faults


def _twice_backward(program: Program, slot: int, inputs: bool) -> Fault:
    numbering = program.numbering
    code = (2 if inputs else 3) * numbering.slots + slot
    action, rank = numbering.action(code), program.rank_of[code]
    full = numbering.action(numbering.slots + slot)
    return Fault(
        "duplicate",
        rank,
        program.position(rank, program.rows[rank].index(code)),
        action,
        f"{action} on rank {rank} repeats a part of {full} on rank {program.rank_of[numbering.slots + slot]}: "
        "B is the input gradient and the weight gradient at once",
        f"keep either {full}, or an I and a W",
    )


def _missing_fault(
    program: Program,
    stage: int,
    what: str,
    microbatches: list[int],
    name: Callable[[int | None], Callable[[int], str]],
) -> Fault:
    ranks = sorted({program.placed[microbatch * program.numbering.stages + stage] for microbatch in microbatches})
    known = [rank for rank in ranks if rank >= 0]
    where = f" (rank{'s' if len(known) > 1 else ''} {ranges(known)})" if known else ""
    many = len(microbatches) > 1
    kinds = [("forward", "backward", "input gradient (I)", "weight gradient (W)").index(what)]
    if what == "backward" and _is_split(program, stage):
        kinds = [2, 3]
    slot, write = microbatches[0] * program.numbering.stages + stage, name(known[0] if known else None)
    actions = " and ".join(write(kind * program.numbering.slots + slot) for kind in kinds)
    more = f"{',' * (len(kinds) - 1)} and so on" if many else ""
    return Fault(
        "missing",
        known[0] if known else None,
        None,
        None,
        f"micro-batch{'es' if many else ''} {ranges(microbatches)} {'have' if many else 'has'} no {what} "
        f"on stage {stage}{where}",
        f"{f'on rank {known[0]}, ' if known else ''}yield {actions}{more}",
    )


def _is_split(program: Program, stage: int) -> bool:
    """Tell whether a stage's backwards are all in halves; where it has none, whether the plan's are."""
    slots, stages = program.numbering.slots, program.numbering.stages
    for first, step in ((stage, stages), (0, 1)):
        whole, *halves = (program.rank_of[kind * slots + first : (kind + 1) * slots : step] for kind in (1, 2, 3))
        if any(len(listed) > listed.count(NO_RANK) for listed in (whole, *halves)):
            return whole.count(NO_RANK) == len(whole)
    return False
