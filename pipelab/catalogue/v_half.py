"""V-Half: half of 1F1B's activations."""

from __future__ import annotations

from pipelab.catalogue.building_block import Controlled


class VHalf(Controlled):
    """Split backwards on two stages in a V: half of 1F1B's activations on every rank, for a larger bubble.

        rank 0 | 0F0         3F0 0F1 3I0 3W0 3F1 0F2     0I0 3I1 0W0 3F2 3W1     0I1 3I2 0W1 3W2     0I2 0W2
        rank 1 |     1F0 2F0         1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 2W1 1I1 1W1     2I2 2W2 1I2 1W2

    A micro-batch that stays half as long leaves half as much behind. In a V, what a rank holds for the way down and for
    the way up adds up to the same on every rank. V-Half lets a micro-batch go down at half speed and back up at full
    speed, forwards and backwards; weight gradients fill the free slots. Peak and bubble follow from this block:

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.VHalf(ranks=8, microbatches=32))
        >>> trace.makespan, max(trace.peak_activations)
        (109.0, 10)
        >>> pipelab.VHalf(ranks=8, microbatches=32).block.peaks[0]
        10
    """

    source = (
        "Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv:2405.15362), section 3 and appendix: "
        "V-Half"
    )
    closed_forms = {
        "makespan if M >= P and F == I and I == W": "M * (F + B) + (7 * (P - 1) + 3 * (1 - P % 2)) / 4 * F",
        "peak if M > P": "2 * (P // 2 + 1)",
    }

    def starts(self, rank: int) -> tuple[int, int, int, int]:
        """Return the first slots: two per hop downwards, one upwards."""
        ranks = self.ranks
        shift = 0 if ranks % 2 else 3
        return 2 * rank, 3 * ranks - rank - 2, 3 * ranks + shift + 2 * rank - 1, 6 * ranks + shift - rank - 2
