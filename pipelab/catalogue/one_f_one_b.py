"""1F1B: one backward for every new forward."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import SingleStage
from pipelab.plan.actions import Action, B, F


class OneFOneB(SingleStage):
    """Fill the pipe, then one backward for every new forward.

        rank 0 | F0 F1 F2       B0 F3 B1 F4 B2    B3    B4
        rank 1 |    F0 F1    B0 F2 B1 F3 B2 F4 B3    B4
        rank 2 |       F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

    It takes as long as GPipe, but rank `r` of `P` holds at most `P - r` activations. So a larger batch fits, with more
    micro-batches, which shrink the bubble. Fewer micro-batches than ranks are fine.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.OneFOneB(ranks=4, microbatches=8))
        >>> trace.makespan, trace.peak_activations
        (33.0, (4, 3, 2, 1))
    """

    source = (
        "Narayanan et al. 2019, PipeDream (SOSP '19), section 3.2; with a flush: Narayanan et al. 2021, Megatron-LM "
        "(arXiv:2104.04473), section 2.2.1 and figure 4"
    )
    closed_forms = {
        "makespan": "(M + P - 1) * (F + B)",
        "makespan with latency if M % P == 0 and P > 1": (
            "(M + P - 1) * (F + B) + (2 * (P - 1) * M / P + 2 * (P - 2)) * T"
        ),
        "makespan with recomputation if P > 1 and C <= B": "(M + P - 1) * (F + B) + max(0, (M - 1) * C - F)",
        "bubble": "(P - 1) / (M + P - 1)",
        "peak": "min(M, P - r)",
    }

    looping = "interleaved-1f1b"

    def warmup(self, rank: int) -> int:
        """Return how many forwards a rank runs before its first backward."""
        return min(self.microbatches, self.ranks - rank)

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the warm-up's forwards, the steady state's pairs, and the drain's backwards."""
        warmup = self.warmup(rank)
        for m in range(warmup):
            yield F(m)
        for m in range(self.microbatches - warmup):
            yield B(m)
            yield F(warmup + m)
        for m in range(self.microbatches - warmup, self.microbatches):
            yield B(m)
