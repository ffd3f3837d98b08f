"""BPipe: 1F1B whose first ranks keep some of their activations on the last ranks."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.one_f_one_b import OneFOneB
from pipelab.plan.actions import LOAD, OFFLOAD, Action


class BPipe(OneFOneB):
    """1F1B in which rank `r` sends activations to rank `P - 1 - r`, so that all ranks hold about the same.

        rank 0 | F0 F1 OFFLOAD1 F2 F3 OFFLOAD3 B0 LOAD1 F4 B1 F5 OFFLOAD5 B2 LOAD3 F6 B3 F7 OFFLOAD7 B4 LOAD5 …

    In 1F1B rank `r` holds `P - r` activations. Here no rank holds more than `(P + 2) / 2`, rounded up. A rank of the
    first half sends the rest to a rank of the second half: at even distances, a micro-batch leaves right after its
    forward, and comes back once the backward before its own has made room.

    That peak is the paper's. It holds, and the step takes as long as 1F1B, if an activation moves in the time of a
    forward or less. It does not hold if moves are slower: with `F = 1`, `B = 2` and moves of 2 units, rank 0 of 8 holds
    6 instead of 5, and 24 micro-batches take 103 units instead of 93.

    Moves are `OFFLOAD` and `LOAD` here, on channels of the rank that sends. So a peak counts what a rank keeps of its
    own: what the last ranks hold for the first ones comes on top, and makes `(P + 2) // 2` on each of them.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.BPipe(ranks=8, microbatches=32), pipelab.Cost(offload=1, load=1))
        >>> trace.makespan, trace.peak_activations
        (117.0, (5, 5, 5, 5, 4, 3, 2, 1))
    """

    source = "Kim et al. 2023, BPipe (ICML '23): pairs of ranks that balance 1F1B's activations; which go when is ours"
    closed_forms = {
        "makespan": "(M + P - 1) * (F + B)",
        "bubble": "(P - 1) / (M + P - 1)",
        "peak if M >= P": "min(P - r, (P + 3) // 2)",
    }

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the actions of 1F1B; of the micro-batches that it holds, `away` leave and come back."""
        held = self.ranks - rank
        away = max(0, held + 1 - (self.ranks + 3) // 2)
        gone = {m for m in range(self.microbatches) if m * away // held != (m + 1) * away // held}
        for action in super().actions(rank):
            yield action
            m = action.microbatch or 0
            if action.traits.forward and m in gone:
                yield OFFLOAD(m)
            if action.traits.backward and m + 1 in gone:
                yield LOAD(m + 1)
