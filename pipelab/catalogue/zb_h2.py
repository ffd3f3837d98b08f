"""ZB-H2: no rank ever waits, for twice the memory."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import SingleStage
from pipelab.plan.actions import Action, F, I, W


class ZBH2(SingleStage):
    """ZB-H1 with twice the warm-up: no rank waits once it has begun.

        rank 0 | F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
        rank 1 |    F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5
        rank 2 |       F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

    Rank `r` warms up with `2 * (P - r) - 1` forwards, which fill the time until its first input gradient comes, and
    puts its weight gradients off by `2 * r` micro-batches. The lanes are a parallelogram: with at least `2 * P - 1`
    micro-batches and equal times, no rank waits between its own first start and its own last end.

    The makespan need not be shorter: if `I` and `W` are equal and no longer than `F`, ZB-H1's makespan is the same. The
    gain is that rank 0 is done before the last rank, and can begin its next step right away if the optimizer allows it:
    the paper postpones the check that all ranks would have to wait for. So compare each rank's own span,
    `Trace.spans`. With fewer than `2 * P - 1` micro-batches and equal times, ZB-H1's makespan is never longer; if `I`
    is longer than `F` or than `W`, it can be.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.ZBH2(ranks=4, microbatches=8))
        >>> trace.makespan, trace.spans, trace.peak_activations
        (27.0, (24.0, 24.0, 24.0, 24.0), (7, 7, 7, 7))
    """

    source = "Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.2, figure 3 and table 2"
    closed_forms = {
        "makespan if M >= 2 * P - 1": "M * (F + B) + (P - 1) * max(F, I - F, F + I - 2 * W)",
        "span if M >= 2 * P - 1": "M * (F + B) + (P - 1 - r) * max(0, I - F, F + I - 2 * W)",
        "peak": "min(M, 2 * P - 1)",
    }

    looping = "interleaved-zb"

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the warm-up's forwards, then forward and input gradient in turn, weight gradients `2 * rank` behind."""
        warmup = min(2 * (self.ranks - 1 - rank), self.microbatches)
        behind = 2 * rank
        for m in range(warmup):
            yield F(m)
        for m in range(self.microbatches):
            if warmup + m < self.microbatches:
                yield F(warmup + m)
            yield I(m)
            if m >= behind:
                yield W(m - behind)
        for m in range(max(0, self.microbatches - behind), self.microbatches):
            yield W(m)
