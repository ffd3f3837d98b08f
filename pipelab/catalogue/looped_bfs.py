"""Looped breadth-first: GPipe over several smaller stages per rank."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import Looped
from pipelab.plan.actions import Action, B, F


class LoopedBFS(Looped):
    """GPipe with several stages per rank, one after the other.

        rank 0 | 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3         2B3 2B2 2B1 2B0 0B3 0B2 0B1 0B0
        rank 1 |     1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B3 3B2 3B1 3B0 1B3 1B2 1B1 1B0

    All micro-batches go through a rank's first stage, then all through its second; backwards in reverse. This is
    breadth first: a rank stays with one stage as long as possible, while interleaved 1F1B goes deep with a few
    micro-batches. So a stage's weights are needed only once per direction, and its all-reduce can start while the
    others still compute.

    With sharded weights (FSDP), `pipelab.with_gathers(schedule, 2)` is the paper's BF-PP: a rank gathers the next stage
    while it computes with this one, `2v - 2` times in all, however many micro-batches there are.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.LoopedBFS(ranks=4, microbatches=8))
        >>> trace.makespan, trace.peak_activations
        (28.5, (16, 16, 16, 16))
    """

    source = "Lamy-Poirier 2022, Breadth-First Pipeline Parallelism (arXiv:2211.05953), section 4"
    closed_forms = {
        "makespan if M >= P": "(M + (P - 1) / v) * (F + B)",
        "makespan if M < P": "(P + (M - 1) / v) * (F + B)",
        "bubble if M >= P": "(P - 1) / (v * M + P - 1)",
        "peak": "v * M",
    }

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield every forward, stage by stage, then every backward in the reverse order."""
        order = [(m, s) for s in self.stages_of(rank) for m in range(self.microbatches)]
        for m, s in order:
            yield F(m, s)
        for m, s in reversed(order):
            yield B(m, s)
