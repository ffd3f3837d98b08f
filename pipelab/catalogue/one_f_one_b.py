"""1F1B, with a longer warm-up too, and the single loop that is often taught as 1F1B."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import SingleStage
from pipelab.plan.actions import Action, B, F


class OneFOneB(SingleStage):
    """Fill the pipe, then one backward for every new forward.

        rank 0 | F0 F1 F2       B0 F3 B1 F4 B2    B3    B4
        rank 1 |    F0 F1    B0 F2 B1 F3 B2 F4 B3    B4
        rank 2 |       F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

    With equal stages it takes as long as GPipe, but rank `r` of `P` holds at most `P - r` activations. So a larger
    batch fits, with more micro-batches, which shrink the bubble. Fewer micro-batches than ranks are fine.

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


class DelayedBackward(SingleStage):
    """After forward `i`, backward of `i - 1`, on every rank; the last backward after the loop.

        rank 0 | F0 F1       B0 F2       B1 F3       B2 B3
        rank 1 |    F0 F1 B0       F2 B1       F3 B2 B3

    It reads like 1F1B, and on the last rank it nearly is. But every rank keeps only two micro-batches in flight, while
    1F1B warms up with more of them on the earlier ranks. So the ranks mostly wait for each other.

    Example:
        >>> import pipelab
        >>> pipelab.simulate(pipelab.DelayedBackward(ranks=4, microbatches=8)).makespan
        87.0
    """

    source = "taught as a single-loop 1F1B in courses; the true one is `OneFOneB`"
    closed_forms = {"makespan if M >= 2": "(P * (M - 1) + 1) * (F + B)", "peak": "min(M, 2)"}

    def actions(self, rank: int) -> Iterator[Action]:  # noqa: ARG002 - every rank does the same
        """Yield each forward followed by the backward before it."""
        for m in range(self.microbatches):
            yield F(m)
            if m > 0:
                yield B(m - 1)
        yield B(self.microbatches - 1)
