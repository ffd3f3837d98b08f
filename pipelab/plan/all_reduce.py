"""Insert the all-reduces that a plan leaves out.

A stage that is on several ranks needs an all-reduce `R` on each of them. If no rank lists it, pipelab inserts it:

    rank 0 | 0F0 0F1 0B0 0B1            rank 0 | 0F0 0F1 0B0 0B1 0R
    rank 1 | 1F0 1F1 1B0 1B1     ->     rank 1 | 1F0 1F1 1B0 1B1 1R
    rank 2 | 0F2 0F3 0B2 0B3            rank 2 | 0F2 0F3 0B2 0B3 0R
    rank 3 | 1F2 1F3 1B2 1B3            rank 3 | 1F2 1F3 1B2 1B3 1R
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipelab.plan.bound import BoundPlan
from pipelab.plan.codes import Codes
from pipelab.plan.order import traverse

Groups = Mapping[int, tuple[int, ...]]
"""For each all-reduce, by code, the ranks that hold its stage."""


def with_reduces(bound: BoundPlan, every_stage: bool = False) -> BoundPlan:
    """Return a plan in which every replicated stage has its all-reduce; or every stage, if the whole plan has replicas.

    Each goes right after the stage's last gradient on every rank that holds the stage. If that would be a deadlock, all
    go to the ends of the rows instead, from the last stage to the first, where they cannot cause one.

    An `R` that a rank lists stays in its place. A plan with faulty items, or of forwards, is returned unchanged.
    """
    codes = bound.codes
    one_rank_each = bound.route(0) * codes.microbatches
    if (bound.rank_of_slot == one_rank_each and not every_stage) or bound.faults or codes.forwards_only:
        return bound
    reduces = zip(codes.of_kind["R"], bound.replicas.values(), strict=True)
    replicated = {code: ranks for code, ranks in reduces if every_stage or len(ranks) > 1}
    groups = {code: ranks for code, ranks in replicated.items() if code not in bound.reduces}
    if not groups:
        return bound
    early = _inserted(bound, groups, late=False)
    # Pairs as one slot are the stricter way, in case `Cost(pair=...)` asks for it, if they can run so at all.
    atomic = not (bound.pairs and traverse(bound, atomic_pairs=True).stuck)
    return _inserted(bound, groups, late=True) if traverse(early, atomic_pairs=atomic).stuck else early


def _places(codes: Codes, row: list[int], reduces: list[int], *, late: bool) -> dict[int, int]:
    """Return, for each all-reduce, how many of a row's actions come before it: up to its stage's last `B` or `W`.

    If it is late, or the row has none, all that compute.
    """
    end = max((at + 1 for at, code in enumerate(row) if code < codes.first_move), default=0)
    last = {} if late else {codes.stage[code]: at + 1 for at, code in enumerate(row) if codes.releases[code]}
    return {code: last.get(codes.stage[code], end) for code in reduces}


def _inserted(bound: BoundPlan, groups: Groups, *, late: bool) -> BoundPlan:
    """Return a plan with the all-reduces of `groups`: see `_places`."""
    lists, places = [list(row) for row in bound.lists], list(bound.places)
    rank_of = list(bound.rank_of)
    for rank, row in enumerate(lists):
        reduces = [code for code, ranks in groups.items() if rank in ranks]
        if not reduces:
            continue
        known = bound.placed(rank)
        # From the back, so that earlier places stay right; of several at one place, the last stage's comes first.
        chosen = _places(bound.codes, row, reduces, late=late)
        for code in sorted(reduces, key=lambda code: (-chosen[code], code)):
            known[code] = known[row[chosen[code] - 1]] if chosen[code] else 0
            row.insert(chosen[code], code)
            rank_of[code] = rank
        places[rank] = known
    computing = [[code for code in row if bound.computes(code)] for row in lists] if bound.moves else lists
    return replace(
        bound,
        lists=lists,
        computing=computing,
        places=places,
        rank_of=rank_of,
        reduces=bound.reduces | {code: list(ranks) for code, ranks in groups.items()},
        automatic=set(groups),
    )
