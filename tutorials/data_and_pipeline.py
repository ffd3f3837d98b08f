# %% [markdown]
# # Data x pipeline: how many copies?
#
# You get sixteen GPUs. You may cut the model into sixteen stages. You may give each GPU the whole model and a sixteenth
# of the batch. Or something in between: four pipelines of four stages, say. The scripts that you find on the net all
# use something in between, and none of them says why.
#
# On this page you find a formula for the quickest number of copies, and then what the formula leaves out.
#
# It takes about 26 minutes, and you need [Fill, drain and the bubble](fill_and_drain.md) before it. How an all-reduce
# works inside is in [Gradients around a ring](gradients_around_a_ring.md). Run it with
# `pipelab tutorial data_and_pipeline`, which asks for your predictions before it shows the answers.
#
# ## Two pipelines side by side
#
# `replicate` puts several copies of a pipeline side by side. Each **replica** takes its share of the micro-batches. At
# the end, the ranks that hold the same stage add up their gradients: `R`, an all-reduce.

# %%
import pipelab

both = pipelab.replicate(pipelab.OneFOneB(ranks=2, microbatches=4), 2)
pipelab.simulate(both, pipelab.Cost(forward=1, backward=2, all_reduce=2))

# %% [markdown]
# Ranks 0 and 1 are one pipeline, ranks 2 and 3 the other one. Rank 0 and rank 2 hold stage 0, so [their
# `R`](#s=0:0R.0) is the same all-reduce: it begins when both are there. [Stage 1's](#s=0:1R.1) begins earlier,
# while stage 0 still computes.
#
# ## A machine with N devices
#
# Now for any cut. The model has 16 blocks; a micro-batch takes 1 ms forward and 2 ms backward in each. There are 32
# micro-batches, and N = P × D devices: D replicas of P stages. Each rank then holds 16 / P blocks and runs 32 / D
# micro-batches. `send_ms` is how long it would take to send the gradient of the whole model once. Around a ring of D
# ranks, each of them sends 2 (D - 1) / D times its stage's gradient, which is 1 / P of it.
#
# `hidden` is the share of a stage's last backward that the all-reduce overlaps with. At first it is 0: all of the
# all-reduce comes after the last backward.

# %%
BLOCKS, MICROBATCHES = 16, 32


def step(P, D, send_ms, hidden=0):
    """Simulate a step of D replicas of P stages."""
    forward, backward = BLOCKS / P, 2 * BLOCKS / P
    reduce = max(0, 2 * (D - 1) / D * send_ms / P - hidden * backward)
    cost = pipelab.Cost(forward=forward, backward=backward, all_reduce=reduce, unit="ms")
    return pipelab.simulate(pipelab.replicate(pipelab.OneFOneB(P, MICROBATCHES // D), D), cost)


# %% [markdown]
# ## Predict: a free all-reduce
#
# Say that the all-reduce takes no time. Sixteen devices: which is the quickest, 16 stages, 4 replicas of 4 stages, or
# 16 replicas of the whole model? And how much quicker is it than the slowest?

# %%
my_prediction = None  # (P, D) of the quickest, and a factor

# %% tags=["answer"]
print(f"predicted {my_prediction}")
CUTS = [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]
free = {(P, D): step(P, D, send_ms=0).makespan for P, D in CUTS}
for (P, D), makespan in free.items():
    print(f"{P:2d} stages x {D:2d} replicas: {makespan:g} ms")
assert free[1, 16] == MICROBATCHES // 16 * 48 == 96
assert free[16, 1] == (MICROBATCHES + 15) * 3 == 141

# %% [markdown] tags=["answer"]
# Data parallelism has no bubble. Nothing is quicker than 16 whole models, and the deepest pipeline takes half as long
# again. If a model fits on one device and the network is free, do not cut it.

# %% [markdown]
# ## Predict: the network
#
# Now let it take time to send the gradient: 8 ms, 24 ms, or 64 ms for the whole model. For which of them is something
# *in the middle* the best cut?

# %%
my_second_prediction = None  # some of 8, 24, 64

# %% tags=["answer"]
print(f"predicted {my_second_prediction}")
print("stages x replicas     8 ms    24 ms    64 ms")
for P, D in CUTS:
    print(f"{P:6d} x {D:<8d}" + "".join(f"{step(P, D, send_ms).makespan:9g}" for send_ms in (8, 24, 64)))
for send_ms, best in ((8, (1, 16)), (64, (16, 1))):
    assert min(CUTS, key=lambda cut: step(*cut, send_ms).makespan) == best
assert {round(step(*cut, 24).makespan, 6) for cut in CUTS} == {141}

# %% [markdown] tags=["answer"]
# For none of them. With a quick network all replicas are best, with a slow one all stages, and at 24 ms all cuts take
# exactly as long.

# %% [markdown]
# ## What decides?
#
# Write W = 48 ms for the work of one micro-batch in the whole model, M for all micro-batches, and G for `send_ms`. A
# stage takes W / P, a replica runs M / D = M P / N micro-batches, and the step takes
#
# (M P / N + P - 1) × W / P + 2 (1 - 1 / D) × G / P
#
# Multiply it out, with D = N / P:
#
# W M / N + W - 2 G / N + (2 G - W) / P
#
# Only the last term contains P. If sending the gradient there and back (2 G) takes longer than one micro-batch's work
# (W), it shrinks with P, so more stages are better. Otherwise fewer are better. The sign decides, and there is nothing
# in between.


# %%
def formula(P, D, send_ms, N=16, M=MICROBATCHES, W=3 * BLOCKS):
    assert P * D == N
    return W * M / N + W - 2 * send_ms / N + (2 * send_ms - W) / P


for send_ms in (0, 8, 24, 64):
    assert all(abs(step(*cut, send_ms).makespan - formula(*cut, send_ms)) < 1e-9 for cut in CUTS)

# %% [markdown]
# More micro-batches do not change the sign: they cost all cuts the same.
#
# ## Predict: a hidden all-reduce
#
# PyTorch's `DistributedDataParallel` (2.13) all-reduces gradients in pieces, while the layers before still run
# backward. Say that an all-reduce runs beside all of a stage's last backward, and that neither slows the other. Sending
# the gradient takes 24 ms again. Which is the best cut now? And is there a time for which something in the middle is?

# %%
my_third_prediction = None  # (P, D) for 24 ms, and yes or no

# %% tags=["answer"]
print(f"predicted {my_third_prediction}")
print("stages x replicas     8 ms    24 ms    48 ms    64 ms")
for P, D in CUTS:
    print(f"{P:6d} x {D:<8d}" + "".join(f"{step(P, D, send_ms, 1).makespan:9g}" for send_ms in (8, 24, 48, 64)))
hidden = {cut: round(step(*cut, 24, hidden=1).makespan, 6) for cut in CUTS}
assert (hidden[1, 16], hidden[4, 4], hidden[16, 1]) == (109, 133, 141)
assert {round(step(*cut, 40, hidden=1).makespan, 6) for cut in CUTS[:-1]} == {139}
for send_ms in (41, 48, 55):
    assert min(CUTS, key=lambda cut: step(*cut, send_ms, hidden=1).makespan) == (8, 2)
assert min(CUTS, key=lambda cut: step(*cut, 64, hidden=1).makespan) == (16, 1)

# %% [markdown] tags=["answer"]
# A last backward takes two thirds of W / P, and hides as much of its all-reduce: most where a rank holds most blocks,
# that is with few stages and many replicas. So the sign turns later, at 2 G = 5/3 W, which is 40 ms, and at 24 ms the
# network is quick. Above 40 ms the formula wants many stages. But with a single replica there is no all-reduce to hide,
# so the step from 2 replicas to 1 gains less than the formula says. Up to 56 ms it gains nothing: the middle *is* best.
#
# Only a measurement tells you how much your network hides.

# %% [markdown]
# ## What decides in practice?
#
# Other limits count, too:
#
# - **Memory.** A whole model may not fit on one device, and a stage does. Then the answer is the *smallest* P that
#   fits, if the network is quick and every replica holds all of its stage. FSDP (ZeRO, Rajbhandari et al. 2020) drops
#   the second condition: the D replicas divide a stage's weights, gradients and optimizer state among themselves. A
#   model may then fit with fewer stages. The price is more to send, because weights must be gathered before they are
#   used.
# - **The batch.** D replicas need at least D micro-batches. (Here 32 micro-batches allow 32 replicas.)
# - **Nodes.** Eight devices in one box are joined by a quick network, the boxes by a slow one. An all-reduce within a
#   box is quick, and one across boxes is slow, so G is not one number. Values between stages are small, and can cross.
#
# The exercise has two of these: memory, without FSDP, and nodes.
#
# ## Exercise: what is worth a measurement?
#
# You get 64 devices for a model of 64 blocks, and you do not know the network yet. Measuring one cut takes an hour of
# all devices. So say which cuts to measure, before you know how long an all-reduce takes: return the numbers of stages,
# such that the quickest cut is among them *whatever the network is*.
#
# You know how many `blocks` fit on a device, how many devices share a `node`, and which share of the last backward
# an all-reduce is `hidden` behind. Unlike in the picture above, ranks that all-reduce with each other are next to each
# other, so D replicas stay within a node if D is at most its size. An all-reduce that crosses nodes may take much
# longer than one within.
#
# - **Par on the first cluster: 2 cuts.** 16 blocks fit; all devices share one node, and nothing is hidden.
# - **Par on the second: 4 cuts.** All blocks fit; nodes of 8 devices; all of the last backward may hide the all-reduce.
#
# There are seven cuts: 1, 2, 4, 8, 16, 32 and 64 stages. The function below measures every cut that fits: the
# starting point, not the solution.

# %%
CLUSTERS = [{"blocks": 16, "node": 64, "hidden": 0}, {"blocks": 64, "node": 8, "hidden": 1}]


def answer(cluster):
    """Return the numbers of stages to measure, from 1 to 64."""
    return [P for P in (1, 2, 4, 8, 16, 32, 64) if 64 / P <= cluster["blocks"]]


# %%
def milliseconds(P, cluster, within_ms, across_ms, N=64, M=64, W=3 * 64):
    """Return how long a step of N // P replicas of P stages takes: as `step` does, by the formula."""
    D = N // P
    send_ms = within_ms if D <= cluster["node"] else across_ms
    reduce = max(0, 2 * (D - 1) / D * send_ms / P - cluster["hidden"] * 2 / 3 * W / P)
    return (M / D + P - 1) * W / P + reduce


for hidden in (0, 1):
    beside = {"node": 4, "hidden": hidden}
    for P, D in CUTS:
        send_ms = 24 if D <= 4 else 64
        assert abs(milliseconds(P, beside, 24, 64, 16, 32, 48) - step(P, D, send_ms, hidden).makespan) < 1e-9


# %%
def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    for cluster, par in zip(CLUSTERS, (2, 4), strict=True):
        cuts = set(answer(cluster))
        possible = [P for P in (1, 2, 4, 8, 16, 32, 64) if 64 / P <= cluster["blocks"]]
        if not cuts <= set(possible) or not cuts:
            print(f"{sorted(cuts)}: choose from {possible}")
            return False
        for within_ms in range(0, 402, 3):
            for across_ms in (within_ms * factor for factor in (1, 2, 5, 20)):
                times = {P: milliseconds(P, cluster, within_ms, across_ms) for P in possible}
                best = min(possible, key=times.get)
                if min(times[P] for P in cuts) > times[best] + 1e-9:
                    print(
                        f"{within_ms} ms within a node, {across_ms} across: best are {best} stages, not {sorted(cuts)}"
                    )
                    return False
        print(f"{sorted(cuts)} of {possible}: the quickest is always among them; {len(cuts)} cuts, par {par}")
        reached.append(len(cuts) <= par)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: which of these cuts drops out if the nodes have 8 devices and only 4 blocks fit on each? Teachers
# have the solution, `teacher/solutions/data_and_pipeline.py`.
#
# `pipelab lab hybrid` makes such tables for a machine with your numbers, and measures them with emulated stages.
