"""The frontier: how small a bubble a memory buys, found by a search over building blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from pipelab.catalogue import schedules
from pipelab.catalogue.building_block import BuildingBlock, first_fit
from pipelab.display import show
from pipelab.errors import require_size
from pipelab.files import write
from pipelab.simulation.clock import simulate
from pipelab.simulation.cost import Cost
from pipelab.trace.trace import Trace

if TYPE_CHECKING:
    from pipelab.table import Table

_INTERVALS = 6, 7, 9, 12
"""Every how many slots a micro-batch enters: a rank has six slots of work for it. More slots need less memory."""


@dataclass(frozen=True, slots=True)
class Point:
    """A schedule of the catalogue, or a building block, at the sizes of a frontier.

    Attributes:
        name: the schedule's name, or the block's speeds.
        trace: its simulated step.
        block: the building block; `None` for a schedule of the catalogue.
    """

    name: str
    trace: Trace
    block: BuildingBlock | None = None

    @property
    def held(self) -> float:
        """The most activations that a rank holds, in micro-batches of its share of the model."""
        return max(self.trace.peak_activations) * self.trace.ranks / self.trace.plan.stages

    @property
    def makespan(self) -> float:
        """The time of the step."""
        return self.trace.makespan

    @property
    def bubble(self) -> float:
        """The idle share of all rank time."""
        return self.trace.bubble


@dataclass(frozen=True, slots=True)
class Frontier:
    """Bubbles against memory. Made by `frontier`.

    Attributes:
        points: the building blocks that no other one beats, from the least memory on: each takes less time than the one
            before, and holds more.
        schedules: the schedules of the catalogue that accept these sizes.
    """

    points: tuple[Point, ...]
    schedules: tuple[Point, ...]

    @property
    def best(self) -> tuple[Point, ...]:
        """The blocks and schedules that nothing beats: everything that holds as little takes longer."""
        return _front([*self.schedules, *self.points])

    @property
    def table(self) -> Table:
        """All blocks and schedules, from the least memory on."""
        return show(self, "table")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture (`svg`), or the table: see `Table.save`. Return the path."""
        if Path(path).suffix.lower() != ".svg":
            return self.table.save(path)
        return write(Path(path), self._repr_svg_())

    def __str__(self) -> str:
        """Return the table as text."""
        return str(self.table)

    def _repr_svg_(self) -> str:
        """Return the picture, which a notebook shows too."""
        return show(self, "svg")


def frontier(ranks: int, microbatches: int, cost: Cost | None = None, *, split: bool = True) -> Frontier:
    """Search for the building blocks that wait least for what they hold, and put the catalogue's schedules beside them.

    The search is over V shapes. One micro-batch goes down and up the ranks, and back, at each of four speeds, and waits
    wherever its slot is taken. The blocks that are best with `2 * ranks` micro-batches are then simulated with all. The
    result is the same in every run. On 8 ranks with 32 micro-batches it takes two seconds. It skips blocks
    that would hold more than `ranks` micro-batches.

    Args:
        ranks: how many workers the pipeline has.
        microbatches: how many slices the batch is cut into.
        cost: the times of actions and transfers, one number for all stages; by default forward 1, backward 2 and free
            transfers.
        split: whether the blocks split backwards into `I` and `W`.

    Example:
        >>> import pipelab
        >>> found = pipelab.frontier(ranks=4, microbatches=8)
        >>> for point in found.points:
        ...     print(point.held, point.makespan, point.name)
        1.0 50.5 speeds 1 1 1 1, every 12
        1.5 47.0 speeds 1 1 1 1, turn 1, every 12
        2.0 29.5 speeds 1 1 1 1, every 6
        3.0 28.5 speeds 1 2 1 2, turn 1, every 6
        3.5 27.5 speeds 4 4 1 4, every 7
        4.0 26.5 speeds 1 4 1 2, every 6
        >>> [each.name for each in found.best if each.block is None]
        ['v-min', 'interleaved-zb', 'dualpipe']

    Raises:
        CostError: if a cost has a list.
        UsageError: if a size is not a positive whole number.

    Source:
        The search is the idea of Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv:2405.15362).
    """
    ranks, microbatches = require_size("ranks", ranks), require_size("microbatches", microbatches)
    known = [
        Point(name, simulate(kind(ranks, microbatches), cost))
        for name, kind in schedules.items()
        if not kind.refusal(ranks, microbatches)
    ]
    found: list[Point] = []
    orders = dict[object, str]()  # many blocks put the same actions in the same order
    least = float(ranks)
    few = min(microbatches, 2 * ranks)  # with more, every block takes longer by the same for each
    for name, block in _blocks(ranks, split):
        if _average(block) < (least if block.interval > 7 else ranks + 1):
            plan = block.plan(few, name)
            if orders.setdefault(plan.written, name) == name:
                found.append(Point(name, simulate(plan, cost), block))
                least = min(least, found[-1].held)
    best = [(each.name, each.block) for each in _front(found) if each.block]
    points = [Point(name, simulate(block.plan(microbatches, name), cost), block) for name, block in best]
    return Frontier(_front(points), tuple(known))


def _blocks(ranks: int, split: bool) -> Iterator[tuple[str, BuildingBlock]]:
    """Yield different blocks in a V, with names."""
    place = [*range(ranks), *reversed(range(ranks))]
    forwards, backwards = range(1, 5), range(1 if split else 2, 5 if split else 6)
    seen = set[tuple[int, ...]]()
    for interval, *speeds, turn in product(_INTERVALS, forwards, forwards, backwards, backwards, range(3)):
        block = first_fit(place, interval, speeds, turn, split=split)
        if block and (timing := (interval, *block.passes.values())) not in seen:
            seen.add(timing)
            yield f"speeds {' '.join(map(str, speeds))}{f', turn {turn}' if turn else ''}, every {interval}", block


def _average(block: BuildingBlock) -> float:
    """Return how many micro-batches of its share a rank holds on average with many, weight gradients not counted."""
    stays = [0] * block.ranks
    for action, slot in block.passes.items():
        stays[block.place[action.stage or 0]] += -slot if action.traits.forward else slot + len(action.traits.gives)
    return max(stays) / block.interval * block.ranks / len(block.place)


def _front(points: list[Point]) -> tuple[Point, ...]:
    """Return the points that none beats, from the least memory on."""
    front: list[Point] = []
    for each in sorted(points, key=lambda point: (point.held, point.makespan)):
        if not front or each.makespan < front[-1].makespan * (1 - 1e-9):
            front.append(each)
    return tuple(front)
