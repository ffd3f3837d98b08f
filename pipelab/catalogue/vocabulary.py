"""1F1B with the vocabulary's layer spread over all ranks."""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.errors import require_size
from pipelab.plan.actions import Action, Kind
from pipelab.schedule import Schedule


class VocabularyParallel(Schedule):
    """Let every rank compute its share of the vocabulary's scores, instead of the last rank all of them.

    A large vocabulary makes the last stage the slowest, and all others wait for it. Here its output layer is cut into
    one share for each rank. A rank runs `S` on its share right after a forward, and `T` or `V` right after a backward.
    The last stage's backward waits for all shares, so each rank holds one activation more than in 1F1B for each time
    that it waits:

        rank 0 | 0F0 0F1 0S0 0F2 0S1 0B0 0V0 …       one barrier: P + 1 - r activations on rank r
        rank 1 | 1F0 1S0 1F1 1S1 1B0 1V0 1F2 …

    It is not among `schedules`, all of which also run.

    Args:
        barriers: how often the last stage's backward waits for all ranks. 1: for every `S`, whose sums are enough for
            the gradient of the last output; `V` makes the rest later. 2: for every `S`, then for every `T`.

    Example:
        The scores take as long as a forward on four ranks: on one of them, four times as long.

        >>> import pipelab
        >>> last = pipelab.Cost(forward=[1, 1, 1, 5], backward=[2, 2, 2, 6], per="stage")
        >>> pipelab.simulate(pipelab.OneFOneB(4, 16), last).makespan
        185.0
        >>> plan = pipelab.VocabularyParallel(ranks=4, microbatches=16)
        >>> trace = pipelab.simulate(plan, pipelab.Cost(vocabulary=1, vocabulary_grad=1))
        >>> trace.makespan, trace.peak_activations
        (88.0, (5, 4, 3, 2))
    """

    source = (
        "Yeung et al. 2024, Balancing Pipeline Parallelism with Vocabulary Parallelism (arXiv:2411.05288), sections 4 "
        "and 5"
    )

    def __init__(self, ranks: int, microbatches: int, barriers: int = 1) -> None:
        """Set the sizes, and how often the last backward waits for all ranks: once or twice."""
        self.barriers = require_size("barriers", barriers, 2)
        super().__init__(ranks, microbatches)

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield forwards, backwards and the passes of the rank's share, by their time if a backward takes two forwards.

        Each rank has one slot after each forward and each backward, and every third unit of time is one of either.
        """
        last: Kind = "V" if self.barriers == 1 else "T"
        starts: list[tuple[int, int, Action]] = []
        for m in range(self.microbatches):
            output = self.ranks - 1 + 3 * m  # when the last rank starts its forward
            after_forward, after_backward = output, output + 6 - 2 * self.barriers
            starts += [
                (rank + 3 * m, 0, Action("F", m)),
                (after_forward + (rank - after_forward) % 3, 1, Action("S", m)),
                (output + 1 + 3 * self.barriers + 2 * (self.ranks - 1 - rank), 0, Action("B", m)),
                (after_backward + (rank + 1 - after_backward) % 3, 1, Action(last, m)),
            ]
        yield from (action for *_, action in sorted(starts, key=lambda start: start[:2]))
