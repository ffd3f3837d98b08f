# %% [markdown]
# # Your first schedule
#
# Your model does not fit on one GPU, so you put its first layers on one, the next ones on another, and so on. Now it
# trains on four GPUs, and not one bit faster than on one. What are the other three doing?

# %%
import pipelab
from pipelab import B, F

pipelab.simulate(pipelab.Naive(ranks=4, microbatches=8))

# %% [markdown]
# They wait. Each row is a GPU, and light boxes are idle time. A better order takes far less time.
#
# A model that is cut like this has **stages**. A **rank** is a worker that holds one of them, on its own device. The
# batch is cut into **micro-batches**, and each of them must go forward through all stages and then backward through all
# of them, as `loss.backward()` does on one device. You only have to decide the *order* in which every rank does its
# work. That order is the **schedule**.
#
# On this page you find out what an order costs in time and in memory, make two mistakes that most people make, and
# write 1F1B, on which most other schedules are built.
#
# It takes about 23 minutes, and you need PyTorch before it, and nothing about pipelines. Run it with
# `pipelab tutorial first_schedule`, which asks for your predictions before it shows the answers: you remember wrong
# guesses.
#
# ## An order, and what it costs
#
# A schedule is a class with one method: `actions(rank)` yields what that rank does, in order. `F(m)` is the forward of
# micro-batch `m`, `B(m)` its backward. The simplest one finishes each micro-batch before it begins the next:


# %%
class OneAtATime(pipelab.Schedule):
    """Forward and backward of one micro-batch, then the next."""

    def actions(self, rank):
        for m in range(self.microbatches):
            yield F(m)
            yield B(m)


plan = OneAtATime(ranks=4, microbatches=8).plan()
print(plan)

# %% [markdown]
# `plan()` wrote the rows out for four ranks and eight micro-batches, and checked them. The notation is PyTorch's: `2F0`
# is stage 2, forward, micro-batch 0. Everything counts from 0.
#
# Nothing in the rows says when something *happens*. That follows from what needs what: a forward needs the output of
# the stage before it, a backward needs the gradient from the stage after it. Tell `simulate` how long things take,
# and it works out the rest. A backward is about twice the work of a forward, so say 1 and 2.

# %%
cost = pipelab.Cost(forward=1, backward=2)
naive = pipelab.simulate(plan, cost)
naive

# %% [markdown]
# One rank works, three wait: rank 0 for instance [from 1 to 10](#s=0:idle.0.1). This is what your model does, and now
# you can count it. The whole step, its **makespan**, takes 96 units. That is 8 micro-batches × 4 stages × 3 units: as
# long as on a single device. Each rank works for 24 of them. The share of the time that ranks wait is the **bubble**,
# and here it is 75 %.

# %%
assert naive.makespan == 8 * 4 * (1 + 2) == 96
assert naive.bubble == 1 - 8 * (1 + 2) / 96 == 0.75

# %% [markdown]
# ## Predict: forward, forward, forward …
#
# While rank 1 works on micro-batch 0, rank 0 could begin with micro-batch 1. **GPipe** (Huang et al. 2019, section
# 2.3) does all forwards first and all backwards after them:


# %%
class ForwardsFirst(pipelab.Schedule):
    """All forwards, then all backwards."""

    def actions(self, rank):
        for m in range(self.microbatches):
            yield F(m)
        for m in range(self.microbatches):
            yield B(m)


assert ForwardsFirst(4, 8).plan() == pipelab.GPipe(4, 8).plan()  # pipelab has it, too

# %% [markdown]
# Now take **twelve** micro-batches. One at a time takes 144 units. How long does this take? No order takes less than
# 36, the work of one rank.

# %%
my_prediction = None  # units

# %% tags=["answer"]
gpipe = pipelab.simulate(ForwardsFirst(ranks=4, microbatches=8), cost)
twelve = pipelab.simulate(ForwardsFirst(ranks=4, microbatches=12), cost)
print(f"predicted {my_prediction}, simulated {twelve.makespan:g}")
print(f"with 8 micro-batches: {gpipe.makespan:g}; bubble {gpipe.bubble:.1%}")
assert (twelve.makespan, gpipe.makespan) == (45, 33)
assert round(gpipe.bubble, 3) == 0.273

# %% tags=["answer"]
gpipe

# %% [markdown] tags=["answer"]
# 45 units: more than three times as fast, but more than 36. With eight it is 33 instead of 96. Look at these: at the
# start rank 3 [waits for its first input](#s=0:idle.3.0), and at the end [for the others to finish](#s=0:idle.3.27).
# The pipe must fill, and it must drain ([Fill, drain and the bubble](fill_and_drain.md)).

# %% [markdown]
# ## The price
#
# What a forward computes, its **activations**, must be kept until its backward has run. GPipe begins no backward before
# all forwards are done, so every rank keeps all 8. With 80 micro-batches it would keep 80.

# %%
print(f"most activations held, by rank: {gpipe.peak_activations}")
assert gpipe.peak_activations == (8, 8, 8, 8)

# %% [markdown]
# Could a rank do its backwards earlier, and so let go of memory earlier? The last rank can: it may turn around right
# away, `F0 B0 F1 B1 …`. The rank before it must be one forward ahead, so that the last one never waits; the rank before
# that, two. So each rank
#
# 1. **warms up** with a few forwards: the last rank with 1, the first with as many as there are ranks,
# 2. then keeps a **steady state**: one backward, one forward, one backward, one forward: *1F1B*,
# 3. then **drains**: it runs the remaining backwards.
#
# That is **1F1B** (Narayanan et al. 2019, PipeDream, section 3.2; with a drain after every batch: Narayanan et al.
# 2021, Megatron-LM, section 2.2.1). Writing it takes most people three tries. Here are two.
#
# ## First try: steps 1 and 2


# %%
class FirstTry(pipelab.Schedule):
    """Warm up, then one backward for every new forward."""

    def actions(self, rank):
        warmup = self.ranks - rank
        for m in range(warmup):
            yield F(m)
        for m in range(self.microbatches - warmup):
            yield B(m)
            yield F(warmup + m)


faults = pipelab.check(FirstTry(ranks=4, microbatches=8))
for fault in faults:
    print(fault)

# %% [markdown]
# `check` returns every fault, each with a code, an explanation and a next move. All forwards are there, but
# each rank still owes the backwards of its warm-up: we forgot to drain. (`.plan()` would have raised a
# `ScheduleError` with the same explanation. An illegal order never runs.)

# %%
assert {fault.code for fault in faults} == {"missing"}
assert [fault.rank for fault in faults] == [0, 1, 2, 3]

# %% [markdown]
# ## Second try: the drain, and a mistake
#
# Now with the drain. But was it `ranks - rank` forwards, or the other way round?


# %%
class SecondTry(pipelab.Schedule):
    """Warm up, steady state, drain; the warm-up is the wrong way round."""

    def actions(self, rank):
        warmup = rank + 1
        for m in range(warmup):
            yield F(m)
        for m in range(self.microbatches - warmup):
            yield B(m)
            yield F(warmup + m)
        for m in range(self.microbatches - warmup, self.microbatches):
            yield B(m)


(fault,) = pipelab.check(SecondTry(ranks=4, microbatches=8))
print(fault)

# %% [markdown]
# A **deadlock**. Each row is fine: every forward and every backward is there, once, in a sensible order. Together they
# cannot run. Read it as a circle: rank 0 does one forward and waits for the gradient from rank 1. Rank 1 wants a second
# forward first, and rank 0 would run it only after its backward. On real devices this program would hang, without a
# message. pipelab finds the deadlock before anything runs, and has run the order it suggests after `try:`.
#
# The lines between say what each rank waits for. The gradient from stage 1 is the gradient of its input, which stage
# 0's backward needs. The output from stage 0 is what stage 1's forward needs.

# %%
assert fault.code == "deadlock"
assert (fault.rank, fault.position, str(fault.action)) == (0, 1, "0B0")

# %% [markdown]
# ## Predict: is 1F1B faster?
#
# The third try is yours, in the exercise below. What will it be good for? Take four ranks and sixteen micro-batches.
# How long do GPipe and 1F1B take, and how many activations does rank 0 hold in each?

# %%
my_second_prediction = None  # units of GPipe and of 1F1B, and activations of each

# %% tags=["answer"]
gpipe, one_f_one_b = (pipelab.simulate(kind(4, 16), cost) for kind in (pipelab.GPipe, pipelab.OneFOneB))
print(f"predicted {my_second_prediction}, simulated {gpipe.makespan:g} and {one_f_one_b.makespan:g} units,", end=" ")
print(f"{gpipe.peak_activations[0]} and {one_f_one_b.peak_activations[0]} activations")
assert one_f_one_b.makespan == gpipe.makespan == 57
assert gpipe.peak_activations == (16, 16, 16, 16)
assert one_f_one_b.peak_activations == (4, 3, 2, 1)

# %% tags=["answer"]
pipelab.compare(gpipe, one_f_one_b, names=["GPipe", "1F1B"])

# %% [markdown] tags=["answer"]
# **The time is the same.** The timeline of 1F1B looks fuller, and many courses say that its bubble is smaller. It is
# not: with equal stages and free transfers, both take 57 units.
#
# **The memory is not.** GPipe holds 16 activations on every rank, and 1F1B 4, 3, 2 and 1. (GPipe's paper holds less,
# because it [computes them again](memory_wall.md#what-does-gpipes-paper-do).) For long batches that is the difference
# between fitting and not fitting, and [What 1F1B really buys](what_1f1b_buys.md) shows how memory turns into time after
# all.

# %% [markdown]
# ## On real tensors
#
# The same class, unchanged, runs a model. `Pipeline` cuts it into stages, gives every rank a worker and a device (a GPU
# if there is one, else the processor), and `step` does what forward and `loss.backward()` do: all micro-batches, all
# gradients. Your optimizer comes after it, as always. Two ranks are enough here, so that a laptop has a core for each.

# %%
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
x, y = torch.randn(256, 512), torch.randn(256, 512)

with pipelab.Pipeline(model, ForwardsFirst(ranks=2, microbatches=8), torch.nn.functional.mse_loss) as pipe:
    proof = pipe.verify(x, y)
    for _ in range(3):  # the first step is slower: everything is touched for the first time
        model.zero_grad()
        step = pipe.step(x, y)

print(proof)
assert step.trace.plan == pipelab.GPipe(ranks=2, microbatches=8).plan()
assert step.trace.peak_activations == (8, 8)

# %% [markdown]
# `verify` ran the plain model on the same micro-batches, and on the whole batch, and compared. That is the test that a
# schedule has to pass: it may change *when* things are computed, never *what*. And here is the step, measured:

# %%
step.trace

# %% [markdown]
# ## Exercise: your 1F1B
#
# Now the third try. Write 1F1B for any number of ranks and micro-batches.
#
# - **Par on four ranks with eight micro-batches: 33 units with 10 activations**, the peaks of all ranks added up.
# - **Par on four ranks with only three: 18 units with 9 activations.**
#
# The order below is GPipe. It is legal, and it is the starting point, not the solution. (A hint: start from
# `SecondTry`, and read what the check prints.)


# %%
class Answer(pipelab.Schedule):
    """Fill the pipe, then one backward for every new forward, then drain."""

    def actions(self, rank):
        for m in range(self.microbatches):
            yield F(m)
        for m in range(self.microbatches):
            yield B(m)


answer = Answer


# %%
def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    for microbatches, par, held in ((8, 33, 10), (3, 18, 9)):
        mine = answer(ranks=4, microbatches=microbatches)
        if faults := pipelab.check(mine):
            print(f"{microbatches} micro-batches: {faults[0]}")
            return False
        trace = pipelab.simulate(mine, cost)
        total = sum(trace.peak_activations)
        print(f"{microbatches} micro-batches: {trace.makespan:g} units, par {par}; {total} activations, par {held}")
        reached.append(trace.makespan <= par and total <= held)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: does your plan equal `pipelab.OneFOneB`'s, for all sizes from 1 to 8? Then run the model
# above with it. Teachers have the solution, `teacher/solutions/first_schedule.py`.
