"""V-1F1B: whole backwards in a V, in two thirds of 1F1B's activations."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import VShaped
from pipelab.catalogue.building_block import BuildingBlock, first_fit
from pipelab.plan.actions import Action


class V1F1B(VShaped):
    """Whole backwards on two stages in a V: two thirds of 1F1B's activations on every rank, and no larger bubble.

        rank 0 | 0F0         3F0 3B0 0F1         3F1 3B1 0F2 0B0     3F2 3B2 0B1     0B2
        rank 1 |     1F0 2F0             1F1 2F1 2B0 1B0     1F2 2F2 2B1 1B1 2B2 1B2

    A V needs no split backward to hold less than 1F1B. A micro-batch goes down and up without a pause. On the way back
    it waits for the time of three forwards after every third stage: without a pause, two passes of a rank would meet.

    Two thirds are exact for many ranks only: 4 ranks hold 3 micro-batches where 1F1B holds 4, and 8 hold 6. The slots
    fit backwards of twice a forward. With backwards of 1.5 forwards, 8 ranks and 32 micro-batches take 16 % longer
    than 1F1B.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.V1F1B(ranks=10, microbatches=40))
        >>> trace.makespan, max(trace.peak_activations) / 2
        (147.0, 7.0)
        >>> pipelab.simulate(pipelab.OneFOneB(ranks=10, microbatches=40)).makespan
        147.0
        >>> short = pipelab.Cost(forward=2, backward=3)
        >>> [pipelab.simulate(pipelab.schedules[name](8, 32), short).makespan for name in ("v-1f1b", "1f1b")]
        [226.5, 195.0]
    """

    source = (
        "Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv:2405.15362), 1F1B-V in the authors' "
        "code; the slots are ours"
    )
    closed_forms = {
        "makespan if M >= 3 and B == 2 * F": "(M + P - 1) * (F + B) + (P - 1) % 3 / 2 * F",
        "peak if M >= 2 * P": "2 * (2 * P // 3 + 1) - ((P - r) % 3 == 2)",
    }

    @property
    def block(self) -> BuildingBlock:
        """The building block."""
        place = [self.place(0, stage) for stage in range(self.stages)]
        block = first_fit(place, 6, (1, 1, 2, 2), split=False)
        assert block is not None  # every pass finds a slot: tried up to 200 ranks
        return block

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the block's passes of every micro-batch."""
        yield from self.block.row(rank, self.microbatches)
