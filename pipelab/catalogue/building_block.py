"""Building blocks: one micro-batch's way through the ranks, repeated."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipelab.catalogue.bases import VShaped
from pipelab.errors import UsageError, require_size
from pipelab.plan.actions import Action, Kind
from pipelab.plan.plan import Plan

_SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}


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

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return max(self.place) + 1

    def row(self, rank: int, microbatches: int) -> list[Action]:
        """Return a rank's actions in order.

        A weight gradient that is not among the passes runs in the rank's first free slot after its input gradient.
        """
        taken = dict[int, Action | None]()
        for action, first in self.passes.items():
            for m in range(microbatches if self.place[action.stage or 0] == rank else 0):
                start = first + m * self.interval
                taken[start] = Action(action.kind, m, action.stage)
                taken.update(
                    dict.fromkeys(range(start + 1, start + _SLOTS[action.kind]))
                )  # a whole backward's second slot
        row, owed = list[Action](), deque[Action]()
        fills = not any(action.kind == "W" for action in self.passes)
        slot, last = min(taken, default=0), max(taken, default=0)
        while slot <= last or owed:
            if slot not in taken and owed:
                row.append(owed.popleft())
            elif begun := taken.get(slot):
                row.append(begun)
                if begun.kind == "I" and fills:
                    owed.append(Action("W", begun.microbatch, begun.stage))
            slot += 1
        return row

    def plan(self, microbatches: int, name: str | None = None) -> Plan:
        """Return the plan for so many micro-batches, which `pipelab.check` need not refuse: its order has no cycle.

        Example:
            >>> import pipelab
            >>> block = pipelab.building_block({"0F": 0, "1F": 1, "1B": 2, "0B": 4}, interval=3)
            >>> block.plan(microbatches=3).rows == pipelab.OneFOneB(ranks=2, microbatches=3).plan().rows
            True
        """
        rows = [self.row(rank, microbatches) for rank in range(self.ranks)]
        return Plan(rows, len(self.place), require_size("microbatches", microbatches), self._rank_of, name)

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
        last = max(first + _SLOTS[action.kind] for action, first in self.passes.items())
        enough = last // self.interval + 2 + len(self.place)
        bound = self.plan(enough).bound
        return tuple(max(bound.in_flight(rank)) for rank in range(self.ranks))


def building_block(passes: Mapping[str, int], interval: int, place: Sequence[int] | None = None) -> BuildingBlock:
    """Return a building block: the slots of one micro-batch's passes, and how many slots later the next one follows.

    Every such block is a legal schedule, and its memory follows from how long a micro-batch stays: with an interval of
    `n` slots, a rank holds as many activations as `n` goes into the time from a forward to the release.

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
    interval = require_size("interval", interval)
    starts = {Action.parse(f"{word}0"): slot for word, slot in passes.items()}
    stages = 1 + max((action.stage or 0 for action in starts), default=0)
    ranks_of = tuple(place) if place is not None else tuple(range(stages))
    if len(ranks_of) != stages or set(ranks_of) != set(range(max(ranks_of) + 1)):
        raise UsageError(f"place={list(ranks_of)}: expected {stages} ranks, one for each stage, and no rank left out")
    block = BuildingBlock(starts, interval, ranks_of)
    _require_order(starts, stages)
    _require_room(block)
    return block


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


def _require_order(starts: Mapping[Action, int], stages: int) -> None:
    """Refuse a pass that is missing, or that starts before what it needs has ended."""
    gradient: Kind = "I" if any(action.kind == "I" for action in starts) else "B"
    listed = {action.kind for action in starts}
    if "B" in listed and listed & {"I", "W"}:
        raise UsageError("the block has whole and split backwards\n  try: one kind, B, or I with or without W")
    way = [Action("F", 0, stage) for stage in range(stages)]
    way += [Action(gradient, 0, stage) for stage in reversed(range(stages))]
    for action in [*way, *(Action("W", 0, stage) for stage in range(stages) if "W" in listed)]:
        if action not in starts:
            raise UsageError(
                f"the block has no slot for {action.stage}{action.kind}\n  try: passes={{…, {str(action)[:-1]!r}: …}}"
            )
    needs = [*pairwise(way)]
    needs += [(Action("I", 0, each.stage), each) for each in starts if each.kind == "W"]
    for before, action in needs:
        end = starts[before] + _SLOTS[before.kind]
        if starts[action] < end:
            raise UsageError(
                f"{str(action)[:-1]} starts in slot {starts[action]}, but {str(before)[:-1]}, which it needs, ends "
                f"with slot {end - 1}\n  try: slot {end} or later"
            )


def _require_room(block: BuildingBlock) -> None:
    """Refuse two passes of a rank in one slot, of one micro-batch or of two, and weight gradients without a slot."""
    taken = dict[tuple[int, int], Action]()
    for action, first in block.passes.items():
        for slot in range(first, first + _SLOTS[action.kind]):
            key = block.place[action.stage or 0], slot % block.interval
            if key in taken:
                raise UsageError(
                    f"{str(taken[key])[:-1]} and {str(action)[:-1]} of rank {key[0]} meet: slot {slot}, and every "
                    f"{block.interval} later\n  try: another slot, or a longer interval"
                )
            taken[key] = action
    listed = any(action.kind == "W" for action in block.passes)
    for rank in range(block.ranks):
        mine = [action for action in block.passes if block.place[action.stage or 0] == rank]
        work = sum(_SLOTS[each.kind] for each in mine) + (0 if listed else sum(each.kind == "I" for each in mine))
        if work > block.interval:
            raise UsageError(
                f"rank {rank} has {work} slots of work for each micro-batch, weight gradients included, and one "
                f"comes every {block.interval} slots\n  try: interval={work} or more"
            )
