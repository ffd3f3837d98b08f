"""The exercise of `v_shapes.py`: how fast should a micro-batch travel?

All four legs at the same speed: one, two or three slots per rank. With two, a rank has a slot between the visits of one
micro-batch in which others have their turn; it holds six halves, and the step is a unit shorter. With three it holds
eight, as ZB-V does, and takes 26.5 units; ZB-V's own order, which is not made of equal legs, takes 25.5.

The speeds (1, 3, 1, 3) and (3, 1, 3, 1) give the same as (2, 2, 2, 2): what counts is how long a micro-batch takes down
and up together.
"""


def answer(cap):
    """Return four speeds and three turns."""
    return ((2, 2, 2, 2) if cap < 8 else (3, 3, 3, 3)), (1, 1, 1)
