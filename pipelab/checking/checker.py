"""Check a plan: find every fault at once and explain it.

A plan is right when every micro-batch passes every stage exactly once forward and exactly once backward (`B`, or `I`
and `W`), on the rank that the placement names, and when the graph of "needs" and "comes after" has no cycle. A cycle is
a deadlock: it is named here, before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from pipelab.checking.deadlock import deadlocks
from pipelab.checking.mistakes import diagnose
from pipelab.checking.repair import as_yielded
from pipelab.checking.rules import complete, misplaced, missing
from pipelab.errors import ScheduleError, require_caps
from pipelab.plan.actions import Action
from pipelab.plan.bound import Program
from pipelab.plan.codes import Numbering
from pipelab.plan.fault import Code, Fault, excerpt, shorten
from pipelab.plan.order import Traversal, traverse
from pipelab.plan.plan import Plan

__all__ = ["Draftable", "as_plan", "check", "require_legal", "with_excerpt"]

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
_OF_ONE_ITEM: tuple[Code, ...] = ("not-an-action", "endless")
"""What is wrong wherever a stage may be."""


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
          try: let a backward come before 1F4 on rank 1, or begin with fewer forwards
            rank 1 | F0 F1 F2 F3 F4 F5 F6 F7 B0 …
                                 ^^

    Raises:
        TypeError: if it is neither a plan nor a schedule.
        UsageError: if `memory_cap` is not a number, or one per rank.
    """
    try:
        plan = as_plan(plan_or_schedule)
    except ScheduleError as error:
        return error.faults
    mistake, meant, found = diagnose(plan, _faults(plan, memory_cap), lambda meant: _faults(meant, memory_cap))
    told = [with_excerpt(meant, fault) for fault in found]
    return told if mistake is None else [with_excerpt(plan, mistake), *told]


def _faults(plan: Plan, memory_cap: int | Sequence[int] | None) -> list[Fault]:
    """Return what is wrong with a plan, each fault by itself, worst kind first, without excerpts.

    What may only look wrong is left out: without a placement nothing is known about stages, and what is missing on a
    rank may be what stands there and cannot be read.
    """
    program = plan.program
    if any(fault.rank is None for fault in program.faults):  # of the placement
        certain = [fault for fault in program.faults if fault.rank is None or fault.code in _OF_ONE_ITEM]
        return sorted(certain, key=_severity)
    unread = {fault.rank for fault in program.faults if _is_unread(fault)}
    incomplete, missing_values = missing(program)
    incomplete = [fault for fault in incomplete if not unread or fault.rank not in (*unread, None)]
    walk = traverse(program, given=missing_values)
    disorder: list[Fault] = []
    if walk.stuck or program.written_reduces:
        disorder, excused = _unordered(program)
        if excused:
            walk = traverse(program, given=missing_values, excused=excused)
        disorder += deadlocks(program, walk, missing_values, excused)
    over = [] if memory_cap is None else _over_cap(program, memory_cap)
    return sorted([*program.faults, *misplaced(program), *incomplete, *disorder, *over], key=_severity)


def _is_unread(fault: Fault) -> bool:
    """Tell whether an item cannot be read: it may be any action."""
    if fault.code == "out-of-range" and isinstance(fault.action, Action):
        return not {type(fault.action.microbatch), type(fault.action.stage)} <= {int, type(None)}
    return fault.code in ("not-an-action", "ambiguous-stage")


def _severity(fault: Fault) -> int:
    return _ORDER.index(fault.code)


def require_legal(plan: Plan) -> Traversal:
    """Return a walk through a plan, all of it; the one thing that whoever runs or simulates a plan calls first.

    Raises:
        ScheduleError: if the plan has any fault, with all of them.
    """
    program = plan.program
    if program.walk is not None:
        return program.walk
    if not program.faults and not misplaced(program) and complete(program):
        walk = traverse(program)
        if not walk.stuck and not (program.written_reduces and _unordered(program)[0]):
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
        example = f"{name}(ranks=4, microbatches=8)"
        raise TypeError(f"expected a plan or a schedule, got the class {name}: make one, {example}")
    if isinstance(plan_or_schedule, Draftable):
        return plan_or_schedule.draft()
    raise TypeError(f"expected a plan or a schedule, got {_how_to_make(plan_or_schedule)}")


def _how_to_make(other: object) -> str:
    """Return what stands where a schedule should, and how to make one of it, if it is a name, rows, or half of one."""
    if isinstance(other, str):
        return f"{shorten(other)}: make one, pipelab.schedules[{other!r}](ranks=4, microbatches=8)"
    if isinstance(other, (list, tuple)) and any(isinstance(row, (list, tuple)) for row in other):
        return f"{shorten(other)}: make a plan of it, Plan(rows)"
    if callable(getattr(other, "actions", None)):
        name = type(other).__name__
        return f"{shorten(other)}, whose class is no schedule: write class {name}(pipelab.Schedule)"
    return shorten(other)


def _unordered(program: Program) -> tuple[list[Fault], set[int]]:
    """Find actions that come before something of the same rank that they need; return also their codes."""
    numbering = program.numbering
    faults: list[Fault] = []
    excused: set[int] = set()
    for rank, row in enumerate(program.rows):
        index_of = {code: index for index, code in enumerate(row)}
        found: list[tuple[int, int, int, int]] = []
        for index, code in enumerate(row):
            for value in numbering.all_needs(code):
                giver = next((other for other in numbering.givers(value) if index_of.get(other, -1) > index), None)
                if giver is not None:
                    found.append((index, giver, value, index_of[giver]))
                    excused.add(code)
                    break
        if found:
            write = as_yielded(program, rank)
            faults += [_unordered_fault(program, rank, *each, write) for each in found]
    return faults, excused


def _unordered_fault(
    program: Program, rank: int, index: int, giver: int, value: int, later: int, write: Callable[[int], str]
) -> Fault:
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
        f"yield {write(giver)} before {write(program.rows[rank][index])} on rank {rank}",
    )


def _over_cap(program: Program, memory_cap: int | Sequence[int]) -> list[Fault]:
    """Find, for each rank, the first forward that makes it hold more activations than allowed."""
    numbering = program.numbering
    slots = numbering.slots
    caps = require_caps(memory_cap, len(program.rows))
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
                            _how_to_hold_less(numbering, row[:index], action, rank),
                        )
                    )
                    break
            elif code < 2 * slots or 3 * slots <= code < 4 * slots:
                held -= 1
    return faults


def _how_to_hold_less(numbering: Numbering, before: Sequence[int], action: Action, rank: int) -> str:
    """Return what lets go of an activation before a forward: a weight gradient that could have run, or a backward."""
    slots = numbering.slots
    done = set(before)
    for code in before:
        if 2 * slots <= code < 3 * slots and code + slots not in done:
            late = numbering.action(code + slots)
            return f"run {late} before {action} on rank {rank}: an activation is held until its weight gradient is made"
    return f"let a backward come before {action} on rank {rank}, or begin with fewer forwards"


def with_excerpt(plan: Plan, fault: Fault) -> Fault:
    """Return the fault with the columns around it, where it stands in a row."""
    if fault.rank is None or fault.position is None:
        return fault
    return replace(fault, excerpt=excerpt(fault.rank, plan.written[fault.rank], fault.position))
