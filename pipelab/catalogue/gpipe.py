"""GPipe and its like: all forwards before the first backward, or one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import Looped, SingleStage
from pipelab.plan.actions import Action, B, F


class Naive(SingleStage):
    """Send one micro-batch through the whole pipeline and back before the next one starts.

        rank 0 | F0       B0 F1       B1
        rank 1 |    F0 B0       F1 B1

    One rank works at a time. `Naive(ranks, 1)` sends the whole batch in one piece, as a model split by hand with
    `.to()` does.

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


class GPipe(SingleStage):
    """All micro-batches forward, then all backward, in the same order.

        rank 0 | F0 F1 F2             B0 B1 B2
        rank 1 |    F0 F1 F2       B0 B1 B2
        rank 2 |       F0 F1 F2 B0 B1 B2

    It takes as long as 1F1B, but every rank holds the activations of all micro-batches, which is what 1F1B improves on.
    The order is the one that PyTorch's `ScheduleGPipe` executes. The paper (figure 2c) and torchgpipe run backwards in
    reverse, from the last micro-batch on, in the same time and memory. The paper also recomputes activations to keep
    less (section 2.3), as `with_recompute` does. Reversed, that takes one `C` fewer: the last rank runs its last
    forward right before the same micro-batch's backward.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.GPipe(ranks=4, microbatches=8))
        >>> trace.makespan, trace.peak_activations
        (33.0, (8, 8, 8, 8))
    """

    source = "Huang et al. 2019, GPipe (arXiv:1811.06965), section 2.2 and figure 2c; its bubble, section 2.3"
    closed_forms = {
        "makespan": "(M + P - 1) * (F + B)",
        "makespan with latency": "(M + P - 1) * (F + B) + 2 * (P - 1) * T",
        "makespan with recomputation if M > 1": "(M + P - 1) * (F + B) + M * C",
        "bubble": "(P - 1) / (M + P - 1)",
        "peak": "M",
    }

    def actions(self, rank: int) -> Iterator[Action]:  # noqa: ARG002 - every rank does the same
        """Yield every forward, then every backward."""
        for m in range(self.microbatches):
            yield F(m)
        for m in range(self.microbatches):
            yield B(m)


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
