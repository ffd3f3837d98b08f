"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import SingleStage
from pipelab.plan.actions import Action, B, F


class GPipe(SingleStage):
    """All micro-batches forward, then all backward, in the same order.

        rank 0 | F0 F1 F2             B0 B1 B2
        rank 1 |    F0 F1 F2       B0 B1 B2
        rank 2 |       F0 F1 F2 B0 B1 B2

    It takes as long as 1F1B, but every rank holds the activations of all micro-batches, which is what 1F1B improves on.
    The order is the one that PyTorch's `ScheduleGPipe` executes. The paper (figure 2c) and torchgpipe run backwards in
    reverse, from the last micro-batch on, in the same time and memory. The paper also recomputes activations to keep
    less (section 2.3), as `with_recompute` does. Reversed, that takes one `C` less: the last rank runs its last forward
    right before that one's backward.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.GPipe(ranks=4, microbatches=8))
        >>> trace.makespan, trace.peak_activations
        (33.0, (8, 8, 8, 8))
    """

    source = "Huang et al. 2019, GPipe (arXiv:1811.06965), section 2.3 and figure 2c"
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
