"""Building blocks: one micro-batch's way through the ranks, repeated."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import lru_cache
from operator import itemgetter

from pipelab.catalogue.bases import VShaped
from pipelab.errors import UsageError, counted, require_size
from pipelab.plan.actions import HALVES, TRAITS, Action, B, F, I, whole
from pipelab.plan.plan import Plan

_ALL = {"out(m,s)", "gin(m,s)", "gw(m,s)"}
"""What the passes of a stage give, together."""


@dataclass(frozen=True)
class BuildingBlock:
    """When each pass of micro-batch 0 starts; every later micro-batch does the same, `interval` slots after the last.

    `building_block` makes it. A forward, an input gradient and a weight gradient take a slot each, a whole backward
    two. The slots only give an order: simulate the plan with whatever times you have.
    """

    passes: Mapping[Action, int]
    """The first slot of each pass of micro-batch 0."""
    interval: int
    """How many slots later the next micro-batch does the same."""
    place: tuple[int, ...]
    """For each stage, its rank."""
    right: InitVar[bool] = False

    def __post_init__(self, right: bool) -> None:
        """Refuse passes that are missing, too early, or in a slot that is taken, unless known to be right."""
        if right:
            return
        if not self.place or set(self.place) != set(range(max(self.place) + 1)):
            raise UsageError(f"place={list(self.place)}: expected a rank for each stage, and no rank left out")
        self._require_order()
        self._require_room()

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return max(self.place) + 1

    def row(self, rank: int, microbatches: int) -> list[Action]:
        """Return a rank's actions in order.

        A weight gradient that is not among the passes runs in the rank's first free slot after its input gradient.
        """
        first_half, second_half = HALVES
        fills = not any(action.kind == second_half for action in self.passes)
        mine = [(slot, _slots(each), each) for each, slot in self.passes.items() if self.place[each.stage or 0] == rank]
        starts = [(slot + m * self.interval, takes, each, m) for slot, takes, each in mine for m in range(microbatches)]
        row, owed, free = list[Action](), deque[Action](), 0
        for slot, takes, each, m in sorted(starts, key=itemgetter(0)):
            while owed and free < slot:
                row.append(owed.popleft())
                free += 1
            row.append(_action(each.kind, m, each.stage))
            free = slot + takes
            if fills and each.kind == first_half:
                owed.append(_action(second_half, m, each.stage))
        return [*row, *owed]

    def plan(self, microbatches: int, name: str | None = None) -> Plan:
        """Return the plan for a number of micro-batches: `pipelab.check` finds no cycle in its order.

        Example:
            >>> import pipelab
            >>> block = pipelab.building_block({"0F": 0, "1F": 1, "1B": 2, "0B": 4}, interval=3)
            >>> block.plan(microbatches=3).rows == pipelab.OneFOneB(ranks=2, microbatches=3).plan().rows
            True
        """
        rows = [self.row(rank, microbatches) for rank in range(self.ranks)]
        return Plan(rows, len(self.place), require_size("microbatches", microbatches), self._rank_of, name)

    def _require_order(self) -> None:
        """Refuse a pass that is missing, or that starts before what it needs has ended."""
        kinds = list(dict.fromkeys(action.kind for action in self.passes))
        gives = [value for kind in kinds for value in TRAITS[kind].gives]
        if {*gives, "gw(m,s)"} != _ALL or len(gives) > len(set(gives)):
            raise UsageError(
                f"the block has {', '.join(kinds) or 'no passes'}\n  try: F and B, or F and I with or without W"
            )
        for action in [Action(kind, 0, stage) for kind in kinds for stage in range(len(self.place))]:
            if action not in self.passes:
                word = _word(action)
                raise UsageError(f"the block has no slot for {word}\n  try: passes={{…, {word!r}: …}}")
        giver = {(value, action.stage): action for action in self.passes for value in action.traits.gives}
        for action, slot in self.passes.items():
            for value in action.traits.needs:
                name, _, ahead = value.partition("(m,s")
                before = giver.get((f"{name}(m,s)", (action.stage or 0) + int(ahead[:-1] or 0)))
                end = slot if before is None else self.passes[before] + _slots(before)
                if before and slot < end:
                    raise UsageError(
                        f"{_word(action)} starts in slot {slot}, but {_word(before)}, which it needs, ends with slot "
                        f"{end - 1}\n  try: slot {end} or later"
                    )

    def _require_room(self) -> None:
        """Refuse two passes of a rank in one slot, and weight gradients without a slot."""
        taken = dict[tuple[int, int], Action]()
        for action, first in self.passes.items():
            for slot in range(first, first + _slots(action)):
                cell = self.place[action.stage or 0], slot % self.interval
                if cell in taken:
                    raise UsageError(
                        f"{_word(taken[cell])} and {_word(action)} of rank {cell[0]} meet: slot {slot}, and every "
                        f"{self.interval} later\n  try: another slot, or a longer interval"
                    )
                taken[cell] = action
        ((rank, stages),) = Counter(self.place).most_common(1)
        if (work := len(_ALL) * stages) > self.interval:
            raise UsageError(
                f"rank {rank} has {work} slots of work for each micro-batch, weight gradients included, and one "
                f"comes every {self.interval} slots\n  try: interval={work} or more"
            )

    def _rank_of(self, microbatch: int, stage: int) -> int:  # noqa: ARG002 - a plan's `place` takes both
        return self.place[stage]

    @property
    def peaks(self) -> tuple[int, ...]:
        """For each rank, how many stage activations it holds with many micro-batches, before anything is simulated.

        Example:
            >>> import pipelab
            >>> pipelab.building_block({"0F": 0, "1F": 1, "1B": 2, "0B": 4}, interval=3).peaks
            (2, 1)
        """
        last = max(first + _slots(action) for action, first in self.passes.items())
        enough = last // self.interval + 2 + len(self.place)
        bound = self.plan(enough).bound
        return tuple(max(bound.in_flight(rank)) for rank in range(self.ranks))


def building_block(passes: Mapping[str, int], interval: int, place: Sequence[int] | None = None) -> BuildingBlock:
    """Return a building block: the slots of one micro-batch's passes, and how many slots later the next one follows.

    Every such block is a legal schedule, and its memory follows from how long a micro-batch stays: with an interval of
    `n` slots, a rank holds as many activations as `n` fits into the time from a forward to the release.

    Args:
        passes: the first slot of each pass of micro-batch 0: `{"0F": 0, "1F": 1, "1B": 2, "0B": 4}`, stage first.
            Weight gradients may be left out: then each runs in its rank's first free slot.
        interval: how many slots later the next micro-batch does the same.
        place: for each stage, its rank; by default, stage `s` is on rank `s`.

    Example:
        ZB-H1 on two ranks, whose second rank puts its weight gradients off; without that, it would hold one activation.

        >>> import pipelab
        >>> passes = {"0F": 0, "1F": 1, "1I": 2, "0I": 4}
        >>> late = pipelab.building_block(passes | {"0W": 5, "1W": 6}, interval=3)
        >>> late.plan(microbatches=4).rows == pipelab.ZBH1(ranks=2, microbatches=4).plan().rows
        True
        >>> late.peaks, pipelab.building_block(passes, interval=3).peaks
        ((2, 2), (2, 1))

    Raises:
        UsageError: if a pass starts before what it needs has ended, or if two passes of a rank take the same slot.

    Source:
        Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv:2405.15362), section 2.
    """
    starts = {Action.parse(f"{word}0"): whole(slot) for word, slot in passes.items()}
    for action, slot in starts.items():
        if not isinstance(slot, int):
            raise UsageError(f"passes has {slot!r} for {_word(action)}: expected a slot, a whole number")
    stages = range(1 + max((action.stage or 0 for action in starts), default=0))
    ranks_of = tuple(stages if place is None else map(whole, place))
    if len(ranks_of) != len(stages):
        raise UsageError(f"place={list(ranks_of)}: expected {counted(len(stages), 'rank')}, one for each stage")
    return BuildingBlock(starts, require_size("interval", interval), ranks_of)


def first_fit(
    place: Sequence[int], interval: int, speeds: Sequence[int], turn: int = 0, *, split: bool = True
) -> BuildingBlock | None:
    """Return the block of a micro-batch that goes from stage to stage at given speeds, and waits where a slot is taken.

    Example:
        On four ranks, one micro-batch of a V with whole backwards waits twice on its way: `3B` and `0B` start late.

        >>> block = first_fit([0, 1, 2, 3, 3, 2, 1, 0], 6, (1, 1, 2, 2), split=False)
        >>> [slot for action, slot in block.passes.items() if action.kind == "B"], block.peaks
        ([8, 10, 12, 17, 19, 21, 26, 28], (6, 6, 5, 6))
    """
    stages, backward = len(place), I if split else B
    way = [F(0, stage) for stage in range(stages)] + [backward(0, stage) for stage in reversed(range(stages))]
    taken: list[set[int]] = [set() for _ in range(max(place) + 1)]
    passes, start = dict[Action, int](), 0
    for number, (action, rank) in enumerate(zip(way, [*place, *reversed(place)], strict=True), 1):
        takes, here = _slots(action), taken[rank]
        for slot in range(start, start + interval):
            cells = [each % interval for each in range(slot, slot + takes)]
            if here.isdisjoint(cells):
                break
        else:
            return None
        passes[action] = slot
        here.update(cells)
        part, ahead = (number - 1) * len(speeds) // len(way), number * len(speeds) // len(way)
        start = slot + (speeds[part] if part == ahead else takes) + turn * (number == stages)
    return BuildingBlock(passes, interval, tuple(place), right=True)


class Controlled(VShaped):
    """A V whose order is a building block of six slots: a forward, an input and a weight gradient on each stage."""

    @abstractmethod
    def starts(self, rank: int) -> tuple[int, int, int, int]:
        """Return a rank's first slots: forwards on the way down and up, then input gradients on the way back."""

    @property
    def block(self) -> BuildingBlock:
        """The building block."""
        passes: dict[str, int] = {}
        for rank in range(self.ranks):
            up = self.stages - 1 - rank
            passes.update(zip((f"{rank}F", f"{up}F", f"{up}I", f"{rank}I"), self.starts(rank), strict=True))
        return building_block(passes, 6, [self.place(0, stage) for stage in range(self.stages)])

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the block's passes of every micro-batch, with weight gradients in the free slots."""
        yield from self.block.row(rank, self.microbatches)


_action = lru_cache(maxsize=1 << 16)(Action)  # a search makes the same ones for each of its blocks


def _slots(action: Action) -> int:
    """Return how many slots an action takes: one for each value that it gives."""
    return len(TRAITS[action.kind].gives)


def _word(action: Action) -> str:
    """Return an action's notation without the micro-batch."""
    return str(action)[:-1]
