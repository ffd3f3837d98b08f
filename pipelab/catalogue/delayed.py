"""Delayed backward: the single loop that is often taught as 1F1B."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import SingleStage
from pipelab.plan.actions import Action, B, F


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
