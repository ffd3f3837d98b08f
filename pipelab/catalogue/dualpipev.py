"""DualPipeV: DualPipe cut in half and folded into a V."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

from pipelab.catalogue.bases import FilledV
from pipelab.plan.actions import Action, B, F, I, Item, W


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
        f0, b0, f1, b1 = count(), count(), count(), count()  # which micro-batch comes next: down (0) and up (1)
        owed: deque[Action] = deque()  # weight gradients put off

        def split(microbatch: int, stage: int) -> Action:
            owed.append(W(microbatch, stage))
            return I(microbatch, stage)

        for _ in range(2 * hops):  # [1] until the first micro-batch is back
            yield F(next(f0), down)
        for _ in range(rank + 1):  # [2] down and up in turn
            yield F(next(f0), down)
            yield F(next(f1), up)
        for _ in range(hops):  # [3] the first gradients: their weights right away
            yield split(next(b1), up)
            yield owed.popleft()
            yield F(next(f1), up)
        for at in range(microbatches - self.enough + rank + 1):  # [4] steady state
            forward, backward = F(next(f0), down), B(next(b1), up)
            if at == 0 and hops == 0:  # the tip: this backward is what all ranks wait for
                yield forward
                yield backward
            else:
                yield forward & backward
            yield F(next(f1), up) & B(next(b0), down)
        for _ in range(hops):  # [5] no forward down any more
            yield B(next(b1), up)
            yield F(next(f1), up) & B(next(b0), down)
        for at in range(rank + 1):  # [6] backwards up and down in turn, the second half of them split
            yield (B if 2 * at <= rank else split)(next(b1), up)
            yield (B if 2 * at + 1 <= rank else split)(next(b0), down)
        for _ in range(hops):  # [7] weight gradients while the last gradients come
            yield owed.popleft()
            yield split(next(b0), down)
        yield from owed  # [8]
