# %% [markdown]
# # Splitting the backward
#
# Four ranks run 1F1B and wait for more than a quarter of the time. You have tried every order of forwards and
# backwards, and none is shorter. Then you read a paper of 2023 that says: a backward is two jobs, and only one of them
# is urgent.
#
# On this page you find out which half of a backward is urgent, what the other half is good for, and what it costs to
# put that off.
#
# It takes about 21 minutes, and you need [Fill, drain and the bubble](fill_and_drain.md) before it. Run it with
# `pipelab tutorial splitting_the_backward`, which asks for your predictions before it shows the answers.
#
# ## Two products
#
# A linear layer computes `y = x @ weight.T`. Its backward gets the gradient of `y` and computes two things that do not
# need each other:

# %%
import torch

import pipelab
from pipelab import F, I, W

torch.manual_seed(0)
x = torch.randn(8, 32, requires_grad=True)
weight = torch.randn(32, 32, requires_grad=True)
y = x @ weight.T
grad_y = torch.randn_like(y)
y.backward(grad_y)

input_grad = grad_y @ weight  # for the stage before this one
weight_grad = grad_y.T @ x.detach()  # for the optimizer, at the end of the step
assert torch.allclose(x.grad, input_grad, atol=1e-5)
assert torch.allclose(weight.grad, weight_grad, atol=1e-5)

# %% [markdown]
# Another rank waits for the **input gradient**, `I`. No rank waits for the **weight gradient**, `W`, before the
# optimizer runs. The two products have the same size, and so has the forward's. So let each of the three take one unit:

# %%
P, M = 4, 8  # ranks and micro-batches
cost = pipelab.Cost(forward=1, input_grad=1, weight_grad=1)
whole = pipelab.simulate(pipelab.OneFOneB(P, M), cost)
whole

# %% [markdown]
# 1F1B with whole backwards takes (M + P - 1) × 3 = 33 units, and every rank waits for 9 of them.
#
# ## Predict: only split
#
# Take 1F1B and replace every backward by `I` and, right after it, `W`. Nothing moves. How long does the step take?


# %%
class OnlySplit(pipelab.Schedule):
    """1F1B, each backward cut in two."""

    def actions(self, rank):
        warmup = min(self.microbatches, self.ranks - 1 - rank)
        for m in range(warmup):
            yield F(m)
        for m in range(self.microbatches):
            if warmup + m < self.microbatches:
                yield F(warmup + m)
            yield I(m)
            yield W(m)


# %%
my_prediction = None  # units

# %% tags=["answer"]
only_split = pipelab.simulate(OnlySplit(P, M), cost)
print(f"predicted {my_prediction}, computed {only_split.makespan:g} instead of {whole.makespan:g}")
assert (whole.makespan, only_split.makespan) == (33, 30)

# %% tags=["answer"]
only_split

# %% [markdown] tags=["answer"]
# A gradient that goes from the last rank to the first one passes three others. With whole backwards, each of them makes
# it wait for a weight gradient that it does not need. Now it leaves after the `I`, one unit earlier on each of the
# three: 33 - 3 = 30.

# %% [markdown]
# ## Fill the bubble
#
# Each rank still waits:

# %%
print(only_split.ledger)

# %% [markdown]
# The last rank waits at the end (`drain`), because the other ranks are still busy with the last gradients. It could
# compute weight gradients there, if it had kept some. To keep them means to run the `I` of the next micro-batch before
# the `W` of this one, and that helps the ranks before it, too: they get their gradients sooner.
#
# So rank r puts its weight gradients off by r micro-batches. This is **ZB-H1** (Qi et al. 2023, section 2.1):

# %%
zb_h1 = pipelab.simulate(pipelab.ZBH1(P, M), cost)
zb_h1

# %% [markdown]
# 27 units. Each rank waits for 3 of them: rank r waits r units [until its first input comes](#s=0:idle.3.0), and then
# P - 1 - r [for its first gradient](#s=0:idle.0.4).

# %%
for rank in range(P):
    waits = zb_h1.ledger[rank]
    assert waits.get("fill", 0) == rank
    assert waits.get("wait", 0) == P - 1 - rank
    assert waits.get("drain", 0) == 0
assert zb_h1.makespan == (P - 1) + M * 3

# %% [markdown]
# The waiting is P - 1 now, a third of 1F1B's. The gradients are the same:

# %%
model = torch.nn.Sequential(*(layer for _ in range(P) for layer in (torch.nn.Linear(16, 16), torch.nn.Tanh())))
batch, target = torch.randn(M, 16), torch.randn(M, 16)
with pipelab.Pipeline(model, pipelab.ZBH1(P, M), torch.nn.functional.mse_loss, devices=["cpu"] * P) as pipe:
    pipe.step(batch, target)
    proof = pipe.verify(batch, target)
print(proof)

# %% [markdown]
# ## What it costs
#
# Between the `I` and the `W` of a micro-batch, a rank keeps what the forward saved: the weight gradient needs it.

# %%
print("1F1B: ", whole.peak_activations)
print("ZB-H1:", zb_h1.peak_activations)
assert whole.peak_activations == (4, 3, 2, 1)
assert zb_h1.peak_activations == (4, 4, 4, 4)

# %% [markdown]
# In 1F1B the last rank holds one activation at a time; in ZB-H1 it holds four. The paper says that ZB-H1 needs no more
# memory than 1F1B. That is true of the rank that needs the *most*. If the last rank's memory is full already, say of
# the head of a language model, it is not true for you.
#
# ## Predict: more memory
#
# **ZB-H2** (section 2.2) lets every rank hold up to 2P - 1 = 7 activations: more forwards before the first gradient,
# and weight gradients put off for longer. The paper reports that its bubble is zero. How long is the step?

# %%
my_second_prediction = None  # units

# %% tags=["answer"]
zb_h2 = pipelab.simulate(pipelab.ZBH2(P, M), cost)
print(f"predicted {my_second_prediction}, computed {zb_h2.makespan:g}; activations {zb_h2.peak_activations}")
print(f"bubble {zb_h2.bubble:.1%}; from its first start to its last end, each rank takes {zb_h2.spans}")
assert zb_h2.makespan == zb_h1.makespan == pipelab.lower_bound(pipelab.ZBH1(P, M), cost) == 27
assert zb_h2.spans == (24, 24, 24, 24)
assert zb_h2.peak_activations == (7, 7, 7, 7)

# %% tags=["answer"]
zb_h2

# %% [markdown] tags=["answer"]
# As long as with ZB-H1. No order is quicker than 27: the last rank cannot begin before 3 units have passed, and then
# has 24 units of work. But look at the shape: a parallelogram. Every rank works without a pause from its first action
# to its last, and that is where the paper measures its bubble. Rank 0 is done after 24 units and could begin the next
# step, *if* the optimizer lets it. Usually all ranks wait for each other there, to clip gradients or to look for
# infinities; the paper puts that check off (section 4).
#
# So ask two questions of a small bubble: between which two moments is it measured, and what happens after the second?

# %% [markdown]
# ## When the three are not equal
#
# A transformer's attention has products without weights: they make `I` longer than `W`. Say 1.2 and 0.8.

# %%
uneven = pipelab.Cost(forward=1, input_grad=1.2, weight_grad=0.8)
for schedule in (pipelab.OneFOneB(P, M), pipelab.ZBH1(P, M), pipelab.ZBH2(P, M)):
    trace = pipelab.simulate(schedule, uneven)
    print(f"{schedule}: {trace.makespan:.1f} units, at most {max(trace.peak_activations)} activations")
assert round(pipelab.simulate(pipelab.ZBH1(P, M), uneven).makespan, 6) == 28.2
assert round(pipelab.simulate(pipelab.ZBH2(P, M), uneven).makespan, 6) == 27
assert round(pipelab.lower_bound(pipelab.ZBH1(P, M), uneven), 6) == 27

# %% [markdown]
# Now memory buys time: ZB-H2's seven activations are worth 1.2 units. The exercise asks for something between.
#
# ## Exercise: divide the memory
#
# A rank can spend its memory on two things: on forwards that it runs *ahead*, before the first gradient comes, and on
# weight gradients that it puts *off*. If it is `ahead` by a and `off` by o, it holds a + 1 + o activations at most.
# Return both, for each of the four ranks. The times are the uneven ones.
#
# - **Par with 4 activations: 28.2 units.**
# - **Par with 6 activations: 27 units.** No order is quicker, and ZB-H2 needs 7 for it.
#
# The function below is `OnlySplit`: the starting point, not the solution.


# %%
def answer(cap):
    """Return by how much each rank is ahead, and by how much it puts its weight gradients off."""
    return (3, 2, 1, 0), (0, 0, 0, 0)


# %%
class Divided(pipelab.Schedule):
    """As ZB-H1, with any numbers."""

    ahead = off = ()

    def actions(self, rank):
        ahead, off = self.ahead[rank], self.off[rank]
        for m in range(ahead):
            yield F(m)
        for m in range(self.microbatches):
            if ahead + m < self.microbatches:
                yield F(ahead + m)
            yield I(m)
            if m >= off:
                yield W(m - off)
        for m in range(self.microbatches - off, self.microbatches):
            yield W(m)


def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    for cap, par in ((4, 28.2), (6, 27)):
        schedule = Divided(P, M)
        schedule.ahead, schedule.off = answer(cap)
        if any(number not in range(M + 1) for number in (*schedule.ahead, *schedule.off)):
            print(f"{cap} activations: each number is one of 0 to {M}")
            return False
        if faults := pipelab.check(schedule, memory_cap=cap):
            print(f"{cap} activations: {faults[0]}")
            return False
        trace = pipelab.simulate(schedule, uneven)
        print(f"{cap} activations: {trace.makespan:.1f} units, par {par}; each rank holds {trace.peak_activations}")
        reached.append(trace.makespan <= par + 1e-9)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: which rank spends all its memory on putting off, and why that one? Teachers have the solution,
# `teacher/solutions/splitting_the_backward.py`.
