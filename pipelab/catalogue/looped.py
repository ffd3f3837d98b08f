"""What looping schedules share: stages dealt out to the ranks in turn, and micro-batches that go in rounds."""

from __future__ import annotations

from itertools import pairwise

from pipelab.schedule import Schedule

__all__ = ["Looped"]


class Looped(Schedule):
    """A schedule whose micro-batches loop through the ranks: rank `r` of `P` holds stages `r`, `r + P`, and so on.

        stage   0 1 2 3   4 5 6 7   8 …
        rank    0 1 2 3   0 1 2 3   0 …

    Args:
        ranks: how many workers the pipeline has.
        microbatches: how many slices the batch is cut into.
        stages_per_rank: how many stages each rank holds, and so how often a micro-batch comes by.
    """

    def __init__(self, ranks: int, microbatches: int, stages_per_rank: int = 2) -> None:
        """Keep the sizes; with two stages per rank unless told otherwise."""
        super().__init__(ranks, microbatches, stages_per_rank)

    def stages_of(self, rank: int) -> range:
        """Return the stages that a rank holds, from the input on."""
        return range(rank, self.stages, self.ranks)

    @property
    def rounds(self) -> list[range]:
        """The micro-batches in rounds: a rank takes a round through all its stages before the next round starts.

        As many rounds as hold one micro-batch or more for every rank, as even as can be, the longer ones first.

        Example:
            >>> import pipelab
            >>> pipelab.Interleaved1F1B(ranks=4, microbatches=8).rounds
            [range(0, 4), range(4, 8)]
            >>> pipelab.Interleaved1F1B(ranks=4, microbatches=9).rounds
            [range(0, 5), range(5, 9)]
        """
        count = max(1, self.microbatches // self.ranks)
        length, longer = divmod(self.microbatches, count)
        starts = [length * index + min(index, longer) for index in range(count + 1)]
        return [range(start, stop) for start, stop in pairwise(starts)]
