"""Eager 1F1B: a longer warm-up than 1F1B's, so that transfers delay it no more than GPipe."""

from __future__ import annotations

from pipelab.catalogue.one_f_one_b import OneFOneB


class Eager1F1B(OneFOneB):
    """1F1B that runs nearly twice as many forwards before the first backward, to hide the time of transfers.

        rank 0 | F0 F1 F2 F3 F4 B0 F5 B1    B2    B3    B4    B5
        rank 1 |    F0 F1 F2 B0 F3 B1 F4 B2 F5 B3    B4    B5
        rank 2 |       F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    In 1F1B, each rank waits for a gradient that has only just been computed, so every round trip of a transfer delays
    the steady state. Here the rank has another forward to run in that time. If a transfer takes at most half as long as
    a forward and a backward, latency costs as little as in GPipe: only once on the way down and once on the way back.

    Rank `r` of `P` holds up to `2 * (P - r) - 1` activations: nearly twice as many as in 1F1B, but still not all
    micro-batches, as in GPipe. If transfers take no time, all three take equally long.

    Example:
        >>> import pipelab
        >>> cost = pipelab.Cost(forward=1, backward=2, latency=0.5)
        >>> for kind in (pipelab.GPipe, pipelab.OneFOneB, pipelab.Eager1F1B):
        ...     trace = pipelab.simulate(kind(ranks=4, microbatches=8), cost)
        ...     print(trace.makespan, trace.peak_activations)
        36.0 (8, 8, 8, 8)
        41.0 (4, 3, 2, 1)
        36.0 (7, 5, 3, 1)
    """

    source = "Fan et al. 2021, DAPPLE (PPoPP '21, arXiv:2007.01045): early backward scheduling with warm-up policy B"
    closed_forms = {
        "makespan": "(M + P - 1) * (F + B)",
        "makespan with latency if 2 * T <= F + B": "(M + P - 1) * (F + B) + 2 * (P - 1) * T",
        "bubble": "(P - 1) / (M + P - 1)",
        "peak": "min(M, 2 * (P - r) - 1)",
    }

    def warmup(self, rank: int) -> int:
        """Return how many forwards a rank runs before its first backward."""
        return min(self.microbatches, 2 * (self.ranks - rank) - 1)
