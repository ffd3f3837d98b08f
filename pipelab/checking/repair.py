"""Moves of actions within rows: what they make of the rows, and how they are said in few words."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from operator import itemgetter

from pipelab.plan.bound import BoundPlan
from pipelab.plan.fault import ranges
from pipelab.plan.order import absent, at_start, traverse

__all__ = ["Block", "Knot", "as_yielded", "merged", "parts_of", "repair", "rows_after", "told"]

_MOST_PARTS = 3
"""How many moves, or rows of moves alike, a hint names."""
_MOST_RANKS = 2
"""On how many ranks."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some actions that a rank should yield before another one."""

    rank: int
    moved: tuple[int, ...]
    before: int


def rows_after(bound: BoundPlan, blocks: Iterable[Block]) -> list[list[int]]:
    """Return the rows with the blocks moved."""
    before: dict[int, tuple[int, ...]] = {}
    for block in blocks:
        before[block.before] = (*before.get(block.before, ()), *block.moved)
    moved = {code for codes in before.values() for code in codes}
    if not moved:
        return bound.rows
    return [[each for code in row if code not in moved for each in (*before.get(code, ()), code)] for row in bound.rows]


def merged(blocks: Iterable[Block], rank: int) -> Block:
    """Return one rank's blocks as one, at the place of the first."""
    mine = [block for block in blocks if block.rank == rank]
    return Block(rank, tuple(code for block in mine for code in block.moved), mine[0].before)


def told(parts: list[tuple[int, str]]) -> str:
    """Return moves in words; nothing where they are too many to be read."""
    if len(parts) > _MOST_PARTS or len({rank for rank, _ in parts}) > _MOST_RANKS:
        return ""
    if len(parts) == 1:
        ((rank, text),) = parts
        return f"yield {text} on rank {rank}"
    by_rank = groupby(parts, key=itemgetter(0))
    return "; ".join(f"on rank {rank}, yield {', '.join(text for _, text in group)}" for rank, group in by_rank)


def parts_of(bound: BoundPlan, blocks: Sequence[Block]) -> list[tuple[int, str]]:
    """Return (rank, words) for each block, or for many blocks in a row that differ by a steady step."""
    names = {rank: as_yielded(bound, rank) for rank in {block.rank for block in blocks}}
    steps = [_step(bound, *pair) for pair in pairwise(blocks)] + [None]
    parts: list[tuple[int, str]] = []
    first = 0
    while first < len(blocks):
        last = first
        while steps[last] is not None and steps[last] == steps[first]:
            last += 1
        alike = blocks[first : last + 1] if last - first >= 2 else blocks[first : first + 1]
        one, *more = (_words(bound, block, names[block.rank]) for block in (*alike[:2], *alike[2:][-1:]))
        parts.append((alike[0].rank, f"{one}, {more[0]}, and so on to {more[1]}" if more else one))
        first += len(alike)
    return parts


def _step(bound: BoundPlan, one: Block, other: Block) -> int | None:
    """Return by how many micro-batches one block is another further on; `None` if it is not."""
    if one.rank != other.rank or len(one.moved) != len(other.moved):
        return None
    pairs = zip((*one.moved, one.before), (*other.moved, other.before), strict=True)
    steps = {_further(bound, *pair) for pair in pairs}
    return steps.pop() if len(steps) == 1 else None


def _further(bound: BoundPlan, one: int, other: int) -> int | None:
    """Return by how many micro-batches an action is another of its kind and stage further on; `None` if it is not."""
    a, b = bound.codes.action(one), bound.codes.action(other)
    if (a.kind, a.stage) != (b.kind, b.stage) or a.microbatch is None or b.microbatch is None:
        return None
    return b.microbatch - a.microbatch


def _words(bound: BoundPlan, block: Block, name: Callable[[int], str]) -> str:
    """Return `F(1) to F(7) before B(0)`."""
    runs: list[list[int]] = []
    for code in block.moved:
        if runs and _further(bound, runs[-1][-1], code) == 1:
            runs[-1].append(code)
        else:
            runs.append([code])
    words: list[str] = []
    for run in runs:
        words.extend([f"{name(run[0])} to {name(run[-1])}"] if len(run) > 2 else map(name, run))
    *most, last = words
    return f"{' and '.join([', '.join(most)] * bool(most) + [last])} before {name(block.before)}"


def as_yielded(bound: BoundPlan, rank: int | None) -> Callable[[int], str]:
    """Return how a schedule would write an action on this rank: the stage only where it is needed."""
    codes = bound.codes
    stages = {stage for stage, ranks in bound.replicas.items() if rank in ranks}
    if rank is not None:
        stages |= {codes.stage[code] for code in bound.rows[rank]}

    def write(code: int) -> str:
        action = codes.action(code)
        stage = f", stage={action.stage}" if len(stages) != 1 else ""
        if action.microbatch is None:
            return f"R({stage.removeprefix(', ')})"
        return f"{action.kind}({action.microbatch}{stage})"

    return write


_TRIAL_ACTIONS = 200_000
"""How many actions may be walked over in search of one move, and as many again in search of a new order."""
_MOST_MOVES = 2_000
"""How many actions a new order may bring forward."""
_LONGEST_ROW = 24
"""How many actions a row may have to be told in full."""


@dataclass(frozen=True, slots=True)
class Knot:
    """A rank of the cycle: at `index` it is stuck at `stuck`, and another rank waits for `wanted`, later in its row."""

    rank: int
    index: int
    stuck: int
    wanted: int


@dataclass(slots=True)
class _Trials:
    """Walks through a plan with other rows, counted."""

    bound: BoundPlan
    given: Collection[int]
    excused: Collection[int]
    walked: int = 0
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(map(len, self.bound.rows))

    def stuck(self, rows: list[list[int]]) -> int:
        """Return how many ranks are stuck with these rows."""
        self.walked += self.size
        trial = replace(self.bound, rows=rows, pairs=set(), faults=[], walk=None)
        return len(traverse(trial, given=self.given, excused=self.excused).stuck)

    def spent(self, budget: int) -> bool:
        """Return whether another walk would be too much."""
        return self.walked + self.size > budget


def repair(bound: BoundPlan, knots: Sequence[Knot], given: Collection[int], excused: Collection[int]) -> str:
    """Return the moves that let a plan with a deadlock run: tried out, not guessed.

    One moved action is best; else a new order of as few ranks as can be; else the move that frees most ranks.

    Args:
        bound: the plan, bound.
        knots: the ranks of the cycle.
        given: values that count as there from the start.
        excused: codes that need not wait for anything.
    """
    bound, knots = _as_written(bound, knots)
    trials = _Trials(bound, given, excused)
    left, move = _one_move(trials, knots)
    if left == 0:
        return move
    trials.walked = 0
    return _new_order(trials, [knot.rank for knot in knots]) or f"{move}, then check again"


def _as_written(bound: BoundPlan, knots: Sequence[Knot]) -> tuple[BoundPlan, Sequence[Knot]]:
    """Leave out the all-reduces that nobody wrote: they follow whatever order the gradients take."""
    if not bound.automatic:
        return bound, knots
    rows = [[code for code in row if code not in bound.automatic] for row in bound.rows]
    listed = {code: ranks for code, ranks in bound.reduces.items() if code not in bound.automatic}
    moved = [replace(knot, index=rows[knot.rank].index(knot.stuck)) for knot in knots]
    return replace(bound, rows=rows, reduces=listed, automatic=set(), walk=None), moved


def _one_move(trials: _Trials, knots: Sequence[Knot]) -> tuple[int, str]:
    """Return the move that leaves fewest ranks stuck, and how many: what is stuck and what is wanted may pass."""
    bound = trials.bound
    best = (len(bound.rows) + 1, "give one rank of the cycle another order")
    for knot in knots:
        row, name = bound.rows[knot.rank], as_yielded(bound, knot.rank)
        without_wanted = [code for code in row if code != knot.wanted]
        without_stuck = [code for code in row if code != knot.stuck]
        after = without_stuck.index(knot.wanted) + 1
        for changed, move in (
            (
                [*without_wanted[: knot.index], knot.wanted, *without_wanted[knot.index :]],
                f"yield {name(knot.wanted)} before {name(knot.stuck)} on rank {knot.rank}",
            ),
            (
                [*without_stuck[:after], knot.stuck, *without_stuck[after:]],
                f"yield {name(knot.stuck)} after {name(knot.wanted)} on rank {knot.rank}",
            ),
        ):
            if best[0] <= len(bound.rows) and trials.spent(_TRIAL_ACTIONS):
                return best
            left = trials.stuck([*bound.rows[: knot.rank], changed, *bound.rows[knot.rank + 1 :]])
            if left == 0:
                return left, move
            if not _waits_for_itself(bound, changed, trials.excused):
                best = min(best, (left, move), key=itemgetter(0))
    return best


def _waits_for_itself(bound: BoundPlan, row: Sequence[int], excused: Collection[int]) -> bool:
    """Return whether something stands before what it needs of the same row, beside what is known to."""
    codes = bound.codes
    later = set(row)
    for code in row:
        later.discard(code)
        needs = () if code in excused else codes.needs(code)
        if any(giver in later for value in needs for giver in codes.givers(value)):
            return True
    return False


def _new_order(trials: _Trials, cycle: Sequence[int]) -> str:
    """Return a new order for some ranks with which the whole plan runs, in words; nothing where none was found."""
    bound = trials.bound
    if bound.reduces:  # an all-reduce binds several rows at once
        return ""
    blocks, runs = _reordered(trials, cycle)
    if not runs:
        blocks, runs = _reordered(trials, range(len(bound.rows)))
    ranks = sorted({block.rank for block in blocks})
    if not runs:
        return _forwards_first(trials, ranks)
    orders = [blocks]
    for rank in dict.fromkeys([*ranks, *cycle]) if len(ranks) > 1 else ():
        if not trials.spent(_TRIAL_ACTIONS):
            alone, runs = _reordered(trials, [rank])
            orders += [alone] if runs else []
    orders.sort(key=lambda order: (len({block.rank for block in order}), len(parts_of(bound, order))))
    return next(filter(None, (words for order in orders for words in _in_words(trials, order))), "")


def _in_words(trials: _Trials, blocks: list[Block]) -> Iterable[str]:
    """Yield an order in words, if they are few, then orders like it that take fewer, if they run too."""
    bound = trials.bound
    yield told(parts_of(bound, blocks))
    ranks = sorted({block.rank for block in blocks})
    together = [merged(blocks, rank) for rank in ranks]
    if trials.stuck(rows_after(bound, together)) == 0:
        yield told(parts_of(bound, together))
    yield _forwards_first(trials, ranks)
    if len(ranks) == 1 and len(bound.rows[ranks[0]]) <= _LONGEST_ROW:
        name = as_yielded(bound, ranks[0])
        yield f"on rank {ranks[0]}, yield {' '.join(map(name, rows_after(bound, blocks)[ranks[0]]))}"


def _forwards_first(trials: _Trials, ranks: Sequence[int]) -> str:
    """Return the order that has all forwards first on some ranks, in words, if the plan then runs."""
    kind = trials.bound.codes.kind
    rows = [
        sorted(row, key=lambda code: kind[code] != "F") if rank in ranks else row
        for rank, row in enumerate(trials.bound.rows)
    ]
    if trials.stuck(rows):
        return ""
    return f"on rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}, yield all forwards before the first backward"


def _reordered(trials: _Trials, free: Collection[int]) -> tuple[list[Block], bool]:
    """Return what the free ranks must bring forward so that all ranks finish, and whether they do then.

    Everybody runs in the order of their rows. When nobody can move, a free rank runs, before what it is stuck at, what
    another rank waits for: so only what must move does.
    """
    trials.walked += trials.size
    walk = _FreeWalk(trials)
    moves: list[tuple[int, int, int]] = []
    walk.run(range(len(trials.bound.rows)))
    while walk.waits_for and len(moves) < _MOST_MOVES and (code := walk.wanted(free)) is not None:
        rank = trials.bound.rank_of[code]
        moves.append((rank, trials.bound.rows[rank][walk.at[rank]], code))
        walk.early.add(code)
        walk.run(walk.give(code))
    blocks = [
        Block(rank, tuple(code for *_, code in group), before)
        for (rank, before), group in groupby(sorted(moves, key=itemgetter(0)), key=itemgetter(0, 1))
    ]
    return blocks, not walk.waits_for


class _FreeWalk:
    """A walk that can be stopped and helped."""

    def __init__(self, trials: _Trials) -> None:
        self.bound = trials.bound
        self.excused = trials.excused
        self.there = at_start(self.bound, trials.given)
        self.at = [0] * len(self.bound.rows)
        self.early: set[int] = set()  # what has run before its turn
        self.waits_for: dict[int, int] = {}  # by rank: the value that it is stuck for
        self.waiting: dict[int, list[int]] = {}  # by value: the ranks that are stuck for it

    def run(self, awake: Iterable[int]) -> None:
        """Run everybody in the order of their rows, until nobody can move."""
        queue = list(awake)
        while queue:
            rank = queue.pop()
            self.waits_for.pop(rank, None)
            row = self.bound.rows[rank]
            while self.at[rank] < len(row):
                code = row[self.at[rank]]
                if code not in self.early:
                    need = absent(self.bound, code, self.there)
                    if not self.there[need] and code not in self.excused:
                        self.waits_for[rank] = need
                        self.waiting.setdefault(need, []).append(rank)
                        break
                    queue += self.give(code)
                self.at[rank] += 1

    def give(self, code: int) -> list[int]:
        """Note that an action has run; return the ranks that waited for it."""
        value = self.bound.codes.gives[code]
        self.there[value] = 1
        return self.waiting.pop(value, [])

    def wanted(self, free: Collection[int]) -> int | None:
        """Return an action of a free rank that could run at once and that a stuck rank waits for: a forward, if any."""
        kind, giver = self.bound.codes.kind, self.bound.giver
        backward = None
        for rank in sorted(self.waits_for, key=lambda rank: (kind[giver(self.waits_for[rank])] != "F", rank)):
            code = self._source(rank, free)
            if code is not None and kind[code] == "F":
                return code
            backward = backward or code
        return backward

    def _source(self, rank: int, free: Collection[int]) -> int | None:
        """Follow what a rank waits for back to an action of a free rank that could run at once."""
        need = self.waits_for[rank]
        while True:
            code = self.bound.giver(need)
            if self.bound.rank_of[code] not in free:
                return None
            need = absent(self.bound, code, self.there)
            if self.there[need] or code in self.excused:
                return code
