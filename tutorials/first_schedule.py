# %% [markdown]
# # Your first schedule
#
# A model that does not fit on one device can be cut into **stages**, each on a device of its own. A **rank** is one
# such worker; here, every rank holds one stage. The batch is cut into **micro-batches**, and each of them must go
# forward through all stages and then backward through all of them, as `loss.backward()` does on one device.
#
# What is left to decide is the *order* in which every rank does its work. That order is the **schedule**, and it alone
# decides how long the ranks wait for each other and how much memory they need. On this page you read three schedules,
# write a fourth, make two mistakes on purpose, and measure everything.
#
# You need to know PyTorch, and nothing about pipelines. The page is a Python file, `tutorials/first_schedule.py`: run
# it as a script, or cell by cell as a notebook.

# %%
import pipelab
from pipelab import B, F

# %% [markdown]
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
# is stage 2, forward, micro-batch 0.
#
# Nothing in the rows says when something *happens*. That follows from what needs what: a forward needs the output of
# the stage before it, a backward needs the gradient from the stage after it. Tell `simulate` how long things take,
# and it works out the rest. A backward is about twice the work of a forward, so say 1 and 2.

# %%
cost = pipelab.Cost(forward=1, backward=2)
naive = pipelab.simulate(plan, cost)
print(naive)

# %%
naive

# %% [markdown]
# One rank works, three wait. The share of all rank time that is spent waiting is the **bubble**. By hand: each rank
# works for 8 × (1 + 2) = 24 units, and all four are there for 96.

# %%
busy = 8 * (1 + 2)
bubble = 1 - 4 * busy / (4 * naive.makespan)

assert naive.makespan == 96
assert naive.bubble == bubble == 0.75
print(f"{naive.bubble:.1%} of the time, a rank waits")

# %% [markdown]
# This is what a model that was split by hand with `.to("cuda:1")` does. Four devices, and not one bit faster than one:
# 8 micro-batches × 4 stages × 3 units are 96 units on a single device, too.
#
# ## GPipe: forward, forward, forward …
#
# While rank 1 works on micro-batch 0, rank 0 could begin with micro-batch 1. GPipe does all forwards first and all
# backwards after them. It comes with pipelab, as `pipelab.GPipe`.

# %%
gpipe = pipelab.simulate(pipelab.GPipe(ranks=4, microbatches=8), cost)
print(gpipe)

# %%
gpipe

# %% [markdown]
# Nearly three times as fast. The bubble is smaller, but not gone: at the start rank 3 waits for its first input, and at
# the end for the others to finish. Each rank loses P - 1 times a forward and a backward, for P ranks, whatever it does:
# the pipe must fill, and it must drain. So with M micro-batches the bubble is (P - 1) / (M + P - 1).

# %%
ranks, microbatches = 4, 8

assert gpipe.makespan == (microbatches + ranks - 1) * (1 + 2) == 33
assert abs(gpipe.bubble - (ranks - 1) / (microbatches + ranks - 1)) < 1e-12
print(f"bubble {gpipe.bubble:.1%}, most activations held at once, by rank: {gpipe.peak_activations}")

# %% [markdown]
# The price stands in the last numbers. What a forward computes (the activations) must be kept until its backward. No
# backward begins before all forwards are done, so every rank keeps all 8.
#
# ## Write 1F1B yourself
#
# Could a rank do its backwards earlier, and so let go of memory earlier? The last rank can: it may turn around at once,
# `F0 B0 F1 B1 …`. The rank before it must be one forward ahead, so that the last one never waits; the rank before that,
# two. So each rank
#
# 1. **warms up** with a few forwards: the last rank with 1, the first with as many as there are ranks,
# 2. then keeps a **steady state**: one backward, one forward, one backward, one forward: *1F1B*,
# 3. then **drains**: the backwards that are left.
#
# Let us write this step by step, and make the mistakes that everybody makes.
#
# ### First try: steps 1 and 2


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
# `check` returns every fault at once, each with a code, an explanation and a next move. All forwards are there, but
# each rank still owes the backwards of its warm-up: we forgot to drain. (`.plan()` would have raised a
# `ScheduleError` with the same explanation. An illegal order never runs.)

# %%
assert {fault.code for fault in faults} == {"missing"}
assert [fault.rank for fault in faults] == [0, 1, 2, 3]

# %% [markdown]
# ### Second try: the drain, and a mistake
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
# message. pipelab finds the deadlock before anything runs, and has run the order it suggests after `try:`. The first
# ranks must do more forwards before their first backward, not fewer.
#
# The lines between say what each rank waits for, always as (micro-batch, stage). `gin(0, 1)` is the gradient of stage
# 1's input for micro-batch 0, which stage 0's backward needs. `out(1, 0)` is the output of micro-batch 1 from stage 0,
# which stage 1's forward needs. Positions in a row count from 0, as everything does.

# %%
assert fault.code == "deadlock"
assert (fault.rank, fault.position, str(fault.action)) == (0, 1, "0B0")

# %% [markdown]
# ### Third try


# %%
class MyOneFOneB(pipelab.Schedule):
    """Fill the pipe, then one backward for every new forward."""

    def actions(self, rank):
        warmup = min(self.microbatches, self.ranks - rank)  # there may be fewer micro-batches than ranks
        for m in range(warmup):
            yield F(m)
        for m in range(self.microbatches - warmup):
            yield B(m)
            yield F(warmup + m)
        for m in range(self.microbatches - warmup, self.microbatches):
            yield B(m)


assert pipelab.check(MyOneFOneB(ranks=4, microbatches=8)) == []
mine = pipelab.simulate(MyOneFOneB(ranks=4, microbatches=8), cost)
print(mine)

# %%
mine

# %% [markdown]
# You wrote the schedule that comes with pipelab as `pipelab.OneFOneB`, and not only for this one size:

# %%
for some_ranks in range(1, 7):
    for some_microbatches in range(1, 13):
        yours = MyOneFOneB(some_ranks, some_microbatches).plan()
        assert yours == pipelab.OneFOneB(some_ranks, some_microbatches).plan()

# %% [markdown]
# ## What 1F1B is good for
#
# Put the two side by side.

# %%
both = pipelab.compare(gpipe, mine, names=["GPipe", "1F1B"])
print(both)

# %%
both

# %% [markdown]
# **The time is the same.** You may have read that 1F1B makes the bubble smaller than GPipe's; many courses say so,
# and it is easy to believe, because its timeline looks fuller. But with equal stages and free transfers both take (M
# + P - 1) × (F + B), and the bubble is (P - 1) / (M + P - 1) for both.
#
# **The memory is not.** With 1F1B, rank r holds at most min(M, P - r) activations at once, and with GPipe all M. For
# long batches that is the difference between fitting and not fitting.

# %%
assert mine.makespan == gpipe.makespan == 33
assert mine.bubble == gpipe.bubble
assert gpipe.peak_activations == (8, 8, 8, 8)
assert mine.peak_activations == tuple(min(microbatches, ranks - rank) for rank in range(ranks)) == (4, 3, 2, 1)

# %% [markdown]
# And *there* is 1F1B's gain in time, one step later. Its memory does not grow with the number of micro-batches, so you
# can afford more of them, and more micro-batches do shrink the bubble:

# %%
print("micro-batches  bubble   GPipe holds  1F1B holds")
for count in (4, 8, 16, 32):
    one = pipelab.simulate(pipelab.GPipe(4, count), cost)
    other = pipelab.simulate(MyOneFOneB(4, count), cost)
    assert one.bubble == other.bubble
    assert abs(one.bubble - (4 - 1) / (count + 4 - 1)) < 1e-12
    print(f"{count:13d} {other.bubble:7.1%} {max(one.peak_activations):13d} {max(other.peak_activations):11d}")

# %% [markdown]
# If you have room for the activations of four micro-batches, GPipe stops at the first line. 1F1B goes on to the last.
#
# ## The single loop that is not 1F1B
#
# Without `warmup`, one is tempted to write 1F1B as one loop: a forward, then the backward of the micro-batch before
# it. Courses teach it in this form, and on the last rank it nearly is 1F1B. pipelab keeps it, under the name of what
# it does.

# %%
delayed = pipelab.simulate(pipelab.DelayedBackward(ranks=4, microbatches=8), cost)
print(delayed)

# %%
delayed

# %% [markdown]
# Every rank is one forward ahead, where the first ranks would have to be several. So they mostly wait for each other:
# (P × (M - 1) + 1) × (F + B) = 87 units, against 96 for one micro-batch at a time and 33 for 1F1B. It is a legal order,
# its gradients are right, and nothing warns you that it is slow. A picture does.

# %%
assert delayed.makespan == (ranks * (microbatches - 1) + 1) * (1 + 2) == 87

# %% [markdown]
# ## When transfers take time
#
# So far each value reached the next rank the moment it was computed. Let each transfer take half a unit.

# %%
slow_links = pipelab.Cost(forward=1, backward=2, latency=0.5)
gpipe_slow = pipelab.simulate(pipelab.GPipe(4, 8), slow_links)
mine_slow = pipelab.simulate(MyOneFOneB(4, 8), slow_links)
print(f"GPipe {gpipe.makespan:g} -> {gpipe_slow.makespan:g}, 1F1B {mine.makespan:g} -> {mine_slow.makespan:g}")

# %%
pipelab.compare(gpipe_slow, mine_slow, names=["GPipe, latency 0.5", "1F1B, latency 0.5"])

# %% [markdown]
# GPipe pays the latency once on the way to the last rank and once on the way back: 2 × 3 × 0.5. In between, its
# transfers travel while the ranks work. 1F1B has no forward to spare: in its steady state a rank sends its output,
# and waits for the gradient that comes back just in time. With latency it comes too late, again and again. So with
# slow links 1F1B is even *slower* than GPipe, and its memory is still what speaks for it.

# %%
assert gpipe_slow.makespan == 33 + 2 * (ranks - 1) * 0.5 == 36
assert mine_slow.makespan == 41

# %% [markdown]
# ## On real tensors
#
# The same class, unchanged, now runs a model. `Pipeline` cuts it into stages, gives every rank a worker and a device
# (a GPU if there is one, else the processor), and `step` does what forward and `loss.backward()` do: all micro-batches,
# all gradients. Your optimizer comes after it, as always. Two ranks are enough here, so that a laptop has a core for
# each.

# %%
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
x, y = torch.randn(256, 1024), torch.randn(256, 1024)
loss_fn = torch.nn.functional.mse_loss
plain_loss = loss_fn(model(x), y).item()

with pipelab.Pipeline(model, MyOneFOneB(ranks=2, microbatches=8), loss_fn) as pipe:
    proof = pipe.verify(x, y)
    for _ in range(3):  # the first step is slower: everything is touched for the first time
        model.zero_grad()
        step = pipe.step(x, y)

assert abs(step.loss.item() - plain_loss) < 1e-4
print(proof)

# %% [markdown]
# `verify` ran the plain model on the same micro-batches, and on the whole batch, and compared. That is the test that a
# schedule has to pass: it may change *when* things are computed, never *what*.
#
# `step.trace` has the same type as the result of `simulate`, but its times are measured, in milliseconds. `Cost.fit`
# reads the usual time of every stage's forward and backward from it. Simulate with these times, and put theory above
# practice. (`step.trace.save("measured.html")` keeps a trace; `pipe.forward(x)` evaluates without gradients.)

# %%
predicted = pipelab.simulate(step.trace.plan, pipelab.Cost.fit(step.trace))
pipelab.compare(predicted, step.trace, names=["predicted", "measured"])

# %% [markdown]
# A real forward does not always take equally long, and a rank notices its input a little late. That is the difference
# between the two pictures.

# %%
assert step.trace.peak_activations == predicted.peak_activations == (2, 1)
assert step.trace.plan == MyOneFOneB(ranks=2, microbatches=8).plan()

# %% [markdown]
# ## Training
#
# `pipe.step(x, y)` stands where `loss.backward()` would. When it returns, the backward has run and the gradients are in
# `.grad`. What comes before and after is yours: `zero_grad`, an optimizer, a scheduler. They need not know of the
# pipeline, since the parameters are the model's own.

# %%
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

with pipelab.Pipeline(model, MyOneFOneB(ranks=2, microbatches=8), loss_fn) as pipe:
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        step = pipe.step(x, y)  # forward and backward of all micro-batches
        optimizer.step()
        losses.append(step.loss.item())
    pipe.eval()  # sets the model's mode, as model.eval() does
    predictions = pipe.forward(x)  # forwards only, without gradients
    pipe.train()

assert losses[-1] < losses[0]
assert predictions.shape == y.shape
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")

# %% [markdown]
# ### What the loss averages over
#
# The loss of the batch is put together from those of the micro-batches, and for that a pipeline must know how the loss
# function reduces. `mse_loss` averages over rows, which is the default, `reduction="mean"`: each micro-batch counts
# by its share of the rows, so the micro-batches may be of different sizes. For a loss that sums, say `reduction="sum"`.
#
# Some losses average over something else. `cross_entropy` leaves out the targets that are `ignore_index`, so a
# micro-batch with few other targets should count little. Then `reduction` is a function that returns a micro-batch's
# weight, given its targets:

# %%
labels = torch.randint(0, 10, (256,))
labels[:100] = -100  # nothing to learn from the first rows: the first micro-batches have no loss at all
classifier = torch.nn.Sequential(torch.nn.Linear(1024, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
cross_entropy = torch.nn.functional.cross_entropy  # its ignore_index is -100 unless you say otherwise

cross_entropy(classifier(x), labels).backward()
plainly = classifier[0].weight.grad.clone()
classifier.zero_grad()


def learned_from(targets):
    return (targets != -100).sum()


with pipelab.Pipeline(classifier, MyOneFOneB(2, 8), cross_entropy, reduction=learned_from) as pipe:
    pipe.step(x, labels)
difference = (classifier[0].weight.grad.cpu() - plainly).norm() / plainly.norm()
print(f"the gradient differs from plain training's by {difference:.0e} of its length")

assert difference < 1e-5

# %% [markdown]
# ## More ranks than cores
#
# Two cores cannot show four ranks side by side. `emulated` makes a model whose stages sleep exactly as long as you say.
# Sleeping leaves the processor free, so a laptop can run any number of them. Everything else is real: the workers, the
# tensors, the gradients, the clock. Here are four ranks, 20 ms forward and 40 ms backward.

# %%
rows = torch.ones(8, 1)
traces = []
for schedule in (pipelab.GPipe(4, 8), MyOneFOneB(4, 8), pipelab.DelayedBackward(4, 8)):
    sleepers = pipelab.emulated(4, forward_ms=20, backward_ms=40)
    with pipelab.Pipeline(sleepers, schedule, loss_fn, devices=["cpu"] * 4) as pipe:
        pipe.step(rows, rows)  # warm up
        traces.append(pipe.step(rows, rows).trace)

measured = pipelab.compare(*traces, names=["GPipe", "1F1B", "single loop"])
print(measured)

# %%
measured

# %% [markdown]
# These are the pictures from above, measured: never less than (8 + 3) × 60 ms = 660 ms for the first two and 29 × 60 ms
# = 1740 ms for the single loop, and a little more where a rank woke up late.

# %%
assert all(row.makespan >= ideal for row, ideal in zip(measured.rows, (660, 660, 1740), strict=True))

# %% [markdown]
# ## Try it
#
# Change something, and let `check` and `simulate` show you what you did. Solutions are in `tests/test_tutorials.py`.
#
# - Write an order for 4 ranks and 8 micro-batches that holds at most 2 activations on every rank;
#   `check(…, memory_cap=2)` finds out whether it does. 1F1B with a warm-up of `min(2, self.ranks - rank)` takes 69
#   units, GPipe with two micro-batches at a time 60, and 1F1B with warm-ups of 2, 2, 1 and 1 forwards 54. Par is 51.
#   No 1F1B reaches it: the ranks in the middle need a pattern of their own.
# - Write a 1F1B that warms up with one more forward on every rank but the last. With latency 0.5, par is 37 instead of
#   41. What does it cost in memory?
