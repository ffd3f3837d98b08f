"""The exercise of `latency.py`: how far must a rank be ahead, for any latency?

Between neighbours, the lead must fall by 1 + 2 L / (F + B), rounded up: by 2 for a latency of 0.5, by 3 for a latency
of 2, and by 1 without latency, which is 1F1B.

A latency of 2 asks for 2 1/3 per rank, and rounding up at every rank is a little too much in the end: leads of 8, 6, 3
and 0 take 69 units, too, and hold 21 activations. Rank 0 is done with its forwards before it needs the last of them.
"""

import math


def answer(rank, ranks, latency, forward=1, backward=2):
    """Return how many forwards a rank is ahead of its backwards."""
    return (ranks - 1 - rank) * math.ceil(1 + 2 * latency / (forward + backward))
