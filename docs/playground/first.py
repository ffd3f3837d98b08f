import pipelab
from pipelab import B, F


class MySchedule(pipelab.Schedule):
    """Fill the pipe, then a backward per forward."""

    def actions(self, rank):
        count = self.microbatches
        warmup = min(count, self.ranks - rank)
        for m in range(warmup):
            yield F(m)
        for m in range(count):
            yield B(m)
            if warmup + m < count:
                yield F(warmup + m)
