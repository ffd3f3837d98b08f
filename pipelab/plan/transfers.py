"""Lower a plan to what a runtime does: actions, sends and receives, in one row per rank.

Two things decide whether such rows hang, and how long they take. The *order* says where each rank posts its sends and
receives, and the *transport* which of them wait for each other:

    plan      rank 0 | F0 F1 B0 B1
              rank 1 | F0 B0 F1 B1

    pytorch   rank 0 | 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
              rank 1 | 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

    at-use    rank 0 | 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
              rank 1 | 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1      0SEND_F1 and 1SEND_B0 never meet
                                                                                in one queue for each rank
A value that crosses has one giver and one needer, so its number (see `codes`) stands for the transfer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal, get_args

from pipelab.errors import UsageError, counted
from pipelab.plan.actions import Pair
from pipelab.plan.bound import BoundPlan
from pipelab.plan.csv_notation import cell
from pipelab.plan.fault import shorten
from pipelab.plan.order import units

Order = Literal["pytorch", "at-use", "deferred", "by-time"]
"""In which order a rank posts its transfers: see `simulate`."""

Transport = Literal["buffered", "rank", "pair", "edge", "holding"]
"""Which transfers wait for each other: see `simulate`."""

Step = tuple[str, tuple[int, ...]]
"""What a lowered row does next: `run` a code, or the two of a pair; `SEND`, `RECV` or `WAIT_SEND` a value; or one of
the words of PyTorch's runtime for a stage: `UNSHARD`, `RESHARD`, `REDUCE_GRAD`, `WAIT_REDUCE_GRAD`."""

Lookahead = Literal["full", "auto"] | Sequence[int]
"""For how many of its coming stages a rank gathers weights: see `with_gathers`."""

_TRANSFERS = ("SEND", "RECV")


def require_words(order: object, transport: object) -> None:
    """Raise a `UsageError` if an order or a transport is none of those that there are."""
    for name, given, words in (("order", order, get_args(Order)), ("transport", transport, get_args(Transport))):
        if given not in words:
            raise UsageError(f"{name}={shorten(given)}: expected {', '.join(words[:-1])} or {words[-1]}")


@dataclass(frozen=True, slots=True)
class Runtime:
    """The PyTorch whose runtime is to run the rows, and how it is set up.

    Attributes:
        waits: whether the rows say when the runtime waits for sends and reductions, as from version 2.15 on.
        lookahead: by rank, for how many of the coming stages the runtime gathers the weights of sharded models.
        outstanding: how many sends of a rank may be under way together; `None` for any number.
    """

    waits: bool
    lookahead: Sequence[int]
    outstanding: int | None = None


ACTIVE_STAGES = 3
"""How many stages PyTorch's runtime keeps unsharded together, if a model is sharded with FSDP."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that crosses between ranks: the codes and the ranks of its giver and its needer."""

    giver: int
    needer: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Lowering:
    """A legal plan with its sends and receives.

    Attributes:
        bound: the plan.
        crossings: what crosses between ranks, by value.
        rows: for each rank, its steps.
        order: where its sends and receives are.
        by_time: for the order `"by-time"`, the values that cross, in their order.
    """

    bound: BoundPlan
    crossings: dict[int, Crossing]
    rows: list[list[Step]]
    order: Order
    by_time: Sequence[int] = ()

    def word(self, step: Step) -> str:
        """Return a step in PyTorch's notation, such as `0F3`, `0SEND_F3` or `1RECV_F3`."""
        codes = self.bound.codes
        word, numbers = step
        if word == "run":
            return cell(Pair(*map(codes.action, numbers)) if len(numbers) > 1 else codes.action(numbers[0]))
        if word in (*_TRANSFERS, "WAIT_SEND"):
            crossing = self.crossings[numbers[0]]
            action = codes.action(crossing.needer if word == "RECV" else crossing.giver)
            letter = "F" if codes.forward[crossing.giver] else "B"
            return f"{action.stage}{word}_{letter}{action.microbatch}"
        return f"{numbers[0]}{word}"

    def words(self) -> tuple[tuple[str, ...], ...]:
        """Return every rank's steps in PyTorch's notation."""
        return tuple(tuple(map(self.word, row)) for row in self.rows)


def lowered(bound: BoundPlan, order: Order, by_time: Sequence[int] = (), runtime: Runtime | None = None) -> Lowering:
    """Lower a legal plan. If its rows list their sends and receives, these are the order `"pytorch"`.

    Where each half of a pair needs what only comes from the other half, rows exist for `"at-use"` alone, and hang.
    """
    found = crossings(bound)
    rows = [_without_transfers(bound, rank, runtime) for rank in range(len(bound.computing))]
    if bound.postings and order == "pytorch":
        rows = [list(_as_listed(bound, rank, row, runtime)) for rank, row in enumerate(rows)]
    elif order in ("pytorch", "deferred"):
        rows = _as_early_as_sent(bound, found, rows)
    else:
        rows = [list(_at_use(bound, found, row)) for row in rows]
    if order == "by-time":
        place = {value: at for at, value in enumerate(by_time)}
        rows = [_reordered(bound, row, place) for row in rows]
    if runtime is not None and runtime.waits:
        rows = [_with_waits(bound, row) for row in rows]
    if order == "deferred":
        rows = [_deferred(found, row) for row in rows]
    if runtime is not None and runtime.outstanding is not None:
        rows = _within(Lowering(bound, found, rows, order), runtime.outstanding)
    return Lowering(bound, found, rows, order, by_time)


def crossings(bound: BoundPlan) -> dict[int, Crossing]:
    """Return, by value, what crosses from one rank to another."""
    rank_of = bound.rank_of
    found: dict[int, Crossing] = {}
    for rank, row in enumerate(bound.computing):
        for needer in row:
            for value, giver in bound.inputs(needer):
                if giver >= 0 and rank_of[giver] != rank:
                    found[value] = Crossing(giver, needer, rank_of[giver], rank)
    return found


def _as_listed(bound: BoundPlan, rank: int, row: Sequence[Step], runtime: Runtime | None) -> Iterator[Step]:
    """Yield a rank's row with its sends and receives where the plan lists them."""
    places, left = bound.placed(rank), list(bound.postings[rank])
    if runtime is not None and runtime.waits:  # it has its own places for the waits
        left = [(at, each) for at, each in left if each.word in _TRANSFERS]
    for step in row:
        while step[0] == "run" and left and left[0][0] <= places[step[1][0]]:
            yield left[0][1].word, (bound.codes.posted(left.pop(0)[1]),)
        yield step
    yield from ((each.word, (bound.codes.posted(each),)) for _, each in left)


def inbound(crossings: Mapping[int, Crossing]) -> dict[int, int]:
    """Return, by code, the value that the action needs from another rank: there is at most one."""
    return {crossing.needer: value for value, crossing in crossings.items()}


def _as_early_as_sent(
    bound: BoundPlan, crossings: Mapping[int, Crossing], waiting: Sequence[Sequence[Step]]
) -> list[list[Step]]:
    """Place transfers as `torch.distributed.pipelining.schedules._add_send_recv` does.

    In each round, every rank in turn appends its next step, if all that it needs has been sent; then its sends, each
    together with its receive, which goes to the end of the receiver's row.
    """
    needed = inbound(crossings)
    rows: list[list[Step]] = [[] for _ in waiting]
    at = [0] * len(waiting)
    sent: set[int] = set()
    left = [rank for rank, steps in enumerate(waiting) if steps]
    while left:
        moved = False
        for rank in left:
            step = waiting[rank][at[rank]]
            item = step[1] if step[0] == "run" else ()
            if any(code in needed and needed[code] not in sent for code in item):
                continue
            moved = True
            at[rank] += 1
            rows[rank].append(step)
            for value in _gives(bound, item, crossings):
                sent.add(value)
                rows[rank].append(("SEND", (value,)))
                rows[crossings[value].target].append(("RECV", (value,)))
        assert moved, "a plan that hangs without transfers cannot be lowered"
        left = [rank for rank in left if at[rank] < len(waiting[rank])]
    return rows


def _gives(bound: BoundPlan, item: Sequence[int], crossings: Container[int]) -> list[int]:
    """Return the values that an item gives to stages on other ranks."""
    given = (bound.codes.gives[code] for code in item if not bound.codes.collective[code])
    return [value for value in given if value in crossings]


def _without_transfers(bound: BoundPlan, rank: int, runtime: Runtime | None) -> list[Step]:
    """Return a rank's items; for a runtime of PyTorch, with the words that it inserts for FSDP and to scale gradients.

    It unshards the stages that come next and reshards the others (`_add_unshard_reshard`), and reduces a stage's
    gradients after the last of them (`_add_reduce_grad`).
    """
    codes = bound.codes
    items = list(map(tuple, units(bound.computing[rank], bound.pairs)))
    if runtime is None:
        return [("run", item) for item in items]
    made = [0] * codes.stages
    steps: list[Step] = []
    moves = residence(bound, items, ACTIVE_STAGES, runtime.lookahead[rank], by_age=runtime.waits)
    if bound.moves:
        items, moves = list(map(tuple, units(bound.lists[rank], bound.pairs))), repeat([])
    for item in items:
        if not bound.computes(item[0]):  # PyTorch has no words for moves of a single micro-batch
            steps += [(codes.kind[item[0]], (codes.stage[item[0]],))] if codes.microbatch[item[0]] < 0 else []
            continue
        steps += next(moves)
        steps.append(("run", item))
        for code in item:
            stage = codes.stage[code]
            steps += [("WAIT_REDUCE_GRAD", (stage,))] * (codes.collective[code] and runtime.waits)
            made[stage] += codes.releases[code]
            listed = codes.of_kind["R"][stage] in bound.reduces
            if codes.releases[code] and made[stage] == codes.microbatches and not listed:
                steps += [("REDUCE_GRAD", (stage,)), *[("WAIT_REDUCE_GRAD", (stage,))] * runtime.waits]
    return steps + next(moves)


def residence(
    bound: BoundPlan, items: Sequence[tuple[int, ...]], most: int, ahead: int, by_age: bool = True
) -> Iterator[list[Step]]:
    """Yield the gathers and frees that PyTorch puts before each of a rank's items, and those after the last one."""
    active: set[int] = set()  # before 2.15, filled and emptied as PyTorch's, because its order is a set's
    aged: list[int] = []
    for stages, of in _coming_stages(bound, items):  # the two stages of a pair stay together
        resident, wanted = (stages[: n + (len(stages) > n and of[n] == of[n - 1])] for n in (most, ahead))
        gone = [each for each in (aged if by_age else active) if each not in resident]
        fresh = [each for each in wanted if each not in active]
        active.difference_update(gone)
        active.update(fresh)
        aged = [each for each in aged if each not in gone] + fresh
        yield [*(("RESHARD", (stage,)) for stage in gone), *(("UNSHARD", (stage,)) for stage in fresh)]
    yield [("RESHARD", (stage,)) for stage in (aged if by_age else active)]


def lookaheads(given: Lookahead, ranks: int, most: int = ACTIVE_STAGES) -> Sequence[int]:
    """Return, by rank, for how many of its coming stages it gathers weights."""
    if given == "full":
        return [most] * ranks
    if given == "auto":
        return [min(rank + 2, most) for rank in range(ranks)]
    numbers = list(given) if isinstance(given, (list, tuple)) else []
    if len(numbers) != ranks or any(type(each) is not int or not 1 <= each <= most for each in numbers):
        raise UsageError(
            f"unshard_lookahead={shorten(given)}: expected 'full', 'auto', or for each of {counted(ranks, 'rank')} "
            f"a whole number from 1 to {most}"
        )
    return numbers


def _coming_stages(bound: BoundPlan, items: Sequence[tuple[int, ...]]) -> list[tuple[list[int], list[int]]]:
    """Return, for each item, the stages in the order in which the rest of the row comes to them, and at which items."""
    found: list[tuple[list[int], list[int]]] = []
    first: dict[int, int] = {}
    for at in range(len(items) - 1, -1, -1):
        here = dict.fromkeys((bound.codes.stage[code] for code in items[at]), at)
        first = here | {stage: item for stage, item in first.items() if stage not in here}
        found.append((list(first), list(first.values())))
    return found[::-1]


def _at_use(bound: BoundPlan, crossings: Mapping[int, Crossing], row: Sequence[Step]) -> Iterator[Step]:
    """Yield a rank's row with each receive right before the item that needs it."""
    needed = inbound(crossings)
    for step in row:
        item = step[1] if step[0] == "run" else ()
        yield from (("RECV", (needed[code],)) for code in item if code in needed)
        yield step
        yield from (("SEND", (value,)) for value in _gives(bound, item, crossings))


def _deferred(crossings: Mapping[int, Crossing], row: Sequence[Step]) -> list[Step]:
    """Put off receives as PyTorch's `_defer_recv_ops` does (`defer_pp_recv`, from 2.13 on).

    Each goes right before the item that needs it; but what comes from a higher rank, before the next send to that rank.
    """
    needed, put_off = inbound(crossings), dict[int, None]()
    steps: list[Step] = []
    for step in row:
        word, numbers = step
        if word == "RECV":
            put_off[numbers[0]] = None
            continue
        due: list[int] = []
        if word == "SEND" and (here := crossings[numbers[0]]).source < here.target:
            due = [value for value in put_off if crossings[value].source == here.target]
        elif word == "run":
            due = [needed[code] for code in numbers if needed.get(code) in put_off]
        for value in due:
            del put_off[value]
        steps += [*(("RECV", (value,)) for value in due), step]
    return steps


def _reordered(bound: BoundPlan, row: Sequence[Step], place: Mapping[int, int]) -> list[Step]:
    """Return a row with its sends and receives in another order: each as early as those before it allow."""
    transfers = sorted((step for step in row if step[0] in _TRANSFERS), key=lambda step: place[step[1][0]])
    others = iter([step for step in row if step[0] not in _TRANSFERS])
    made: set[int] = set()
    steps: list[Step] = []
    for transfer in transfers:
        while transfer[0] == "SEND" and transfer[1][0] not in made:
            steps.append(next(others))
            if steps[-1][0] == "run":
                made.update(_gives(bound, steps[-1][1], place))
        steps.append(transfer)
    return [*steps, *others]


def _with_waits(bound: BoundPlan, row: Sequence[Step]) -> list[Step]:
    """Return a row that waits for its sends where PyTorch's `_add_wait_send` does (from 2.15 on).

    The wait for an output comes after the backward of the same stage, which proves that it has arrived. All others
    come at the end of the row.
    """
    codes = bound.codes
    pending: dict[int, None] = {}
    steps: list[Step] = []
    for step in row:
        word, numbers = step
        steps.append(step)
        if word == "SEND":
            pending[numbers[0]] = None
        for code in numbers if word == "run" else ():
            value = codes.gives[codes.sibling(code, "F")] if codes.traits(code).backward else -1
            if value in pending:
                del pending[value]
                steps.append(("WAIT_SEND", (value,)))
    return steps + [("WAIT_SEND", (value,)) for value in pending]


def _within(low: Lowering, outstanding: int) -> list[list[Step]]:
    """Move waits forward so that no rank has more sends under way, as PyTorch's `_add_wait_send_budget` (from 2.15 on).

    Before a send that would be one too many, the rank waits for another one that is under way. A wait lasts until the
    receive has been posted, so it may not come before anything that this receive needs. Of those that may, it takes
    the first whose receive comes before in any case, else the first.
    """
    after = _followers(low.rows)
    return [list(_row_within(low, row, outstanding, after)) for row in low.rows]


def _followers(rows: Sequence[Sequence[Step]]) -> dict[Step, list[Step]]:
    """Return what comes right after each item and each transfer, in any case."""
    after: dict[Step, list[Step]] = defaultdict(list)
    for row in rows:
        follower: list[Step] = []
        for step in reversed(row):
            word, numbers = step
            received: Step = "RECV", numbers
            if word == "WAIT_SEND":
                after[received] += follower
            elif word in ("run", *_TRANSFERS):
                after[step] += [*follower, received] if word == "SEND" else follower
                follower = [step]
    return after


def _row_within(low: Lowering, row: Sequence[Step], outstanding: int, after: dict[Step, list[Step]]) -> Iterator[Step]:
    """Yield a row with a wait before each send that would be one too many, and without the waits that are then over."""
    pending: list[int] = []
    for step in row:
        word, numbers = step
        if word == "SEND":
            while len(pending) >= outstanding:
                ended = _ended_first(low, after, pending, step)
                after["RECV", (ended,)].append(step)
                pending.remove(ended)
                yield "WAIT_SEND", (ended,)
            pending += numbers
        elif word == "WAIT_SEND":
            if numbers[0] not in pending:
                continue
            pending.remove(numbers[0])
        yield step


def _ended_first(low: Lowering, after: Mapping[Step, Sequence[Step]], pending: Sequence[int], send: Step) -> int:
    """Return which of the sends under way can end before another one begins; best one that does in any case."""
    later = _reachable(after, send)
    safe = [value for value in pending if ("RECV", (value,)) not in later]
    if not safe:
        sends = ", ".join(low.word(("SEND", (value,))) for value in pending)
        raise UsageError(
            f"max_outstanding_sends={len(pending)} is too small for this plan: before {low.word(send)}, "
            f"{f'none of {sends} can end' if pending else 'there is no send to wait for'}\n  try: a larger number"
        )
    return next((value for value in safe if send in _reachable(after, ("RECV", (value,)))), safe[0])


def _reachable(after: Mapping[Step, Sequence[Step]], start: Step) -> set[Step]:
    """Return all that comes after a step in any case."""
    seen, left = {start}, [start]
    while left:
        fresh = {each for each in after.get(left.pop(), ()) if each not in seen}
        seen |= fresh
        left += fresh
    return seen
