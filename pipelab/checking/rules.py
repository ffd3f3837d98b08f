"""Check that a plan holds every action exactly once and on its rank; `check` does this before it looks at the order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial

from pipelab.checking.repair import as_yielded
from pipelab.plan.actions import HALVES, PER_MICROBATCH, TRAITS, Kind
from pipelab.plan.binding import NO_RANK
from pipelab.plan.bound import BoundPlan
from pipelab.plan.codes import GIVERS
from pipelab.plan.fault import Fault, ranges

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
    codes, lacked = bound.codes, bound.codes.table[lacks]
    rank_of = {m: bound.rank_of_slot[codes.slot[lacked[m][stage]]] for m in microbatches}
    known = sorted({*rank_of.values()} - {NO_RANK})
    first, many = next(iter(known), None), len(microbatches) > 1
    kinds = HALVES if len(TRAITS[lacks].gives) > 1 and is_split(stage) else (lacks,)
    what = TRAITS[lacks].word + f" ({lacks})" * (lacks in HALVES)
    lacking = f"micro-batches {ranges(microbatches)} have" if many else f"micro-batch {microbatches[0]} has"
    message = f"{lacking} no {what} on stage {stage}" + f" (rank{'s' * (len(known) > 1)} {ranges(known)})" * bool(known)
    actions = " and ".join(name(first)(codes.table[kind][microbatches[0]][stage]) for kind in kinds)
    more = f"{',' * (len(kinds) - 1)} and so on" * many
    hint = f"on rank {first}, " * bool(known) + f"yield {actions}{more}"
    absent = tuple(
        (rank_of[m] if rank_of[m] != NO_RANK else None, codes.action(codes.table[kind][m][stage]))
        for m in microbatches[:_MOST_KEPT]
        for kind in kinds
    )
    return Fault("missing", first, None, None, message, hint, lacking=absent)


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
