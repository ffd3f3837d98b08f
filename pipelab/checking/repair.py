"""Find moves of actions within rows that let a plan with a deadlock run, and describe them in few words."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, takewhile
from operator import itemgetter
from typing import NamedTuple

from pipelab.plan.binding import written
from pipelab.plan.bound import BoundPlan
from pipelab.plan.fault import ranges
from pipelab.plan.order import absent, at_start, traverse

_MOST_PARTS = 3
"""How many moves, or sequences of similar moves, a hint names."""
_MOST_RANKS = 2
"""On how many ranks a hint names moves."""


@dataclass(frozen=True, slots=True)
class Shift:
    """Some actions that a rank should yield before another one."""

    rank: int
    moved: tuple[int, ...]
    before: int


def rows_after(bound: BoundPlan, moves: Iterable[Shift]) -> list[list[int]]:
    """Return the rows after the moves."""
    before: dict[int, tuple[int, ...]] = {}
    for move in moves:
        before[move.before] = (*before.get(move.before, ()), *move.moved)
    moved = {code for codes in before.values() for code in codes}
    if not moved:
        return bound.computing
    left = ([code for code in row if code not in moved] for row in bound.computing)
    return [[each for code in row for each in (*before.get(code, ()), code)] for row in left]


def describe(parts: list[tuple[int, str]]) -> str:
    """Return moves in words; nothing if they are too many to read."""
    if len(parts) > _MOST_PARTS or len({rank for rank, _ in parts}) > _MOST_RANKS:
        return ""
    if len(parts) == 1:
        ((rank, text),) = parts
        return f"yield {text} on rank {rank}"
    by_rank = groupby(parts, key=itemgetter(0))
    return "; ".join(f"on rank {rank}, yield {', '.join(text for _, text in group)}" for rank, group in by_rank)


def parts_of(bound: BoundPlan, moves: Sequence[Shift]) -> list[tuple[int, str]]:
    """Return (rank, words) for each move, or for a sequence of moves with equal steps between them."""
    names = {rank: as_yielded(bound, rank) for rank in {move.rank for move in moves}}
    parts: list[tuple[int, str]] = []
    while moves:
        count = _alike(bound, moves)
        shown = (*moves[:2], moves[count - 1]) if count > 1 else moves[:1]
        one, *more = (_words(bound, move, names[move.rank]) for move in shown)
        parts.append((moves[0].rank, f"{one}, {more[0]}, and so on to {more[1]}" if more else one))
        moves = moves[count:]
    return parts


def _alike(bound: BoundPlan, moves: Sequence[Shift]) -> int:
    """Return how many moves begin a sequence with equal steps between them: three or more, or one."""
    steps = (_step(bound, *pair) for pair in pairwise(moves))
    step = next(steps, None)
    if step is None:
        return 1
    count = 2 + sum(1 for _ in takewhile(lambda other: other == step, steps))
    return count if count > 2 else 1


def _step(bound: BoundPlan, one: Shift, other: Shift) -> int | None:
    """Return by how many micro-batches two moves differ; `None` if they differ in anything else."""
    if one.rank != other.rank or len(one.moved) != len(other.moved):
        return None
    pairs = zip((*one.moved, one.before), (*other.moved, other.before), strict=True)
    steps = {_further(bound, *pair) for pair in pairs}
    return steps.pop() if len(steps) == 1 else None


def _further(bound: BoundPlan, one: int, other: int) -> int | None:
    """Return by how many micro-batches two actions differ; `None` if they differ in kind or stage."""
    kind, stage, microbatch = bound.codes.kind, bound.codes.stage, bound.codes.microbatch
    alike = (kind[one], stage[one]) == (kind[other], stage[other])
    return microbatch[other] - microbatch[one] if alike else None


def _words(bound: BoundPlan, move: Shift, name: Callable[[int], str]) -> str:
    """Return `F(1) to F(7) before B(0)`."""
    runs: list[list[int]] = []
    for code in move.moved:
        if runs and _further(bound, runs[-1][-1], code) == 1:
            runs[-1].append(code)
        else:
            runs.append([code])
    words: list[str] = []
    for run in runs:
        words.extend([f"{name(run[0])} to {name(run[-1])}"] if len(run) > 2 else map(name, run))
    *most, last = words
    return f"{' and '.join([', '.join(most)] * bool(most) + [last])} before {name(move.before)}"


def as_yielded(bound: BoundPlan, rank: int | None) -> Callable[[int], str]:
    """Return a function that writes an action as a schedule does on this rank: with its stage only if it is needed."""
    codes = bound.codes
    stages: set[int] = set()
    if rank is not None:
        stages = bound.stages_of.get(rank, set()) | {codes.stage[code] for code in bound.computing[rank]}

    def write(code: int) -> str:
        action = codes.action(code)
        return written(replace(action, stage=None) if len(stages) == 1 else action)

    return write


_TRIAL_ACTIONS = 200_000
"""How many actions the search for one move may walk through; the search for a new order may do the same."""
_MOST_MOVES = 2_000
"""How many actions a new order may move forward."""
_LONGEST_ROW = 24
"""How many actions a row may have to be shown in full."""


@dataclass(frozen=True, slots=True)
class BlockedRank:
    """A rank of the cycle: it is stuck at `stuck`, and another rank waits for `wanted`, later in its row."""

    rank: int
    stuck: int
    wanted: int


class Repair(NamedTuple):
    """A change that has been tried out, in words, and the rows with it: without all-reduces that pipelab inserts."""

    words: str
    rows: list[list[int]]


@dataclass(slots=True)
class _Trials:
    """Walks through a plan with other rows, and their total length."""

    bound: BoundPlan
    given: Collection[int]
    excused: Collection[int]
    walked: int = 0

    @property
    def size(self) -> int:
        return sum(map(len, self.bound.computing))

    def stuck(self, rows: list[list[int]]) -> int:
        """Return how many ranks are stuck with these rows."""
        self.walked += self.size
        trial = replace(self.bound, computing=rows, pairs=set(), faults=[], walk=None)
        return len(traverse(trial, given=self.given, excused=self.excused).stuck)

    def spent(self, budget: int) -> bool:
        """Return whether another walk would exceed a budget of actions."""
        return self.walked + self.size > budget


def repair(
    bound: BoundPlan, blocked: Sequence[BlockedRank], given: Collection[int], excused: Collection[int]
) -> Repair:
    """Return the moves that let a plan with a deadlock run; pipelab tries them out before it suggests them.

    One moved action is best, then a new order of as few ranks as possible, then the move that frees most ranks.
    """
    trials = _Trials(_as_written(bound), given, excused)
    left, move = _one_move(trials, blocked)
    if left == 0:
        return move
    trials.walked = 0
    order = _new_order(trials, [each.rank for each in blocked])
    return order or move._replace(words=f"{move.words}, then check again")


def _as_written(bound: BoundPlan) -> BoundPlan:
    """Remove the all-reduces that pipelab inserted: their places follow from the order of the gradients."""
    if not bound.automatic:
        return bound
    rows = [[code for code in row if code not in bound.automatic] for row in bound.computing]
    listed = {code: ranks for code, ranks in bound.reduces.items() if code not in bound.automatic}
    return replace(bound, computing=rows, reduces=listed, automatic=set(), walk=None)


def _one_move(trials: _Trials, blocked: Sequence[BlockedRank]) -> tuple[int, Repair]:
    """Return the number of ranks that the best move leaves stuck, and that move; the first that leaves none is best."""
    bound = trials.bound
    best = (len(bound.computing) + 1, Repair("give one rank of the cycle another order", []))
    for rank, row, words in (move for each in blocked for move in _moves(bound, each)):
        if best[0] <= len(bound.computing) and trials.spent(_TRIAL_ACTIONS):
            break
        rows = [*bound.computing[:rank], row, *bound.computing[rank + 1 :]]
        left = trials.stuck(rows)
        if left == 0:
            return left, Repair(words, rows)
        if left < best[0] and not _waits_for_itself(bound, row, trials.excused):
            best = left, Repair(words, rows)
    return best


def _moves(bound: BoundPlan, blocked: BlockedRank) -> Iterator[tuple[int, list[int], str]]:
    """Yield the row with the wanted action right before the stuck one, and that with the stuck one right after it."""
    rank, row, name = blocked.rank, bound.computing[blocked.rank], as_yielded(bound, blocked.rank)
    stuck, wanted = name(blocked.stuck), name(blocked.wanted)
    first, last = row.index(blocked.stuck), row.index(blocked.wanted)
    before, between, behind = row[:first], row[first + 1 : last], row[last + 1 :]
    earlier = [*before, blocked.wanted, blocked.stuck, *between, *behind]
    yield rank, earlier, f"yield {wanted} before {stuck} on rank {rank}"
    later = [*before, *between, blocked.wanted, blocked.stuck, *behind]
    yield rank, later, f"yield {stuck} after {wanted} on rank {rank}"


def _waits_for_itself(bound: BoundPlan, row: Sequence[int], excused: Collection[int]) -> bool:
    """Return whether an action comes before an action of its row that it needs, apart from the excused ones."""
    codes = bound.codes
    later = set(row)
    for code in row:
        later.discard(code)
        needs = () if code in excused else codes.needs(code)
        if any(giver in later for value in needs for giver in codes.givers(value)):
            return True
    return False


def _new_order(trials: _Trials, cycle: Sequence[int]) -> Repair | None:
    """Return a new order for some ranks with which the whole plan runs; nothing if none was found."""
    bound = trials.bound
    if bound.reduces:  # an all-reduce binds several rows together
        return None
    moves, runs = _reordered(trials, cycle)
    if not runs:
        moves, runs = _reordered(trials, range(len(bound.computing)))
    ranks = sorted({move.rank for move in moves})
    if not runs:
        return next(_forwards_first(trials, ranks), None)
    orders = [moves, *_of_one_rank(trials, [*ranks, *cycle] if len(ranks) > 1 else [])]
    orders.sort(key=lambda order: (len({move.rank for move in order}), len(parts_of(bound, order))))
    tried = (repair for order in orders for repair in _descriptions(trials, order))
    return next((repair for repair in tried if repair.words), None)


def _of_one_rank(trials: _Trials, ranks: Sequence[int]) -> Iterator[list[Shift]]:
    """Yield, as long as the budget lasts, the new orders of a single rank with which the whole plan runs."""
    for rank in dict.fromkeys(ranks):
        if not trials.spent(_TRIAL_ACTIONS):
            moves, runs = _reordered(trials, [rank])
            if runs:
                yield moves


def _descriptions(trials: _Trials, moves: list[Shift]) -> Iterator[Repair]:
    """Yield an order in words, if few are enough, then similar orders that need fewer words, if they run too."""
    bound = trials.bound
    rows = rows_after(bound, moves)
    yield Repair(describe(parts_of(bound, moves)), rows)
    ranks = sorted({move.rank for move in moves})
    by_rank = [[move for move in moves if move.rank == rank] for rank in ranks]
    together = [replace(mine[0], moved=tuple(code for move in mine for code in move.moved)) for mine in by_rank]
    if not trials.stuck(rows_together := rows_after(bound, together)):
        yield Repair(describe(parts_of(bound, together)), rows_together)
    yield from _forwards_first(trials, ranks)
    if len(ranks) == 1 and len(bound.computing[ranks[0]]) <= _LONGEST_ROW:
        name = as_yielded(bound, ranks[0])
        yield Repair(f"on rank {ranks[0]}, yield {' '.join(map(name, rows[ranks[0]]))}", rows)


def _forwards_first(trials: _Trials, ranks: Sequence[int]) -> Iterator[Repair]:
    """Yield the order in which some ranks run all forwards first, if the plan then runs."""
    forward = trials.bound.codes.forward
    rows = [
        sorted(row, key=lambda code: not forward[code]) if rank in ranks else row
        for rank, row in enumerate(trials.bound.computing)
    ]
    if not trials.stuck(rows):
        words = f"on rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}, yield all forwards before the first backward"
        yield Repair(f"{words} (GPipe: holds all activations)", rows)


def _reordered(trials: _Trials, free: Collection[int]) -> tuple[list[Shift], bool]:
    """Return which actions the free ranks must run earlier so that all ranks finish, and whether all then finish.

    Every rank runs in the order of its row. If no rank can move, a free rank runs an action that another rank waits
    for before its own next one. So no action moves without need.
    """
    trials.walked += trials.size
    walk = _FreeWalk(trials)
    early: list[tuple[int, int, int]] = []
    walk.run(range(len(trials.bound.computing)))
    while walk.waits_for and len(early) < _MOST_MOVES and (code := walk.wanted(free)) is not None:
        rank = trials.bound.rank_of[code]
        early.append((rank, trials.bound.computing[rank][walk.at[rank]], code))
        walk.early.add(code)
        walk.run(walk.give(code))
    moves = [
        Shift(rank, tuple(code for *_, code in group), before)
        for (rank, before), group in groupby(sorted(early, key=itemgetter(0)), key=itemgetter(0, 1))
    ]
    return moves, not walk.waits_for


class _FreeWalk:
    """A walk in which ranks may also run actions before their turn."""

    def __init__(self, trials: _Trials) -> None:
        self.bound = trials.bound
        self.excused = trials.excused
        self.there = at_start(self.bound, trials.given)
        self.at = [0] * len(self.bound.computing)
        self.early: set[int] = set()  # the actions that have run before their turn
        self.waits_for: dict[int, int] = {}  # by rank: the value that it is stuck for
        self.waiting: dict[int, list[int]] = {}  # by value: the ranks that are stuck for it

    def run(self, awake: Iterable[int]) -> None:
        """Run every rank in the order of its row, until none can move."""
        queue = list(awake)
        while queue:
            rank = queue.pop()
            self.waits_for.pop(rank, None)
            row = self.bound.computing[rank]
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
        """Record that an action has run; return the ranks that waited for its value."""
        value = self.bound.codes.gives[code]
        self.there[value] = 1
        return self.waiting.pop(value, [])

    def wanted(self, free: Collection[int]) -> int | None:
        """Return an action of a free rank that can run now and that a stuck rank waits for, preferably a forward."""
        forward, giver = self.bound.codes.forward, self.bound.giver_of
        backward = None
        for rank in sorted(self.waits_for, key=lambda rank: (not forward[giver[self.waits_for[rank]]], rank)):
            code = self._source(rank, free)
            if code is not None and forward[code]:
                return code
            backward = backward or code
        return backward

    def _source(self, rank: int, free: Collection[int]) -> int | None:
        """Follow what a rank waits for back to an action of a free rank that can run now."""
        need = self.waits_for[rank]
        while True:
            code = self.bound.giver_of[need]
            if self.bound.rank_of[code] not in free:
                return None
            need = absent(self.bound, code, self.there)
            if self.there[need] or code in self.excused:
                return code
