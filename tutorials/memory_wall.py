# %% [markdown]
# # The memory wall
#
# GPipe runs on your four GPUs with four micro-batches. For a smaller bubble you take eight. `CUDA out of memory`, on
# the first GPU, in the middle of the forwards. The model is no larger than before, and neither is a micro-batch.
#
# On this page you find out what fills the memory, how much of it a pipeline really needs, and what each saved
# activation costs in time.
#
# It takes about 23 minutes, and you need [Fill, drain and the bubble](fill_and_drain.md) before it. Run it with
# `pipelab tutorial memory_wall`, which asks for your predictions before it shows the answers.
#
# ## What fills the memory
#
# A forward leaves something behind: the activations that its backward will need. They are let go when that backward has
# run. So a rank's memory grows by one micro-batch's activations with each `F`, and shrinks with each `B`.

# %%
import pipelab
from pipelab import B, F

P, M = 4, 8  # ranks and micro-batches
cost = pipelab.Cost(forward=1, backward=2)
gpipe = pipelab.simulate(pipelab.GPipe(P, M), cost)
print(f"most activations held, by rank: {gpipe.peak_activations}")
assert gpipe.peak_activations == (8, 8, 8, 8)

# %% [markdown]
# GPipe runs all forwards before the first backward, so every rank holds all eight. (In GPipe's paper it holds less; see
# [below](#what-does-gpipes-paper-do).) The more micro-batches of one size, the more memory: the step that shrinks the
# bubble runs out of memory. If you cut the *same* batch into eight instead, each micro-batch is half as large. GPipe's
# memory then stays the same, because it always holds the whole batch.
#
# Say that four fit on each GPU. `check` knows this **memory cap**, and finds the forward that does not fit:

# %%
faults = pipelab.check(pipelab.GPipe(P, M), memory_cap=4)
print(faults[0])
assert [fault.code for fault in faults] == ["memory-cap"] * 4
assert str(faults[0].action) == "0F4"

# %% [markdown]
# It names the next move, too: a backward must come first.
#
# ## Predict: when can the first backward come?
#
# Rank 0 begins with the forward of micro-batch 0 at time 0. A forward takes 1 unit, a backward 2, and there are four
# ranks. When can rank 0 begin the *backward* of micro-batch 0, at the earliest?

# %%
my_prediction = None  # units

# %% tags=["answer"]
one_f_one_b = pipelab.simulate(pipelab.OneFOneB(P, M), cost)
first = next(event for event in one_f_one_b.events if str(event.action) == "0B0")
print(f"predicted {my_prediction}, simulated {first.start:g}")
assert first.start == P * 1 + (P - 1) * 2 == 10

# %% tags=["answer"]
one_f_one_b

# %% [markdown] tags=["answer"]
# Four forwards on the way down, three backwards on the way up: [10](#s=0:0B0.0). It ends at 12, so micro-batch 0 stays
# on rank 0 for 12 units, a round trip of P × (F + B).

# %% [markdown]
# ## How much is enough?
#
# When all ranks are busy, a micro-batch begins every F + B = 3 units, and stays on rank 0 for a round trip of 12. So 12
# / 3 = **4** of them are there together. On rank r the round trip is shorter, (P - r) × (F + B), and P - r are enough.
# Queues in shops obey the same rule (Little's law): the number of customers inside is their arrival rate times the time
# that each one stays.

# %%
assert one_f_one_b.peak_activations == (4, 3, 2, 1)
began = {str(event.action): event.start for event in one_f_one_b.events}
ended = {str(event.action): event.end for event in one_f_one_b.events}
for rank in range(P):
    stay = ended[f"{rank}B7"] - began[f"{rank}F7"]
    print(f"rank {rank}: the last micro-batch stays for {stay:g} units")
    assert stay == (P - rank) * 3

# %% [markdown]
# This is 1F1B, and now you know where its warm-up comes from: as many forwards as it takes until the first gradient is
# back, and then one backward for each forward. It holds 4 activations on rank 0 with 8 micro-batches, and with 800. If
# these are of one size, the batch grows and the memory does not. If the batch is given, 4 of 8 are half of it, and 4 of
# 800 a two-hundredth: the memory shrinks.

# %%
for count in (4, 8, 16, 800):
    peak = pipelab.simulate(pipelab.OneFOneB(P, count), cost).peak_activations[0]
    print(f"{count:3d} micro-batches: rank 0 holds {peak}, {peak / count:.1%} of the batch")
    assert peak == 4

# %% [markdown]
# ## Predict: less than enough
#
# Now only **three** fit on each GPU, and there are twelve micro-batches. The step takes 45 units with a cap of 4 or
# more. How long does the quickest order take with a cap of 3? And with 2, and 1?

# %%
my_second_prediction = None  # three numbers, for caps of 3, 2 and 1

# %% tags=["answer"]
print(f"predicted {my_second_prediction}")
print("micro-batches  cap  quickest order  bubble")
twelve, eight = ((4, 45), (3, 54), (2, 75), (1, 144)), ((8, 33), (5, 33), (4, 33), (3, 39), (2, 51), (1, 96))
for count, cap, expected in [(12, *each) for each in twelve] + [(M, *each) for each in eight]:
    bound = pipelab.lower_bound(pipelab.OneFOneB(P, count), cost, memory_cap=cap)
    trace = pipelab.simulate(pipelab.Greedy(P, count, memory_cap=cap, cost=cost), cost)
    assert bound == trace.makespan == expected  # an order, and a proof that none is quicker
    print(f"{count:13d} {cap:4d} {trace.makespan:15g} {trace.bubble:7.1%}")

# %% [markdown] tags=["answer"]
# With a cap of 1, a micro-batch must have left before the next one enters: one at a time. A cap of 4 gives all that
# memory can give, and more than that gives nothing. In between, each activation that you remove makes the rank wait for
# a part of the round trip.
#
# So the wall has a price list. With eight micro-batches, 8 → 4 activations is free, 4 → 3 costs 6 units, 3 → 2 costs
# 12.

# %% [markdown]
# ## Which 1F1B fits?
#
# Could you simply run 1F1B with a shorter warm-up? 1F1B schedules differ only in the warm-ups of their ranks, and a
# rank holds as many activations as its warm-up is long. So a cap of 3 means: no warm-up above 3. But not all of these
# can run:


# %%
class WarmedUp(pipelab.Schedule):
    """1F1B with any warm-ups, one for each rank."""

    def __init__(self, *warmups):
        super().__init__(P, M)
        self.warmups = warmups

    def actions(self, rank):
        warmup = self.warmups[rank]
        for m in range(warmup):
            yield F(m)
        for m in range(self.microbatches - warmup):
            yield B(m)
            yield F(warmup + m)
        for m in range(self.microbatches - warmup, self.microbatches):
            yield B(m)


print(pipelab.check(WarmedUp(2, 3, 2, 1))[0])

# %% [markdown]
# Rank 1 wants a third forward before its first backward, and rank 0 sends only two before it wants a gradient. So a
# warm-up must never be longer than the previous rank's. That is the whole rule: every 1F1B that keeps to it is
# legal.

# %%
from itertools import pairwise, product

quickest = {}  # by cap: the makespan and the warm-ups
for warmups in product(range(1, 5), repeat=P):
    legal = pipelab.check(WarmedUp(*warmups)) == []
    assert legal == all(before >= after for before, after in pairwise(warmups))
    if legal:
        trace = pipelab.simulate(WarmedUp(*warmups), cost)
        assert trace.peak_activations == warmups
        for cap in range(max(warmups), 5):
            quickest[cap] = min(quickest.get(cap, (1000,)), (trace.makespan, warmups))
for cap, (makespan, warmups) in sorted(quickest.items(), reverse=True):
    print(f"cap {cap}: 1F1B takes {makespan:g} at best, with warm-ups of {warmups}")
assert quickest == {
    4: (33, (4, 3, 2, 1)),
    3: (48, (3, 3, 2, 1)),
    2: (54, (2, 2, 1, 1)),
    1: (96, (1, 1, 1, 1)),
}

# %% [markdown]
# With a cap of 4, 1F1B fits and costs nothing. It is not the only order that fits: `Greedy` takes 33 units too, and
# holds 4 on three ranks. 1F1B needs the least memory for 33 units. Take one activation from any rank that holds more
# than one, and no order is as quick. With a cap of 3 or 2 there is a 1F1B that fits, and it takes 48 or 54 units. The
# quickest order takes less, and is not a 1F1B.

# %%
greedy = pipelab.simulate(pipelab.Greedy(P, M, memory_cap=4, cost=cost), cost)
assert (greedy.makespan, greedy.peak_activations) == (33, (4, 4, 4, 1))
for rank in range(P - 1):
    caps = [P] * P
    caps[rank] = P - rank - 1  # one less than 1F1B holds
    bound = pipelab.lower_bound(pipelab.OneFOneB(P, M), cost, memory_cap=caps)
    print(f"caps {caps}: at least {bound:g} units")
    assert bound > 33

# %% [markdown]
# ## What does GPipe's paper do?
#
# There is another way around the wall: release the activations after the forward, and compute them again right before
# the backward (*activation checkpointing*). GPipe's paper does this (Huang et al. 2019, section 2.3): a rank keeps only
# the *input* of its stage for each micro-batch, and all activations of just the one that it computes again. Wherever
# these pages say "GPipe holds all eight", they mean its order without recomputation.
#
# It is not free: each micro-batch costs an extra forward, 4 units instead of 3. If a rank computes again only when the
# gradient is there, the bubble stays the same, and the step takes a third longer. If it begins earlier, a part of this
# time hides in the bubble. [Recomputation](recomputation.md) is about choosing what to compute again, and when.

# %%
recomputing = pipelab.simulate(pipelab.GPipe(P, M), pipelab.Cost(forward=1, backward=1 + 2))
print(f"{gpipe.makespan:g} units, with recomputation {recomputing.makespan:g}")
assert (gpipe.makespan, recomputing.makespan) == (33, 44)
assert abs(gpipe.bubble - recomputing.bubble) < 1e-12

# %% [markdown]
# ## Exercise: at the wall
#
# Write an order for four ranks and eight micro-batches that never holds more than `self.cap` activations on any rank.
# The check sets `cap`.
#
# - **Par with a cap of 2: 51 units.**
# - **Par with a cap of 3: 39 units.**
#
# Both are proven above: nothing is quicker. The order below is GPipe with `cap` micro-batches at a time. It is legal
# with any cap, also with 4, where it takes 42 units. It is the starting point, not the solution. (Hints. For the cap of
# 2: the last rank never needs two. What is a good pattern for the ranks in the middle? For the cap of 3: rather than
# rows, write the rule by which a rank decides what to do next, and a small clock that applies it.)


# %%
class Answer(pipelab.Schedule):
    """GPipe with `cap` micro-batches at a time."""

    cap = 2

    def actions(self, rank):
        for first in range(0, self.microbatches, self.cap):
            group = range(first, min(first + self.cap, self.microbatches))
            yield from (F(m) for m in group)
            yield from (B(m) for m in group)


answer = Answer
four = type("Four", (Answer,), {"cap": 4})(P, M)
assert pipelab.check(four, memory_cap=4) == []
assert pipelab.simulate(four, cost).makespan == 42


# %%
def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    for cap, par in ((2, 51), (3, 39)):
        mine = type("Mine", (answer,), {"cap": cap})(P, M)
        if faults := pipelab.check(mine, memory_cap=cap):
            print(f"cap {cap}: {faults[0]}")
            return False
        trace = pipelab.simulate(mine, cost)
        print(f"cap {cap}: {trace.makespan:g} units, par {par}; activations {trace.peak_activations}")
        reached.append(trace.makespan <= par)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: how far do you get with a cap of 2 on the *first* rank only, where the embedding needs memory, too?
# (`memory_cap` may be a list.) Teachers have the solution, `teacher/solutions/memory_wall.py`.
