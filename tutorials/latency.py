# %% [markdown]
# # Latency, and eager 1F1B
#
# Two nodes, two stages on each. Inside a node a transfer costs next to nothing. Between the nodes it takes half as long
# as a forward. You move from GPipe to 1F1B to save memory, since both have the same bubble. The step gets longer.
#
# On this page you find out what latency costs GPipe and 1F1B, and how many extra forwards buy it back.
#
# It takes about 20 minutes, and you need [The single loop, dissected](option_c.md) before it, because the *lead* comes
# from there. Run it with `pipelab tutorial latency`, which asks for your predictions before it shows the answers.

# %%
import pipelab
from pipelab import B, F

P, M = 4, 8  # ranks and micro-batches
free = pipelab.Cost(forward=1, backward=2)
far = pipelab.Cost(forward=1, backward=2, latency=0.5)  # each value arrives half a unit after it was made

# %% [markdown]
# ## Predict: GPipe, half a unit away
#
# Without latency, GPipe takes (8 + 3) × 3 = 33 units. Now each of the 8 × 3 outputs on their way down and each of the 8
# × 3 gradients on their way up arrives half a unit later. A sender does not wait: it goes on computing. How long does
# GPipe take?

# %%
my_prediction = None  # units

# %% tags=["answer"]
gpipe = pipelab.simulate(pipelab.GPipe(P, M), far)
print(f"predicted {my_prediction}, simulated {gpipe.makespan:g}")
assert gpipe.makespan == 33 + 2 * (P - 1) * 0.5 == 36
for count in (4, 16, 32):
    assert pipelab.simulate(pipelab.GPipe(P, count), far).makespan == (count + P - 1) * 3 + 2 * (P - 1) * 0.5

# %% [markdown] tags=["answer"]
# Of the 48 transfers, 6 count: the pipe fills through 3 of them and drains through 3. All others fly while both their
# ranks have something else to do.

# %% [markdown]
# ## And 1F1B?

# %%
one_f_one_b = pipelab.simulate(pipelab.OneFOneB(P, M), far)
assert one_f_one_b.makespan == 41
one_f_one_b

# %% [markdown]
# 41 units, 8 more than without latency. Look at the steady state of rank 0: after each backward [there is a
# gap](#s=0:idle.0.19). The ledger knows its name:

# %%
print(one_f_one_b.ledger)

# %% [markdown]
# In 1F1B, each rank is exactly as far ahead as it must be when transfers are free: the gradient that it wants next has
# *just* been made by the rank below. Now that gradient is still on the wire, and the rank has nothing else to do. Then
# its next forward starts late, so the rank below gets its input late, and so on. The more micro-batches there are, the
# more often all ranks pay:

# %%
print("micro-batches  GPipe  1F1B  without latency")
for count in (4, 8, 16, 32):
    flush, alternate = (pipelab.simulate(kind(P, count), far).makespan for kind in (pipelab.GPipe, pipelab.OneFOneB))
    ideal = (count + P - 1) * 3
    assert alternate == ideal + (2 * (P - 1) * count / P + 2 * (P - 2)) * 0.5
    print(f"{count:13d} {flush:6g} {alternate:5g} {ideal:16g}")

# %% [markdown]
# GPipe pays 2 (P - 1) latencies, whatever the number of micro-batches. 1F1B pays 2 (P - 1) × M / P + 2 (P - 2) of them
# (if P divides M), so its bubble does *not* vanish with more micro-batches. "The same bubble" is true only where
# transfers are free.
#
# ## Predict: one extra forward
#
# Here is 1F1B with a lead, as in [The single loop, dissected](option_c.md): rank r of P is P - 1 - r forwards ahead of
# its backwards. If every rank but the last were **one** more ahead, it would have a forward to run while the gradient
# is on the wire. How long does the step take then, and what does it cost?


# %%
class Loop(pipelab.Schedule):
    """After forward i, the backward of i - lead; the last backwards after the loop."""

    def lead(self, rank):
        return self.ranks - 1 - rank

    def actions(self, rank):
        lead = min(self.lead(rank), self.microbatches)
        for i in range(self.microbatches + lead):
            if i < self.microbatches:
                yield F(i)
            if i >= lead:
                yield B(i - lead)


assert Loop(P, M).plan() == pipelab.OneFOneB(P, M).plan()


class OneMore(Loop):
    def lead(self, rank):
        return 0 if rank == self.ranks - 1 else self.ranks - rank


# %%
my_second_prediction = None  # units, and activations on rank 0

# %% tags=["answer"]
one_more = pipelab.simulate(OneMore(P, M), far)
print(f"predicted {my_second_prediction}, simulated {one_more.makespan:g}, activations {one_more.peak_activations}")
assert (one_more.makespan, one_more.peak_activations) == (37, (5, 4, 3, 1))

# %% tags=["answer"]
one_more

# %% [markdown] tags=["answer"]
# 37 instead of 41, for one activation more on three ranks. Nearly GPipe's 36, and GPipe holds 8 on every rank (without
# [recomputation](memory_wall.md#what-does-gpipes-paper-do)).

# %% [markdown]
# ## How far ahead?
#
# Which lead makes latency as cheap as in GPipe? Think of two neighbours. An output of the upper rank is on the wire for
# L, the lower rank computes with it, and the gradient is on the wire for L again. The upper rank should be busy during
# these 2 L, and it has F + B of work for each micro-batch.
#
# So it is enough if, from rank to rank, the lead does not fall by 1, as in 1F1B, but by 1 + 2 L / (F + B), rounded up.
# For all latencies up to (F + B) / 2 that is 2. This schedule has a name: **eager 1F1B**, policy B in DAPPLE (Fan et
# al. 2021). It is a rule for any number of micro-batches. If there are few, a rank runs out of forwards before it needs
# its whole lead, and a smaller one is as quick.

# %%
eager = pipelab.simulate(pipelab.Eager1F1B(P, M), far)
pipelab.compare(gpipe, one_f_one_b, eager, names=["GPipe", "1F1B", "eager 1F1B"])

# %%
assert (eager.makespan, eager.peak_activations) == (36, (7, 5, 3, 1))
for count in (16, 32):
    assert pipelab.simulate(pipelab.Eager1F1B(P, count), far).makespan == (count + 3) * 3 + 3
    assert max(pipelab.simulate(pipelab.Eager1F1B(P, count), far).peak_activations) == 7


class Fewer(Loop):
    def lead(self, rank):
        return (5, 3, 2, 0)[rank]


assert pipelab.simulate(Fewer(P, M), far).makespan == 36  # with leads of 6, 4, 2 and 0, eager 1F1B takes as long
assert pipelab.simulate(Fewer(P, 16), far).makespan > 60
farther = pipelab.Cost(forward=1, backward=2, latency=2)
assert pipelab.simulate(pipelab.Eager1F1B(P, 16), farther).makespan == 75
assert pipelab.simulate(pipelab.GPipe(P, 16), farther).makespan == 69

# %% [markdown]
# Its 7 activations stay 7 however many micro-batches there are, where GPipe holds all of them. So GPipe tolerates
# latency but not many micro-batches, 1F1B tolerates many micro-batches but not latency, and eager 1F1B tolerates both,
# for nearly twice 1F1B's memory.
#
# If the wire is busy rather than far, this does not help: what a link can carry in a second is a different limit
# ([`Links`](../reference/simulation.md)).
#
# ## Exercise: any latency
#
# Return the lead of a rank for any latency. Here are four ranks and 16 micro-batches, with a forward of 1 and a
# backward of 2.
#
# - **Par for a latency of 0.5: 60 units with 16 activations**, the peaks of all ranks added up.
# - **Par for a latency of 2: 69 units with 22 activations.** There, eager 1F1B takes 75.
#
# GPipe takes 60 and 69, with 64 activations. The function below is 1F1B: the starting point, not the solution.


# %%
def answer(rank, ranks, latency):
    """Return how many forwards a rank is ahead of its backwards, with F = 1 and B = 2."""
    return ranks - 1 - rank


# %%
def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    for latency, par, held in ((0.5, 60, 16), (2, 69, 22)):

        class Mine(Loop):
            def lead(self, rank, latency=latency):
                return answer(rank, self.ranks, latency)

        if faults := pipelab.check(Mine(P, 16)):
            print(f"latency {latency}: {faults[0]}")
            return False
        trace = pipelab.simulate(Mine(P, 16), pipelab.Cost(forward=1, backward=2, latency=latency))
        total = sum(trace.peak_activations)
        print(f"latency {latency}: {trace.makespan:g} units, par {par}; {total} activations, par {held}")
        reached.append(trace.makespan <= par and total <= held)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: for a latency of 2 there is an order of the same kind with 69 units and 21 activations. Where can
# one activation be saved? Teachers have the solution, `teacher/solutions/latency.py`.
