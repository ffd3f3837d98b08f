# %% [markdown]
# # The memory of a model
#
# A model of 70 billion parameters takes 140 GB in 16-bit numbers. You have 80 GPUs of 80 GB, so you cut the model into
# 80 stages, a layer for each GPU. The last GPU needs 18 GB. The first one stops with `CUDA out of memory`, before its
# first backward.
#
# On this page you calculate how much memory a parameter and a layer take, for models of 7 and 70 billion parameters.
# Then you find out what a pipeline divides by its ranks.
#
# It takes about 24 minutes, and you need [The memory wall](memory_wall.md) before it. Run it with
# `pipelab tutorial model_memory`, which asks for your predictions before it shows the answers.
#
# ## Two models
#
# A transformer's layer of width h has about 12 h² parameters: 4 h² in the attention, and 8 h² in the two matrices after
# it. The embedding and the head have V × h each, for V different words. Two models with the widths and depths of Llama
# 2:

# %%
import pipelab

GB = 10**9
WORDS = 32_000
SIZES = {"7B": (32, 4096, 32), "70B": (80, 8192, 64)}  # layers, width h, attention heads a


def parameters(layers, h):
    """Return about how many parameters a model has."""
    return 12 * layers * h**2 + 2 * WORDS * h


for name, (layers, h, _) in SIZES.items():
    print(f"{name}: {parameters(layers, h) / 1e9:.1f} billion parameters, {2 * parameters(layers, h) / GB:.0f} GB")

# %% [markdown]
# (Llama 2's layers are a little different: its largest model has 69 billion.)
#
# ## Predict: bytes per parameter
#
# You train with 16-bit numbers and Adam. How many bytes does each parameter take, with everything that training needs
# for it from one step to the next?

# %%
my_prediction = None  # bytes

# %% tags=["answer"]
EACH = {"weight": 2, "gradient": 2, "weight in 32 bits": 4, "Adam's mean": 4, "Adam's mean square": 4}
print(f"predicted {my_prediction}, counted {sum(EACH.values())}")
for name, (layers, h, _) in SIZES.items():
    print(f"{name}: {sum(EACH.values()) * parameters(layers, h) / GB:.0f} GB")
assert sum(EACH.values()) == 16
assert round(16 * parameters(32, 4096) / GB) == 107
assert round(16 * parameters(80, 8192) / GB) == 1039

# %% [markdown] tags=["answer"]
# **16 bytes** (Rajbhandari et al. 2020, ZeRO, section 3.1): eight times what you counted. Adam adds small updates to
# large weights, and 16 bits would round them away, so the optimizer keeps a copy in 32 bits. (Gradients in 32 bits, as
# Megatron-LM sums them, make it 18.) So 7B does not fit on a GPU of 80 GB, and 70B needs 13 of them before it has seen
# a single word.

# %% [markdown]
# ## What a layer keeps
#
# A forward keeps activations for its backward. For one layer, micro-batches of b sequences, s words each, they take
#
# s × b × h × (34 + 5 × a × s / h) bytes
#
# (Korthikanti et al. 2022, section 4.1). It counts 16-bit activations of a layer as in GPT-3: 11 for the attention's
# inputs and outputs, 19 for the two matrices, 4 for the two layer norms, each times s b h. The term with 5 a s / h is
# different: for each of the a heads, every word has a weight for every other word. That is s² numbers.


# %%
def kept(s, h, a, b=1, matrices=True):
    """Return how many bytes of activations a layer keeps for one micro-batch."""
    return s * b * h * (34 + matrices * 5 * a * s / h)


print(f"a layer of 7B, one sequence of 4,096 words: {kept(4096, 4096, 32) / GB:.2f} GB")

# %% [markdown]
# ## Predict: twice as long
#
# 7B has 32 such layers, so one sequence of 4,096 words takes 104 GB of activations. How much do all layers keep for a
# sequence of 8,192 words? And how much, if a layer does not keep the s² numbers?

# %%
my_second_prediction = None  # two numbers of GB

# %% tags=["answer"]
print(f"predicted {my_second_prediction}")
print("words    7B, GB  without s²   70B, GB  without s²")
for s in (1024, 2048, 4096, 8192):
    found = [layers * kept(s, h, a, matrices=m) / GB for layers, h, a in SIZES.values() for m in (True, False)]
    print(f"{s:5d} {found[0]:9.1f} {found[1]:11.1f} {found[2]:9.1f} {found[3]:11.1f}")
assert round(32 * kept(4096, 4096, 32) / GB) == 104
assert round(32 * kept(8192, 4096, 32) / GB) == 380
assert round(32 * kept(8192, 4096, 32, matrices=False) / GB, 1) == 36.5
assert round(32 * kept(4096, 4096, 32, matrices=False) / GB, 1) == 18.3
assert round(80 * kept(4096, 8192, 64, matrices=False) / GB, 1) == 91.3

# %% [markdown] tags=["answer"]
# 380 GB, nearly four times as much, because most of it grows with s². Without the s² numbers it is 36.5 GB, twice the
# 18.3 GB of 4,096 words: it grows with s only. FlashAttention (Dao et al. 2022) does not keep them: it computes them
# again, block by block, in the backward. We assume it from here on. Even so, *one* sequence of 4,096 words takes 91 GB
# in 70B.

# %% [markdown]
# ## Cut into stages
#
# Now a pipeline. On P ranks, each rank holds 1/P of the layers, and so 1/P of the parameters and of all that belongs to
# them. What about the activations?

# %%
P, M = 4, 8  # ranks and micro-batches
trace = pipelab.simulate(pipelab.OneFOneB(P, M), pipelab.Cost(forward=1, backward=2))
trace

# %% [markdown]
# Before rank 0 runs its [first backward](#s=0:0B0.0), it has run [four](#s=0:0F0.0) [forwards](#s=0:0F3.0), and it
# holds the activations of all four. The last rank runs [one forward](#s=0:3F0.3), and lets go of its activations
# [right after it](#s=0:3B0.3).
#
# ## Predict: rank 0 on more and more ranks
#
# On one GPU, all layers of 7B keep 18.3 GB for a micro-batch of one sequence. How many GB of activations does rank 0
# hold at most, if you run 1F1B on 4 ranks? And on 16?

# %%
my_third_prediction = None  # two numbers of GB


# %% tags=["answer"]
def memory(name, cut, s=4096):
    """Return what the stages take if stage r holds `cut[r]` layers; embedding first, head last."""
    _, h, a = SIZES[name]
    held = [12 * layers * h**2 for layers in cut]
    held[0] += WORDS * h
    held[-1] += WORDS * h
    return pipelab.Memory(
        weights=[2 * count for count in held],
        gradients=[2 * count for count in held],
        optimizer=[12 * count for count in held],
        activations=[layers * kept(s, h, a, matrices=False) for layers in cut],
    )


print(f"predicted {my_third_prediction}")
for ranks in (2, 4, 8, 16):
    use = pipelab.memory_use(pipelab.OneFOneB(ranks, 32), memory("7B", [32 // ranks] * ranks))
    first, last = use.at_peak[0], use.at_peak[-1]
    print(
        f"{ranks:2d} ranks: rank 0 holds {first.activations / GB:.1f} GB of activations of {first.total / GB:.1f} GB, "
        f"the last {last.activations / GB:.1f} of {last.total / GB:.1f}"
    )
    assert round(first.activations / GB, 1) == 18.3
    assert round(last.activations / GB, 1) == round(18.253611 / ranks, 1)

# %% [markdown] tags=["answer"]
# 18.3 GB, on any number of ranks. Each activation is 1/P as large, and rank 0 holds P of them: **P × 1/P = 1**. A
# pipeline divides the parameters by its ranks, and the activations of the first rank by nothing.
#
# GPipe is worse: it holds M × 1/P, and M is larger than P. Only the last rank of 1F1B gets the whole gain.

# %% [markdown] tags=["answer"]
# So here is 70B on GPUs of 80 GB. More ranks do not help it:

# %% tags=["answer"]
for ranks in (16, 20, 40, 80):
    use = pipelab.memory_use(pipelab.OneFOneB(ranks, 80), memory("70B", [80 // ranks] * ranks))
    first = use.at_peak[0]
    rest = first.weights + first.gradients + first.optimizer
    print(
        f"{ranks} ranks: {rest / GB:5.1f} GB for parameters + {first.activations / GB:.1f} GB for activations on rank 0"
    )
    assert first.total > first.activations > 91 * GB

# %% [markdown]
# ## What does help?
#
# - **Fewer words or sequences** in a micro-batch, down to one sequence.
# - **Another order.** V-Min holds half of this on 4 or 8 ranks, and less on more, because every rank has a stage of the
#   first ones and a stage of the last ones: [V shapes](v_shapes.md).
# - **Computing activations again** instead of keeping them: [Recomputation](recomputation.md).
# - **Cutting layers across**, so that t GPUs share each layer (tensor and sequence parallelism; Korthikanti et al.,
#   section 4.2). Each holds 1/t of the activations.
# - **ZeRO** shares the optimizer's bytes among data-parallel copies, and leaves activations as they
#   are.
# - **Another cut.** The first rank holds P activations of each of its layers, and the last rank one. So they need not
#   hold the same number of layers.
#
# ## Exercise: as full as its neighbours
#
# Write a function that says how many layers each rank should hold, so that the fullest rank of 1F1B holds as little as
# possible. A rank needs at least one layer.
#
# - **Par for 7B on 4 ranks: 39.5 GB.** With equal cuts it is 46.1, too much for a GPU of 40 GB.
# - **Par for 70B on 40 ranks: 76.4 GB.** With equal cuts it is 121.2.
#
# The function below makes all ranks equal: the starting point, not the solution. (There are too many cuts of 80 layers
# to try them all. How much does one more layer take on rank r?)


# %%
def answer(name, ranks):
    """Return how many layers of a model each rank holds."""
    layers, _, _ = SIZES[name]
    return [layers // ranks] * ranks


# %%
def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    for name, ranks, par in (("7B", 4, 39.5), ("70B", 40, 76.4)):
        cut = list(answer(name, ranks))
        layers, _, _ = SIZES[name]
        if len(cut) != ranks or sum(cut) != layers or min(cut) < 1:
            print(f"{cut} is not a cut of {layers} layers over {ranks} ranks")
            return False
        peaks = pipelab.memory_use(pipelab.OneFOneB(ranks, 80), memory(name, cut)).peaks
        fullest = peaks.index(max(peaks))
        print(f"{name} on {ranks} ranks: rank {fullest} holds {max(peaks) / GB:.1f} GB, par {par}; layers {cut}")
        reached.append(max(peaks) <= par * GB)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: a step is as slow as its slowest rank. How much longer does the step take with your cut of 7B, and
# with your cut of 70B? [Recomputation](recomputation.md) often costs less. Teachers have the
# solution, `teacher/solutions/model_memory.py`.
