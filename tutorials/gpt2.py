# %% [markdown]
# # GPT-2, split and trained
#
# So far every model was a row of equal layers. Now you get a real one: its inputs have names, it returns a record, and
# its loss ignores padding. You have to train it on several ranks, with the gradients that plain training would have.
#
# On this page you split Hugging Face's GPT-2 and train it, prove the gradients, and find out which of its pieces makes
# a pipeline slow.
#
# It takes about 23 minutes, and you need [Your first schedule](first_schedule.md) before it, and the package
# `transformers`. The weights are random, so nothing is downloaded. Run it with `pipelab tutorial gpt2`, which asks for
# your predictions before it shows the answers.
#
# ## A small GPT-2
#
# Six blocks, 1000 words, and a batch of eight sentences. Some of them are shorter: they are padded, and their padding
# has the label -100, which the loss ignores.

# %%
import math
import warnings

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import pipelab

torch.manual_seed(0)
WORDS, WIDTH, BLOCKS = 1000, 64, 6
config = GPT2Config(
    vocab_size=WORDS,
    n_embd=WIDTH,
    n_layer=BLOCKS,
    n_head=4,
    n_positions=64,
    bos_token_id=0,
    eos_token_id=0,
    use_cache=False,  # a cache of keys and values is for generating, and cannot be traced
    resid_pdrop=0,
    embd_pdrop=0,
    attn_pdrop=0,
)
model = GPT2LMHeadModel(config)

ids = torch.randint(0, WORDS, (8, 32))
mask = torch.ones_like(ids)
mask[::3, 20:] = 0
labels = ids.masked_fill(mask == 0, -100)
x = {"input_ids": ids, "attention_mask": mask, "labels": labels}

# %% [markdown]
# `split` traces the model with one micro-batch as an example, and cuts it between its layers:

# %%
stages = pipelab.split(model, into=2, by="parameters", example={name: each[:1] for name, each in x.items()})
print(stages)
print(f"the whole model: {sum(each.numel() for each in model.parameters()):,} parameters")

# %% [markdown]
# A pipeline needs two functions about the loss. The model has computed it already, and averaged it over some words:


# %%
def loss_of(output, labels):
    return output.loss  # the model has computed it


def compared_words(labels):
    return (labels[:, 1:] != -100).sum()


# %% [markdown]
# ## Predict: too many parameters
#
# Add up the parameters of the two stages: there are more than the model has. How many more, and which are they?

# %%
my_prediction = None  # how many parameters more

# %% tags=["answer"]
cpus = ["cpu"] * 2
with pipelab.Pipeline(stages, pipelab.GPipe(2, 8), loss_of, reduction=compared_words, devices=cpus) as pipe:
    memory = pipe.memory(x, labels)
twice = sum(memory.weights) // 4 - sum(each.numel() for each in model.parameters())  # 4 bytes each
print(f"predicted {my_prediction}, computed {twice:,}")
assert model.lm_head.weight is model.transformer.wte.weight
assert twice == WORDS * WIDTH == 64_000

# %% [markdown] tags=["answer"]
# 64,000, the embedding: 1000 words of width 64. Stage 0 looks words up in it, and the last stage compares its output
# with it, to say which word comes next. It is **one** weight with two gradients, one from each end of the pipeline.
#
# A pipeline that forgets this trains two weights that drift apart, and the loss looks fine. pipelab adds up the two
# gradients at the end of the step. For `optimizer`, `clip_grad_norm_` and `verify` it is one parameter.

# %% [markdown]
# ## How much does a micro-batch weigh?
#
# The model averages its loss over the words that are not padding. Micro-batches have different numbers of those, so the
# mean of their losses is not the loss of the batch. `reduction=compared_words` above says how much a micro-batch
# weighs. It leaves out the first word, because the model compares each word with the one before it. What if you forget
# it?

# %%
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with pipelab.Pipeline(stages, pipelab.GPipe(2, 8), loss_of, devices=cpus) as forgetful:
        forgetful.step(x, labels)
print(caught[0].message)
assert "-100" in str(caught[0].message)

# %% [markdown]
# ## Predict: the first loss
#
# The weights are random, so the model knows nothing about words. Roughly which loss does the first step have? (It is
# the first thing to look at in any training.)

# %%
my_second_prediction = None  # a loss


# %% tags=["answer"]
def train(schedule, steps):
    """Train some steps; return the losses, the traces after the first step, and the proof of the gradients."""
    losses, traces = [], []
    with pipelab.Pipeline(stages, schedule, loss_of, reduction=compared_words, devices=cpus) as pipe:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            step = pipe.step(x, labels)
            losses.append(float(step.loss))
            traces.append(step.trace)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
        return losses, traces[1:], pipe.verify(x, labels)


losses, gpipe, proof = train(pipelab.GPipe(2, 8), steps=4)
print(f"predicted {my_second_prediction}; losses {[round(each, 2) for each in losses]}")
print(proof)
assert abs(losses[0] - math.log(WORDS)) < 0.1
assert round(math.log(WORDS), 1) == 6.9
assert losses[-1] < losses[0]
assert proof.largest_difference < 1e-5

# %% [markdown] tags=["answer"]
# A model that knows nothing gives each of 1000 words the same probability, so the loss is log 1000 = 6.9. And it falls.
# The proof says *within*, not *bit for bit*: the two gradients of the embedding are added up in another order than in
# plain training.

# %% [markdown]
# ## Predicted and measured
#
# `Cost.fit` reads from the traces of the GPipe steps how long each stage takes. With it, 1F1B can be predicted, and
# then measured. The prediction is above, the measurement below:

# %%
predicted = pipelab.simulate(pipelab.OneFOneB(2, 8), pipelab.Cost.fit(gpipe))
_, steps, proof = train(pipelab.OneFOneB(2, 8), steps=3)
assert proof.largest_difference < 1e-5
print(pipelab.diff(predicted, steps[-1], names=["predicted", "measured"]).sentence)
pipelab.compare(predicted, steps[-1], names=["predicted", "measured"])

# %% [markdown]
# Both have one axis. The first gradient comes back to rank 0 [here in the prediction](#s=0:0B0.0), and [here in the
# measured step](#s=1:0B0.0). These blocks are tiny, so most of the time goes into launching operations, and the two
# ranks share your machine's cores. Expect the two to differ, more than in [Reading a measured
# timeline](reading_a_timeline.md).
#
# ## Which piece is slow?
#
# Now the real GPT-2. We do not need its weights to know its work. For each word, a block multiplies and adds 12 h²
# times in its weights and 2 s h times in its attention (h is the width, s the length of a sentence); each counts as two
# operations (Narayanan et al. 2021, appendix). The head multiplies with all V words: 2 V h. The embedding looks up, and
# computes nothing.
#
# ## Predict: how many blocks is the head?
#
# GPT-2 has 12 blocks of width 768, sentences of 1024 words, and a vocabulary of 50,257. How many blocks take as long as
# the head?

# %%
my_third_prediction = None  # a number of blocks


# %% tags=["answer"]
def head_in_blocks(config):
    """Return how many blocks take as long as the head."""
    width, length = config.n_embd, config.n_positions
    return 2 * config.vocab_size * width / (24 * width**2 + 4 * length * width)


SMALL, XL = GPT2Config(), GPT2Config(n_embd=1600, n_layer=48, n_head=25)
print(f"predicted {my_third_prediction}, computed {head_in_blocks(SMALL):.1f}; in GPT-2 XL {head_in_blocks(XL):.1f}")
assert round(head_in_blocks(SMALL), 1) == 4.5
assert round(head_in_blocks(XL), 1) == 2.4

# %% [markdown] tags=["answer"]
# 4.5 blocks. If you put three blocks on each of four ranks, the last one has 7.5 blocks of work and the others wait for
# it, whatever the schedule is.

# %% [markdown]
# ## Exercise: where do the blocks go?
#
# Say how many blocks each rank holds. The last rank also holds the head, and may hold no block at all. A block takes 1
# unit forward and 2 backward, and the order is 1F1B.
#
# - **Par for GPT-2 (12 blocks) on four ranks with 8 micro-batches: 143.1 units.** Three each take 206.1.
# - **Par for GPT-2 XL (48 blocks) on eight ranks with 16 micro-batches: 449.2 units.** Six each take 527.5.
#
# The function below gives every rank the same number: the starting point, not the solution.


# %%
def answer(blocks, ranks, head):
    """Return how many blocks each rank holds. The last rank also has the head, which takes as long as `head` blocks."""
    return [blocks // ranks] * ranks


# %%
def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    for config, ranks, microbatches, par in ((SMALL, 4, 8, 143.1), (XL, 8, 16, 449.2)):
        head = head_in_blocks(config)
        held = list(answer(config.n_layer, ranks, head))
        if len(held) != ranks or sum(held) != config.n_layer or min(held[:-1]) < 1 or held[-1] < 0:
            print(f"{held}: not {config.n_layer} blocks on {ranks} ranks, at least one on each but the last")
            return False
        forward = [*held[:-1], held[-1] + head]
        cost = pipelab.Cost(forward=forward, backward=[2 * each for each in forward])
        trace = pipelab.simulate(pipelab.OneFOneB(ranks, microbatches), cost)
        print(f"{config.n_layer} blocks: {held} take {trace.makespan:.1f} units, par {par}")
        reached.append(round(trace.makespan, 1) <= par)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: what happens to the first par with the vocabulary of a newer model, 128,000 words? And what would
# *you* do about it? Teachers have the solution, `teacher/solutions/gpt2.py`.
#
# [Hugging Face models](../hugging_face.md) has the rest: autocast, other lengths, what cannot be traced.
