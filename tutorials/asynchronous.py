# %% [markdown]
# # Asynchronous pipelines
#
# Your bubble is 27 %. A colleague points at the end of the step: "There the pipe runs empty, only because the optimizer
# wants all gradients before it steps. Let each stage step as soon as it has a gradient, and the pipe never runs empty."
#
# She is right, and PipeDream (Narayanan et al. 2019) did this before 1F1B had a flush. On this page you find out what
# it buys, and what it costs: in memory, and in learning.
#
# It takes about 21 minutes, and you need [What 1F1B buys](what_1f1b_buys.md) before it. Run it with
# `pipelab tutorial asynchronous`, which asks for your predictions before it shows the answers.
#
# ## Without a flush
#
# `U(m)` is an action that updates its stage's weights, with all gradients up to micro-batch m that no earlier update
# has used. PipeDream has one after each backward:

# %%
import pipelab
from pipelab import B, F, U

P = 4  # ranks
cost = pipelab.Cost(forward=1, backward=2)
endless = pipelab.simulate(pipelab.PipeDream(P, 8), pipelab.Cost(forward=1, backward=2, update=0.5))
print(endless)

# %%
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

# %%
memory = pipelab.Memory(weights=100)
print(pipelab.memory_use(pipelab.PipeDream(P, 8), memory))
assert [held.weights for held in pipelab.memory_use(pipelab.PipeDream(P, 8), memory).at_peak] == [400, 300, 200, 100]

# %% [markdown]
# Fewer updates need fewer versions. PipeDream-2BW (Narayanan et al. 2021) updates once for P micro-batches, with
# gradients that are one update late, on every rank. Two versions are enough, and it takes as long:

# %%
assert pipelab.check(pipelab.TwoBW(P, 64), versions=2) == []
assert pipelab.simulate(pipelab.TwoBW(P, 64), cost).makespan == 201

# %% [markdown]
# ## Predict: what does a late gradient cost?
#
# The simplest thing to learn: a weight w whose loss is w²/2, so that its gradient is w. Gradient descent shrinks it for
# every learning rate below 2. Now each gradient is one update late, as in 2BW: w ← w - rate x (the w of one step
# before). Below which rate does it shrink?

# %%
my_third_prediction = None  # a learning rate, where 2 is the limit without delay


# %% tags=["answer"]
def shrinks(rate, late, steps=3000):
    """Return whether gradient descent with late gradients makes a weight smaller."""
    w = [1.0] * (late + 1)
    for _ in range(steps):
        w.append(w[-1] - rate * w[-1 - late])
        if abs(w[-1]) > 1e6:
            return False
    return max(map(abs, w[-50:])) < 0.1


print(f"predicted {my_third_prediction}")
for late in range(4):
    largest = max(rate / 100 for rate in range(1, 220) if shrinks(rate / 100, late))
    print(f"{late} updates late: up to a rate of about {largest}")
    assert abs(largest - (2.0, 1.0, 0.62, 0.44)[late]) < 0.03

# %% [markdown] tags=["answer"]
# 1, half of it; with three updates, as on PipeDream's first rank of four, 0.44. A rate that a model has been tuned with
# may be too large once its gradients are late, and a smaller one needs more steps. Gradient descent with a delay of d
# is stable below 2 sin(π / (4d + 2)).

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
