"""Check that a plan holds every action exactly once and on its rank; `check` does this before it looks at the order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial

from pipelab.checking.repair import as_yielded
from pipelab.plan.actions import HALVES, PER_MICROBATCH, TRAITS, Action, Kind
from pipelab.plan.binding import NO_RANK, written
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
    needed = _NEEDED[: 1 if bound.codes.forwards_only else None]
    return set(absent.values()) <= {0, every} and all(given.count(value) == 1 for value in needed)


def misplaced(bound: BoundPlan) -> list[Fault]:
    """Find actions that are on another rank than the placement says."""
    faults = list(_misplaced_reduces(bound))
    if not bound.misplaced:
        return faults
    codes = bound.codes
    verb = "is placed on" if bound.names_ranks else "went forward on"
    for rank, row in enumerate(bound.computing):
        for index, code in enumerate(row):
            right = rank if codes.collective[code] else bound.rank_of_slot[codes.slot[code]]
            if right not in (rank, NO_RANK):
                action = codes.action(code)
                what = f"micro-batch {action.microbatch} of stage {action.stage}"
                message = f"{action} is on rank {rank}, but {what} {verb} rank {right}"
                hint = f"move {action} to rank {right}, or override place(microbatch, stage)"
                faults.append(Fault("wrong-rank", rank, bound.position(rank, index), action, message, hint))
    return faults


def _listed_reduces(bound: BoundPlan) -> Iterator[tuple[Action, tuple[int, ...], set[int]]]:
    """Yield each all-reduce, the ranks that hold its stage, and the ranks that list it."""
    replicas = bound.replicas if bound.reduces else {}
    for code, listers in bound.reduces.items():
        yield bound.codes.action(code), replicas[bound.codes.stage[code]], set(listers)


def _misplaced_reduces(bound: BoundPlan) -> Iterator[Fault]:
    """Find all-reduces on ranks that do not hold the stage."""
    index_of = cache(bound.index_of)
    for action, group, listers in _listed_reduces(bound):
        for rank in sorted(listers.difference(group)) if group else ():
            position = bound.position(rank, index_of(rank)[bound.codes.code(action)])
            holders = f"ranks {ranges(group)} do" if len(group) > 1 else f"rank {ranges(group)} does"
            message = f"{action} is on rank {rank}, which does not hold stage {action.stage}: {holders}"
            yield Fault("wrong-rank", rank, position, action, message, f"remove {action} from rank {rank}")


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
            if TRAITS[kind].forward or not codes.forwards_only:
                lacking[codes.stage[slot], kind].append(codes.microbatch[slot])
        values.update(codes.of_value(value)[slot] for value in absent)
        if twice:
            both.append(_repeated_backward(bound, codes.of_kind[twice][slot], index_of))
    name = cache(partial(as_yielded, bound))  # one look at the rank's row, not one for each fault
    halved = _halved(bound) if lacking else ()
    alone = bool(lacking) and all(TRAITS[kind].forward for kind in bound.kinds)
    alone = alone and not any(TRAITS[kind].forward for _, kind in lacking)
    faults = [
        _missing_fault(bound, *which, each, name, which[0] in halved, alone) for which, each in sorted(lacking.items())
    ]
    return [*both, *faults, *_missing_reduces(bound)], values


@cache
def _wrong(listed: tuple[bool, ...]) -> tuple[list[Kind], list[str], Kind | None]:
    """Return what a slot lacks, as kinds and as values, and which kind repeats another; by which kinds it has."""
    there = [kind for kind, has in zip(_REQUIRED, listed, strict=True) if has]
    givers = {value: [kind for kind in there if kind in GIVERS[value]] for value in _NEEDED}
    absent = [value for value in _NEEDED if not givers[value]]
    at = _NEEDED[0] in absent
    lacks = [kind for kind in _REQUIRED if TRAITS[kind].gives in (tuple(absent[:at]), tuple(absent[at:]))]
    return lacks, absent, next((kinds[1] for kinds in givers.values() if len(kinds) > 1), None)


def _missing_reduces(bound: BoundPlan) -> Iterator[Fault]:
    """Find all-reduces that some ranks of the group list and others do not."""
    for action, group, listers in _listed_reduces(bound):
        inside = listers.intersection(group)
        for rank in sorted(set(group) - inside) if inside else ():
            message = f"{action} is on rank {min(inside)} but not on rank {rank}, which holds stage {action.stage} too"
            hint = f"on rank {rank}, yield {written(action)} after the stage's last gradient; or on no rank"
            yield Fault("missing", rank, None, None, message, hint, lacking=((rank, action),))


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
    halved: bool,
    alone: bool,
) -> Fault:
    codes, lacked = bound.codes, bound.codes.table[lacks]
    rank_of = {m: bound.rank_of_slot[codes.slot[lacked[m][stage]]] for m in microbatches}
    known = sorted({*rank_of.values()} - {NO_RANK})
    first, many = next(iter(known), None), len(microbatches) > 1
    kinds = HALVES if len(TRAITS[lacks].gives) > 1 and halved else (lacks,)
    what = TRAITS[lacks].word + f" ({lacks})" * (lacks in HALVES)
    lacking = f"micro-batches {ranges(microbatches)} have" if many else f"micro-batch {microbatches[0]} has"
    message = f"{lacking} no {what} on stage {stage}" + f" (rank{'s' * (len(known) > 1)} {ranges(known)})" * bool(known)
    actions = " and ".join(name(first)(codes.table[kind][microbatches[0]][stage]) for kind in kinds)
    more = f"{',' * (len(kinds) - 1)} and so on" * many
    hint = f"on rank {first}, " * bool(known) + f"yield {actions}{more}"
    if alone:
        hint += "; or, for evaluation, use its .forwards()"
    absent = tuple(
        (rank_of[m] if rank_of[m] != NO_RANK else None, codes.action(codes.table[kind][m][stage]))
        for m in microbatches[:_MOST_KEPT]
        for kind in kinds
    )
    return Fault("missing", first, None, None, message, hint, lacking=absent)


def _halved(bound: BoundPlan) -> set[int]:
    """Return the stages whose backwards are all in halves; of a stage without any, all others decide."""
    codes, rank_of = bound.codes, bound.rank_of
    stages: dict[bool, set[int]] = {False: set(), True: set()}
    for kind in {kind for value in _NEEDED[1:] for kind in GIVERS[value]}:
        listed = (code for code in codes.of_kind[kind] if rank_of[code] != NO_RANK)
        stages[kind in HALVES] |= {codes.stage[code] for code in listed}
    halved, whole = stages[True], stages[False]
    return halved - whole if whole or not halved else set(range(codes.stages))
