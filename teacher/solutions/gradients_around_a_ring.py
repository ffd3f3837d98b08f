"""The exercise of `gradients_around_a_ring.py`: everybody sends in every step.

In step t, rank r sends chunk r - t (counted around the ring). In step 0 that is the chunk with its own number. In the
next step it hands on what has just arrived, with its own part added. After D - 1 steps, rank r owns chunk r + 1: in the
first phase, it is the only one that it has not sent. The same formula goes on: in step D - 1 rank r sends chunk r + 1,
and in D - 1 more steps the finished chunks go around.
"""


def answer(ranks):
    """Return the steps of an all-reduce around a ring."""
    return [[(rank - step) % ranks for rank in range(ranks)] for step in range(2 * (ranks - 1))]
