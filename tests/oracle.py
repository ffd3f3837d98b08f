"""An independent oracle: what a legal plan is, written from the design's table and nothing else.

It knows `Action` and `Pair` as records and uses no other part of pipelab, so that a mistake in pipelab's numbering,
walking or checking cannot hide in the tests.

    F(m,s) needs out(m,s-1)              gives out(m,s)
    C(m,s) needs out(m,s)                gives again(m,s), which then I(m,s) and B(m,s) need
    I(m,s) needs out(m,s), gin(m,s+1)    gives gin(m,s)
    W(m,s) needs gin(m,s)                gives gw(m,s)
    B(m,s) needs what I needs            gives gin(m,s), gw(m,s)
    R(s)   needs every gw(m,s)           on all ranks of s at once
    U(m,s) needs gw(e,s) for each e up to m, and weights(e,s) of each U(e,s) before it; gives weights(m,s)

With slices, for each e that after(m,s) names, F(m,s) also needs out(e,s), and I(e,s) and B(e,s) need gin(m,s).

Moves only change what their rank holds: see `resident`.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product

from pipelab import Action, Pair

Value = tuple[str, int, int]

MOVES = ("UNSHARD", "RESHARD", "OFFLOAD", "LOAD")


def needs(action: Action, stages: int, microbatches: int, after=None, again=frozenset()) -> set[Value]:
    """Return the values an action waits for; `again` are those that recomputations and updates give."""
    kind, m, s = action.kind, action.microbatch, action.stage
    if after is not None and kind == "F":
        return needs(action, stages, microbatches, again=again) | {("out", earlier, s) for earlier in after(m, s)}
    if after is not None and kind in "BI":
        later = {("gin", other, s) for other in range(microbatches) if m in after(other, s)}
        return needs(action, stages, microbatches, again=again) | later
    if kind == "R":
        return {("gw", each, s) for each in range(microbatches)}
    if kind == "U":
        return {("gw", each, s) for each in range(m + 1)} | {("weights", each, s) for each in range(m)} & again
    if kind == "W":
        return {("gin", m, s)}
    if kind == "F":
        return {("out", m, s - 1)} if s else set()
    if kind == "C":
        return {("out", m, s)}
    return {("out", m, s)} | ({("gin", m, s + 1)} if s + 1 < stages else set()) | {("again", m, s)} & again


def gives(action: Action) -> set[Value]:
    """Return the values an action gives."""
    names = {"F": ["out"], "C": ["again"], "B": ["gin", "gw"], "I": ["gin"], "W": ["gw"], "R": [], "U": ["weights"]}[
        action.kind
    ]
    return {(name, action.microbatch, action.stage) for name in names}


def finishes(rows, stages, microbatches, group, after=None) -> bool:
    """Run the rows by brute force, whoever can move first; tell whether all of them finish."""
    done: set[Value] = set()
    again = {value for row in rows for action in row for value in gives(action) if value[0] in ("again", "weights")}
    left = [list(row) for row in rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(left):
            if not row or not needs(row[0], stages, microbatches, after, again) <= done:
                continue
            action = row[0]
            together = group[action.stage] if action.kind == "R" else {rank}
            if all(left[other] and left[other][0] == action for other in together):
                for other in together:
                    left[other].pop(0)
                done |= gives(action)
                moved = True
    return not any(left)


def legal(rows, stages, microbatches, place=None, after=None) -> bool:
    """Tell whether a plan is right: everything once, on its rank, and in an order that finishes."""
    flat = [[half for item in row for half in halves(item)] for row in rows]
    bound = [[_bind(item, rank, stages, microbatches, place) for item in row] for rank, row in enumerate(flat)]
    if any(action is None for row in bound for action in row):
        return False
    found: dict[tuple[int | None, int], list[tuple[str, int]]] = defaultdict(list)  # (m, s) -> kinds and their ranks
    computing = [[action for action in row if action.kind not in MOVES] for row in bound]
    for rank, row in enumerate(computing):
        for action in row:
            found[action.microbatch, action.stage].append((action.kind, rank))
    group: dict[int, set[int]] = defaultdict(set)
    for m, s in product(range(microbatches), range(stages)):
        here = sorted(found[m, s])
        homes = {rank for _, rank in here} if place is None else {place(m, s)}
        kinds = "".join(kind for kind, _ in here)
        if len(homes) != 1 or kinds.replace("C", "", 1).replace("U", "", 1) not in ("BF", "FIW"):
            return False
        if {rank for _, rank in here} != homes:
            return False
        group[s] |= homes
    for s in range(stages):
        listers = sorted(rank for _, rank in found[None, s])
        if listers and listers != sorted(group[s]):
            return False
        if len(group[s]) > 1 and any(("U", rank) in found[m, s] for m in range(microbatches) for rank in group[s]):
            return False
    if after is not None:  # what earlier slices keep does not travel
        for m, s in product(range(microbatches), range(stages)):
            if any(earlier not in range(m) or place(earlier, s) != place(m, s) for earlier in after(m, s)):
                return False
    return finishes(computing, stages, microbatches, group, after) and resident(bound)


def resident(rows) -> bool:
    """Say by hand whether each rank has what it uses: by stage its weights, by micro-batch and stage its activation."""
    sharded = {each.stage for row in rows for each in row if each.kind in ("UNSHARD", "RESHARD")}
    again = {(each.microbatch, each.stage) for row in rows for each in row if each.kind == "C"}
    for row in rows:
        own = {each.stage for each in row if each.kind not in ("R", *MOVES)}
        weights, here, away = set(), set(), set()
        for each in row:
            key = (each.microbatch, each.stage)
            if each.kind == "UNSHARD":
                right = each.stage in own and each.stage not in weights
                weights.add(each.stage)
            elif each.kind == "RESHARD":
                right = each.stage in weights
                weights.discard(each.stage)
            elif each.kind == "OFFLOAD":
                right = key in here
                here.discard(key)
                away.add(key)
            elif each.kind == "LOAD":
                right = key in away
                away.discard(key)
                here.add(key)
            else:
                right = each.kind == "R" or each.stage in weights or each.stage not in sharded
                if each.kind == ("C" if key in again else "F"):
                    here.add(key)
                elif each.kind in "BI":
                    right &= key in here
                    here.discard(key)
            if not right:
                return False
        if weights:
            return False
    return True


def halves(item):
    """Return the one or two actions of an item."""
    return (item.forward, item.backward) if isinstance(item, Pair) else (item,)


def _bind(item, rank, stages, microbatches, place):
    """Return the action with its stage, or None if it can be no part of a legal plan."""
    whole = ("R", "UNSHARD", "RESHARD")
    if not isinstance(item, Action) or item.kind not in (*"FBIWCUR", *MOVES):
        return None
    if item.kind in whole:
        if item.microbatch is not None:
            return None
    elif type(item.microbatch) is not int or item.microbatch not in range(microbatches):
        return None
    stage = item.stage
    if stage is None:
        which = range(microbatches) if item.kind in whole else [item.microbatch]
        here = {s for m in which for s in range(stages) if place(m, s) == rank}
        if len(here) != 1:
            return None
        (stage,) = here
    if type(stage) is not int or stage not in range(stages):
        return None
    return Action(item.kind, item.microbatch, stage)


def clock(rows, stages, microbatches, *, lasts, lag=None, pair=None, after=None):
    """Run bound rows by brute force with a clock; return (rank, action, start, end) of each, or None where all wait.

    Args:
        rows: for each rank, its bound items.
        stages: how many stages there are.
        microbatches: how many micro-batches there are.
        lasts: how long an action takes.
        lag: how long a value travels to another rank.
        pair: how long an overlapped pair takes as one slot; if left out, its halves run one after the other.
        after: which micro-batches come before one on a stage.
    """
    left = [[(item,) if pair is None or not isinstance(item, Pair) else (item.forward, item.backward)
             for item in (row if pair is not None else [half for each in row for half in halves(each)])]
            for row in rows]  # fmt: skip
    again = {value for row in left for slot in row for value in gives(slot[0]) if value[0] == "again"}
    there: dict[Value, tuple[float, int]] = {}
    free = [0.0] * len(rows)
    spans = []
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(left):
            if not row:
                continue
            slot = row[0]
            wanted = set().union(*(needs(action, stages, microbatches, after, again) for action in slot))
            together = [rank]
            if slot[0].kind == "R":
                together = [other for other, others in enumerate(left) if slot in others]
            if not wanted <= there.keys() or not all(left[other][0] == slot for other in together):
                continue
            start = max(free[other] for other in together)
            if slot[0].kind != "R":
                for value in wanted:
                    time, giver = there[value]
                    start = max(start, time + (lag(value) if lag and giver != rank else 0))
            end = start + (pair(slot[0]) if len(slot) == 2 else lasts(slot[0]))
            for other in together:
                left[other].pop(0)
                free[other] = end
                spans += [(other, action, start, end) for action in slot]
            for action in slot:
                there |= dict.fromkeys(gives(action), (end, rank))
            moved = True
    return None if any(left) else spans
