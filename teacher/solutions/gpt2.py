"""The exercise of `gpt2.py`: where do the blocks go, if the head is as slow as some of them?

A step cannot be quicker than its slowest rank, so fill the ranks one block at a time, each time the one that then has
the least to do. Among equals the first one comes first: a rank that begins early has time for more.

GPT-2's head is more than a quarter of the work, so the last rank holds nothing else, and is still the slowest: 4, 4, 4
and the head. In GPT-2 XL the last rank holds 4 blocks and the first two hold 7.

With 128,000 words GPT-2's head is as slow as 11 blocks, nearly half of the model. Then no cut between layers helps. One
cuts the head itself: each rank compares with a part of the words (vocabulary parallelism).
"""


def answer(blocks, ranks, head):
    """Return how many blocks each rank holds."""
    held = [0] * ranks
    for _ in range(blocks):
        work = [*held[:-1], held[-1] + head]
        held[work.index(min(work))] += 1
    return held
