"""V-Min: a third of 1F1B's activations."""

from __future__ import annotations

from pipelab.catalogue.building_block import Controlled


class VMin(Controlled):
    """Split backwards on two stages in a V: a third of 1F1B's activations, the least that a V can hold.

        rank 0 | 0F0         3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2     0I2 0W2
        rank 1 |     1F0 2F0         2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2

    A micro-batch goes down and up without a pause, forwards and backwards, and so leaves as little behind as a V
    allows. Every rank holds about a third of what 1F1B's rank 0 holds. The bubble grows with times that differ: a rank
    has few activations to work on while it waits.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.VMin(ranks=8, microbatches=32))
        >>> trace.makespan, max(trace.peak_activations)
        (109.5, 8)
    """

    source = (
        "Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv:2405.15362), section 3 and appendix: "
        "V-Min"
    )
    closed_forms = {
        "makespan if M >= 2 and P >= 2 and F == I and I == W": "M * (F + B) + (4 * P - 5 + 2 * (P % 3 == 0)) / 2 * F",
        "peak if M >= P": "2 * ((P + 4) // 3) - 2 * (P % 3 == 2) * (r % 3 == 0)",
    }

    def starts(self, rank: int) -> tuple[int, int, int, int]:
        """Return the first slots: one per hop."""
        ranks = self.ranks
        shift = 0 if ranks % 3 else 2
        return rank, 2 * ranks - rank - 1, 2 * ranks + shift + rank, 4 * ranks + shift - rank - 1
