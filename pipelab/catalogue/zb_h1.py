"""ZB-H1: the backward split in two, in 1F1B's memory."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import SingleStage
from pipelab.plan.actions import Action, F, I, W


class ZBH1(SingleStage):
    """1F1B with split backwards: weight gradients fill the bubble.

        rank 0 | F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        rank 1 |    F0 F1    I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        rank 2 |       F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

    Another rank waits only for the input gradient `I` (the paper calls it B), so `I` comes first, and the weight
    gradient `W` runs when a rank would wait. Rank `r` delays its weight gradients by `r` micro-batches: the first input
    gradients reach rank 0 sooner, and the remaining weight gradients fill the drain.

    Its bubble is never larger than 1F1B's, and a third of it if `F`, `I` and `W` take equally long. Every rank holds as
    many activations as 1F1B's rank 0; what is held between `I` and `W` is less than a whole activation, which is not
    counted here.

    PyTorch has no class for it; its `ScheduleInterleavedZeroBubble` with one stage per rank executes this order.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.ZBH1(ranks=4, microbatches=8))
        >>> trace.makespan, trace.peak_activations
        (27.0, (4, 4, 4, 4))
    """

    source = "Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.1, figure 3 and table 2"
    closed_forms = {
        "makespan": "M * (F + B) + (P - 1) * (F + I) - (min(M, P) - 1) * min(F, I, W)",
        "makespan if M >= P and W <= min(F, I)": "M * (F + B) + (P - 1) * (F + I - W)",
        "peak": "min(M, P)",
    }

    looping = "interleaved-zb"

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the warm-up's forwards, then forward and input gradient in turn, weight gradients `rank` behind."""
        warmup = min(self.ranks - 1 - rank, self.microbatches)
        for m in range(warmup):
            yield F(m)
        for m in range(self.microbatches):
            if warmup + m < self.microbatches:
                yield F(warmup + m)
            yield I(m)
            if m >= rank:
                yield W(m - rank)
        for m in range(max(0, self.microbatches - rank), self.microbatches):
            yield W(m)
