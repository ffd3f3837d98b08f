"""Micro-batches run through the ranks in waves."""

from __future__ import annotations

from pipelab.catalogue.greedy import Greedy


class Hanayo(Greedy):
    """Down the ranks and back up, once or several times: a wave is a V, and rank `r` of `P` holds two stages of each.

        stage   0 1 2 3   4 5 6 7   8 9 …
        rank    0 1 2 3   3 2 1 0   0 1 …

        rank 0 | 0F0 0F1 0F2 3F0 3B0 3F1 3B1     0B0     0B1 3F2 3B2         0B2
        rank 1 |     1F0 2F0 1F1 2F1 1F2 2B0 1B0 2B1 1B1 2F2         2B2 1B2

    At the turns a value stays where it is. The order follows from the placement: whenever a rank is free, it runs the
    first backward that is ready, otherwise the first forward. So this is [`Greedy`][pipelab.Greedy] with another
    `place`, and it accepts the same arguments: a `memory_cap`, costs, a `priority`.

    Two waves (`stages_per_rank=4`) wait less than one, and send twice as much.

    Example:
        >>> import pipelab
        >>> for stages_per_rank in (2, 4):
        ...     print(pipelab.simulate(pipelab.Hanayo(4, 8, stages_per_rank)).makespan)
        32.5
        30.5

    Raises:
        UsageError: as [`Greedy`][pipelab.Greedy].
    """

    source = "Liu et al. 2023, Hanayo (SC '23; arXiv:2308.15762), section 3; the order is list scheduling's"
    stages_per_rank = 2

    def place(self, microbatch: int, stage: int) -> int:  # noqa: ARG002 - all micro-batches go the same way
        """Return the rank that runs a stage: down the ranks in every even round, up in every odd one."""
        turn, at = divmod(stage, self.ranks)
        return self.ranks - 1 - at if turn % 2 else at


class BitPipe(Hanayo):
    """Micro-batches go through the ranks in a V, every second one in a V upside down.

        stage          0 1 2 3   4 5 6 7
        even           0 1 2 3   3 2 1 0
        odd            3 2 1 0   0 1 2 3

        rank 0 | 0F0 1F1 2F1 3F0 3B0 2B1 1B1 0B0 0F2 1F3 2F3 3F2 3B2 2B3 1B3 0B2
        rank 1 | 0F1 1F0 2F0 3F1 3B1 2B0 1B0 0B1 0F3 1F2 2F2 3F3 3B3 2B2 1B2 0B3

    Every rank holds four stages, two for each direction, so the parameters are held twice, and all-reduces sum their
    gradients. (Of an odd number of ranks, the middle one holds two.) The order comes from list scheduling, as in
    [`Greedy`][pipelab.Greedy], and it accepts the same arguments. The paper's own order has the bubble
    `(P - 2) / (3 * M + P - 2)` at `B = 2 * F` and `M = P`: this one reaches it with 4 ranks, and misses it by half a
    unit of 30 with 8.

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
