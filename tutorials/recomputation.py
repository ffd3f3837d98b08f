# %% [markdown]
# # Recomputation
#
# Your pipeline runs out of memory on rank 0. A colleague wraps every layer in `torch.utils.checkpoint`, so that it
# keeps only its input and computes the rest again when the backward needs it. Now the model fits, and a step takes a
# third longer. "That is what recomputation costs", she says.
#
# It is what recomputing *everything* costs. On this page you find out which stages need recomputation, in how many of
# their layers, what the same memory would cost if you saved it with another order, and when a rank should compute
# again.
#
# It takes about 27 minutes, and you need [The memory of a model](model_memory.md) before it. Run it with
# `pipelab tutorial recomputation`, which asks for your predictions before it shows the answers.
#
# ## The cost
#
# A backward that computes its forward again takes both times: 1 + 2 = 3 units instead of 2.

# %%
import pipelab

P, M = 4, 8  # ranks and micro-batches
kept = pipelab.simulate(pipelab.OneFOneB(P, M), pipelab.Cost(forward=1, backward=2))
again = pipelab.simulate(pipelab.OneFOneB(P, M), pipelab.Cost(forward=1, backward=1 + 2))
print(f"{kept.makespan:g} units; all stages recompute: {again.makespan:g}")
assert (kept.makespan, again.makespan) == (33, 44)

# %% [markdown]
# A third longer, as she says. And this is what she gets for it: a transformer layer keeps 34 s b h bytes (with
# FlashAttention), and its input is 2 s b h of these. So a layer that recomputes keeps **1/17**. While its backward
# runs, one layer after the other has all of its activations for a moment.
#
# ## Predict: who needs it?
#
# In 1F1B rank 0 holds four micro-batches' activations, and the last rank one. Say that only rank 0 is too full. So only
# rank 0 recomputes, which is a quarter of all recomputation. Recomputing everywhere costs 11 units. What does it cost
# now?

# %%
my_prediction = None  # units more than 33

# %% tags=["answer"]
first = pipelab.simulate(pipelab.OneFOneB(P, M), pipelab.Cost(forward=1, backward=[3, 2, 2, 2]))
print(f"predicted {my_prediction}, simulated {first.makespan - kept.makespan:g}")
assert first.makespan == 38
assert sum(first.ledger[0].values()) == 6

# %% tags=["answer"]
pipelab.compare(kept, first, names=["nothing recomputed", "rank 0 recomputes"])

# %% [markdown] tags=["answer"]
# 5 units, nearly half of 11. Rank 0 now works for 8 × 4 = 32 units, and the step cannot be shorter. The other ranks
# have less to do, and so they wait for it: rank 3 for instance [before micro-batch 4](#s=1:idle.3.15), where it did not
# wait without recomputation.

# So the first stage that recomputes is expensive, and the next ones are cheap: they recompute while they would
# otherwise wait.

# %% tags=["answer"]
for count in range(P + 1):
    cost = pipelab.Cost(forward=1, backward=[3 if rank < count else 2 for rank in range(P)])
    trace = pipelab.simulate(pipelab.OneFOneB(P, M), cost)
    print(f"the first {count} ranks recompute: {trace.makespan:g} units")
    assert trace.makespan == (33 if count == 0 else 36 + 2 * count)

# %% [markdown]
# ## A part of a stage
#
# A stage has several layers, say eight, and each can recompute or not. If k of rank r's layers do, its backward takes
# 2 + k/8. In 1F1B it has P - r micro-batches in flight, so it holds (in activations of a stage, as in [The memory
# wall](memory_wall.md))
#
# (P - r) × ((8 - k) + k/17) / 8, and one layer that is being computed again: 16/17 of 1/8 more


# %%
def held(rank, k, layers=8):
    """Return how many activations of a stage a rank holds if k of its layers recompute."""
    return ((P - rank) * (layers - k + k / 17) + (k > 0) * 16 / 17) / layers


def fewest(rank, cap, layers=8):
    """Return how many layers must recompute so that a rank stays below the cap."""
    return next(k for k in range(layers + 1) if held(rank, k) <= cap)


# %% [markdown]
# ## Predict: recompute, or another order?
#
# On [The memory wall](memory_wall.md) you saved memory with another order. With a cap of 3 activations on each rank the
# quickest order takes 39 units, with 2 it takes 51, and with 1 it takes 96. Now keep the order of 1F1B, and let as few
# layers recompute as the cap allows. How long does a step take with a cap of 2? And of 1?

# %%
my_second_prediction = None  # two numbers of units

# %% tags=["answer"]
print(f"predicted {my_second_prediction}")
print("cap  another order  1F1B and recomputation, layers of 8")
for cap, order, recomputed in ((4, 33, 33), (3, 39, 34.875), (2, 51, 37.125), (1, 96, 40.125)):
    counts = [fewest(rank, cap) for rank in range(P)]
    cost = pipelab.Cost(forward=1, backward=[2 + k / 8 for k in counts])
    trace = pipelab.simulate(pipelab.OneFOneB(P, M), cost)
    print(f"{cap:3d} {order:14g} {trace.makespan:7g} {counts}")
    assert trace.makespan == recomputed
    assert pipelab.lower_bound(pipelab.OneFOneB(P, M), pipelab.Cost(), memory_cap=cap) == order

# %% [markdown] tags=["answer"]
# 37.1 and 40.1 units. An order that holds less makes ranks wait for a whole round trip. A layer that recomputes costs
# its own forward. And only the first ranks pay: with a cap of 2, ranks 2 and 3 recompute nothing.
#
# That is the choice for each stage: **recompute as few layers on each rank as its micro-batches in flight demand**, not
# the same number everywhere.

# %% [markdown]
# ## Predict: which part of a layer?
#
# Recomputation need not be all of a layer. [The memory of a model](model_memory.md) counts s b h × 34 bytes for most of
# a layer, and 5 a s² b for the s² numbers of its attention. A layer's forward takes 24 s b h² multiplications and
# additions in its matrices, and 4 s² b h in those that make and use the s² numbers (Narayanan et al. 2021, appendix).
# Take 7B and sequences of 4,096 words. You compute only the s² part again. Which share of the activations do you save,
# and how much longer does a step take?

# %%
my_third_prediction = None  # two percentages

# %% tags=["answer"]
print(f"predicted {my_third_prediction}")
for name, h, a in (("7B", 4096, 32), ("70B", 8192, 64)):
    s = 4096
    saved = 5 * a * s / h / (34 + 5 * a * s / h)
    longer = 4 * s**2 * h / (3 * (24 * s * h**2 + 4 * s**2 * h))
    print(f"{name}: {saved:.0%} of the activations saved, {longer:.1%} longer")
    assert round(saved, 2) == 0.82
    assert round(longer, 3) == {"7B": 0.048, "70B": 0.026}[name]

# %% [markdown] tags=["answer"]
# 82 % of the memory for 5 % of the time, or less in a wider model. Korthikanti et al. (2022, section 5) call this
# *selective* recomputation, and FlashAttention does it in its kernel, where it costs even less. It is nearly always
# worth it, so the numbers above include it already.

# %% [markdown]
# ## Predict: when should a forward run again?
#
# So far a backward ran its forward again when its gradient had arrived. But the second forward needs only the stage's
# input, and the rank has kept that. So let it be an action of its own, `C`, right before its backward `B` in the row:

# %%
plan = pipelab.with_recompute(pipelab.GPipe(P, M))
print(plan)

# %% [markdown]
# `B` waits for the gradient, and `C` does not. Where a forward comes right before its own backward, as always on the
# last rank of 1F1B, `with_recompute` puts no `C`: the activations are there. With recomputation inside their backwards,
# GPipe and 1F1B both take 44 units, 11 more than without. How long do they take now?

# %%
my_fourth_prediction = None  # two numbers of units, GPipe's and 1F1B's

# %% tags=["answer"]
print(f"predicted {my_fourth_prediction}")
early = pipelab.simulate(plan)
one = pipelab.simulate(pipelab.with_recompute(pipelab.OneFOneB(P, M)))
print(f"GPipe {early.makespan:g} units, 1F1B {one.makespan:g}")
assert (early.makespan, one.makespan) == (41, 39)
assert early.peak_activations == one.peak_activations == (1, 1, 1, 1)

# %% tags=["answer"]
pipelab.compare(again, one, names=["1F1B, inside the backward", "1F1B, an action of its own"])

# %% [markdown] tags=["answer"]
# 41 and 39 units. Where a rank waits for a gradient, its `C` is free. GPipe's last rank never waits between its first
# backward and its last, so it pays 8 units. In 1F1B the last rank pays nothing. The others pay once they have no time
# left between a backward and the next forward. In both, each rank holds the activations of one micro-batch, and besides
# only inputs. GPipe's paper recomputes too (Huang et al. 2019, section 2.3), but its backwards begin with the last
# micro-batch (figure 2c). In that order, the last rank runs its last forward right before the backward of the same
# micro-batch, and GPipe takes 40 units.
#
# Rank 0 of 1F1B still waits 5 units before its first backward. If it may hold two activations for a while, it can run
# two forwards again there: Liu et al. (2025, "Mario", PPoPP '25) fill bubbles this way. `ahead` says how many more
# activations a rank may hold:

# %% tags=["answer"]
ahead = pipelab.with_recompute(pipelab.OneFOneB(P, M), ahead=1)
trace = pipelab.simulate(ahead)
print(f"{trace.makespan:g} units, activations {trace.peak_activations}; no order takes less than", end=" ")
print(f"{pipelab.lower_bound(ahead):g}")
assert trace.makespan == pipelab.lower_bound(ahead) == 38

# %% [markdown] tags=["answer"]
# So 1F1B recomputes everything for 5 units of 33, not for 11, and no order can save the rest.

# %% [markdown]
# ## Exercise: what fits, and how fast?
#
# 7B with its 32 layers on four GPUs, 1F1B with 32 micro-batches of one sequence. Say for each rank how many layers it
# holds, and how many of these recompute. A layer's forward takes 1 unit, its backward 2, and 3 with recomputation.
#
# - **Par with GPUs of 80 GB, sequences of 16,384 words and 8 layers on each rank: 929 units.**
# - **Par with GPUs of 48 GB, sequences of 8,192 words and any numbers of layers: 938 units.**
#
# `gigabytes` counts what a rank holds. The function below recomputes everything, and takes 1120 units: the starting
# point, not the solution. The first par needs no trying: how few layers may recompute on each rank? For the second, do
# the same with 8 layers on each rank, and look at the slowest rank: the step takes at least 32 times as long as it
# takes for one micro-batch. Give one of its layers to a rank that has the time and the memory for it.

# %%
LAYERS, WIDTH, WORDS = 32, 4096, 32_000


def gigabytes(rank, layers, recomputed, s):
    """Return what a rank of 1F1B holds: 16 bytes for each parameter, and activations of P - rank micro-batches."""
    layer, layer_input = 34 * s * WIDTH, 2 * s * WIDTH
    words = WORDS * WIDTH if rank in (0, P - 1) else 0  # the embedding, the head
    parameters = 16 * (12 * layers * WIDTH**2 + words)
    in_flight = (P - rank) * ((layers - recomputed) * layer + recomputed * layer_input)
    return (parameters + in_flight + (recomputed > 0) * (layer - layer_input)) / 1e9


def answer(cap, s):
    """Return for each of four ranks how many layers it holds, and how many of them recompute."""
    return [(8, 8), (8, 8), (8, 8), (8, 8)]


# %%
def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    for cap, s, par in ((80, 16384, 929), (48, 8192, 938)):
        ranks = answer(cap, s)
        layers, _ = zip(*ranks, strict=True)
        if len(ranks) != P or sum(layers) != LAYERS or any(not 0 <= k <= n or n < 1 for n, k in ranks):
            print(f"{ranks} does not spread {LAYERS} layers over {P} ranks")
            return False
        holds = [gigabytes(rank, *ranks[rank], s) for rank in range(P)]
        if max(holds) > cap:
            rank = holds.index(max(holds))
            print(f"{cap} GB: rank {rank} would hold {holds[rank]:.1f} GB")
            return False
        backward = [2 * n + k for n, k in ranks]
        trace = pipelab.simulate(pipelab.OneFOneB(P, 32), pipelab.Cost(forward=layers, backward=backward))
        print(f"{cap} GB: {trace.makespan:g} units, par {par}; the fullest rank holds {max(holds):.1f} GB")
        reached.append(trace.makespan <= par)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: which of the two fits without recomputation, if ranks may hold different numbers of layers? How
# many units does it take? Teachers have the
# solution, `teacher/solutions/recomputation.py`.
