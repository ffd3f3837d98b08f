"""Check a plan: find every fault at once and explain it.

A plan is right when every micro-batch passes every stage exactly once forward and exactly once backward (`B`, or `I`
and `W`), on the rank that the placement names, and when the graph of "needs" and "comes after" has no cycle. A cycle is
a deadlock: it is named here, before anything runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Protocol, runtime_checkable

from pipelab.deadlocks import deadlocks
from pipelab.errors import ScheduleError, SizeError
from pipelab.faults import Code, Fault
from pipelab.plan import Plan, require_size
from pipelab.program import Program
from pipelab.traversal import Traversal, traverse

__all__ = ["Draftable", "as_plan", "check", "require_legal"]

_ORDER: tuple[Code, ...] = (
    "refused",
    "exception",
    "endless",
    "not-an-action",
    "out-of-range",
    "ambiguous-stage",
    "wrong-rank",
    "duplicate",
    "missing",
    "unordered",
    "deadlock",
    "memory-cap",
)


@runtime_checkable
class Draftable(Protocol):
    """What can write a plan before it is checked: a `Schedule`."""

    def draft(self) -> Plan:
        """Return the plan, unchecked."""


def check(plan_or_schedule: Plan | Draftable, memory_cap: int | Sequence[int] | None = None) -> list[Fault]:
    """Return every fault of a plan or schedule, worst kind first; an empty list means that it is right.

    Args:
        plan_or_schedule: what to check.
        memory_cap: how many stage activations a rank may hold at once: one number, or one per rank.

    Example:
        >>> import pipelab
        >>> pipelab.check(pipelab.GPipe(ranks=4, microbatches=8))
        []
        >>> for fault in pipelab.check(pipelab.GPipe(ranks=2, microbatches=8), memory_cap=[8, 4]):
        ...     print(fault)
        memory-cap: 1F4 would be activation 5 in flight on rank 1 (cap 4)
          try: run a backward before 1F4 on rank 1
            rank 1 | F0 F1 F2 F3 F4 F5 F6 F7 B0 …
                                 ^^

    Raises:
        TypeError: if it is neither a plan nor a schedule.
        SizeError: if `memory_cap` is not a number, or one per rank.
    """
    try:
        plan = as_plan(plan_or_schedule)
    except ScheduleError as error:
        return error.faults
    program = plan.program
    misplaced = _misplaced(program)
    incomplete, missing_values = _missing(program)
    walk = traverse(program, given=missing_values)
    disorder: list[Fault] = []
    if walk.stuck:
        disorder, excused = _unordered(program)
        if excused:
            walk = traverse(program, given=missing_values, excused=excused)
        disorder += deadlocks(program, walk)
    over = [] if memory_cap is None else _over_cap(program, memory_cap)
    found = [*program.faults, *misplaced, *incomplete, *disorder, *over]
    found.sort(key=lambda fault: _ORDER.index(fault.code))
    return [replace(fault, excerpt=_excerpt(plan, fault)) for fault in found]


def require_legal(plan: Plan) -> Traversal:
    """Return a walk through a plan, all of it; the one thing that whoever runs or simulates a plan calls first.

    Raises:
        ScheduleError: if the plan has any fault, with all of them.
    """
    program = plan.program
    if program.walk is not None:
        return program.walk
    if not program.faults and not _misplaced(program) and _complete(program):
        walk = traverse(program)
        if not walk.stuck:
            program.walk = walk
            return walk
    raise ScheduleError(check(plan), plan.name)


def as_plan(plan_or_schedule: Plan | Draftable) -> Plan:
    """Return a plan as it is, and a schedule's draft.

    Raises:
        TypeError: if it is neither.
        ScheduleError: if the schedule cannot write a plan at all.
    """
    if isinstance(plan_or_schedule, Plan):
        return plan_or_schedule
    if isinstance(plan_or_schedule, type):
        name = plan_or_schedule.__name__
        raise TypeError(f"expected a plan or a schedule, got the class {name}: make one, {name}(ranks=4, microbatches=8)")
    if isinstance(plan_or_schedule, Draftable):
        return plan_or_schedule.draft()
    raise TypeError(f"expected a Plan or a Schedule, got {plan_or_schedule!r}")


def _complete(program: Program) -> bool:
    """Tell whether there are as many forwards and backwards as there must be, which is quick to see."""
    slots, rank_of = program.numbering.slots, program.rank_of
    absent = [rank_of[start : start + slots].count(-1) for start in range(0, 4 * slots, slots)]
    if absent == [0, 0, slots, slots]:
        return True
    return not _missing(program)[0]


def _misplaced(program: Program) -> list[Fault]:
    """Find what runs on another rank than the placement says."""
    if not program.misplaced:
        return []
    numbering = program.numbering
    slots, placed = numbering.slots, program.placed
    faults: list[Fault] = []
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


def _missing(program: Program) -> tuple[list[Fault], set[int]]:
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
    faults = [
        _missing_fault(program, stage, what, microbatches) for (stage, what), microbatches in sorted(lacking.items())
    ]
    return both + faults, values


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


def _missing_fault(program: Program, stage: int, what: str, microbatches: list[int]) -> Fault:
    ranks = sorted({program.placed[microbatch * program.numbering.stages + stage] for microbatch in microbatches})
    known = [rank for rank in ranks if rank >= 0]
    where = f" (rank{'s' if len(known) > 1 else ''} {_ranges(known)})" if known else ""
    many = len(microbatches) > 1
    letter = {"forward": "F", "backward": "B"}.get(what, what[-2])
    example = f"{letter}({microbatches[0]}, stage={stage})" if program.numbering.stages > 1 else f"{letter}({microbatches[0]})"
    return Fault(
        "missing",
        known[0] if known else None,
        None,
        None,
        f"micro-batch{'es' if many else ''} {_ranges(microbatches)} {'have' if many else 'has'} no {what} "
        f"on stage {stage}{where}",
        f"yield {example}{' and so on' if many else ''}{f' on rank {known[0]}' if known else ''}",
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text, runs as first…last, cut after six runs.

    Example:
        >>> _ranges([0, 1, 2, 5, 7, 8])
        '0…2, 5, 7, 8'
    """
    runs: list[str] = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.extend([f"{run[0]}…{run[-1]}"] if len(run) > 2 else map(str, run))
    return ", ".join(runs) if len(runs) <= 6 else f"{', '.join(runs[:6])}, … ({len(numbers)} in all)"


def _unordered(program: Program) -> tuple[list[Fault], set[int]]:
    """Find actions that come before something of the same rank that they need; return also their codes."""
    numbering = program.numbering
    slots, stages = numbering.slots, numbering.stages
    faults: list[Fault] = []
    excused: set[int] = set()
    for rank, row in enumerate(program.rows):
        index_of = {code: index for index, code in enumerate(row)}
        for index, code in enumerate(row):
            values: Iterable[int] = numbering.needs(code)
            if code >= 4 * slots:
                values = range(2 * slots + code - 4 * slots, 3 * slots, stages)
            for value in values:
                giver = next((other for other in numbering.givers(value) if index_of.get(other, -1) > index), None)
                if giver is not None:
                    faults.append(_unordered_fault(program, rank, index, giver, value, index_of[giver]))
                    excused.add(code)
                    break
    return faults, excused


def _unordered_fault(program: Program, rank: int, index: int, giver: int, value: int, later: int) -> Fault:
    numbering = program.numbering
    needer, needed = numbering.action(program.rows[rank][index]), numbering.action(giver)
    own = "its own " if needer.microbatch == needed.microbatch and needer.stage == needed.stage else ""
    return Fault(
        "unordered",
        rank,
        program.position(rank, index),
        needer,
        f"{needer} on rank {rank}, position {program.position(rank, index)} comes before {own}{needed.word} {needed} "
        f"at position {program.position(rank, later)}, which gives it {numbering.value_name(value)}",
        f"yield {needed} before {needer} on rank {rank}",
    )


def _over_cap(program: Program, memory_cap: int | Sequence[int]) -> list[Fault]:
    """Find, for each rank, the first forward that makes it hold more activations than allowed."""
    numbering = program.numbering
    slots = numbering.slots
    ranks = len(program.rows)
    caps = [memory_cap] * ranks if isinstance(memory_cap, int) else list(memory_cap)
    if len(caps) != ranks:
        raise SizeError(f"memory_cap has {len(caps)} numbers for {ranks} ranks: give one number, or one per rank")
    for cap in caps:
        require_size("memory_cap", cap)
    faults: list[Fault] = []
    for rank, row in enumerate(program.rows):
        held = 0
        for index, code in enumerate(row):
            if code < slots:
                held += 1
                if held > caps[rank]:
                    action = numbering.action(code)
                    faults.append(
                        Fault(
                            "memory-cap",
                            rank,
                            program.position(rank, index),
                            action,
                            f"{action} would be activation {held} in flight on rank {rank} (cap {caps[rank]})",
                            f"run a backward before {action} on rank {rank}",
                        )
                    )
                    break
            elif code < 2 * slots or 3 * slots <= code < 4 * slots:
                held -= 1
    return faults


def _excerpt(plan: Plan, fault: Fault, around: int = 4) -> str:
    """Return the few columns around a fault, the place marked."""
    if fault.rank is None or fault.position is None or fault.rank >= plan.ranks:
        return ""
    row = plan.written[fault.rank]
    first = max(0, fault.position - around)
    words = [_word(item) for item in row[first : fault.position + around + 1]]
    marked = fault.position - first
    lead = f"rank {fault.rank} | {'… ' if first else ''}"
    before = lead + "".join(f"{word} " for word in words[:marked])
    after = " …" if fault.position + around + 1 < len(row) else ""
    line = lead + " ".join(words) + after
    return f"{line}\n{' ' * len(before)}{'^' * len(words[marked])}"


def _word(item: object, most: int = 24) -> str:
    text = str(item)
    return text if len(text) <= most else text[: most - 1] + "…"
