"""Seq1F1B: 1F1B on slices of sequences."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import SingleStage
from pipelab.errors import require_size
from pipelab.plan.actions import Action, B, F


class Seq1F1B(SingleStage):
    """1F1B whose micro-batches are slices of sequences: the bubble shrinks without more sequences.

        rank 0 | F0 F1 F2 F3       B1 F4 B0 F5 B3    B2    B5 B4
        rank 1 |    F0 F1 F2    B1 F3 B0 F4 B3 F5 B2    B5 B4
        rank 2 |       F0 F1 B1 F2 B0 F3 B3 F4 B2 F5 B5 B4

    Causal attention reads earlier slices only, so a slice can go on to the next rank while the next slice follows.
    Backwards run from a sequence's last slice to its first. So a rank runs `slices - 1` more forwards before its first
    backward than in 1F1B, but each activation is `slices` times smaller.

    Here all slices take the same time. In a model, later slices of equal length take longer, because they attend to
    more; the paper cuts sequences unevenly instead.

    Args:
        ranks: how many workers the pipeline has.
        microbatches: how many slices there are, those of all sequences together.
        stages_per_rank: 1.
        slices: into how many slices each sequence is cut; the last sequence may have fewer.

    Example:
        Four sequences, whole and in halves, in units of a whole sequence's forward:

        >>> import pipelab
        >>> whole = pipelab.simulate(pipelab.OneFOneB(ranks=4, microbatches=4))
        >>> halves = pipelab.simulate(pipelab.Seq1F1B(ranks=4, microbatches=8), pipelab.Cost(forward=0.5, backward=1))
        >>> whole.makespan, whole.peak_activations
        (21.0, (4, 3, 2, 1))
        >>> halves.makespan, halves.peak_activations
        (16.5, (5, 4, 3, 2))

    Raises:
        UsageError: if a number is not a positive whole number, or if `stages_per_rank` is not 1.
    """

    source = "Sun et al. 2024, Seq1F1B (arXiv:2406.03488), section 3: the warm-up of rank r is min(P - r - 2 + k, k M)"
    closed_forms = {
        "makespan": "(M + P - 1) * (F + B)",
        "bubble": "(P - 1) / (M + P - 1)",
        "peak": "min(M, P - r - 1 + k)",
    }
    looping = "slimpipe"
    slices = 2

    def __init__(
        self, ranks: int, microbatches: int, stages_per_rank: int | None = None, slices: int | None = None
    ) -> None:
        """Keep the sizes."""
        super().__init__(ranks, microbatches, stages_per_rank)
        self.slices = require_size("slices", type(self).slices if slices is None else slices)

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the warm-up's forwards, the steady state's pairs, and the drain's backwards."""
        every = range(self.microbatches)
        sequences = [every[first : first + self.slices] for first in every[:: self.slices]]
        backwards = [m for sequence in sequences for m in reversed(sequence)]
        warmup = min(self.ranks - rank - 2 + self.slices, self.microbatches)
        for m in range(warmup):
            yield F(m)
        for m in range(warmup, self.microbatches):
            yield F(m)
            yield B(backwards[m - warmup])
        for m in backwards[self.microbatches - warmup :]:
            yield B(m)
