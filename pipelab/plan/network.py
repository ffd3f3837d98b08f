"""Jobs, and which others each one follows: an order, and times."""

from __future__ import annotations

from collections.abc import Sequence


class Network:
    """Jobs by number, each of which begins when all jobs that it follows have ended.

    Args:
        follows: for each job, those that it follows.

    Attributes:
        follows: the same.
        order: the jobs in an order in which each stands after those that it follows; without those that wait in a
            circle, or for one that does.

    Example:
        >>> network = Network([[], [0], [0], [1, 2]])
        >>> network.starts([1, 5, 2, 1])
        [0.0, 1.0, 1.0, 6.0]
        >>> network.rests([1, 5, 2, 1])
        [7.0, 6.0, 3.0, 1.0]
        >>> Network([[1], [0], []]).order
        [2]
    """

    def __init__(self, follows: Sequence[Sequence[int]]) -> None:
        """Find the order."""
        self.follows = follows
        after: list[list[int]] = [[] for _ in follows]
        waiting = [len(each) for each in follows]
        for job, before in enumerate(follows):
            for each in before:
                after[each].append(job)
        self.order = [job for job, count in enumerate(waiting) if not count]
        for job in self.order:  # grows as it is read
            for each in after[job]:
                waiting[each] -= 1
                if not waiting[each]:
                    self.order.append(each)

    def starts(self, lasts: Sequence[float]) -> list[float]:
        """Return when each job begins at the earliest, given how long each lasts."""
        starts, ends = [0.0] * len(lasts), [0.0] * len(lasts)
        for job in self.order:
            if before := self.follows[job]:
                starts[job] = max(ends[each] for each in before)
            ends[job] = starts[job] + lasts[job]
        return starts

    def rests(self, lasts: Sequence[float]) -> list[float]:
        """Return, for each job, how long it takes from its start to the end of all that comes after it."""
        rests = list(lasts)
        longest = [0.0] * len(lasts)  # of what comes after a job
        for job in reversed(self.order):
            rests[job] = lasts[job] + longest[job]
            for each in self.follows[job]:
                longest[each] = max(longest[each], rests[job])
        return rests
