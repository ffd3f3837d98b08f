"""Hanayo: micro-batches run through the ranks in waves."""

from __future__ import annotations

from pipelab.catalogue.greedy import Greedy


class Hanayo(Greedy):
    """Down the ranks and back up, several times: a wave is a V, and rank `r` of `P` holds two stages of each.

        stage   0 1 2 3   4 5 6 7   8 9 …
        rank    0 1 2 3   3 2 1 0   0 1 …

        rank 0 | 0F0 0F1 0F2 3F0 3B0 3F1 3B1     0B0     0B1 3F2 3B2         0B2
        rank 1 |     1F0 2F0 1F1 2F1 1F2 2B0 1B0 2B1 1B1 2F2         2B2 1B2

    At the turns a value stays where it is. The order follows from the placement: whenever a rank is free, it runs the
    first backward that is ready, otherwise the first forward. So this is [`Greedy`][pipelab.Greedy] with a `place` of
    its own, and takes what `Greedy` takes: a `memory_cap`, costs, a `priority`.

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
