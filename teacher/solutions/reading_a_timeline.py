"""The exercise of `reading_a_timeline.py`: how many layers should each rank hold?

The trace says how long each rank's stage takes, and so how long one layer takes there. What any cut would take follows
from simulating it. Four ranks leave few cuts, 455 of 16 layers and 1,771 of 24, so we try them all.

On the first job, the slow rank holds 2 layers instead of 4. On the second one, the shortest step is not the one in
which the slowest rank has the least to do: the cut 8 5 7 4 has no rank with more than 17.5 ms of forward, and takes
556.5 ms; 9 5 7 3 has a rank with 18 ms, and takes 538.5. A micro-batch passes all ranks, so the sum counts too: 62.5 ms
of forward there, 64.5 ms here. And a rank that begins at once, the first one, has time for more.
"""

from itertools import combinations

import pipelab


def answer(trace, layers):
    """Return how many layers each rank should hold, given a trace and how many it held there."""
    cost = pipelab.Cost.fit(trace)
    forward = [time / count for time, count in zip(cost.forward, layers, strict=True)]
    backward = [time / count for time, count in zip(cost.backward, layers, strict=True)]
    total, ranks = sum(layers), len(layers)

    def makespan(cut):
        times = pipelab.Cost(
            forward=[count * time for count, time in zip(cut, forward, strict=True)],
            backward=[count * time for count, time in zip(cut, backward, strict=True)],
        )
        return pipelab.simulate(trace.plan, times).makespan

    cuts = []
    for ends in combinations(range(1, total), ranks - 1):
        edges = (0, *ends, total)
        cuts.append(tuple(edges[rank + 1] - edges[rank] for rank in range(ranks)))
    return min(cuts, key=makespan)
