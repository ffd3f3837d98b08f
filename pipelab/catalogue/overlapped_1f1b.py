"""Overlapped 1F1B: interleaved 1F1B whose every forward hides the transfers of a backward."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.interleaved_1f1b import Interleaved1F1B
from pipelab.plan.actions import Item


class Overlapped1F1B(Interleaved1F1B):
    """Interleaved 1F1B with one forward more of warm-up, so that each later forward overlaps a backward.

        rank 0 | 0F0 0F1 2F0 2F1 0F2         0F3&2B0──── 2F2&2B1──── 2F3&0B0──── 0B1         2B2 2B3 0B2 0B3
        rank 1 |     1F0 1F1 3F0 3F1&3B0──── 1F2&3B1──── 1F3&1B0──── 3F2&1B1──── 3F3&3B2──── 3B3 1B2 1B3

    While a rank computes a forward and a backward in one slot (`F(3, 0) & B(0, 2)`), the transfers of each hide behind
    the arithmetic of the other: with many experts, their exchanges. The halves of a pair must not wait for each other,
    so every rank needs one forward more before its first pair.

    A pair that takes as long as its two halves (`Cost(pair=FB)` with `FB = F + B`) gains nothing. Without the overlap,
    the makespan is interleaved 1F1B's, for one more stage activation on every rank.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.Overlapped1F1B(ranks=4, microbatches=8), pipelab.Cost(pair=2.5))
        >>> trace.makespan, trace.peak_activations
        (25.75, (12, 10, 8, 6))
    """

    source = (
        "Moonshot AI 2025, Kimi K2 (arXiv:2507.20534), section 2.4.2; Megatron-Core's combined_1f1b, with which an "
        "exchange between experts overlaps"
    )
    closed_forms = {
        "makespan if M >= P": "(M + (P - 1) / v) * (F + B)",
        "makespan if M < P": "(P + (M - 1) / v) * (F + B)",
        "makespan with pairs if M >= P and FB >= max(F, B)": (
            "((v - 1) * L + P) / v * (F + B) + (M - ((v - 1) * L + 1) / v) * FB"
        ),
        "peak": "min(v * M, (v - 1) * L + 2 * (P - r))",
    }

    def actions(self, rank: int) -> Iterator[Item]:
        """Yield the warm-up's forwards, the steady state's pairs, and the drain's backwards."""
        forwards, backwards, warmup = self.phases(rank)
        warmup = min(warmup + 1, len(forwards))
        yield from forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            yield forward & backward
        yield from backwards[len(forwards) - warmup :]
