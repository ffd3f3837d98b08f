"""The exercise of `option_c.py`: how many forwards must a rank be ahead of its backwards?

The last rank turns around at once: its lead is 0. Each rank before it must be one further ahead than its successor, so
that the successor's next input is there when it wants it: the lead is P - 1 - r. That is 1F1B.

A rank with a lead of n holds n + 1 activations. On four ranks these are 4 + 3 + 2 + 1 = 10, whatever the number of
micro-batches, where GPipe holds all of them on every rank. A lead that grows with the rank deadlocks: the first rank
waits for a backward before it sends the forwards that the last one wants first.
"""

from itertools import product

import pipelab
from pipelab import B, F


def answer(rank, ranks):
    """Return how many forwards a rank is ahead of its backwards."""
    return ranks - 1 - rank


class _Leads(pipelab.Schedule):
    leads = ()

    def actions(self, rank):
        for i in range(self.microbatches + self.leads[rank]):
            if i < self.microbatches:
                yield F(i)
            if i >= self.leads[rank]:
                yield B(i - self.leads[rank])


# All other leads up to 4 take longer, hold more, or deadlock.
best = {}
for leads in product(range(5), repeat=4):
    schedule = type("Leads", (_Leads,), {"leads": leads})(4, 8)
    if not pipelab.check(schedule):
        trace = pipelab.simulate(schedule, pipelab.Cost(forward=1, backward=2))
        best[leads] = (trace.makespan, sum(trace.peak_activations))
assert min(best.values()) == (33, 10)
assert [leads for leads, found in best.items() if found == (33, 10)] == [(3, 2, 1, 0)]
