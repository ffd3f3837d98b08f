# %% [markdown]
# # What 1F1B really buys
#
# In the lecture you heard that 1F1B has a smaller bubble than GPipe. You change one word in your script, from GPipe to
# 1F1B, and measure. What should you see?
#
# On this page you find out what ranks wait for in 1F1B, what it saves, and how you turn that into a shorter step.
#
# It takes about 20 minutes, and you need [The memory wall](memory_wall.md) before it. Run it with
# `pipelab tutorial what_1f1b_buys`, which asks for your predictions before it shows the answers.

# %%
from itertools import pairwise

import pipelab
from pipelab import B, F

P, M = 4, 8  # ranks and micro-batches
cost = pipelab.Cost(forward=1, backward=2)
gpipe = pipelab.simulate(pipelab.GPipe(P, M), cost)
print(gpipe.ledger)

# %% [markdown]
# ## Predict: how long does 1F1B wait?
#
# The ledger says what each rank of GPipe waits for: rank 0 waits 9 units in one piece, in the middle, for the first
# gradient. In 1F1B it runs its first backward much earlier, at 10 and not at 17. In how many pieces does rank 0 wait in
# 1F1B, and how long is each?

# %%
my_prediction = None  # the units of each piece

# %% tags=["answer"]
one_f_one_b = pipelab.simulate(pipelab.OneFOneB(P, M), cost)
row = [event for event in one_f_one_b.events if event.rank == 0]
pieces = [after.start - before.end for before, after in pairwise(row) if after.start > before.end]
print(f"predicted {my_prediction}, simulated {pieces}")
print(one_f_one_b.ledger)
assert pieces == [6, 1, 1, 1]

for trace, start in ((gpipe, 17), (one_f_one_b, 10)):
    assert next(event.start for event in trace.events if str(event.action) == "0B0") == start
for rank in range(P):
    assert one_f_one_b.ledger[rank] == gpipe.ledger[rank]
    assert sum(gpipe.ledger[rank].values()) == (P - 1) * (1 + 2) == 9

# %% tags=["answer"]
pipelab.compare(gpipe, one_f_one_b, names=["GPipe", "1F1B"])

# %% [markdown] tags=["answer"]
# The two ledgers are the same, number by number. The first micro-batch must still go down through all ranks, and the
# last gradient must still come up through all of them. No order of the work in between changes that. 1F1B only moves
# the gaps: [one of 9 units](#s=0:idle.0.8) on rank 0 is now [one of 6](#s=1:idle.0.4) and three short ones. That is why
# its timeline *looks* fuller.

# %% [markdown]
# ## So what was wrong in the lecture?
#
# Very little. Megatron-LM's paper says what our ledger says: 1F1B with a flush spends as much time in the bubble as
# GPipe, but has at most as many micro-batches in flight as there are ranks (Narayanan et al. 2021, section 2.2.1). On
# rank r, 1F1B holds min(M, P - r) activations, where GPipe holds all M (without
# [recomputation](memory_wall.md#what-does-gpipes-paper-do)). Micro-batches are of one size here, so each line is a
# larger batch:

# %%
print("micro-batches  makespan  bubble   GPipe holds  1F1B holds")
for count in (4, 8, 16, 32, 64):
    flush, alternate = (pipelab.simulate(kind(P, count), cost) for kind in (pipelab.GPipe, pipelab.OneFOneB))
    assert flush.makespan == alternate.makespan == (count + P - 1) * 3
    assert flush.peak_activations == (count,) * P
    assert alternate.peak_activations == tuple(min(count, P - rank) for rank in range(P))
    print(
        f"{count:13d} {flush.makespan:9g} {flush.bubble:7.1%} {max(flush.peak_activations):13d}"
        f" {max(alternate.peak_activations):11d}"
    )

# %% [markdown]
# In each line, both have the same bubble. But if there is room for four activations, GPipe stops at the *first* line,
# with a bubble of 42.9 %. 1F1B goes on to the last, with 4.5 %. So the lecture's sentence lacks three words: 1F1B has
# the smaller bubble **for equal memory**. It buys memory. You pay for micro-batches with it, and *they* shrink the
# bubble.

# %%
assert round(pipelab.simulate(pipelab.GPipe(P, 4), cost).bubble, 3) == 0.429
assert round(pipelab.simulate(pipelab.OneFOneB(P, 64), cost).bubble, 3) == 0.045

# %% [markdown]
# ## Predict: the same batch, the same memory
#
# Here is the fair race. Both train on 24 micro-batches of the same size, and each rank has room for four activations.
# GPipe can do that in turns: four forwards, four backwards, and again, with the optimizer's step only after all six
# turns (gradient accumulation). How long does it take, and how long does 1F1B?


# %%
class InTurns(pipelab.Schedule):
    """GPipe with `group` micro-batches at a time."""

    group = 4

    def actions(self, rank):
        for first in range(0, self.microbatches, self.group):
            turn = range(first, min(first + self.group, self.microbatches))
            yield from (F(m) for m in turn)
            yield from (B(m) for m in turn)


assert pipelab.check(InTurns(P, 24), memory_cap=4) == []
assert pipelab.check(pipelab.OneFOneB(P, 24), memory_cap=4) == []

# %%
my_second_prediction = None  # two numbers, in units

# %% tags=["answer"]
turns = pipelab.simulate(InTurns(P, 24), cost)
steady = pipelab.simulate(pipelab.OneFOneB(P, 24), cost)
print(f"predicted {my_second_prediction}, simulated {turns.makespan:g} and {steady.makespan:g}")
assert turns.makespan == 6 * (4 + P - 1) * 3 == 126
assert steady.makespan == (24 + P - 1) * 3 == 81
assert round(turns.makespan / steady.makespan, 2) == 1.56

# %% tags=["answer"]
pipelab.compare(turns, steady, names=["GPipe, four at a time", "1F1B"])

# %% [markdown] tags=["answer"]
# GPipe pays for fill and drain six times, and 1F1B once. *That* is the difference between the two, and it is a factor
# of 1.56 here.

# %% [markdown]
# ## The small print
#
# "The same bubble" holds for equal stages and free transfers. Otherwise the two can differ, in both directions:
#
# - If stages are unequal, 1F1B can be a little shorter. Below, one of four stages takes twice as long as the others: 55
#   instead of 57. In none of the 81 cases of the last cell is 1F1B longer.
# - If transfers take time, 1F1B is *longer* than GPipe, 37 instead of 34.5: see [Latency, and eager 1F1B](latency.md).

# %%
uneven = pipelab.Cost(forward=[1, 1, 2, 1], backward=[2, 2, 4, 2])
far = pipelab.Cost(forward=1, backward=2, latency=0.25)
for some_cost, expected in ((uneven, (57, 55)), (far, (34.5, 37))):
    flush, alternate = (pipelab.simulate(kind(P, M), some_cost).makespan for kind in (pipelab.GPipe, pipelab.OneFOneB))
    print(f"GPipe {flush:g}, 1F1B {alternate:g}")
    assert (flush, alternate) == expected

# %%
from itertools import product

for forward in product((1, 2, 3), repeat=4):  # all ways to be uneven with these
    some_cost = pipelab.Cost(forward=forward, backward=[2 * time for time in forward])
    assert (
        pipelab.simulate(pipelab.OneFOneB(P, M), some_cost).makespan
        <= pipelab.simulate(pipelab.GPipe(P, M), some_cost).makespan
    )

# %% [markdown]
# ## Exercise: buy time with memory
#
# A batch has a number of rows, and each rank has room for the activations of some of them. With n rows in a
# micro-batch, a forward takes 3 + n ms and a backward 3 + 2n ms, as in [Fill, drain and the bubble](fill_and_drain.md).
# Return the schedule of the whole batch on four ranks, with equal micro-batches.
#
# - **Par for 96 rows with room for 96: 450 ms.**
# - **Par for 384 rows with room for 48: 1470 ms.**
#
# The function below takes 12 rows per micro-batch, and GPipe with as many of them at a time as there is room for. It is
# the starting point, not the solution. (A hint: the two pars want different numbers of rows. One asks what a launch
# costs, the other also what fits.)


# %%
def answer(rows, room):
    """Return a schedule for four ranks; its micro-batches have rows / microbatches rows each."""

    class Turns(InTurns):
        group = room // 12

    return Turns(ranks=4, microbatches=rows // 12)


# %%
def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    for rows, room, par in ((96, 96, 450), (384, 48, 1470)):
        mine = answer(rows, room)
        if mine.ranks != 4 or rows % mine.microbatches:
            print(f"{rows} rows cannot be cut into {mine.microbatches} equal micro-batches on four ranks")
            return False
        n = rows // mine.microbatches
        if faults := pipelab.check(mine, memory_cap=room // n):
            print(f"{rows} rows, {n} in a micro-batch: {faults[0]}")
            return False
        trace = pipelab.simulate(mine, pipelab.Cost(forward=3 + n, backward=3 + 2 * n, unit="ms"))
        held = max(trace.peak_activations) * n
        print(f"{rows} rows, {n} in a micro-batch: {trace.makespan:g} ms, par {par}; {held} rows held of {room}")
        reached.append(trace.makespan <= par)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: how many rows does GPipe hold if it runs the whole batch in one piece, and does it help to cut the
# batch finer? Teachers have the solution, `teacher/solutions/what_1f1b_buys.py`.
