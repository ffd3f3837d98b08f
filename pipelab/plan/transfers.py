"""Lower a plan to what a runtime does: actions, sends and receives, in one row per rank.

PyTorch's runtime runs such rows. All sends and receives of a rank stand in one queue, and the two ends of a transfer
meet: it starts when it is first in the queues of both its ranks, and holds both until it is over.

    plan      rank 0 | F0 F1 B0 B1
              rank 1 | F0 B0 F1 B1

    pytorch   rank 0 | 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
              rank 1 | 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

    deferred  rank 0 | 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
              rank 1 | 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1      0SEND_F1 and 1SEND_B0 never meet

A value that crosses has one giver and one needer, so its number (see `codes`) stands for the transfer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pipelab.plan.actions import Pair
from pipelab.plan.bound import BoundPlan
from pipelab.plan.csv_notation import cell
from pipelab.plan.order import units

__all__ = [
    "SEMANTICS",
    "Crossing",
    "Lowering",
    "Queues",
    "Semantics",
    "Step",
    "in_order",
    "inbound",
    "lowered",
    "queues",
]

Semantics = Literal["arrive", "pytorch", "pytorch-runtime", "deferred", "two-way", "per-peer", "by-time"]
SEMANTICS: tuple[Semantics, ...] = get_args(Semantics)
"""How transfers are ordered and queued: see `Cost.transfers`."""

Step = tuple[Literal["run", "SEND", "RECV", "UNSHARD", "RESHARD", "REDUCE_GRAD"], tuple[int, ...]]
"""What a lowered row does next: run a code, or the two of a pair; send or receive a value; or a word and its stage."""

_ACTIVE_STAGES = 3
"""How many stages PyTorch's runtime keeps unsharded at once, if a model is sharded with FSDP."""


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
    """

    bound: BoundPlan
    crossings: dict[int, Crossing]
    rows: list[list[Step]]

    def word(self, step: Step) -> str:
        """Return a step in PyTorch's notation, such as `0F3`, `0SEND_F3` or `1RECV_F3`."""
        codes = self.bound.codes
        word, numbers = step
        if word == "run":
            return cell(Pair(*map(codes.action, numbers)) if len(numbers) > 1 else codes.action(numbers[0]))
        if word in ("SEND", "RECV"):
            crossing = self.crossings[numbers[0]]
            action = codes.action(crossing.giver if word == "SEND" else crossing.needer)
            letter = "F" if codes.kind[crossing.giver] == "F" else "B"
            return f"{action.stage}{word}_{letter}{action.microbatch}"
        return f"{numbers[0]}{word}"


def crossings_of(bound: BoundPlan) -> dict[int, Crossing]:
    """Return, by value, what crosses from one rank to another in a legal plan."""
    rank_of = bound.rank_of
    found: dict[int, Crossing] = {}
    for rank, row in enumerate(bound.rows):
        for needer in row:
            for value, giver in bound.inputs(needer):
                if rank_of[giver] != rank:
                    found[value] = Crossing(giver, needer, rank_of[giver], rank)
    return found


def lowered(bound: BoundPlan, semantics: Semantics) -> Lowering:
    """Lower a legal plan; `in_order` does so for the order `"by-time"`.

    Where each half of a pair needs what only comes from the other half, rows exist for `"deferred"` alone, and hang.

    Example:
        >>> from pipelab import Plan
        >>> low = lowered(Plan.parse("0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1").bound, "deferred")
        >>> [low.word(step) for step in low.rows[1] if step[0] in ("run", "SEND", "RECV")]
        ['1RECV_F0', '1F0', '1B0', '1SEND_B0', '1RECV_F1', '1F1', '1B1', '1SEND_B1']
    """
    crossings = crossings_of(bound)
    if semantics == "deferred":
        rows = [list(_deferred(bound, crossings, rank)) for rank in range(len(bound.rows))]
    else:
        rows = _as_pytorch(bound, crossings, words_take_turns=semantics == "pytorch-runtime")
    return Lowering(bound, crossings, rows)


def in_order(bound: BoundPlan, order: Sequence[int]) -> Lowering:
    """Lower a plan so that every rank's transfers stand in one order of all values that cross, as early as they can."""
    crossings = crossings_of(bound)
    place = {value: at for at, value in enumerate(order)}
    rows = [list(_deferred(bound, crossings, rank)) for rank in range(len(bound.rows))]
    return Lowering(bound, crossings, [_reordered(bound, row, place) for row in rows])


def _as_pytorch(bound: BoundPlan, crossings: Mapping[int, Crossing], *, words_take_turns: bool) -> list[list[Step]]:
    """Place transfers as `torch.distributed.pipelining.schedules._add_send_recv` does.

    In each round, every rank in turn appends its next item, if all that it needs has been sent; then its sends, each
    together with its receive, which goes to the end of the receiver's row.
    """
    waiting = [_turns(bound, rank, words_take_turns) for rank in range(len(bound.rows))]
    rows: list[list[Step]] = [[] for _ in waiting]
    at = [0] * len(waiting)
    needed = inbound(crossings)
    sent: set[int] = set()
    left = [rank for rank, turns in enumerate(waiting) if turns]
    while left:
        moved = False
        for rank in left:
            turn = waiting[rank][at[rank]]
            item = turn[-1][1] if turn[-1][0] == "run" else ()
            if any(code in needed and needed[code] not in sent for code in item):
                continue
            moved = True
            at[rank] += 1
            rows[rank] += turn
            for value in _gives(bound, item):
                if value in crossings:
                    sent.add(value)
                    rows[rank].append(("SEND", (value,)))
                    rows[crossings[value].target].append(("RECV", (value,)))
        assert moved, "a plan that hangs without transfers cannot be lowered"
        left = [rank for rank in left if at[rank] < len(waiting[rank])]
    return rows


def inbound(crossings: Mapping[int, Crossing]) -> dict[int, int]:
    """Return, by code, the value that the action needs from another rank: there is at most one."""
    return {crossing.needer: value for value, crossing in crossings.items()}


def _gives(bound: BoundPlan, item: Sequence[int]) -> list[int]:
    """Return the values that an item gives to other stages."""
    return [bound.codes.gives[code] for code in item if bound.codes.kind[code] in "FBI"]


def _turns(bound: BoundPlan, rank: int, words_take_turns: bool) -> list[list[Step]]:
    """Return what a rank appends in each round: an item, after the words before it if they take no turns."""
    turns: list[list[Step]] = []
    pending: list[Step] = []
    for step in _with_words(bound, rank):
        pending.append(step)
        if words_take_turns or step[0] == "run":
            turns.append(pending)
            pending = []
    return [*turns, pending] if pending else turns


def _with_words(bound: BoundPlan, rank: int) -> list[Step]:
    """Return a rank's items and the words that PyTorch's runtime inserts first, for FSDP and to scale gradients.

    It unshards the stages that come next and reshards the others (`_add_unshard_reshard`), and reduces a stage's
    gradients after the last of them (`_add_reduce_grad`).
    """
    codes = bound.codes
    items = list(map(tuple, units(bound.rows[rank], bound.pairs)))
    active: set[int] = set()  # filled and emptied as PyTorch's, because its order is that of a set
    made = [0] * codes.stages
    steps: list[Step] = []
    for item, coming in zip(items, _coming_stages(bound, items), strict=True):
        gone, fresh = [each for each in active if each not in coming], [each for each in coming if each not in active]
        active.difference_update(gone)
        active.update(fresh)
        steps += [*(("RESHARD", (stage,)) for stage in gone), *(("UNSHARD", (stage,)) for stage in fresh)]
        steps.append(("run", item))
        for code in item:
            stage = codes.stage[code]
            made[stage] += codes.releases[code]
            listed = codes.of_kind["R"][stage] in bound.reduces
            if codes.releases[code] and made[stage] == codes.microbatches and not listed:
                steps.append(("REDUCE_GRAD", (stage,)))
    return steps + [("RESHARD", (stage,)) for stage in active]


def _coming_stages(bound: BoundPlan, items: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Return, for each item, the few stages that the rest of the row comes to first; a pair's two stay together."""
    found: list[list[int]] = []
    first: dict[int, int] = {}  # by stage, in the order of their first items in the rest of the row: that item
    for at in range(len(items) - 1, -1, -1):
        here = dict.fromkeys((bound.codes.stage[code] for code in items[at]), at)
        first = here | {stage: item for stage, item in first.items() if stage not in here}
        coming, most = list(first), _ACTIVE_STAGES
        if len(coming) > most and first[coming[most]] == first[coming[most - 1]]:
            most += 1
        found.append(coming[:most])
    return found[::-1]


def _deferred(bound: BoundPlan, crossings: Mapping[int, Crossing], rank: int) -> Iterator[Step]:
    """Yield a rank's row with each receive right before the item that needs it."""
    needed = inbound(crossings)
    for step in _with_words(bound, rank):
        item = step[1] if step[0] == "run" else ()
        yield from (("RECV", (needed[code],)) for code in item if code in needed)
        yield step
        yield from (("SEND", (value,)) for value in _gives(bound, item) if value in crossings)


def _reordered(bound: BoundPlan, row: Sequence[Step], place: Mapping[int, int]) -> list[Step]:
    """Return a row with its sends and receives in another order: each as early as those before it allow."""
    transfers = sorted((step for step in row if step[0] in ("SEND", "RECV")), key=lambda step: place[step[1][0]])
    others = iter([step for step in row if step[0] not in ("SEND", "RECV")])
    made: set[int] = set()
    steps: list[Step] = []
    for transfer in transfers:
        while transfer[0] == "SEND" and transfer[1][0] not in made:
            steps.append(next(others))
            if steps[-1][0] == "run":
                made.update(_gives(bound, steps[-1][1]))
        steps.append(transfer)
    return [*steps, *others]


@dataclass(frozen=True, slots=True)
class Queues:
    """The queues in which values cross, each in order.

    Attributes:
        crossings: what crosses between ranks, by value.
        values: for each queue, its values in order.
        rank: for each queue, its rank.
        ends: by value, the queue of its send and the queue of its receive.
    """

    crossings: dict[int, Crossing]
    values: list[list[int]]
    rank: list[int]
    ends: dict[int, tuple[int, int]]


def queues(low: Lowering, semantics: Semantics) -> Queues:
    """Return the queues of a lowered plan: of each rank one, one each way, one for each peer, or one for each value."""
    found: dict[tuple[int, int], list[int]] = {}
    ends: dict[int, dict[str, int]] = {value: {} for value in low.crossings}
    numbers: dict[tuple[int, int], int] = {}
    for rank, row in enumerate(low.rows):
        for word, (value, *_) in row:
            if word not in ("SEND", "RECV"):
                continue
            crossing = low.crossings[value]
            peer = crossing.target if word == "SEND" else crossing.source
            which = {"arrive": 2 * value + (word == "SEND"), "two-way": int(word == "SEND"), "per-peer": peer}
            key = (rank, which.get(semantics, 0))
            found.setdefault(key, []).append(value)
            ends[value][word] = numbers.setdefault(key, len(numbers))
    both = {value: (end["SEND"], end["RECV"]) for value, end in ends.items()}
    return Queues(low.crossings, list(found.values()), [rank for rank, _ in found], both)
