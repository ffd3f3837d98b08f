# %% [markdown]
# # Asynchronous pipelines
#
# Your bubble is 27 %. A colleague points at the end of the step: "There the pipe runs empty, only because the optimizer
# wants all gradients before it steps. Let each stage step as soon as it has a gradient, and the pipe never runs empty."
#
# She is right, and PipeDream (Narayanan et al. 2019) did this before 1F1B had a flush. On this page you find out what a
# pipeline without a flush buys, and what it costs: in memory, and in learning.
#
# It takes about 21 minutes, and you need [What 1F1B really buys](what_1f1b_buys.md) before it. Run it with
# `pipelab tutorial asynchronous`, which asks for your predictions before it shows the answers.
#
# ## Without a flush
#
# `U(m)` is an action that updates its stage's weights, with all gradients up to micro-batch m that no earlier update
# has used. PipeDream has one after each backward:

# %%
import math

import pipelab
from pipelab import B, F, U

P = 4  # ranks
cost = pipelab.Cost(forward=1, backward=2)
endless = pipelab.simulate(pipelab.PipeDream(P, 8), pipelab.Cost(forward=1, backward=2, update=0.5))
pipelab.compare(pipelab.simulate(pipelab.OneFOneB(P, 8), cost), endless, names=["1F1B", "PipeDream"])

# %% [markdown]
# ## Predict: what does it buy?
#
# Eight batches of 8 micro-batches, 64 in all. 1F1B with a flush takes 33 units for each batch. PipeDream runs all 64 in
# one go. How many units does it take, if an update takes none?

# %%
my_prediction = None  # units, where 1F1B takes 8 x 33 = 264

# %% tags=["answer"]
flushed = 8 * pipelab.simulate(pipelab.OneFOneB(P, 8), cost).makespan
run = pipelab.simulate(pipelab.PipeDream(P, 64), cost)
print(f"predicted {my_prediction}, simulated {run.makespan:g}, with flushes {flushed:g}")
assert (flushed, run.makespan) == (264, 201)

# %% [markdown] tags=["answer"]
# 201: (64 + 3) x 3. The pipe fills once and drains once, so the bubble is 4.5 %, and less in a longer run.

# %% [markdown]
# ## Predict: what do the first rank's forwards miss?
#
# Rank 0 runs four forwards before its first backward, and then one for each backward. So when `0F7` runs, how many of
# the updates 0 to 6 do its weights lack? And how many do the weights of `3F7` lack, on the last rank?

# %%
my_second_prediction = None  # two numbers of updates

# %% tags=["answer"]
print(f"predicted {my_second_prediction}")
for rank, row in enumerate(pipelab.PipeDream(P, 8).plan().rows):
    had = sum(action.kind == "U" for action in row[: row.index(F(7, rank))])
    print(f"rank {rank}: {rank}F7 lacks {7 - had} of 7 updates")
    assert 7 - had == P - 1 - rank

# %% [markdown] tags=["answer"]
# 3 and none: rank r lacks P - 1 - r. Its gradient belongs to weights it has overwritten, unless it keeps them.
# PipeDream keeps them: each backward uses the weights of its forward, and a rank keeps a *version* for each micro-batch
# in flight.

# %% tags=["answer"]
memory = pipelab.Memory(weights=100)
print(pipelab.memory_use(pipelab.PipeDream(P, 8), memory))
assert [held.weights for held in pipelab.memory_use(pipelab.PipeDream(P, 8), memory).at_peak] == [400, 300, 200, 100]

# %% [markdown]
# Fewer updates need fewer versions. PipeDream-2BW (Narayanan et al. 2021) updates once for P micro-batches, with
# gradients that are one update late, on every rank. Two versions are enough, and it takes as long:

# %%
assert pipelab.check(pipelab.TwoBW(P, 64), versions=2) == []
assert pipelab.simulate(pipelab.TwoBW(P, 64), cost).makespan == run.makespan

# %% [markdown]
# ## Predict: what does a late gradient cost?
#
# The simplest thing to learn: a weight w whose loss is w²/2, so that its gradient is w. Each update subtracts rate × w.
# So w shrinks for every rate below 2, and at 2 it jumps between 1 and -1 for ever. Now the gradient is some updates
# late:


# %%
def weights(rate, late, updates):
    """Return a weight after each update, each with the gradient at the weight `late` updates before."""
    w = [1] * (late + 1)
    for _ in range(updates):
        w.append(w[-1] - rate * w[-1 - late])
    return w


print(weights(rate=2, late=0, updates=6))

# %% [markdown]
# Say that it is one update late, as in 2BW. Below which rate does w shrink? (A hint: try a rate by hand, from 1 and 1.)

# %%
my_third_prediction = None  # a learning rate, where 2 is the limit without delay

# %% tags=["answer"]
print(f"predicted {my_third_prediction}")
print(weights(rate=1, late=1, updates=8))
assert weights(rate=1, late=1, updates=8) == [1, 1, 0, -1, -1, 0, 1, 1, 0, -1]

# %% [markdown] tags=["answer"]
# 1, half of it: at a rate of 1, w goes 1, 1, 0, -1, -1, 0 and begins again. With gradients that are d updates late, the
# limit is also a wave that neither shrinks nor grows, cos(θn) after n updates. The next update changes it by
# cos(θ(n + 1)) - cos(θn) = -2 sin(θ/2) sin(θ(n + 1/2)). The rule changes it by -rate × cos(θ(n - d)), which is
# -rate × sin(θ(n - d) + π/2). Both are the same for every n if rate = 2 sin(θ/2) and θ(n + 1/2) = θ(n - d) + π/2. So
# θ = π / (2d + 1), and the limit is a rate of 2 sin(π / (4d + 2)). Just below it w fades, just above it w grows:

# %% tags=["answer"]
for late in range(4):
    limit = 2 * math.sin(math.pi / (4 * late + 2))
    below, above = (max(map(abs, weights(near * limit, late, 3000)[-50:])) for near in (0.98, 1.02))
    print(f"{late} updates late: up to a rate of {limit:.3f}")
    assert below < 0.01
    assert above > 100

# %% [markdown] tags=["answer"]
# With three updates, as on PipeDream's first rank of four, the limit is 0.445. A rate that a model has been tuned with
# may be too large once its gradients are late, and a smaller one needs more steps.

# %% [markdown]
# So that is the trade: the bubble of each flush, against versions of the weights and a smaller learning rate. With many
# micro-batches in a batch the bubble is small anyway, and large models are trained with a flush.
#
# ## Exercise: as many updates as the memory allows
#
# Four ranks and a run of 32 micro-batches. Write the order of a rank that updates its stage a given number of times.
#
# - **Par with 8 updates and 2 versions of the weights: 105 units.**
# - **Par with 16 updates and 3 versions: 105 units.**
#
# The order below lets the pipe run empty before each update. It takes 168 and 240 units: the starting point, not the
# solution. `pipelab.check(schedule, versions=2)` says which backward would need an older version.


# %%
def answer(rank, ranks, microbatches, updates):
    """Yield a rank's actions."""
    group = microbatches // updates
    for first in range(0, microbatches, group):
        for m in range(first, first + group):
            yield F(m)
        for m in range(first, first + group):
            yield B(m)
        yield U(first + group - 1)


# %%
def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    for updates, versions in ((8, 2), (16, 3)):

        class Mine(pipelab.Schedule):
            def actions(self, rank, updates=updates):
                return answer(rank, self.ranks, self.microbatches, updates)

        schedule = Mine(P, 32)
        faults = pipelab.check(schedule, versions=versions)
        if faults:
            print(faults)
            return False
        rows = schedule.plan().rows
        if any(sum(action.kind == "U" for action in row) != updates or row[-1].kind != "U" for row in rows):
            print(f"each rank needs {updates} updates, the last one at its end")
            return False
        trace = pipelab.simulate(schedule, cost)
        print(f"{updates} updates, {versions} versions: {trace.makespan:g} units, par 105")
        reached.append(trace.makespan <= 105)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: how many versions does your order need with 32 updates? Teachers have the solution,
# `teacher/solutions/asynchronous.py`.
