"""The exercise of `interleaved.py`: how large must a group be?

A micro-batch that leaves a rank comes back after P stages and P transfers: P (f + L), if a stage's forward takes f. In
this time the rank runs the other micro-batches of the group, f each. So a group of P (1 + L / f) is just enough.
Without latency that is P, interleaved 1F1B. In the backwards, a stage takes longer and a transfer does not: what is
enough for the forwards is enough for them.

Of 16 micro-batches, groups of five leave a last group of one. A group with fewer micro-batches than ranks cannot keep
the ranks busy until its first one is back, so they wait although the other groups are larger.
"""


def answer(ranks, microbatches, forward, latency):
    """Return how many micro-batches a group should have."""
    enough = ranks * (1 + latency / forward)
    divisors = [group for group in range(1, microbatches + 1) if microbatches % group == 0]
    return next((group for group in divisors if group >= enough - 1e-9), microbatches)
