"""The exercise of `first_schedule.py`: 1F1B, for any number of ranks and micro-batches.

The first ranks need the longer warm-up: rank r begins with `ranks - r` forwards, so that every rank below it has work
while the first gradient climbs back. If there are fewer micro-batches than that, they are all that can be warmed up
with: the `min` is what the second par asks for.
"""

import pipelab
from pipelab import B, F


class answer(pipelab.Schedule):  # noqa: N801 - the exercise's name
    """Fill the pipe, then one backward for every new forward, then drain."""

    def actions(self, rank):
        warmup = min(self.microbatches, self.ranks - rank)
        for m in range(warmup):
            yield F(m)
        for m in range(self.microbatches - warmup):
            yield B(m)
            yield F(warmup + m)
        for m in range(self.microbatches - warmup, self.microbatches):
            yield B(m)


for ranks in range(1, 9):
    for microbatches in range(1, 9):
        assert answer(ranks, microbatches).plan() == pipelab.OneFOneB(ranks, microbatches).plan()
