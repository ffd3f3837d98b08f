"""The exercise of `splitting_the_backward.py`: how should each rank divide its memory?

With four activations, the best is ZB-H1: three for being ahead on rank 0, three for putting off on the last rank. Rank
0 needs forwards for the time until its first gradient comes. The last rank has its gradient at once: it never needs to
be ahead, and whatever it puts off lets gradients leave sooner.

With six, the first three ranks run one forward more, because a gradient that takes 1.2 units on each rank comes back
later. They put off no more than before. The last rank puts off five: only it holds all six.
"""


def answer(cap):
    """Return by how much each rank is ahead, and by how much it puts its weight gradients off."""
    return ((3, 2, 1, 0), (0, 1, 2, 3)) if cap < 6 else ((4, 3, 2, 0), (0, 1, 2, 5))
