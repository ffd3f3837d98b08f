"""Two stages per rank in a V: zero bubble, and orders that hold less than 1F1B."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from pipelab.catalogue.bases import FilledV, VShaped
from pipelab.catalogue.building_block import BuildingBlock, Controlled, first_fit
from pipelab.plan.actions import Action, F, I, W


class ZBV(FilledV):
    """Split backwards in a V: no rank waits once it has begun, if `M >= 2 * P - 1` and times are equal.

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        rank 1 |     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    Micro-batches go down the ranks and back up. A backward starts on rank 0, where its forward started, so every rank
    holds as much as 1F1B's rank 0: ZB-H2's gain, in 1F1B's memory.

    The ranks do not start together: over the whole step, 4 ranks with 8 micro-batches have a bubble of 5.9 %, where
    1F1B has 27.3 %. Every rank holds at most `2 * P` stage activations, each half a rank's share: `P` of 1F1B's.

    The order is PyTorch's: fixed, and fitted to equal times. Where `W` is shorter than `F` and `I`, ranks wait; where
    `F` and `I` differ too, all ranks wait. The paper computes a new order for measured times.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.ZBV(ranks=4, microbatches=8))
        >>> trace.makespan, trace.spans, trace.peak_activations
        (25.5, (24.0, 24.0, 24.0, 24.0), (8, 8, 8, 8))
    """

    source = (
        "Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 6; V-ZB in Qi et al. 2024, "
        "Pipeline Parallelism with Controllable Memory (arXiv:2405.15362)"
    )
    closed_forms = {
        "makespan if M >= 2 * P - 1 and F == I >= W": "M * (F + B) + (P - 1) * max(F / 2, F - W)",
        "span if M >= 2 * P - 1 and F == I >= W": "M * (F + B) + (P - 1 - r) * (F - W)",
        "peak": "min(2 * M, M + 1 + r, 2 * P)",
    }

    @property
    def enough(self) -> int:
        """How many micro-batches fill the pipeline."""
        return 2 * self.ranks - 1

    def filled(self, rank: int, down: int, up: int, microbatches: int) -> Iterator[Action]:
        """Yield warm-up, steady state and drain; on either stage, micro-batches come in turn."""
        hops = self.ranks - 1 - rank  # to the tip of the V
        (f0, i0, w0), (f1, i1, w1) = ((count(), count(), count()) for _ in ("down", "up"))  # which comes next

        # Warm-up: fill the time until the first micro-batch is back, then until its input gradient comes.
        for _ in range(2 * hops + 1):
            yield F(next(f0), down)
        for _ in range(rank):
            yield F(next(f1), up)
            yield F(next(f0), down)
        for _ in range(hops + 1):
            yield F(next(f1), up)
            yield I(next(i1), up)
            yield W(next(w1), up)

        # Steady state: three actions down, three up; the forwards down are the first to run out.
        last_down = microbatches - (self.enough - rank)
        for at in range(microbatches - self.ranks):
            if at < last_down:
                yield F(next(f0), down)
            yield I(next(i0), down)
            yield W(next(w0), down)
            yield F(next(f1), up)
            yield I(next(i1), up)
            yield W(next(w1), up)

        # Drain: input gradients first, others wait for them; the weight gradients put off fill the end.
        for _ in range(rank):
            yield I(next(i0), down)
            yield I(next(i1), up)
        for _ in range(hops + 1):
            yield I(next(i0), down)
            yield W(next(w0), down)
        for _ in range(rank):
            yield W(next(w1), up)
        for _ in range(rank):
            yield W(next(w0), down)


class V1F1B(VShaped):
    """Whole backwards on two stages in a V: about two thirds of 1F1B's activations, in its time.

        rank 0 | 0F0         3F0 3B0 0F1         3F1 3B1 0F2 0B0     3F2 3B2 0B1     0B2
        rank 1 |     1F0 2F0             1F1 2F1 2B0 1B0     1F2 2F2 2B1 1B1 2B2 1B2

    A V needs no split backward to hold less than 1F1B. A micro-batch goes down and up without a pause. On the way back
    it waits for the time of three forwards after every third stage: without a pause, two passes of a rank would meet.

    Two thirds are for many ranks: 4 ranks hold 3 micro-batches where 1F1B holds 4, and 8 hold 6. The step is up to one
    forward longer than 1F1B's, and exactly as long where `P - 1` is a multiple of 3. The slots fit backwards of twice a
    forward. With backwards of 1.5 forwards, 8 ranks and 32 micro-batches take 16 % longer than 1F1B.

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


class VHalf(Controlled):
    """Split backwards on two stages in a V: towards half of 1F1B's activations on many ranks.

        rank 0 | 0F0         3F0 0F1 3I0 3W0 3F1 0F2     0I0 3I1 0W0 3F2 3W1     0I1 3I2 0W1 3W2     0I2 0W2
        rank 1 |     1F0 2F0         1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 2W1 1I1 1W1     2I2 2W2 1I2 1W2

    A micro-batch that stays half as long leaves half as much behind. In a V, what a rank holds for the way down and for
    the way up adds up to the same on every rank. V-Half lets a micro-batch go down at half speed and back up at full
    speed, forwards and backwards; weight gradients fill the free slots. Its step is shorter than 1F1B's, and longer
    than ZB-V's, which holds as much as 1F1B. Half is for many ranks: 4 ranks hold 3 micro-batches where 1F1B holds 4, 8
    hold 5, and 24 hold 13. Peak and bubble follow from this block:

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


class VMin(Controlled):
    """Split backwards on two stages in a V: towards a third of 1F1B's activations on many ranks.

        rank 0 | 0F0         3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2     0I2 0W2
        rank 1 |     1F0 2F0         2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2

    A micro-batch goes down and up without a pause, forwards and backwards, and so leaves little behind. On 4 and on 8
    ranks, each holds half of what 1F1B's rank 0 holds, on 16 three eighths. The bubble grows with times that differ: a
    rank has few activations to work on while it waits.

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
