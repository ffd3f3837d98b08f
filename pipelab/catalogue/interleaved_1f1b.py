"""Interleaved 1F1B: 1F1B over several smaller stages per rank."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import Looped
from pipelab.plan.actions import Action, B, F


class Interleaved1F1B(Looped):
    """1F1B with several stages per rank, and so a smaller bubble.

        rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3
        rank 1 |     1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    A round of micro-batches, one for every rank, goes through the rank's first stage, then through its second, before
    the next round starts. Backwards do the same, starting at the last stage.

    With `v` stages per rank and at least as many micro-batches as ranks, a rank waits `v` times less than in 1F1B. The
    price: a rank holds more activations, and `v` times as much travels. With fewer micro-batches, a rank waits until
    they come round again.

    The paper and Megatron-LM need a multiple of `P` micro-batches, PyTorch a multiple of the number of rounds. Here
    rounds may differ by one micro-batch, which costs no time, so any number is accepted.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.Interleaved1F1B(ranks=4, microbatches=8))
        >>> trace.makespan, trace.peak_activations
        (28.5, (11, 9, 7, 5))
    """

    source = "Narayanan et al. 2021, Megatron-LM (arXiv:2104.04473), section 2.2.2 and figure 4"
    closed_forms = {
        "makespan if M >= P": "(M + (P - 1) / v) * (F + B)",
        "makespan if M < P": "(P + (M - 1) / v) * (F + B)",
        "bubble if M >= P": "(P - 1) / (v * M + P - 1)",
        "peak": "min(v * M, (v - 1) * L + 2 * (P - 1 - r) + 1)",
    }

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the warm-up's forwards, the steady state's pairs, and the drain's backwards."""
        stages = self.stages_of(rank)
        forwards = [F(m, s) for each in self.rounds for s in stages for m in each]
        backwards = [B(m, s) for each in self.rounds for s in reversed(stages) for m in each]
        ahead = (self.stages_per_rank - 1) * len(self.rounds[0]) + 2 * (self.ranks - 1 - rank)
        warmup = min(ahead, len(forwards))
        yield from forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            yield forward
            yield backward
        yield from backwards[len(forwards) - warmup :]
