import pipelab
from pipelab import B, F


class MySchedule(pipelab.Schedule):
    """Fill the pipe, then one backward for every new forward."""

    def actions(self, rank):
        warmup = min(self.microbatches, self.ranks - rank)
        for m in range(warmup):
            yield F(m)
        for m in range(self.microbatches - warmup):
            yield B(m)
            yield F(warmup + m)
        for m in range(self.microbatches - warmup, self.microbatches):
            yield B(m)
