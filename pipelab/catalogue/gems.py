"""GEMS: two copies of the model in opposite directions, and room for one activation."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import BothWays
from pipelab.plan.actions import Action, B, F


class GEMS(BothWays):
    """Micro-batches enter at the two ends in turn, and each follows the backward of the one before.

        rank 0 | F0             B0 F1 B1 F2             B2
        rank 1 |    F0       B0 F1       B1 F2       B2
        rank 2 |       F0 B0 F1             B1 F2 B2

    When a backward has left a rank, the next micro-batch's forward enters it from the same side. A rank never holds
    more than one activation, so this is for models whose activations do not fit otherwise. Two ranks work at a time,
    however many there are. Every rank holds two stages, one for each direction, and all-reduces (not drawn) sum their
    gradients.

    Example:
        >>> import pipelab
        >>> both = pipelab.GEMS(ranks=4, microbatches=8), pipelab.Naive(ranks=4, microbatches=8)
        >>> [pipelab.simulate(each).makespan for each in both]
        [75.0, 96.0]
    """

    source = "Jain et al. 2020, GEMS (SC '20; arXiv:1911.05146), section IV: GEMS-MASTER"
    closed_forms = {
        "makespan": "P * (F + B) + (M - 1) * max(P * B + F, P * F + B)",
        "peak": "1",
    }
    needs = {"1 stage per rank": "v == 1"}

    def down(self, microbatch: int) -> bool:
        """Return whether a micro-batch enters at rank 0: every second one does."""
        return microbatch % 2 == 0

    def actions(self, rank: int) -> Iterator[Action]:  # noqa: ARG002 - all ranks run the same order
        """Yield each micro-batch's forward, then its backward."""
        for m in range(self.microbatches):
            yield F(m)
            yield B(m)
