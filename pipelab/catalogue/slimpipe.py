"""SlimPipe: interleaved 1F1B on slices of sequences, of which a rank holds about one."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import Looped
from pipelab.errors import UsageError, require_size
from pipelab.plan.actions import Action, B, F


class SlimPipe(Looped):
    """Interleaved 1F1B in which each round is one sequence in slices: a rank holds little more than one sequence.

        rank 0 | 0F0 0F1 2F0 2F1 0F2     2B1 0F3 2B0 2F2 0B1 2F3 0B0     2B3 2B2 0B3 0B2
        rank 1 |     1F0 1F1 3F0 3F1 3B1 1F2 3B0 1F3 1B1 3F2 1B0 3F3 3B3 3B2 1B3 1B2

    A sequence goes through all stages of a rank, slice by slice, before the next one starts; its backwards come back in
    reverse. So the first backward can start as soon as one sequence is through, and the more slices there are, the
    less is held beside it: `(P - 1 - r) / (v * slices)` of a sequence.

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
