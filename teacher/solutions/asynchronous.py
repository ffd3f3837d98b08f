"""The exercise of `asynchronous.py`: 1F1B, with an update as soon as the last gradient of a group is there.

1F1B without a flush takes (32 + 3) x 3 = 105 units, and no order is quicker. In flight are at most four micro-batches,
which span two groups of four, or three of two. With 32 updates it is PipeDream, and needs four versions.
"""

from pipelab import B, F, U


def answer(rank, ranks, microbatches, updates):
    """Yield a rank's actions."""
    group = microbatches // updates
    warmup = ranks - rank
    for m in range(warmup):
        yield F(m)
    for m in range(microbatches):
        yield B(m)
        if (m + 1) % group == 0:
            yield U(m)
        if warmup + m < microbatches:
            yield F(warmup + m)
