"""The exercise of `interleaved.py`: how many stages per rank, in groups of how many?

A micro-batch that leaves a rank comes back after P stages and P transfers. Meanwhile the rank runs the other
micro-batches of its group. With a group of P they are just enough if transfers are free, and a larger group pays for
the transfers. With 8 activations, groups of eight do so for stages of a quarter. With 6.5 there is room for groups of
six, and fewer stages are better, because each boundary more is a transfer more.

A group of five leaves a last group of one: 5 + 5 + 5 + 1. A group with fewer micro-batches than ranks cannot keep the
ranks busy until its first one is back, so they wait although the other groups are larger. 6 + 6 + 4 and 8 + 8 are fine.
"""


def answer(cap):
    """Return the number of stages per rank, and the size of a group."""
    return (2, 6) if cap < 8 else (4, 8)
