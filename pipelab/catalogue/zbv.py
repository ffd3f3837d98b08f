"""ZB-V: zero bubble in a V, in 1F1B's memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from pipelab.catalogue.bases import FilledV
from pipelab.plan.actions import Action, F, I, W


class ZBV(FilledV):
    """Split backwards on two stages per rank in a V: no bubble.

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        rank 1 |     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    Micro-batches go down the ranks and back up. A backward starts on rank 0, where its forward started, so every rank
    holds as much as 1F1B's rank 0: ZB-H2's gain, in 1F1B's memory.

    With at least `2 * P - 1` micro-batches and equal times, no rank waits between its own first start and its own last
    end; the makespan is longer, because the ranks do not start together. Every rank holds at most `2 * P` stage
    activations, each half a rank's share: `P` of 1F1B's.

    The order is PyTorch's: fixed, and fitted to equal times. Where `W` is shorter than `F` and `I`, ranks wait; where
    `F` and `I` differ too, all ranks wait. The paper computes a new order for measured times.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.ZBV(ranks=4, microbatches=8))
        >>> trace.makespan, trace.spans, trace.peak_activations
        (25.5, (24.0, 24.0, 24.0, 24.0), (8, 8, 8, 8))
    """

    source = (
        "Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 6; V-ZB in Qi et al. 2024, "
        "Pipeline Parallelism with Controllable Memory (arXiv:2405.15362)"
    )
    closed_forms = {
        "makespan if M >= 2 * P - 1 and F == I >= W": "M * (F + B) + (P - 1) * max(F / 2, F - W)",
        "span if M >= 2 * P - 1 and F == I >= W": "M * (F + B) + (P - 1 - r) * (F - W)",
        "peak": "min(2 * M, M + 1 + r, 2 * P)",
    }

    @property
    def enough(self) -> int:
        """How many micro-batches fill the pipeline."""
        return 2 * self.ranks - 1

    def filled(self, rank: int, down: int, up: int, microbatches: int) -> Iterator[Action]:
        """Yield warm-up, steady state and drain; on either stage, micro-batches come in turn."""
        hops = self.ranks - 1 - rank  # to the tip of the V
        (f0, i0, w0), (f1, i1, w1) = ((count(), count(), count()) for _ in ("down", "up"))  # which comes next

        # Warm-up: fill the time until the first micro-batch is back, then until its input gradient comes.
        for _ in range(2 * hops + 1):
            yield F(next(f0), down)
        for _ in range(rank):
            yield F(next(f1), up)
            yield F(next(f0), down)
        for _ in range(hops + 1):
            yield F(next(f1), up)
            yield I(next(i1), up)
            yield W(next(w1), up)

        # Steady state: three actions down, three up; the forwards down are the first to run out.
        last_down = microbatches - (self.enough - rank)
        for at in range(microbatches - self.ranks):
            if at < last_down:
                yield F(next(f0), down)
            yield I(next(i0), down)
            yield W(next(w0), down)
            yield F(next(f1), up)
            yield I(next(i1), up)
            yield W(next(w1), up)

        # Drain: input gradients first, others wait for them; the weight gradients put off fill the end.
        for _ in range(rank):
            yield I(next(i0), down)
            yield I(next(i1), up)
        for _ in range(hops + 1):
            yield I(next(i0), down)
            yield W(next(w0), down)
        for _ in range(rank):
            yield W(next(w1), up)
        for _ in range(rank):
            yield W(next(w0), down)
