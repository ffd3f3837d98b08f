"""Check that a plan holds every action exactly once and on its rank; `check` does this before it looks at the order."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeGuard, get_args

from pipelab.checking.repair import as_yielded
from pipelab.errors import require_caps
from pipelab.plan.actions import HALVES, PER_MICROBATCH, TRAITS, Action, Kind, Pair
from pipelab.plan.binding import NO_RANK, ask, within, written
from pipelab.plan.bound import BoundPlan
from pipelab.plan.codes import GIVERS
from pipelab.plan.fault import Code, Fault, line_of_function, ranges
from pipelab.plan.plan import Plan

_NEEDED = ("out(m,s)", "gin(m,s)", "gw(m,s)")
"""The values that exactly one action gives for every micro-batch and stage."""
_REQUIRED = tuple(kind for kind in PER_MICROBATCH if not TRAITS[kind].optional)
"""The kinds that give them."""
_MOST_KEPT = 1_000
"""For how many micro-batches a fault keeps what is missing: a picture shows fewer."""


def _complete(bound: BoundPlan) -> bool:
    """Return whether every stage has its forwards and backwards, all of them whole or all in halves: that is quick."""
    every = len(bound.rank_of_slot)
    absent = {kind: bound.ranks_of(kind).count(NO_RANK) for kind in _REQUIRED}
    given = [value for kind, count in absent.items() if not count for value in TRAITS[kind].gives]
    return set(absent.values()) <= {0, every} and all(given.count(value) == 1 for value in _NEEDED)


def misplaced(bound: BoundPlan) -> list[Fault]:
    """Find actions that are on another rank than the placement says."""
    faults = _misplaced_reduces(bound) if bound.reduces else []
    if not bound.misplaced:
        return faults
    codes = bound.codes
    verb = "is placed on" if bound.names_ranks else "went forward on"
    for rank, row in enumerate(bound.rows):
        for index, code in enumerate(row):
            right = rank if codes.collective[code] else bound.rank_of_slot[codes.slot[code]]
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
    index_of = cache(bound.index_of)
    for code, listers in bound.reduces.items():
        action = bound.codes.action(code)
        group = replicas[bound.codes.stage[code]]
        strangers = sorted(set(listers).difference(group)) if group else []
        if strangers:
            holders = f"ranks {ranges(group)} do" if len(group) > 1 else f"rank {ranges(group)} does"
            for rank in strangers:
                position = bound.position(rank, index_of(rank)[code])
                message = f"{action} is on rank {rank}, which does not hold stage {action.stage}: {holders}"
                hint = f"remove {action} from rank {rank}"
                faults.append(Fault("wrong-rank", rank, position, action, message, hint))
    return faults


def missing(bound: BoundPlan) -> tuple[list[Fault], set[int]]:
    """Find actions that no rank lists; return the faults, and the values that no action gives."""
    codes = bound.codes
    lacking: dict[tuple[int, Kind], list[int]] = defaultdict(list)
    values: set[int] = set()
    both: list[Fault] = []
    index_of = cache(bound.index_of)
    looked_at = () if _complete(bound) else enumerate(zip(*map(bound.ranks_of, _REQUIRED), strict=True))
    for slot, ranks in looked_at:
        lacks, absent, twice = _wrong(tuple(rank != NO_RANK for rank in ranks))
        for kind in lacks:
            lacking[codes.stage[slot], kind].append(codes.microbatch[slot])
        values.update(codes.of_value(value)[slot] for value in absent)
        if twice:
            both.append(_repeated_backward(bound, codes.of_kind[twice][slot], index_of))
    faults = _missing_faults(bound, lacking) if lacking else []
    return both + faults + _missing_reduces(bound), values


@cache
def _wrong(listed: tuple[bool, ...]) -> tuple[list[Kind], list[str], Kind | None]:
    """Return what a slot lacks, as kinds and as values, and which kind repeats another; by which kinds it has."""
    there = [kind for kind, has in zip(_REQUIRED, listed, strict=True) if has]
    givers = {value: [kind for kind in there if kind in GIVERS[value]] for value in _NEEDED}
    absent = [value for value in _NEEDED if not givers[value]]
    at = _NEEDED[0] in absent
    lacks = [kind for kind in _REQUIRED if TRAITS[kind].gives in (tuple(absent[:at]), tuple(absent[at:]))]
    return lacks, absent, next((kinds[1] for kinds in givers.values() if len(kinds) > 1), None)


def _missing_faults(bound: BoundPlan, lacking: dict[tuple[int, Kind], list[int]]) -> list[Fault]:
    """Return one fault for each stage and what it lacks for some micro-batches."""
    name = cache(partial(as_yielded, bound))  # one look at the rank's row, not one for each fault
    is_split = _halved(bound)
    return [
        _missing_fault(bound, stage, kind, microbatches, name, is_split)
        for (stage, kind), microbatches in sorted(lacking.items())
    ]


def _missing_reduces(bound: BoundPlan) -> list[Fault]:
    """Find all-reduces that some ranks of the group list and others do not."""
    faults: list[Fault] = []
    replicas = bound.replicas if bound.reduces else {}
    for code, listers in bound.reduces.items():
        stage = bound.codes.stage[code]
        group = replicas[stage]
        inside = set(listers).intersection(group)
        for rank in sorted(set(group) - inside) if inside else ():
            message = f"{stage}R is on rank {min(inside)} but not on rank {rank}, which holds stage {stage} too"
            hint = f"on rank {rank}, yield R(stage={stage}) after the stage's last gradient; or on no rank"
            lacking = ((rank, bound.codes.action(code)),)
            faults.append(Fault("missing", rank, None, None, message, hint, lacking=lacking))
    return faults


def _repeated_backward(bound: BoundPlan, half: int, index_of: Callable[[int], dict[int, int]]) -> Fault:
    codes = bound.codes
    action, rank = codes.action(half), bound.rank_of[half]
    whole = codes.sibling(half, "B")
    full = codes.action(whole)
    message = (
        f"{action} on rank {rank} repeats a part of {full} on rank {bound.rank_of[whole]}: "
        "B is the input gradient and the weight gradient at once"
    )
    position = bound.position(rank, index_of(rank)[half])
    return Fault("duplicate", rank, position, action, message, f"keep either {full}, or an I and a W")


def _missing_fault(
    bound: BoundPlan,
    stage: int,
    lacks: Kind,
    microbatches: list[int],
    name: Callable[[int | None], Callable[[int], str]],
    is_split: Callable[[int], bool],
) -> Fault:
    codes = bound.codes
    ranks = sorted({bound.rank_of_slot[codes.slot[codes.table["F"][m][stage]]] for m in microbatches})
    known = [rank for rank in ranks if rank != NO_RANK]
    where = f" (rank{'s' if len(known) > 1 else ''} {ranges(known)})" if known else ""
    many = len(microbatches) > 1
    kinds = HALVES if len(TRAITS[lacks].gives) > 1 and is_split(stage) else (lacks,)
    what = TRAITS[lacks].word + f" ({lacks})" * (lacks in HALVES)
    write = name(known[0] if known else None)
    actions = " and ".join(write(codes.table[kind][microbatches[0]][stage]) for kind in kinds)
    more = f"{',' * (len(kinds) - 1)} and so on" if many else ""
    lacking = f"micro-batches {ranges(microbatches)} have" if many else f"micro-batch {microbatches[0]} has"
    message = f"{lacking} no {what} on stage {stage}{where}"
    hint = f"{f'on rank {known[0]}, ' if known else ''}yield {actions}{more}"
    absent: list[tuple[int | None, Action]] = []
    for microbatch in microbatches[:_MOST_KEPT]:
        slot = codes.slot[codes.table["F"][microbatch][stage]]
        rank = None if bound.rank_of_slot[slot] == NO_RANK else bound.rank_of_slot[slot]
        absent += [(rank, codes.action(codes.of_kind[kind][slot])) for kind in kinds]
    return Fault("missing", known[0] if known else None, None, None, message, hint, lacking=tuple(absent))


def _halved(bound: BoundPlan) -> Callable[[int], bool]:
    """Return a function: whether a stage's backwards are all in halves; if it has none, whether the plan's are."""
    codes, rank_of = bound.codes, bound.rank_of
    backwards = {kind for value in _NEEDED[1:] for kind in GIVERS[value]}
    everywhere = backwards.intersection(bound.kinds)

    def is_split(stage: int) -> bool:
        own = {kind: codes.of_kind[kind][stage :: codes.stages] for kind in backwards}
        here = {kind for kind, listed in own.items() if any(rank_of[code] != NO_RANK for code in listed)}
        kinds = here or everywhere
        return bool(kinds) and kinds <= set(HALVES)

    return is_split


# ── The four commonest mistakes: if one of them explains many faults, pipelab reports it instead of them ──────────────

_OF_PLACE: tuple[Code, ...] = ("out-of-range", "wrong-rank", "ambiguous-stage")
"""The faults that a wrong stage, micro-batch or placement causes."""
_OF_STAGES: tuple[Code, ...] = (*_OF_PLACE, "missing", "duplicate", "exception")
"""The faults that a missing `stages_per_rank` causes."""
_ALL_BUT_THE_CAP = tuple(code for code in get_args(Code) if code != "memory-cap")
_TRIED_PER_RANK = (2, 3, 4)
_MOST_SLOTS = 1 << 12
"""The largest plan, in ranks times micro-batches, for which pipelab tries other numbers of stages."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake that the author may have made.

    Attributes:
        fault: the fault that reports it.
        meant: the plan without it.
        clears: the kinds of faults that it explains: if `meant` has one of them, this was not the mistake.
    """

    fault: Fault
    meant: Plan
    clears: tuple[Code, ...]


def diagnose(
    plan: Plan, faults: Sequence[Fault], judge: Callable[[Plan], list[Fault]]
) -> tuple[Fault | None, Plan, list[Fault]]:
    """Return the mistake that explains most faults, if there is one; the plan that was meant; and its faults."""
    best: tuple[Fault | None, Plan, list[Fault]] = (None, plan, list(faults))
    for mistake in _mistakes(plan, faults):
        left = judge(mistake.meant)
        if len(left) < len(best[2]) and not any(fault.code in mistake.clears for fault in left):
            then = "then the schedule is right" if not left else "what would still be wrong follows"
            best = replace(mistake.fault, hint=f"{mistake.fault.hint}; {then}"), mistake.meant, left
        if not left:
            break
    return best


def _mistakes(plan: Plan, faults: Sequence[Fault]) -> Iterator[Mistake]:
    of_place = any(fault.code in _OF_PLACE for fault in faults)
    if of_place:
        yield from _numbers_swapped(plan, faults)
        yield from _place_swapped(plan)
    if any(fault.code in _OF_STAGES for fault in faults):
        yield from _stages_forgotten(plan, faults)
    if of_place:
        yield from _counted_from_one(plan, faults)


# F(rank, m) for F(m, rank)


def _numbers_swapped(plan: Plan, faults: Sequence[Fault]) -> Iterator[Mistake]:
    """Swap micro-batch and stage of every action, then only of the actions that are then right on their rank."""
    shown = [fault for fault in faults if fault.code in ("out-of-range", "wrong-rank")]
    shown = [fault for fault in shown if _right_if_swapped(plan, fault.rank, fault.action)]
    if shown:
        places = {(fault.rank, fault.position) for fault in shown}
        fault = _swap_fault(shown)
        yield Mistake(fault, _rewritten(plan, lambda _, action: _swapped(action)), _OF_PLACE)
        yield Mistake(fault, _rewritten(plan, lambda at, each: _swapped(each) if at in places else each), _OF_PLACE)


def _names_both(action: object) -> TypeGuard[Action]:
    return (
        isinstance(action, Action) and action.kind in PER_MICROBATCH and None not in (action.microbatch, action.stage)
    )


def _swapped(action: Action) -> Action:
    return Action(action.kind, action.stage, action.microbatch) if _names_both(action) else action


def _right_if_swapped(plan: Plan, rank: int | None, action: object) -> bool:
    """Return whether an action with its numbers swapped would be right on its rank, and is not there yet."""
    if not (_names_both(action) and within(action.stage, plan.microbatches) and within(action.microbatch, plan.stages)):
        return False
    meant, bound = _swapped(action), plan.bound
    code = bound.codes.code(meant)
    if bound.rank_of_slot[bound.codes.slot[code]] not in (rank, NO_RANK) or bound.rank_of[code] == rank:
        return False
    instead = {kind for value in meant.traits.gives for kind in GIVERS[value]} - {meant.kind}
    return all(bound.rank_of[bound.codes.code(replace(meant, kind=kind))] == NO_RANK for kind in instead)


def _swap_fault(shown: Sequence[Fault]) -> Fault:
    """Return the first of the faults that a swap explains; its message says where the others are."""
    first = shown[0]
    assert isinstance(first.action, Action)
    message = first.message
    if len(shown) > 1:
        kinds = {fault.action.kind for fault in shown if isinstance(fault.action, Action)}
        ranks = sorted({fault.rank for fault in shown if fault.rank is not None})
        message = (
            f"on rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}, micro-batch and stage of "
            f"{' and '.join(sorted(kinds, key=PER_MICROBATCH.index))} are swapped; the first: {message}"
        )
    meant = _swapped(first.action)
    hint = (
        f"it is {meant.kind}(microbatch, stage): did you swap them? "
        f"{meant.kind}({meant.microbatch}, {meant.stage}), in text {meant}, is right on rank {first.rank}"
    )
    return replace(first, message=message, hint=hint)


# place(stage, microbatch) for place(microbatch, stage)


def _place_swapped(plan: Plan) -> Iterator[Mistake]:
    """Call `place` with its two arguments swapped."""
    place = plan.place
    where = None if place is None else line_of_function(place)
    if place is None or where is None:  # there is none, or it is pipelab's
        return

    def meant(microbatch: int, stage: int) -> int:
        return place(stage, microbatch)

    if ask(meant, plan.stages, plan.microbatches, plan.ranks)[1] is None:
        message = f"the two parameters of place are swapped: pipelab calls place(microbatch, stage)\n  at {where}"
        hint = f"write def place({'self, ' * hasattr(place, '__self__')}microbatch, stage)"
        fault = Fault("wrong-rank", None, None, None, message, hint)
        yield Mistake(
            fault, Plan(plan.written, plan.stages, plan.microbatches, meant, plan.name, plan.after), _OF_PLACE
        )


# No stages_per_rank in the class


def _stages_forgotten(plan: Plan, faults: Sequence[Fault]) -> Iterator[Mistake]:
    """Ask the schedule for its plan with several stages per rank, if its class does not set their number."""
    schedule: Any = getattr(plan.place, "__self__", None)
    if getattr(type(schedule), "stages_per_rank", None) != 1 or schedule.stages_per_rank != 1:
        return
    if plan.ranks * plan.microbatches > _MOST_SLOTS:
        return
    many = f"that causes {len(faults)} faults; the first:" if len(faults) > 1 else "so"
    message = f"{type(schedule).__name__} has one stage on each of {plan.ranks} ranks, and {many} {faults[0].message}"
    for per_rank in _TRIED_PER_RANK:
        meant = _drafted(schedule, per_rank)
        if meant is not None and not meant.bound.faults and not meant.bound.misplaced:
            hint = f"write stages_per_rank = {per_rank} in the class: stages 0 to {meant.stages - 1}"
            yield Mistake(replace(faults[0], message=message, hint=hint), meant, _ALL_BUT_THE_CAP)


def _drafted(schedule: Any, stages_per_rank: int) -> Plan | None:
    """Return a schedule's plan with another number of stages per rank, if it can write one."""
    try:
        other = copy.copy(schedule)
        other.stages_per_rank = stages_per_rank
        plan = other.draft()
    except Exception:  # noqa: BLE001 - a student's code: whatever it raises, this is not what was meant
        return None
    return plan if isinstance(plan, Plan) else None


# range(1, M + 1) for range(M)


def _counted_from_one(plan: Plan, faults: Sequence[Fault]) -> Iterator[Mistake]:
    """Lower every micro-batch by one, then every stage."""
    numbers = (("microbatch", "micro-batches", plan.microbatches), ("stage", "stages", plan.stages))
    for field, what, limit in numbers:
        late = (fault for fault in faults if fault.code == "out-of-range" and isinstance(fault.action, Action))
        first = next((fault for fault in late if getattr(fault.action, field) == limit), None)
        if first is not None:
            message = f"{what} are counted from 1 here, but pipelab counts from 0: {first.message}"
            hint = f"count from 0: range({limit}), not range(1, {limit + 1})"
            meant = _rewritten(plan, lambda _, action, field=field: _lowered(action, field))  # type: ignore[misc]
            yield Mistake(replace(first, message=message, hint=hint), meant, (*_OF_PLACE, "missing"))


def _lowered(action: Action, field: str) -> Action:
    number = getattr(action, field)
    return replace(action, **{field: number - 1}) if type(number) is int else action  # type: ignore[arg-type]


def _rewritten(plan: Plan, change: Callable[[tuple[int, int], Action], Action]) -> Plan:
    """Return the plan with every action changed: `change((rank, position), action)`."""

    def other(at: tuple[int, int], item: object) -> object:
        if isinstance(item, Pair):
            return Pair(change(at, item.forward), change(at, item.backward))
        return change(at, item) if isinstance(item, Action) else item

    rows = [[other((rank, at), item) for at, item in enumerate(row)] for rank, row in enumerate(plan.written)]
    return plan.with_rows(rows)


# ── What a rank holds beside computing ────────────────────────────────────────────────────────────────────────────────

# Every use has its weights gathered, and its activation there.
#
# rank 0 | UNSHARD F0 RESHARD … UNSHARD B0 RESHARD      one gather before each use, and a free after the last one
# rank 0 | F0 OFFLOAD0 … LOAD0 B0                       what was taken away is back before its backward


def residency(bound: BoundPlan, gather_cap: int | Sequence[int] | None = None) -> list[Fault]:
    """Find moves that cannot be, and actions whose weights or activation are not there."""
    moves = [move for move in bound.moves if not move.action.traits.computes]
    caps = [len(moves)] * len(bound.lists)
    if gather_cap is not None:
        caps = require_caps(gather_cap, len(bound.lists), "gather_cap")
    sharded = {move.action.stage for move in moves if move.action.microbatch is None}
    ranks = range(len(bound.lists)) if sharded else dict.fromkeys(move.rank for move in moves)
    return [fault for rank in ranks for fault in _of_rank(bound, rank, sharded, caps[rank])]


def _of_rank(bound: BoundPlan, rank: int, sharded: set[int | None], cap: int) -> Iterator[Fault]:
    holding, places = _Holding(bound, rank, sharded, cap), bound.placed(rank)
    for code in bound.lists[rank]:
        follow = holding.ran if bound.computes(code) else holding.moved
        yield from follow(code, bound.codes.action(code), places[code])
    for stage, position in holding.gathered.items():
        hint = f"yield {_free(stage)} after the stage's last action"
        yield holding.fault(position, Action("UNSHARD", None, stage), "gathers weights that nothing frees", hint)


def _free(stage: int) -> str:
    return written(Action("RESHARD", None, stage))


class _Holding:
    """What a rank holds while it goes along its row.

    Attributes:
        gathered: by stage, the position since which its weights are gathered.
    """

    def __init__(self, bound: BoundPlan, rank: int, sharded: set[int | None], cap: int) -> None:
        self.bound, self.rank, self.sharded, self.cap = bound, rank, sharded, cap
        self.gathered: dict[int, int] = {}
        self._freed: dict[int, int] = {}  # by stage, the position
        self._reported: set[int] = set()  # stages whose lack of weights is reported already
        self._kept: dict[tuple[int, int], int | None] = {}  # by activation: since when away, or None if here

    def fault(self, position: int, action: Action, message: str, hint: str) -> Fault:
        message = f"{action} on rank {self.rank}, position {position} {message}"
        return Fault("residency", self.rank, position, action, message, hint)

    def moved(self, code: int, action: Action, position: int) -> Iterator[Fault]:
        """Follow a move; yield its faults."""
        if self.bound.codes.collective[code]:
            return
        follow = {"gathered": self._gathered, "activations": self._carried}
        traits = action.traits
        yield from follow[traits.holds or traits.releases](code, action, position)

    def _gathered(self, code: int, action: Action, position: int) -> Iterator[Fault]:
        stage, remove = self.bound.codes.stage[code], f"remove {written(action)}"
        if action.traits.releases:
            if stage not in self.gathered:
                yield self.fault(position, action, f"frees stage {stage}, which is not gathered", remove)
            self._freed[stage] = position
            self.gathered.pop(stage, None)
        elif stage not in self.bound.stages_of.get(self.rank, ()):
            yield self.fault(position, action, f"gathers a stage that rank {self.rank} does not hold", remove)
        elif stage in self.gathered:
            twice = f"gathers stage {stage}, which is gathered since position {self.gathered[stage]}"
            hint = f"{remove}, or free the stage before it with {_free(stage)}"
            yield self.fault(position, action, f"{twice}: one gather before each use", hint)
        else:
            self.gathered[stage] = position
            self._reported.discard(stage)
            if len(self.gathered) > self.cap:
                held = ", ".join(map(str, self.gathered))
                message = f"makes rank {self.rank} hold the weights of stages {held} (cap {self.cap})"
                hint = f"free a stage before it, such as with {_free(next(iter(self.gathered)))}"
                yield self.fault(position, action, message, hint)

    def _carried(self, code: int, action: Action, position: int) -> Iterator[Fault]:
        what, takes = self.bound.what(code), bool(action.traits.releases)
        away = self._kept.get(what)
        if what in self._kept and (away is None) == takes:
            self._kept[what] = position if takes else None
            return
        where = "is here" if away is None else f"is away since position {away}"
        why = where if what in self._kept else "the rank does not keep: it comes between F and B"
        verb = "takes away" if takes else "brings back"
        yield self.fault(position, action, f"{verb} an activation that {why}", f"remove {written(action)}")

    def ran(self, code: int, action: Action, position: int) -> Iterator[Fault]:
        """Follow an action that computes; yield its faults."""
        codes = self.bound.codes
        stage, what = codes.stage[code], self.bound.what(code)
        if codes.collective[code]:
            return
        if stage in self.sharded and stage not in self.gathered and stage not in self._reported:
            cause = f"freed at position {self._freed[stage]}" if stage in self._freed else "not gathered"
            hint = f"yield {written(Action('UNSHARD', None, stage))} before it: one gather before each use"
            yield self.fault(position, action, f"needs the weights of stage {stage}, which are {cause}", hint)
            self._reported.add(stage)
        if codes.holds[code]:
            self._kept[what] = None
        elif action.traits.releases == "activations" and (since := self._kept.pop(what, None)) is not None:
            message = f"needs the activation that was taken away at position {since}"
            load = written(Action("LOAD", action.microbatch, stage))
            yield self.fault(position, action, message, f"yield {load} before it")
