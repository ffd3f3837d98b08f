"""Check a plan: find every fault and explain it.

A plan is right if every micro-batch passes every stage exactly once forward and exactly once backward (`B`, or `I` and
`W`), on the rank that the placement names, and if the graph of "needs" and "comes after" has no cycle. A cycle is a
deadlock: `check` names it before anything runs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol, get_args, runtime_checkable

from pipelab.checking.deadlock import deadlocks
from pipelab.checking.memory import Memory
from pipelab.checking.mistakes import main_mistake
from pipelab.checking.repair import as_yielded
from pipelab.checking.residency import residency
from pipelab.checking.rules import misplaced, missing
from pipelab.checking.transfers import misposted, transfer_deadlocks
from pipelab.display import show
from pipelab.errors import clean, counted, require_caps, require_size
from pipelab.plan.actions import HALVES, Action
from pipelab.plan.bound import BoundPlan
from pipelab.plan.codes import Codes
from pipelab.plan.csv_notation import is_plan
from pipelab.plan.fault import Code, Fault, Link, ScheduleError, excerpt, shorten
from pipelab.plan.order import Traversal, traverse
from pipelab.plan.plan import Plan
from pipelab.plan.transfers import Order, Transport, require_words

_WORST_FIRST: tuple[Code, ...] = get_args(Code)
_OF_ONE_ITEM: tuple[Code, ...] = ("not-an-action", "endless")
"""Faults that do not depend on the placement."""
_MOST_EXCERPTS = 10_000
"""How many faults with the same code get an excerpt, which takes longer than the fault itself."""


@runtime_checkable
class ScheduleLike(Protocol):
    """An object that writes a plan before it is checked: a `Schedule`."""

    def draft(self) -> Plan:
        """Return the plan, unchecked."""


class Faults(list[Fault]):
    """What `check` returns: a list of faults. `print` and notebooks show them numbered, or that there is none."""

    def __init__(
        self,
        faults: Iterable[Fault],
        subject: str,
        plan: Plan | None = None,
        meant: Plan | None = None,
        order: Order = "pytorch",
        transport: Transport = "buffered",
    ) -> None:
        """Keep the faults and, for pictures, what they were found in."""
        super().__init__(faults)
        self.subject, self.plan, self.meant, self.order, self.transport = subject, plan, meant, order, transport

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the faults without the plan, which may hold a student's function."""
        return Faults, (list(self), self.subject)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Draw the plan as far as it runs, with its faults; the suffix is `html`, `svg`, `png`, `pdf` or `txt`.

        Each rank is a row of its actions in order. Where nothing can start any more, the blocked actions are marked. A
        cycle is drawn as numbered arrows, what is missing dotted, and what may not be there struck out. If pipelab
        has tried out another order, it is the second picture.

        Example:
            >>> import pipelab, tempfile
            >>> faults = check(pipelab.Plan.parse("0F0 0B0 0F1 0B1; 1F0 1F1 1B0 1B1"))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     faults.save(Path(folder) / "deadlock.svg").name
            'deadlock.svg'
        """
        return show(self, "save", path)

    def __str__(self) -> str:
        """Return what `ScheduleError` says about these faults."""
        right = f"{clean(self.subject)} is right: no fault"
        return str(ScheduleError(self, self.subject)) if self else "\n".join(filter(None, (right, self.transports)))

    @property
    def transports(self) -> str:
        """With which transports a plan hangs whose rows list their sends and receives, in words."""
        if self.plan is None or not self.plan.postings:
            return ""
        stuck = [each for each in get_args(Transport) if transfer_deadlocks(self.plan.bound, "pytorch", each)]
        words = f"{', '.join(stuck)}\n  try: to check it with transport {stuck[0]}, which says why" if stuck else "none"
        return f"transports with which its sends and receives hang: {words}"

    def _repr_html_(self) -> str:
        return show(self, "html")


def check(
    plan: Plan | ScheduleLike,
    *,
    memory_cap: int | Sequence[int] | None = None,
    gather_cap: int | Sequence[int] | None = None,
    order: Order = "pytorch",
    transport: Transport = "buffered",
    memory: Memory | None = None,
    versions: int | None = None,
) -> Faults:
    """Return every fault of a plan or schedule, worst kind first; an empty list means that it is right.

    `print` shows the list in words, a notebook as a picture, and `check(plan).save("why.html")` writes the picture.

    Args:
        plan: the plan or schedule.
        memory_cap: how many stage activations a rank may hold, or how many bytes if there is a `memory`: one
            number, or one per rank.
        gather_cap: how many stages' weights a rank may hold gathered: one number, or one per rank.
        order: in which order each rank posts its sends and receives: see `simulate`.
        transport: which of them wait for each other: see `simulate`. With any but `"buffered"`, a plan whose
            sends and receives wait for each other in a circle has the fault `transfer-deadlock`, unless it has other
            faults, which come first.
        memory: how many bytes each stage takes. Bytes are counted only if the plan has no other faults.
        versions: how many versions of a stage's weights a rank keeps, if the plan updates them: the newest ones. By
            default, all that backwards still need.

    Example:
        >>> import pipelab
        >>> pipelab.check(pipelab.GPipe(ranks=4, microbatches=8))
        []
        >>> print(pipelab.check(pipelab.GPipe(ranks=4, microbatches=8)))
        GPipe(ranks=4, microbatches=8) is right: no fault
        >>> for fault in pipelab.check(pipelab.GPipe(ranks=2, microbatches=8), memory_cap=[8, 4]):
        ...     print(fault)
        memory-cap: 1F4 would be activation 5 in flight on rank 1 (cap 4)
          try: let a backward come before 1F4 on rank 1, or begin with fewer forwards
            rank 1 | F0 F1 F2 F3 F4 F5 F6 F7 B0 …
                                 ^^

        A plan can be right and yet hang where a rank's sends and receives wait in one queue. PyTorch's issue 172668
        reports such a plan, whose receives were put right before their use:

        >>> for fault in pipelab.check(pipelab.OneFOneB(ranks=2, microbatches=4), order="at-use", transport="rank"):
        ...     print(fault)
        transfer-deadlock: rank 0 waits for rank 1, which waits for rank 0
          0SEND_F1 (rank 0) has to meet 1RECV_F1
          1RECV_F1 (rank 1) comes after 1SEND_B0, which has to meet 0RECV_B0
          0RECV_B0 comes after 0SEND_F1 on rank 0
          try: use pipelab.lower(plan, order="by-time"): it cannot hang, and its to_csv writes a file that PyTorch runs
            rank 0 | F0 F1 B0 F2 B1 F3 …
                        ^^

    Raises:
        CostError: if a list of the memory does not have one number per stage.
        TypeError: if it is neither a plan nor a schedule.
        UsageError: if a cap is not a number, or one per rank; or if `order` or `transport` is not one of the words.
    """
    require_words(order, transport)
    try:
        plan = as_plan(plan)
    except ScheduleError as error:
        return Faults(error.faults, error.subject)
    activations = memory_cap if memory is None else None
    judge = partial(_faults, memory_cap=activations, gather_cap=gather_cap, order=order, transport=transport)
    mistake, meant, found = main_mistake(plan, judge(plan), judge)
    if mistake is not None:
        first = replace(with_excerpt(plan, mistake), tried=meant)
        return Faults([first, *_with_excerpts(meant, found)], plan.name, plan, meant, order, transport)
    if memory is not None and memory_cap is not None:
        found = found or list(_over_cap(plan.bound, memory_cap, memory))
    if versions is not None:
        found = found or _over_versions(plan.bound, require_size("versions", versions))
    return Faults(_with_excerpts(plan, found), plan.name, plan, None, order, transport)


Cap = int | Sequence[int] | None


def _faults(plan: Plan, memory_cap: Cap, gather_cap: Cap, order: Order, transport: Transport) -> list[Fault]:
    """Return the faults of a plan, worst kind first, without excerpts.

    Uncertain faults are left out: if the placement is faulty, all faults that depend on it; if a rank has an item that
    cannot be read, that rank's missing actions, because the item may be one of them.
    """
    bound = plan.bound
    if any(fault.rank is None for fault in bound.faults):  # of the placement
        certain = [fault for fault in bound.faults if fault.rank is None or fault.code in _OF_ONE_ITEM]
        return sorted(certain, key=_severity)
    unread = {fault.rank for fault in bound.faults if _is_unread(fault)}
    lacking, missing_values = missing(bound)
    incomplete = [fault for fault in lacking if not unread or fault.rank not in (*unread, None)]
    faults = [*bound.faults, *misposted(bound), *misplaced(bound), *incomplete, *_disorder(plan, missing_values)]
    faults += residency(bound, gather_cap)
    faults = faults or transfer_deadlocks(bound, order, transport)
    over = [] if memory_cap is None else _over_cap(bound, memory_cap)
    return sorted([*faults, *over], key=_severity)


def _disorder(plan: Plan, missing_values: set[int]) -> list[Fault]:
    """Find actions that come too early, and deadlocks."""
    bound = plan.bound
    walk = traverse(bound, given=missing_values)
    if not walk.stuck and not bound.needs_aside:
        return []
    faults, excused = _unordered(bound)
    if excused:
        walk = traverse(bound, given=missing_values, excused=excused)
    return faults + deadlocks(plan, walk, missing_values, excused)


def _is_unread(fault: Fault) -> bool:
    """Return whether the item may be any action."""
    if fault.code == "out-of-range" and isinstance(fault.action, Action):
        return not {type(fault.action.microbatch), type(fault.action.stage)} <= {int, type(None)}
    return fault.code in ("not-an-action", "ambiguous-stage")


def _severity(fault: Fault) -> int:
    return _WORST_FIRST.index(fault.code)


def require_legal(plan: Plan) -> Traversal:
    """Return a walk through the whole plan; call this before you run or simulate a plan."""
    bound = plan.bound
    if bound.walk is None:
        if bound.faults or misplaced(bound) or missing(bound)[0] or any(misposted(bound)):
            raise ScheduleError(check(plan), plan.name)
        walk = traverse(bound)
        hung = transfer_deadlocks(bound, "pytorch", "buffered")
        if walk.stuck or (bound.needs_aside and _unordered(bound)[0]) or residency(bound) or hung:
            raise ScheduleError(check(plan), plan.name)
        bound.walk = walk
    return bound.walk


def as_plan(plan: Plan | ScheduleLike) -> Plan:
    """Return a plan unchanged, and a schedule's draft."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, type):
        name = plan.__name__
        example = f"{name}(ranks=4, microbatches=8)"
        raise TypeError(f"expected a plan or a schedule, got the class {name}: make a schedule with {example}")
    if isinstance(plan, ScheduleLike):
        return plan.draft()
    raise TypeError(f"expected a plan or a schedule, got {_how_to_make(plan)}")


def _how_to_make(other: object) -> str:
    """Return an object that is not a schedule in words, and how to make one from it: a name, rows or another class."""
    if isinstance(other, str) and is_plan(other):
        return f"{shorten(other)}: make a plan with Plan.parse({shorten(other)})"
    if isinstance(other, str):
        return f"{shorten(other)}: make a schedule with pipelab.schedules[{other!r}](ranks=4, microbatches=8)"
    if isinstance(other, (list, tuple)) and any(isinstance(row, (list, tuple)) for row in other):
        return f"{shorten(other)}: make a plan with Plan(rows)"
    if callable(getattr(other, "actions", None)):
        name = type(other).__name__
        return f"{shorten(other)}, whose class does not derive from Schedule: write class {name}(pipelab.Schedule)"
    return shorten(other)


def _unordered(bound: BoundPlan) -> tuple[list[Fault], set[int]]:
    """Find actions that come before an action of the same rank that they need; return also their codes."""
    faults: list[Fault] = []
    excused: set[int] = set()
    for rank in range(len(bound.computing)):
        index_of, write = bound.index_of(rank), as_yielded(bound, rank)
        for needer, giver, value in _too_early(bound, rank, index_of):
            excused.add(needer)
            at, later = (bound.position(rank, index_of[code]) for code in (needer, giver))
            faults.append(_unordered_fault(bound, rank, needer, giver, value, at, later, write))
    return faults, excused


def _too_early(bound: BoundPlan, rank: int, index_of: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield each action that comes too early, the later action that it needs, and that one's value."""
    codes, row = bound.codes, bound.computing[rank]
    late = _late_gradients(codes, row) if bound.reduces else {}
    for code in row:
        if code in late:
            yield code, late[code], codes.all_needs(code)[codes.microbatch[late[code]]]
        needed = ((giver, value) for value in codes.needs(code) for giver in codes.givers(value))
        later = ((code, giver, value) for giver, value in needed if index_of.get(giver, -1) > index_of[code])
        yield from islice(later, 1)


def _late_gradients(codes: Codes, row: Sequence[int]) -> dict[int, int]:
    """Return, for each all-reduce that comes too early, the later gradient of the lowest micro-batch, both by code."""
    lowest: dict[int, int] = {}
    late: dict[int, int] = {}
    for code in reversed(row):
        stage = codes.stage[code]
        if codes.collective[code]:
            if stage in lowest:
                late[code] = lowest[stage]
        elif codes.releases[code]:
            before = lowest.get(stage, code)
            lowest[stage] = min(before, code, key=lambda each: (codes.microbatch[each], codes.kind[each]))
    return late


def _unordered_fault(
    bound: BoundPlan, rank: int, early: int, giver: int, value: int, at: int, later: int, write: Callable[[int], str]
) -> Fault:
    """Return the fault of an action at one position that needs a value of the action at a later one."""
    codes = bound.codes
    needer, needed, name = codes.action(early), codes.action(giver), codes.value_words(value)
    own = "its own " if (needer.microbatch, needer.stage) == (needed.microbatch, needed.stage) else ""
    slices = needer.microbatch != needed.microbatch and value in codes.more_needs.get(early, ())
    slices = slices and not needer.traits.updates
    message = (
        f"{needer} on rank {rank}, position {at} comes before {own}{needed.word} {needed} "
        f"at position {later}, which gives it {name}{': they are slices of one sequence' * slices}"
    )
    cycle = (
        Link(rank, str(needer), f"{needer} needs {name}, given by {needed}"),
        Link(rank, str(needed), f"{needed} comes after {needer} on rank {rank}"),
    )
    hint = f"yield {write(giver)} before {write(early)} on rank {rank}"
    return Fault("unordered", rank, at, needer, message, hint, cycle=cycle)


def _over_cap(bound: BoundPlan, memory_cap: int | Sequence[int], memory: Memory | None = None) -> Iterator[Fault]:
    """Find, for each rank, the first action with which it holds more activations, or bytes, than allowed."""
    for rank, cap in enumerate(require_caps(memory_cap, len(bound.computing))):
        counts = bound.in_flight(rank) if memory is None else memory.held(bound, rank)
        for index, held in islice(((index, held) for index, held in enumerate(counts) if held > cap), 1):
            if memory is None:
                what = f"would be activation {held} in flight on rank {rank} (cap {cap})"
                hint = _how_to_hold_less(bound, rank, index)
            else:
                what = f"would make rank {rank} hold {held:,} bytes (cap {cap:,})"
                hint = _how_to_hold_fewer_bytes(bound, rank, index, memory)
            yield _cap_fault(bound, rank, index, what, hint)


def _cap_fault(bound: BoundPlan, rank: int, index: int, what: str, hint: str) -> Fault:
    action = bound.codes.action(bound.computing[rank][index])
    return Fault("memory-cap", rank, bound.position(rank, index), action, f"{action} {what}", hint)


def _how_to_hold_fewer_bytes(bound: BoundPlan, rank: int, index: int, memory: Memory) -> str:
    codes, row = bound.codes, bound.computing[rank][: index + 1]
    traits = codes.traits(row[-1])
    own = codes.holds[row[-1]] if traits.forward else bool(traits.holds)
    if bound.in_flight(rank)[index] != own:
        return _how_to_hold_less(bound, rank, index)
    if _inputs_kept(codes, row, memory):
        return f"begin with fewer forwards on rank {rank}, which keeps their inputs"
    # It holds no other activation, nor an input for one.
    return f"no order holds less: raise the cap, or give rank {rank} smaller stages or micro-batches"


def _inputs_kept(codes: Codes, until: Sequence[int], memory: Memory) -> int:
    """Return the bytes of the inputs that forwards before the last action keep for another action than that one."""
    sizes = memory.of("inputs", codes.stages)
    again = () if codes.forwards_only else until[:-1]
    kept = sum(sizes[codes.stage[code]] for code in again if codes.forward[code] and not codes.holds[code])
    return kept - sum(sizes[codes.stage[code]] for code in until if codes.traits(code).again)


def _over_versions(bound: BoundPlan, versions: int) -> list[Fault]:
    """Find, for each rank, the first backward whose version of the weights is not one of the newest."""
    first = (_too_old(bound, rank, versions) for rank in range(len(bound.computing)))
    return [fault for faults in first for fault in islice(faults, 1)]


def _too_old(bound: BoundPlan, rank: int, versions: int) -> Iterator[Fault]:
    """Yield the faults of a rank's actions whose versions of the weights are too old."""
    before: dict[int, dict[int, int]] = {}
    used_at = dict(zip(bound.lists[rank], bound.versions(rank), strict=True))
    for index, code in enumerate(bound.computing[rank]):
        used, traits = used_at[code], bound.codes.traits(code)
        m, stage = bound.codes.microbatch[code], bound.codes.stage[code]
        version, newest = before.get(stage, used).get(m, used[-1]), used[-1]
        before[stage] = used
        if not (traits.forward or traits.updates) and newest - version >= versions:
            action = bound.codes.action(code)
            what = (
                f"on rank {rank} needs version {version} of stage {stage}'s weights, which {stage}F{m} used: "
                f"{counted(newest - version, 'update')} ago, and the rank keeps {counted(versions, 'version')}"
            )
            hint = f"run {action} before the updates, or keep {newest - version + 1} versions"
            yield _cap_fault(bound, rank, index, what, hint)


def _how_to_hold_less(bound: BoundPlan, rank: int, index: int) -> str:
    """Return how to release an activation before an action: with a delayed weight gradient, or with a backward."""
    codes, row = bound.codes, bound.computing[rank][: index + 1]
    done, action = set(row), codes.action(row[-1])
    halves = (codes.sibling(code, HALVES[-1]) for code in row if codes.kind[code] in HALVES)
    if (late := next((code for code in halves if code not in done), None)) is not None:
        weights = f"run {codes.action(late)} before {action} on rank {rank}"
        return f"{weights}: an activation is held until its weight gradient is made"
    if action.traits.again:
        return f"run {action} later on rank {rank}: right before its backward"
    if not action.traits.forward:
        return f"begin with fewer forwards on rank {rank}"
    return f"let a backward come before {action} on rank {rank}, or begin with fewer forwards"


def _with_excerpts(plan: Plan, faults: Sequence[Fault]) -> list[Fault]:
    """Return faults with excerpts, for the first ones of each code."""
    often = Counter[str]()
    found = []
    for fault in faults:
        often[fault.code] += 1
        found.append(with_excerpt(plan, fault) if often[fault.code] <= _MOST_EXCERPTS else fault)
    return found


def with_excerpt(plan: Plan, fault: Fault) -> Fault:
    """Return the fault with the columns around it, if it has a place in a row."""
    if fault.rank is None or fault.position is None:
        return fault
    return replace(fault, excerpt=excerpt(fault.rank, plan.written[fault.rank], fault.position))
