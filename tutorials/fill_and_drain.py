# %% [markdown]
# # Fill, drain and the bubble
#
# You rent four GPUs by the hour, cut your model into four stages, and run GPipe. At the end of the month your boss asks
# how much of the paid time the GPUs spent computing. On this page you find out what ranks of a pipeline wait for, what
# more micro-batches do to that, and whether the smallest bubble is the shortest step.
#
# It takes about 20 minutes, and you need [Your first schedule](first_schedule.md) before it. Run it with
# `pipelab tutorial fill_and_drain`, which asks for your predictions before it shows the answers: you remember wrong
# guesses.

# %%
import pipelab

P, M = 4, 8  # ranks and micro-batches
cost = pipelab.Cost(forward=1, backward=2)
gpipe = pipelab.simulate(pipelab.GPipe(ranks=P, microbatches=M), cost)
gpipe

# %% [markdown]
# ## Where does a rank wait?
#
# Every rank works for 8 × (1 + 2) = 24 of 33 units. The **ledger** says what it waited for in the other 9:

# %%
print(gpipe.ledger)

# %% [markdown]
# - [**fill**](#s=0:idle.3.0): a rank cannot begin before its first input has come down through the ranks before it.
# - [**wait**](#s=0:idle.0.8), here: after its last forward, a rank waits until its first gradient has come up.
# - [**drain**](#s=0:idle.3.27): when a rank is done, the ranks before it still have work.
#
# Rank 0 waits only in the middle, the last rank only at the ends. But the three add up to 9 on each rank.
#
# ## Predict: twice the micro-batches
#
# Now the batch is cut into 16 micro-batches of the same size as before, so each rank works twice as long: 48 units. How
# long does each rank *wait*?

# %%
my_prediction = None  # units

# %% tags=["answer"]
longer = pipelab.simulate(pipelab.GPipe(ranks=P, microbatches=16), cost)
waited = sum(longer.ledger[0].values())
print(f"predicted {my_prediction}, computed {waited:g}: the same as with 8 micro-batches")
assert all(sum(longer.ledger[rank].values()) == waited == 9 for rank in range(P))

# %% tags=["answer"]
longer

# %% [markdown] tags=["answer"]
# Rank r waits r × 1 units for r forwards on the ranks before it. Then it waits (P - 1 - r) × (1 + 2), while its last
# micro-batch goes down the ranks after it and the first gradient comes back up, and at the end r × 2 for the last r
# backwards. Together these are (P - 1) × (1 + 2) = 9. None of the three contains the number of micro-batches. The pipe
# fills once and drains once, however much flows through it. So the waiting is a *fixed price*, and more work between
# the two ends makes it a smaller share.

# %% tags=["answer"]
for trace in (gpipe, longer):
    for rank in range(P):
        waits = trace.ledger[rank]
        assert waits.get("fill", 0) == rank * 1
        assert waits.get("wait", 0) == (P - 1 - rank) * (1 + 2)
        assert waits.get("drain", 0) == rank * 2

# %% [markdown]
# ## The formula
#
# A rank waits (P - 1) × (F + B) and works M × (F + B), for a forward of F and a backward of B. The **bubble** is the
# share of the time that it waits. F + B cancels:
#
# bubble = (P - 1) / (M + P - 1)

# %%
print("micro-batches  makespan  each rank waits  bubble")
for count in (1, 2, 4, 8, 16, 32, 64):
    trace = pipelab.simulate(pipelab.GPipe(P, count), cost)
    assert abs(trace.bubble - (P - 1) / (count + P - 1)) < 1e-12
    assert trace.makespan - count * (1 + 2) == waited
    print(f"{count:13d} {trace.makespan:9g} {trace.makespan - count * 3:16g} {trace.bubble:7.1%}")

# %% [markdown]
# With one micro-batch the bubble is 75 %: one rank works and three wait. Nothing ever brings it to zero.
#
# When you read a paper, look at what it divides by. The formula here, and GPipe's paper, divide the waiting by the
# *whole* time. Megatron-LM's paper (2021, section 2.2) divides it by the *ideal* time, which is the work alone, and
# gets (P - 1) / M. For the picture at the top, one says 27.3 % and the other 37.5 %.

# %%
assert round(gpipe.bubble, 3) == 0.273
assert (gpipe.makespan - M * 3) / (M * 3) == (P - 1) / M == 0.375

# %% [markdown]
# ## Predict: is the smallest bubble the shortest step?
#
# So far we added micro-batches of the same size, that is, a larger batch. Usually the batch is given, and more
# micro-batches are *smaller* ones. Take a batch of 96 rows. On each rank, a row costs 1 ms forward and 2 ms backward.
# Every action also costs 3 ms before it computes anything, to launch its kernels. So with n rows in a micro-batch, a
# forward takes 3 + n ms and a backward 3 + 2n ms.


# %%
def step(microbatches, ranks=4, rows=96):
    """Simulate a step with a batch of `rows`, cut into so many micro-batches."""
    n = rows / microbatches
    sizes = pipelab.Cost(forward=3 + n, backward=3 + 2 * n, unit="ms")
    return pipelab.simulate(pipelab.GPipe(ranks, microbatches), sizes)


# %% [markdown]
# Cut into 8 micro-batches of 12 rows, the step has a bubble of 3/11 = 27.3 %. Cut into 96 micro-batches of one row, its
# bubble is 3/99 = 3.0 %. Which step is shorter, and by how much?

# %%
my_second_prediction = None  # "8" or "96", and how many times as long the other one takes

# %% tags=["answer"]
coarse, fine = step(8), step(96)
print(f"predicted {my_second_prediction}")
print(f" 8 micro-batches: bubble {coarse.bubble:5.1%}, step {coarse.makespan:g} ms")
print(f"96 micro-batches: bubble {fine.bubble:5.1%}, step {fine.makespan:g} ms")
assert (round(coarse.bubble, 3), coarse.makespan) == (0.273, 462)
assert (round(fine.bubble, 3), fine.makespan) == (0.030, 891)
assert 1.9 < fine.makespan / coarse.makespan < 2

# %% [markdown] tags=["answer"]
# The step with the small bubble takes nearly twice as long. Its ranks hardly ever wait, but they are busy launching:
# 96 × (3 + 3) = 576 ms of their work is launches. The bubble says how much of the time a rank *waits*, and nothing
# about what it does when it works. Compare step times.

# %% [markdown]
# ## Exercise: cut the batch
#
# Write a function that says into how many micro-batches a batch of 96 rows should be cut, for any number of ranks. All
# micro-batches must have the same number of rows.
#
# - **Par on four ranks: 450 ms.**
# - **Par on eight ranks: 552 ms.**
#
# The function below takes the smallest possible bubble. It is the starting point, not the solution.


# %%
def answer(ranks, rows):
    """Return into how many micro-batches to cut the batch."""
    return rows


# %% [markdown]
# The check below simulates what your function chooses. (A hint: write the makespan as a formula in M. One part of it
# grows with M, another one shrinks.)


# %%
def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    for ranks, par in ((4, 450), (8, 552)):
        count = answer(ranks, 96)
        if count not in range(1, 97) or 96 % count:
            print(f"{ranks} ranks: 96 rows cannot be cut into {count} equal micro-batches")
            return False
        trace = step(count, ranks)
        print(f"{ranks} ranks: {count} micro-batches, {trace.makespan:g} ms, par {par}; bubble {trace.bubble:.1%}")
        reached.append(trace.makespan <= par)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: is the best number of micro-batches on eight ranks larger or smaller than on four, and why?
# Teachers have the solution, `teacher/solutions/fill_and_drain.py`.
