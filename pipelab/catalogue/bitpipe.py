"""BitPipe: V shapes in both directions."""

from __future__ import annotations

from pipelab.catalogue.hanayo import Hanayo


class BitPipe(Hanayo):
    """Micro-batches go through the ranks in a V, every second one in a V upside down.

        stage          0 1 2 3   4 5 6 7
        even           0 1 2 3   3 2 1 0
        odd            3 2 1 0   0 1 2 3

        rank 0 | 0F0 1F1 2F1 3F0 3B0 2B1 1B1 0B0 0F2 1F3 2F3 3F2 3B2 2B3 1B3 0B2
        rank 1 | 0F1 1F0 2F0 3F1 3B1 2B0 1B0 0B1 0F3 1F2 2F2 3F3 3B3 2B2 1B2 0B3

    Every rank holds four stages, two for each direction, so the parameters are held twice, and all-reduces sum their
    gradients. The order is list scheduling's, as of [`Greedy`][pipelab.Greedy], whose arguments it takes. The paper's
    own order has the bubble `(P - 2) / (3 * M + P - 2)` at `B = 2 * F` and `M = P`: this one reaches it with 4 ranks,
    and misses it by half a unit of 30 with 8.

    Example:
        >>> import pipelab
        >>> [pipelab.simulate(pipelab.BitPipe(ranks, ranks)).makespan for ranks in (4, 8)]
        [14.0, 30.5]

    Raises:
        UsageError: as [`Greedy`][pipelab.Greedy].
    """

    source = "Wu et al. 2024, BitPipe (arXiv:2410.19367), section 3; the order is list scheduling's"

    def place(self, microbatch: int, stage: int) -> int:
        """Return the rank that runs a stage: down and back up, or up and back down."""
        down = super().place(microbatch, stage)
        return self.ranks - 1 - down if microbatch % 2 else down
