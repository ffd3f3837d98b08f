"""What V-shaped schedules share: micro-batches travel down the ranks and back up."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator

from pipelab.errors import SizeError
from pipelab.plan.actions import Item, Pair
from pipelab.schedule import Schedule

__all__ = ["VShaped"]


class VShaped(Schedule):
    """A schedule whose micro-batches go down the ranks and back up: rank `r` of `P` holds stages `r` and `2P - 1 - r`.

        rank 0 | 0       7
        rank 1 |  1     6
        rank 2 |   2   5
        rank 3 |    3 4

    Rank 0 has the loss at hand, and the last rank passes a value on to itself.

    Args:
        ranks: how many workers the pipeline has.
        microbatches: how many slices the batch is cut into.
        stages_per_rank: two.

    Raises:
        SizeError: if `stages_per_rank` is not 2.
    """

    def __init__(self, ranks: int, microbatches: int, stages_per_rank: int = 2) -> None:
        """Keep the sizes."""
        if stages_per_rank != 2:
            raise SizeError(
                f"stages_per_rank={stages_per_rank!r}: {type(self).__name__} needs exactly 2 on every rank, one on the "
                "way down the ranks and one on the way back up: leave it out, or take a looping schedule such as "
                "interleaved-1f1b or interleaved-zb, which take any number"
            )
        super().__init__(ranks, microbatches, stages_per_rank)

    def place(self, microbatch: int, stage: int) -> int:  # noqa: ARG002 - all micro-batches go the same way
        """Return the rank that runs a stage: down the ranks, and back up."""
        return min(stage, self.stages - 1 - stage)

    def actions(self, rank: int) -> Iterator[Item]:
        """Yield a full pipeline's actions, without those of micro-batches that do not exist."""
        row = self.filled(rank, rank, self.stages - 1 - rank, max(self.microbatches, self.enough))
        return row if self.microbatches >= self.enough else self._existing(row)

    def _existing(self, row: Iterable[Item]) -> Iterator[Item]:
        """Yield what concerns micro-batches that exist; of a pair, perhaps one half."""
        for item in row:
            halves = (item.forward, item.backward) if isinstance(item, Pair) else (item,)
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
        """Yield a rank's actions on its two stages, with micro-batches enough to fill the pipeline."""
