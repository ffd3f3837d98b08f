"""1F1B over several smaller stages per rank, and its overlapped form."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import Looped
from pipelab.errors import UsageError, require_size
from pipelab.plan.actions import Action, B, F, Item


class Interleaved1F1B(Looped):
    """1F1B with several stages per rank, and so a smaller bubble.

        rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3
        rank 1 |     1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    The forwards of a round of micro-batches, one for every rank, run on the rank's first stage, then on its second.
    Those of the next round follow. Backwards do the same, starting at the last stage.

    With `v` stages per rank and at least as many micro-batches as ranks, a rank waits `v` times less than in 1F1B. The
    price: a rank holds more activations, and more than `v` times as much travels. With fewer micro-batches, a rank
    waits until they come round again.

    The paper and Megatron-LM need a multiple of `P` micro-batches, PyTorch a multiple of the number of rounds. Here
    rounds may differ by one micro-batch, which costs no time, so any number is accepted.

    Args:
        ranks: how many workers the pipeline has.
        microbatches: how many slices the batch is cut into.
        stages_per_rank: how many stages each rank holds, and so how often a micro-batch visits it.
        group_size: how many micro-batches a round has, at least one for each rank; Megatron-Core calls it
            `microbatch_group_size_per_vp_stage`. By default, rounds are as even as possible. With one round of all
            micro-batches, the forwards come in the order of looped BFS. A larger group holds more, and a value has more
            time to travel.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.Interleaved1F1B(ranks=4, microbatches=8))
        >>> trace.makespan, trace.peak_activations
        (28.5, (11, 9, 7, 5))
        >>> pipelab.simulate(pipelab.Interleaved1F1B(4, 8, group_size=8)).peak_activations
        (15, 13, 11, 9)

    Raises:
        UsageError: if a number is not a positive whole number, or if `group_size` is smaller than `ranks`
            or does not divide the micro-batches.
    """

    source = "Narayanan et al. 2021, Megatron-LM (arXiv:2104.04473), section 2.2.2 and figure 4"
    closed_forms = {
        "makespan if M >= P": "(M + (P - 1) / v) * (F + B)",
        "makespan if M < P": "(P + (M - 1) / v) * (F + B)",
        "bubble if M >= P": "(P - 1) / (v * M + P - 1)",
        "peak": "min(v * M, (v - 1) * L + 2 * (P - 1 - r) + 1)",
    }

    group_size: int | None = None
    """How many micro-batches a round has; `None` for rounds as even as possible."""

    def __init__(self, ranks: int, microbatches: int, stages_per_rank: int = 2, group_size: int | None = None) -> None:
        """Keep the sizes."""
        super().__init__(ranks, microbatches, stages_per_rank)
        if group_size is None:
            return
        self.group_size = require_size("group_size", group_size)
        if self.group_size < self.ranks:
            raise UsageError(
                f"group_size={self.group_size}: at least one micro-batch for each of the {self.ranks} ranks, or all "
                f"ranks wait in every round\n  try: group_size={self.ranks} or more, or leave it out"
            )
        if self.microbatches > self.group_size and self.microbatches % self.group_size:
            whole = -(-self.microbatches // self.group_size) * self.group_size
            raise UsageError(
                f"group_size={self.group_size} does not divide {self.microbatches} micro-batches: a shorter last round "
                f"can end in a deadlock\n  try: microbatches={whole}; or leave it out, for rounds as even as possible"
            )

    @property
    def rounds(self) -> list[range]:
        """The micro-batches in rounds, of `group_size` if there is one."""
        if self.group_size is None:
            return super().rounds
        every = range(self.microbatches)
        return [every[start : start + self.group_size] for start in every[:: self.group_size]]

    def phases(self, rank: int) -> tuple[list[Action], list[Action], int]:
        """Return a rank's forwards in order, its backwards, and how many forwards are the warm-up."""
        stages, rounds = self.stages_of(rank), [list(each) for each in self.rounds]  # lists: one object for each number
        forwards = [F(m, s) for each in rounds for s in stages for m in each]
        backwards = [B(m, s) for each in rounds for s in reversed(stages) for m in each]
        ahead = (self.stages_per_rank - 1) * len(rounds[0]) + 2 * (self.ranks - 1 - rank)
        return forwards, backwards, min(ahead, len(forwards))

    def actions(self, rank: int) -> Iterator[Item]:
        """Yield the warm-up's forwards, the steady state's pairs, and the drain's backwards."""
        forwards, backwards, warmup = self.phases(rank)
        yield from forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            yield forward
            yield backward
        yield from backwards[len(forwards) - warmup :]


class Overlapped1F1B(Interleaved1F1B):
    """Interleaved 1F1B with one extra forward of warm-up, so that each later forward overlaps a backward.

        rank 0 | 0F0 0F1 2F0 2F1 0F2         0F3&2B0──── 2F2&2B1──── 2F3&0B0──── 0B1         2B2 2B3 0B2 0B3
        rank 1 |     1F0 1F1 3F0 3F1&3B0──── 1F2&3B1──── 1F3&1B0──── 3F2&1B1──── 3F3&3B2──── 3B3 1B2 1B3

    While a rank computes a forward and a backward in one slot (`F(3, 0) & B(0, 2)`), the transfers of each hide behind
    the arithmetic of the other: with many experts, their exchanges. The halves of a pair must not wait for each other,
    so every rank needs one more forward before its first pair.

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
