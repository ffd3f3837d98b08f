"""Micro-batches enter at both ends of the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.bases import BothWays
from pipelab.plan.actions import Action, B, F


class Chimera(BothWays):
    """Two 1F1B pipelines in opposite directions, which fill each other's idle time.

        rank 0 | F0 F1    F2 B2 F3 B3 B0    B1
        rank 1 |    F0 F2 F1 F3 B2 B0 B3 B1
        rank 2 |    F2 F0 F3 F1 B0 B2 B1 B3
        rank 3 | F2 F3    F0 B0 F1 B1 B2    B3

    In each block of `P` micro-batches, the first half enters at rank 0, the other half at the last rank. Every rank
    holds two stages, one for each direction, so the parameters are held twice, and all-reduces (not drawn) sum their
    gradients.

    The paper draws forwards as long as backwards. A rank then idles for `P - 2` of them, while 1F1B idles for
    `2 * (P - 1)`. With `B = 2 * F` the two directions do not fit into each other so well: 27.3 % of 8 ranks' time with
    16 micro-batches, where 1F1B has 30.4 %.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.Chimera(ranks=4, microbatches=8), pipelab.Cost(forward=1, backward=1))
        >>> trace.makespan, trace.peak_activations
        (18.0, (3, 4, 4, 3))
        >>> both = pipelab.Chimera(ranks=8, microbatches=16), pipelab.OneFOneB(ranks=8, microbatches=16)
        >>> [f"{pipelab.simulate(each).bubble:.1%}" for each in both]
        ['27.3%', '30.4%']
    """

    source = (
        "Li and Hoefler 2021, Chimera (arXiv:2107.06925), section 3.1 and figure 3; direct concatenation of section 3.5"
    )
    closed_forms = {
        "makespan if M % P == 0": "M / P * (2 * min(F, B) + (2 * P - 2) * max(F, B)) + (P - 2) * min(F, B)",
        "peak if M >= P": "P / 2 + 1 + min(r, P - 1 - r)",
    }
    needs = {"an even number of ranks": "P % 2 == 0", "1 stage per rank": "v == 1"}

    @classmethod
    def refusal(cls, ranks: int, microbatches: int) -> str | None:
        """Refuse an odd number of ranks."""
        if ranks % 2 == 0:
            return None
        near = " or ".join(f"ranks={each}" for each in (ranks - 1, ranks + 1) if each)
        return (
            f"ranks={ranks}, microbatches={microbatches}: Chimera needs an even number of ranks, because the rank in "
            f"the middle of an odd number would get two micro-batches at a time; the nearest sizes are {near}"
        )

    def down(self, microbatch: int) -> bool:
        """Return whether a micro-batch enters at rank 0: the first half of its block does."""
        return microbatch % self.ranks < self.ranks // 2

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield forwards and backwards by their slots, as long as each other, in which no two of a rank meet."""
        starts: list[tuple[int, Action]] = []
        for m in range(self.microbatches):
            block, turn = divmod(m, self.ranks)
            stage = rank if self.down(m) else self.ranks - 1 - rank
            first = 2 * self.ranks * block + 2 * (turn % (self.ranks // 2))
            starts += [(first + stage, F(m)), (first + 2 * self.ranks - 1 - stage, B(m))]
        starts.sort(key=lambda each: each[0])
        yield from (action for _, action in starts)


class GEMS(BothWays):
    """Micro-batches enter at the two ends in turn, and each follows the backward of the one before.

        rank 0 | F0             B0 F1 B1 F2             B2
        rank 1 |    F0       B0 F1       B1 F2       B2
        rank 2 |       F0 B0 F1             B1 F2 B2

    When a backward has left a rank, the next micro-batch's forward enters it from the same side. A rank never holds
    more than one activation, so this is for models whose activations do not fit otherwise. At most two ranks
    work at a time, however many there are: 1.28 on average on 4 ranks with 8 micro-batches. Every rank holds two
    stages, one for each direction, and all-reduces (not drawn) sum their gradients.

    Example:
        >>> import pipelab
        >>> both = pipelab.GEMS(ranks=4, microbatches=8), pipelab.Naive(ranks=4, microbatches=8)
        >>> [pipelab.simulate(each).makespan for each in both]
        [75.0, 96.0]
    """

    source = "Jain et al. 2020, GEMS (SC '20; arXiv:1911.05146), section IV: GEMS-MASTER"
    closed_forms = {
        "makespan": "P * (F + B) + (M - 1) * max(P * B + F, P * F + B)",
        "peak": "1",
    }
    needs = {"1 stage per rank": "v == 1"}

    def down(self, microbatch: int) -> bool:
        """Return whether a micro-batch enters at rank 0: every second one does."""
        return microbatch % 2 == 0

    def actions(self, rank: int) -> Iterator[Action]:  # noqa: ARG002 - all ranks run the same order
        """Yield each micro-batch's forward, then its backward."""
        for m in range(self.microbatches):
            yield F(m)
            yield B(m)
