"""The exercise of `which_layout.py`: the quickest layout of GPT-3 on 64 A100s that fits into 80 GB.

Waiting is the largest term beside the matrix products (1.3 s), so put more stages on each rank: with three it takes
12.5 s. Tensor parallelism is next (2.0 s): with 4 GPUs for each layer the rings have half the size and 3 instead of 7
messages, 0.8 s. Each GPU then holds twice as many parameters of a layer, so 16 ranks must share the depth, and 6 stages
on each bring the bubble down again: 11.4 s in 74.9 GB. Two replicas of 8 ranks halve the bubble, and ZeRO-2 makes room
for it: 11.1 s in 78.7 GB, the best that a search finds among 1F1B and interleaved 1F1B. ZeRO-3 takes as
long in 74.9 GB.
"""

from pipelab.layouts.estimate import Layout


def answer():
    """Return a layout of 64 GPUs."""
    return Layout(tensor=4, pipeline=16, microbatches=64, schedule="interleaved-1f1b", stages_per_rank=6)
