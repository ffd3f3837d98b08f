"""1F1B without a flush: PipeDream, with an update after each backward, and PipeDream-2BW, with one for each group.

        1F1B        F0 F1 B0 F2 B1 ... B7 | the optimizer, while the pipe is empty | F0 F1 ...
        PipeDream   F0 F1 B0 U0 F2 B1 U1 F3 ...     weights P - 1 - r updates late, on rank r of P
        2BW         F0 F1 B0 F2 B1 F3 ... U1 F4     weights one update late, on every rank

They are not among `schedules`, which all compute the gradients of plain training: these update weights within a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipelab.catalogue.one_f_one_b import OneFOneB
from pipelab.plan.actions import Action, U


class PipeDream(OneFOneB):
    """Update a stage's weights after every backward, and never wait for the pipe to be empty.

    A plan is a piece of an endless run: only its beginning and its end have idle ranks. The price is staleness: while
    rank `r` of `P` waits for a gradient, it runs forwards whose weights lack the last `P - 1 - r` updates. A backward
    uses the weights of its forward, so a rank keeps up to `P - r` versions of them.

    Example:
        >>> import pipelab
        >>> plan = pipelab.PipeDream(ranks=3, microbatches=8).plan()
        >>> plan.rows[2][:6]
        (2F0, 2B0, 2U0, 2F1, 2B1, 2U1)

        A rank's versions are in its peak:

        >>> memory = pipelab.Memory(weights=100)
        >>> [use.weights for use in pipelab.memory_use(plan, memory).at_peak]
        [300, 200, 100]
    """

    source = "Narayanan et al. 2019, PipeDream (SOSP '19), sections 3.2 and 3.3, weight stashing"

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the actions of 1F1B, with an update after each backward."""
        for action in super().actions(rank):
            yield action
            if action.traits.backward and action.microbatch is not None:
                yield U(action.microbatch)


class TwoBW(OneFOneB):
    """Update once for `P` micro-batches, always with gradients that are one update late.

    Group `k` of `P` micro-batches runs with the weights that lack the update of group `k - 1`, on every rank: it is
    gradient descent with a delay of one step, whatever the number of ranks. So a rank keeps at most two versions. In
    the paper a rank makes new weights when their gradients are complete, and keeps them beside the old ones until it
    uses them. Here `U` comes right before their first use, and a rank keeps the gradients beside the old weights
    instead: the numbers are the same.

    Example:
        >>> import pipelab
        >>> plan = pipelab.TwoBW(ranks=2, microbatches=6).plan()
        >>> plan.rows[1]
        (1F0, 1B0, 1F1, 1B1, 1F2, 1B2, 1F3, 1B3, 1U1, 1F4, 1B4, 1F5, 1B5, 1U3, 1U5)

        Two versions are enough; with one, a backward lacks its own:

        >>> pipelab.check(plan, versions=2), len(pipelab.check(plan, versions=1))
        ([], 1)
    """

    source = "Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN Training (arXiv:2006.09503), section 3.1"

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the actions of 1F1B, with each group's update before the forwards of the second group after it."""
        groups = range(0, self.microbatches, self.ranks)
        late = [min(first + self.ranks, self.microbatches) - 1 for first in groups]
        for action in super().actions(rank):
            if action.traits.forward and action.microbatch in groups[2:]:
                yield U(late.pop(0))
            yield action
        for microbatch in late:
            yield U(microbatch)
