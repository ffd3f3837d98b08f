"""DualPipe: a forward hides the transfers of a backward; in both directions, or folded into a V."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from pipelab.catalogue.bases import BothWays, FilledV
from pipelab.plan.actions import Action, B, F, I, Item, W

Way = Sequence[tuple[int, int | None]]
"""The micro-batches that go one way, in turn, each with its stage on the rank if there are two."""


def phases(near: Way, far: Way, before: int, behind: int, steady: int) -> Iterator[Item]:
    """Yield a rank's eight phases; near micro-batches come first.

    There are `before` ranks from here to where the two ways meet, in the middle or at
    the tip of the V, and `behind` ranks on the other side.
    """
    f0, b0, f1, b1 = iter(near), iter(near), iter(far), iter(far)  # what comes next: near (0) and far (1)
    owed: deque[Action] = deque()  # weight gradients put off

    def split(microbatch: int, stage: int | None) -> Action:
        owed.append(W(microbatch, stage))
        return I(microbatch, stage)

    for _ in range(2 * before):  # [1] until the first far micro-batch comes
        yield F(*next(f0))
    for _ in range(behind + 1):  # [2] both ways in turn
        yield F(*next(f0))
        yield F(*next(f1))
    for _ in range(before):  # [3] the first far gradients: their weights right away
        yield split(*next(b1))
        yield owed.popleft()
        yield F(*next(f1))
    for at in range(steady):  # [4] steady state
        forward, backward = F(*next(f0)), B(*next(b1))
        if at == 0 and before == 0:  # where the ways meet: all ranks wait for this backward
            yield forward
            yield backward
        else:
            yield forward & backward
        yield F(*next(f1)) & B(*next(b0))
    for _ in range(before):  # [5] no near forward any more
        yield B(*next(b1))
        yield F(*next(f1)) & B(*next(b0))
    for at in range(behind + 1):  # [6] backwards both ways in turn, the second half of them split
        yield (B if 2 * at <= behind else split)(*next(b1))
        yield (B if 2 * at + 1 <= behind else split)(*next(b0))
    for _ in range(before):  # [7] weight gradients while the last near gradients come
        yield owed.popleft()
        yield split(*next(b0))
    yield from owed  # [8]


class DualPipe(BothWays):
    """Half of the micro-batches enter at each end; ranks pair forwards of one half with backwards of the other.

        rank 0 | F0 F1 F2 F4 I4 W4 F5 F3&B5───    F6&B0─── B6───    F7&B1─── B7─── I2 W2 I3 W3
        rank 1 |    F0 F4 F1 F5 F2 B4─── F6&B0─── F3&B5─── F7&B1─── B6─── B2───    I7 I3 W7 W3
        rank 2 |    F4 F0 F5 F1 F6 B0─── F2&B4─── F7&B1─── F3&B5─── B2─── B6───    I3 I7 W3 W7
        rank 3 | F4 F5 F6 F0 I0 W0 F1 F7&B1───    F2&B4─── B2───    F3&B5─── B3─── I6 W6 I7 W7

    Every rank holds two stages, one for each direction: rank `r` of `P` holds stage `r` for the micro-batches that
    enter at rank 0, and stage `P - 1 - r` for those that enter at the last rank. When it computes a forward of one and
    a backward of the other at the same time (`F(3) & B(5)`), the transfers of each hide behind the arithmetic of the
    other. Every stage is on two ranks, so the parameters are held twice, and all-reduces (not drawn) sum their
    gradients.

    The bubble in the source's table, `(P / 2 - 1) * (FB + B - 3 * W)`, is how long the two ranks in the middle wait if
    a pair is one slot of length `FB` (`Cost(pair=FB)`), `F = I >= W`, and `FB >= B`. Ranks towards the ends have fewer
    pairs to save time with: they work longer and wait less. The two in the middle wait longer than the table says if
    `F > I` or `W > I`, and may wait longer still if `F < I`, or if a pair is quicker than one of its halves.

    A pair that takes as long as its two halves is slower than the halves one after the other (`Cost(pair=None)`): the
    forward's output waits for the pair's end. A rank holds as many activations for many micro-batches as for few.

    Args:
        ranks: how many workers the pipeline has: an even number.
        microbatches: how many slices the batch is cut into: an even number, at least twice the ranks.
        stages_per_rank: one, for each micro-batch.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.DualPipe(ranks=4, microbatches=8), pipelab.Cost(pair=2.5))
        >>> trace.makespan, trace.peak_activations
        (24.0, (5, 5, 5, 5))

    Raises:
        UsageError: if `stages_per_rank` is not 1.
    """

    source = (
        "DeepSeek-AI 2024, DeepSeek-V3 (arXiv:2412.19437), section 3.2.1, figure 5 and table 2, in the order of the "
        "authors' program DualPipe"
    )
    closed_forms = {
        "makespan if F == I >= W": "M * (F + B) + (P / 2 - 1) * (F + I - W)",
        "makespan with pairs if F >= I and FB >= max(F, B)": (
            "M * (F + B) - (M - P - 1) * (F + B - FB) + (P / 2 - 1) * (FB + F - W - min(I, W))"
        ),
        "peak": "P + 1",
    }
    needs = {
        "an even number of ranks": "P % 2 == 0",
        "an even number of micro-batches": "M % 2 == 0",
        "at least twice as many micro-batches as ranks": "M >= 2 * P",
        "1 stage per rank": "v == 1",
    }

    @classmethod
    def refusal(cls, ranks: int, microbatches: int) -> str | None:
        """Refuse odd numbers, and fewer micro-batches than fill the pipeline from both ends."""
        if ranks % 2 == 0 and microbatches % 2 == 0 and microbatches >= 2 * ranks:
            return None
        return (
            f"ranks={ranks}, microbatches={microbatches}: DualPipe needs an even number of ranks and an even number of "
            "micro-batches, at least twice as large, because half of the micro-batches go each way and the two ways "
            f"meet between the ranks in the middle; the nearest sizes are {_nearest(ranks, microbatches)}"
        )

    def down(self, microbatch: int) -> bool:
        """Return whether a micro-batch enters at rank 0: the first half does."""
        return microbatch < self.microbatches // 2

    def actions(self, rank: int) -> Iterator[Item]:
        """Yield the eight phases; in each direction, micro-batches come in turn.

        Near micro-batches enter at this rank's end of the pipeline, far ones at the other.
        """
        half = self.microbatches // 2
        behind = min(rank, self.ranks - 1 - rank)  # ranks between this one and its end
        before = self.ranks // 2 - 1 - behind  # and between this one and the middle
        ways = range(half), range(half, self.microbatches)
        near, far = ([(m, None) for m in way] for way in (ways if rank < self.ranks // 2 else reversed(ways)))
        yield from phases(near, far, before, behind, steady=half - self.ranks + behind + 1)


def _nearest(ranks: int, microbatches: int) -> str:
    """Return the nearest sizes that DualPipe accepts."""
    found = []
    for even in sorted({max(ranks - ranks % 2, 2), ranks + ranks % 2}):
        wanted = sorted(
            {max(2 * even, microbatches - microbatches % 2), max(2 * even, microbatches + microbatches % 2)}
        )
        found.append(f"ranks={even}, microbatches={' or '.join(map(str, wanted))}")
    return "; ".join(found)


class DualPipeV(FilledV):
    """Forwards overlapped with backwards, on two stages in a V.

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1────     3F2&0B0──── 3B2────     3F3&0B1──── 3B3──── 0I2 0W2 0I3 0W3
        rank 1 |     1F0 2F0 1F1 2F1 1F2 2B0──── 2F2&1B0──── 1F3&2B1──── 2F3&1B1──── 2B2──── 1B2────     2I3 1I3 2W3 1W3

    In nearly every slot a rank computes a forward of one stage and a backward of the other (`F(2, 0) & B(0, 3)`): the
    transfers of the one hide behind the arithmetic of the other. It is one half of DualPipe's symmetric picture, folded
    at the middle: DualPipe's micro-batches from the other direction are the way back up here. So each rank holds two
    stages, and no parameters are held twice.

    A pair that takes as long as its two halves is slower than the halves one after the other (`Cost(pair=None)`): the
    forward's output waits for the pair's end. Each stage activation is half a rank's share.

    It is the order of PyTorch's `ScheduleDualPipeV`, which needs `M >= 2 * P`; here any number of micro-batches is
    accepted.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.DualPipeV(ranks=4, microbatches=8), pipelab.Cost(pair=2.5))
        >>> trace.makespan, trace.peak_activations
        (24.5, (9, 9, 9, 9))
    """

    source = (
        "DeepSeek-AI 2024, DeepSeek-V3 (arXiv:2412.19437), section 3.2.1 and table 2; cut in half: Sea AI Lab 2025, "
        "DualPipe could be better without the Dual"
    )
    closed_forms = {
        "makespan if M >= 2 * P and F == I >= W": "M * (F + B) + (P - 1) / 2 * (F + I - W)",
        "makespan with pairs if M >= 2 * P and F == I >= W and FB >= B": (
            "M * (F + B) - (2 * M - 2 * P - 1) / 2 * (F + B - FB) + (P - 1) / 2 * (FB + B - 3 * W)"
        ),
        "peak": "min(2 * M, M + 1 + r, 2 * P + 1)",
    }

    @property
    def enough(self) -> int:
        """How many micro-batches fill the pipeline."""
        return 2 * self.ranks

    def filled(self, rank: int, down: int, up: int, microbatches: int) -> Iterator[Item]:
        """Yield the eight phases; on either stage, micro-batches come in turn."""
        hops = self.ranks - 1 - rank  # to the tip of the V
        near, far = ([(m, stage) for m in range(microbatches)] for stage in (down, up))
        yield from phases(near, far, before=hops, behind=rank, steady=microbatches - self.enough + rank + 1)
