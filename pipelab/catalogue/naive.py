"""Naive model parallelism: one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import SingleStage
from pipelab.plan.actions import Action, B, F


class Naive(SingleStage):
    """Send one micro-batch through the whole pipeline and back before the next one starts.

        rank 0 | F0       B0 F1       B1
        rank 1 |    F0 B0       F1 B1

    One rank works at a time. `Naive(ranks, 1)` sends the whole batch in one, as a model split by hand with `.to()`
    does.

    Example:
        >>> import pipelab
        >>> pipelab.simulate(pipelab.Naive(ranks=4, microbatches=8)).bubble
        0.75
    """

    source = "Huang et al. 2019, GPipe (arXiv:1811.06965), figure 2b"
    closed_forms = {"makespan": "M * P * (F + B)", "bubble": "1 - 1 / P", "peak": "1"}

    def actions(self, rank: int) -> Iterator[Action]:  # noqa: ARG002 - every rank does the same
        """Yield forward and backward of one micro-batch after the other."""
        for m in range(self.microbatches):
            yield F(m)
            yield B(m)
