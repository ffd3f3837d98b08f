"""1F1B on slices of sequences."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import Looped, SingleStage
from pipelab.errors import UsageError, require_size
from pipelab.plan.actions import Action, B, F


class Seq1F1B(SingleStage):
    """1F1B on slices: cut sequences fill the pipe sooner than whole ones, and run back from their last slice.

        rank 0 | F0 F1 F2 F3       B1 F4 B0 F5 B3    B2    B5 B4
        rank 1 |    F0 F1 F2    B1 F3 B0 F4 B3 F5 B2    B5 B4
        rank 2 |       F0 F1 B1 F2 B0 F3 B3 F4 B2 F5 B5 B4

    Causal attention only reads earlier slices, so a slice can go on to the next rank while the next slice follows.
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


class SlimPipe(Looped):
    """Interleaved 1F1B in which each round is one sequence in slices: a rank holds little more than one sequence.

        rank 0 | 0F0 0F1 2F0 2F1 0F2     2B1 0F3 2B0 2F2 0B1 2F3 0B0     2B3 2B2 0B3 0B2
        rank 1 |     1F0 1F1 3F0 3F1 3B1 1F2 3B0 1F3 1B1 3F2 1B0 3F3 3B3 3B2 1B3 1B2

    A sequence goes through all stages of a rank, slice by slice, before the next one starts; its backwards come back in
    reverse. So the first backward can start as soon as one sequence is through, and the more slices there are, the less
    a rank holds in addition: `(P - 1 - r) / (v * slices)` of a sequence.

    The paper evens out the slices' times, which causal attention makes unequal, by moving work between ranks; here
    every slice takes the same time.

    Args:
        ranks: how many workers the pipeline has.
        microbatches: how many slices there are, those of all sequences together.
        stages_per_rank: how many stages each rank holds.
        slices: into how many slices each sequence is cut, at least one for each rank; by default, as many as ranks.

    Example:
        Two sequences in 4 slices each on 4 ranks; and in 8:

        >>> import pipelab
        >>> pipelab.simulate(pipelab.SlimPipe(ranks=4, microbatches=8)).peak_activations
        (11, 10, 9, 8)
        >>> pipelab.simulate(pipelab.SlimPipe(ranks=4, microbatches=16, slices=8)).peak_activations
        (19, 18, 17, 16)

    Raises:
        UsageError: if a number is not a positive whole number, or if there are fewer slices than ranks.
    """

    source = (
        "Li et al. 2025, SlimPipe (arXiv:2504.14519), abstract: uniform slices with 1F1B, about one sequence's "
        "activations; the order is ours"
    )
    closed_forms = {
        "makespan if M % k == 0": "(M + (P - 1) / v) * (F + B)",
        "bubble if M % k == 0": "(P - 1) / (v * M + P - 1)",
        "peak": "min(v * M, v * k + P - 1 - r)",
    }

    _slices: int | None = None

    def __init__(self, ranks: int, microbatches: int, stages_per_rank: int = 2, slices: int | None = None) -> None:
        """Keep the sizes."""
        super().__init__(ranks, microbatches, stages_per_rank)
        self._slices = None if slices is None else require_size("slices", slices)
        if self.slices < self.ranks:
            raise UsageError(
                f"slices={self.slices}: at least one slice for each of the {self.ranks} ranks, or all ranks wait for "
                f"every sequence\n  try: slices={self.ranks} or more, or leave it out"
            )

    @property
    def slices(self) -> int:  # type: ignore[override]  # it follows from the number of ranks
        """Into how many slices each sequence is cut."""
        return self._slices or self.ranks

    @property
    def rounds(self) -> list[range]:
        """The micro-batches in rounds: the slices of one sequence each."""
        every = range(self.microbatches)
        return [every[first : first + self.slices] for first in every[:: self.slices]]

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the warm-up's forwards, the steady state's pairs, and the drain's backwards."""
        stages = self.stages_of(rank)
        forwards = [F(m, s) for each in self.rounds for s in stages for m in each]
        backwards = [B(m, s) for each in self.rounds for s in reversed(stages) for m in reversed(each)]
        warmup = min(self.stages_per_rank * self.slices + self.ranks - rank - 2, len(forwards))
        yield from forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            yield forward
            yield backward
        yield from backwards[len(forwards) - warmup :]
