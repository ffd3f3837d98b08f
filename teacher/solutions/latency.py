"""The exercise of `latency.py`: how far must a rank be ahead, for any latency?

From rank to rank, it is enough if the lead falls by 1 + 2 L / (F + B), rounded up: by 2 for a latency of 0.5, by 3 for
a latency of 2, and by 1 without latency, which is 1F1B.

That is not the smallest lead for 16 micro-batches and a latency of 2: leads of 8, 6, 3 and 0 take 69 units too, and
hold 21 activations. Rank 0 is done with its forwards before it needs the last of them.
"""

import math
from itertools import product

import pipelab
from pipelab import B, F


def answer(rank, ranks, latency, forward=1, backward=2):
    """Return how many forwards a rank is ahead of its backwards."""
    return (ranks - 1 - rank) * math.ceil(1 + 2 * latency / (forward + backward))


class _Leads(pipelab.Schedule):
    leads = (8, 6, 3, 0)

    def actions(self, rank):
        for i in range(self.microbatches + self.leads[rank]):
            if i < self.microbatches:
                yield F(i)
            if i >= self.leads[rank]:
                yield B(i - self.leads[rank])


far = pipelab.Cost(forward=1, backward=2, latency=2)
trace = pipelab.simulate(_Leads(4, 16), far)
assert (trace.makespan, sum(trace.peak_activations)) == (69, 21)
for leads in product(range(9), range(8), range(5), range(2)):  # none with fewer activations is as quick
    if sum(leads) + 4 < 21 and list(leads) == sorted(leads, reverse=True):
        fewer = type("Leads", (_Leads,), {"leads": leads})(4, 16)
        assert pipelab.simulate(fewer, far).makespan > 69
