"""Interleaved zero bubble: ZB-H1 over several smaller stages per rank."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import Looped
from pipelab.plan.actions import Action, F, I, W


class InterleavedZeroBubble(Looped):
    """Interleaved 1F1B with split backwards, as in ZB-H1.

        rank 0 | 0F0 0F1 2F0 2F1     2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
        rank 1 |     1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3

    Micro-batches go in interleaved 1F1B's rounds, but each rank warms up with only one forward more than the next,
    instead of two. Rank `r` delays its weight gradients by `r` input gradients. With one stage per rank it is ZB-H1.

    It is the order of PyTorch's `ScheduleInterleavedZeroBubble`, which needs a multiple of the number of rounds; here
    any number of micro-batches is accepted.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.InterleavedZeroBubble(ranks=4, microbatches=8))
        >>> trace.makespan, trace.peak_activations
        (25.5, (8, 8, 8, 8))
    """

    source = (
        "Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.1, over the stages of "
        "Narayanan et al. 2021, Megatron-LM (arXiv:2104.04473), section 2.2.2"
    )
    closed_forms = {
        "makespan if M >= P": "M * (F + B) + (P - 1) / v * (F + I - min(F, I, W))",
        "peak": "min(v * M, (v - 1) * L + P)",
    }

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the warm-up's forwards, then forward and input gradient in turn, weight gradients `rank` behind."""
        stages = self.stages_of(rank)
        forwards = [F(m, s) for each in self.rounds for s in stages for m in each]
        backwards = [(m, s) for each in self.rounds for s in reversed(stages) for m in each]
        warmup = (self.stages_per_rank - 1) * len(self.rounds[0]) + self.ranks - 1 - rank
        yield from forwards[:warmup]
        for at, (m, s) in enumerate(backwards):
            if warmup + at < len(forwards):
                yield forwards[warmup + at]
            yield I(m, s)
            if at >= rank:
                yield W(*backwards[at - rank])
        for m, s in backwards[max(0, len(backwards) - rank) :]:
            yield W(m, s)
