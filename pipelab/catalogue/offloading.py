"""1F1B whose ranks send activations away, and bring them back for their backwards."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pipelab.catalogue.interleaved_1f1b import Interleaved1F1B
from pipelab.catalogue.one_f_one_b import OneFOneB
from pipelab.errors import require_size
from pipelab.plan.actions import LOAD, OFFLOAD, Action


class BPipe(OneFOneB):
    """1F1B in which rank `r` sends activations to rank `P - 1 - r`, so that all ranks hold about the same.

        rank 0 | F0 F1 OFFLOAD1 F2 F3 OFFLOAD3 B0 LOAD1 F4 B1 F5 OFFLOAD5 B2 LOAD3 F6 B3 F7 OFFLOAD7 B4 LOAD5 …

    In 1F1B rank `r` holds `P - r` activations. Here no rank holds more than `(P + 2) / 2`, rounded up. A rank of the
    first half sends the rest to a rank of the second half: at regular intervals, a micro-batch leaves right after its
    forward, and comes back once the backward before its own has made room.

    That peak is the paper's. It holds, and the step takes as long as 1F1B, if an activation moves in the time of a
    forward or less. It does not hold if moves are slower: with `F = 1`, `B = 2` and moves of 2 units, rank 0 of 8 holds
    6 instead of 5, and 24 micro-batches take 103 units instead of 93.

    Moves are `OFFLOAD` and `LOAD` here, on channels of the rank that sends. So a peak counts only a rank's own
    activations. What the last ranks hold for the first ones comes on top, and makes `(P + 2) // 2` on each of them.

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


class PipeOffload(Interleaved1F1B):
    """Interleaved 1F1B that sends activations of each rank's first stages, which live longest, to the host.

        rank 0 | 0F0 0OFFLOAD0 0F1 0OFFLOAD1 2F0 2F1 0F2 0OFFLOAD2 2B0 0F3 0OFFLOAD3 2B1 0LOAD0 2F2 0B0 …

    An activation leaves right after its forward, and comes back while the action before its backward runs. Half of the
    stages, the default, saves more than half: of 8 ranks, the first one holds 10 activations instead of 23. If all
    stages are sent, a rank holds three at most, whatever the number of ranks. Both are true, and the step takes as long
    as interleaved 1F1B, if a stage's activation moves in the time of its forward or less. With slower moves, ranks wait
    for loads. The paper uses another order, from a block that repeats uniformly; here it is interleaved 1F1B's.

    Args:
        ranks: how many workers the pipeline has.
        microbatches: how many slices the batch is cut into.
        stages_per_rank: how many stages each rank holds.
        sent: how many of these stages send their activations away; by default, half.

    Example:
        >>> import pipelab
        >>> cost = pipelab.Cost(offload=1, load=1)
        >>> for sent in (1, 2):
        ...     trace = pipelab.simulate(pipelab.PipeOffload(ranks=4, microbatches=8, sent=sent), cost)
        ...     print(trace.makespan, trace.peak_activations)
        28.5 (6, 5, 3, 2)
        28.5 (3, 3, 3, 2)

    Raises:
        UsageError: if a number is not a positive whole number.
    """

    source = (
        "Wan et al. 2025, PipeOffload (arXiv:2503.01328), abstract: offload of half or all activations; the order is "
        "interleaved 1F1B's"
    )
    closed_forms = {
        "makespan if M >= P": "(M + (P - 1) / v) * (F + B)",
        "makespan if M < P": "(P + (M - 1) / v) * (F + B)",
        "bubble if M >= P": "(P - 1) / (v * M + P - 1)",
        "peak if M % L == 0 and M > L and v > 1": (
            "max(2, (v - 1 - (v + 1) // 2) * L + min(2 * (P - 1 - r) + 1, L + 2))"
        ),
    }

    sent: int | None = None
    """Of how many of a rank's stages activations leave; `None` for half, rounded up."""

    def __init__(self, ranks: int, microbatches: int, stages_per_rank: int = 2, sent: int | None = None) -> None:
        """Keep the sizes."""
        super().__init__(ranks, microbatches, stages_per_rank)
        self.sent = None if sent is None else require_size("sent", sent)

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the actions of interleaved 1F1B, and the moves of what is not needed at once."""
        row = [each for each in super().actions(rank) if isinstance(each, Action)]
        places = [(each.microbatch or 0, each.stage or 0) for each in row]
        sent = range((self.sent or (self.stages_per_rank + 1) // 2) * self.ranks)
        stay = {one for one, other in pairwise(places) if one == other}  # a backward right after its forward
        gone = {place for place in places if place[1] in sent} - stay
        for at, action in enumerate(row):
            if at + 1 < len(row) and row[at + 1].traits.backward and places[at + 1] in gone:
                yield LOAD(*places[at + 1])
            yield action
            if action.traits.forward and places[at] in gone:
                yield OFFLOAD(*places[at])
