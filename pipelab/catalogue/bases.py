"""Base classes of the schedules: one stage per rank, several in a loop, two in a V, and two directions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import ClassVar

from pipelab.errors import UsageError
from pipelab.plan.actions import Item, halves_of
from pipelab.schedule import Schedule


class SingleStage(Schedule):
    """A schedule whose micro-batches go down the ranks once: rank `r` holds stage `r` only.

    Args:
        ranks: how many workers the pipeline has.
        microbatches: how many slices the batch is cut into.
        stages_per_rank: 1.

    Raises:
        UsageError: if a number is not a positive whole number, or if `stages_per_rank` is not 1.
    """

    needs = {"1 stage per rank": "v == 1"}

    looping: ClassVar[str] = "looped-bfs"
    """The similar schedule with several stages per rank, which the error suggests."""

    def __init__(self, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> None:
        """Keep the sizes."""
        super().__init__(ranks, microbatches, stages_per_rank)
        ours = type(self).actions.__module__.startswith("pipelab.")  # a student's may be for any number of stages
        if ours and self.stages_per_rank != 1:
            raise UsageError(
                f"stages_per_rank={self.stages_per_rank}: {type(self).__name__} has exactly 1 on every rank: leave it "
                f"out, or use a schedule for several, such as {self.looping}"
            )


class Looped(Schedule):
    """A schedule whose micro-batches loop through the ranks: rank `r` of `P` holds stages `r`, `r + P`, and so on.

        stage   0 1 2 3   4 5 6 7   8 …
        rank    0 1 2 3   0 1 2 3   0 …

    Args:
        ranks: how many workers the pipeline has.
        microbatches: how many slices the batch is cut into.
        stages_per_rank: how many stages each rank holds, and so how often a micro-batch visits it.
    """

    def __init__(self, ranks: int, microbatches: int, stages_per_rank: int = 2) -> None:
        """Keep the sizes; two stages per rank by default."""
        super().__init__(ranks, microbatches, stages_per_rank)

    def stages_of(self, rank: int) -> range:
        """Return the stages that a rank holds, from the input on."""
        return range(rank, self.stages, self.ranks)

    @property
    def shortest_round(self) -> int:
        """How many micro-batches a round has at least, if there are enough."""
        return self.ranks

    @property
    def rounds(self) -> list[range]:
        """The micro-batches in rounds: on a rank, a round's forwards precede the next one's, and so do its backwards.

        Each round has at least as many micro-batches as there are ranks, if there are enough. Rounds are as even as
        possible, the longer ones first.

        Example:
            >>> import pipelab
            >>> pipelab.Interleaved1F1B(ranks=4, microbatches=8).rounds
            [range(0, 4), range(4, 8)]
            >>> pipelab.Interleaved1F1B(ranks=4, microbatches=9).rounds
            [range(0, 5), range(5, 9)]
        """
        count = max(1, self.microbatches // self.shortest_round)
        length, longer = divmod(self.microbatches, count)
        starts = [length * index + min(index, longer) for index in range(count + 1)]
        return [range(start, stop) for start, stop in pairwise(starts)]


class VShaped(Schedule):
    """A schedule whose micro-batches go down the ranks and back up: rank `r` of `P` holds stages `r` and `2P - 1 - r`.

        rank 0 | 0       7
        rank 1 |  1     6
        rank 2 |   2   5
        rank 3 |    3 4

    Rank 0 computes the loss, and the last rank passes a value to itself.

    Args:
        ranks: how many workers the pipeline has.
        microbatches: how many slices the batch is cut into.
        stages_per_rank: 2.

    Raises:
        UsageError: if `stages_per_rank` is not 2.
    """

    needs = {"2 stages per rank": "v == 2"}

    def __init__(self, ranks: int, microbatches: int, stages_per_rank: int = 2) -> None:
        """Keep the sizes."""
        if stages_per_rank != 2:
            raise UsageError(
                f"stages_per_rank={stages_per_rank!r}: {type(self).__name__} needs exactly 2 on every rank, one on the "
                "way down the ranks and one on the way back up: leave it out, or use a looping schedule such as "
                "interleaved-1f1b or interleaved-zb, which accept any number"
            )
        super().__init__(ranks, microbatches, stages_per_rank)

    def place(self, microbatch: int, stage: int) -> int:  # noqa: ARG002 - all micro-batches go the same way
        """Return the rank that runs a stage: down the ranks, and back up."""
        return min(stage, self.stages - 1 - stage)


class FilledV(VShaped):
    """A V whose order is written for a full pipeline; with fewer micro-batches, what does not exist is left out."""

    def actions(self, rank: int) -> Iterator[Item]:
        """Yield a full pipeline's actions, leaving out micro-batches that do not exist."""
        row = self.filled(rank, rank, self.stages - 1 - rank, max(self.microbatches, self.enough))
        return row if self.microbatches >= self.enough else self._existing(row)

    def _existing(self, row: Iterable[Item]) -> Iterator[Item]:
        """Yield the actions of micro-batches that exist; of a pair, perhaps only one half."""
        for item in row:
            halves = halves_of(item)
            there = [half for half in halves if half.microbatch is not None and half.microbatch < self.microbatches]
            if len(there) == len(halves):
                yield item
            else:
                yield from there

    @property
    @abstractmethod
    def enough(self) -> int:
        """How many micro-batches fill the pipeline."""

    @abstractmethod
    def filled(self, rank: int, down: int, up: int, microbatches: int) -> Iterator[Item]:
        """Yield a rank's actions on its two stages, for enough micro-batches to fill the pipeline."""


class BothWays(Schedule):
    """A schedule whose micro-batches go down the ranks or up: rank `r` of `P` holds stages `r` and `P - 1 - r`.

        down    rank 0 | 0      up    rank 0 |    3
                rank 1 |  1           rank 1 |   2
                rank 2 |   2          rank 2 |  1
                rank 3 |    3         rank 3 | 0

    Every stage is on two ranks, so the parameters are held twice; of an odd number of ranks, the middle one holds one
    stage, which is on no other. A micro-batch finds one stage on every rank.

    Args:
        ranks: how many workers the pipeline has.
        microbatches: how many slices the batch is cut into.
        stages_per_rank: one, for each micro-batch.

    Raises:
        UsageError: if `stages_per_rank` is not 1.
    """

    needs = {"1 stage per rank": "v == 1"}

    def __init__(self, ranks: int, microbatches: int, stages_per_rank: int = 1) -> None:
        """Keep the sizes."""
        if stages_per_rank != 1:
            raise UsageError(
                f"stages_per_rank={stages_per_rank!r}: {type(self).__name__} cuts the model into as many stages as "
                "there are ranks and puts each on two of them, so a micro-batch finds exactly 1 on every rank: "
                "leave it out"
            )
        super().__init__(ranks, microbatches, stages_per_rank)

    @abstractmethod
    def down(self, microbatch: int) -> bool:
        """Return whether a micro-batch enters at rank 0."""

    def place(self, microbatch: int, stage: int) -> int:
        """Return the rank that runs a stage, in the micro-batch's direction."""
        return stage if self.down(microbatch) else self.ranks - 1 - stage
