# %% [markdown]
# # The single loop, dissected
#
# In a course's practical you run three scripts on two GPUs: A takes one micro-batch at a time, B is GPipe, and C is
# "1F1B": one short loop, forward of i, backward of i - 1. Which one wins, and by how much?
#
# On this page you find out what a single loop makes its ranks wait for, how much that costs on any number of ranks, and
# which single number turns the loop into 1F1B.
#
# It takes about 21 minutes, and you need [Fill, drain and the bubble](fill_and_drain.md) before it. Run it with
# `pipelab tutorial option_c`, which asks for your predictions before it shows the answers.

# %%
import pipelab
from pipelab import B, F


class SingleLoop(pipelab.Schedule):
    """After forward i, backward of i - 1; the last backward after the loop."""

    def actions(self, rank):
        for i in range(self.microbatches):
            yield F(i)
            if i > 0:
                yield B(i - 1)
        yield B(self.microbatches - 1)


cost = pipelab.Cost(forward=1, backward=2)

# %% [markdown]
# It is legal: every micro-batch gets its forward and its backward, in an order that can run. And its gradients are
# right, as in every legal order. Only its time is in question.

# %%
assert pipelab.check(SingleLoop(ranks=2, microbatches=8)) == []

# %% [markdown]
# ## Predict: two ranks, eight micro-batches
#
# One micro-batch at a time (A) takes 8 × 2 × 3 = 48 units on two ranks. GPipe (B) takes (8 + 1) × 3 = 27. How long does
# the single loop take?

# %%
my_prediction = None  # units

# %% tags=["answer"]
loop = pipelab.simulate(SingleLoop(ranks=2, microbatches=8), cost)
print(f"predicted {my_prediction}, simulated {loop.makespan:g}")
assert loop.makespan == 45
assert pipelab.simulate(pipelab.Naive(2, 8), cost).makespan == 48
assert pipelab.simulate(pipelab.GPipe(2, 8), cost).makespan == 27

# %% tags=["answer"]
loop

# %% [markdown] tags=["answer"]
# 45 of 48: the second rank gains nearly nothing. While one rank works, the other one waits, all the way through.

# %% [markdown]
# ## What do the ranks wait for?
#
# With more ranks it is easier to see. Here are four:

# %%
four = pipelab.simulate(SingleLoop(ranks=4, microbatches=8), cost)
four

# %% [markdown]
# Nothing here waits because a device is busy. Follow the [**critical path**](#l=c), the chain of actions without a gap
# that makes the step as long as it is:

# %%
path = four.critical_path
print(" ".join(str(event.action) for event in path[:18]), "…")
assert [str(event.action) for event in path[5:13]] == ["3B0", "2B0", "1B0", "0B0", "0F2", "1F2", "2F2", "3F2"]
assert [str(event.action) for event in path[13:21]] == ["3B1", "2B1", "1B1", "0B1", "0F3", "1F3", "2F3", "3F3"]

# %% [markdown]
# `3B0` is the backward of micro-batch 0 on stage 3. Read the line aloud: the backward of 0 climbs from rank 3 to rank
# 0. Only then does rank 0 run the forward of 2, because the loop says *B(0), then F(2)*. That forward goes down to rank
# 3. Only then does rank 3 run the backward of 1, because the loop says *F(2), then B(1)*. And so on.
#
# So each turn of the loop is a round trip through all P ranks, which costs P × (F + B). There are M - 1 of them, and
# one more forward and backward at the ends:
#
# makespan = (P × (M - 1) + 1) × (F + B)

# %%
print("ranks  one at a time  single loop  GPipe")
for P in (3, 4, 8):
    naive, single, gpipe = (
        pipelab.simulate(kind(P, 8), cost).makespan for kind in (pipelab.Naive, SingleLoop, pipelab.GPipe)
    )
    assert naive == P * 8 * 3
    assert single == (P * (8 - 1) + 1) * 3
    assert gpipe == (8 + P - 1) * 3
    print(f"{P:5d} {naive:14g} {single:12g} {gpipe:6g}")

# %% [markdown]
# More ranks make it *longer*, as they do for one micro-batch at a time. That pipeline has no parallelism to speak of:
# two micro-batches are on their way, but they take turns.
#
# ## One number
#
# What does the loop have to do with 1F1B? Count how far the forwards are ahead of the backwards. The loop lets every
# rank be *one* forward ahead. Call this number the **lead**:


# %%
class Loop(pipelab.Schedule):
    """After forward i, the backward of i - lead; the last backwards after the loop. A rank's lead is `lead(rank)`."""

    def lead(self, rank):
        return 1

    def actions(self, rank):
        lead = min(self.lead(rank), self.microbatches)
        for i in range(self.microbatches):
            yield F(i)
            if i >= lead:
                yield B(i - lead)
        for m in range(self.microbatches - lead, self.microbatches):
            yield B(m)


assert Loop(4, 8).plan() == SingleLoop(4, 8).plan()

# %% [markdown]
# A lead of 0 on every rank is one micro-batch at a time. A lead of 8 on every rank is GPipe.


# %%
class NoLead(Loop):
    def lead(self, rank):
        return 0


class WholeLead(Loop):
    def lead(self, rank):
        return self.microbatches


assert NoLead(4, 8).plan() == pipelab.Naive(4, 8).plan()
assert WholeLead(4, 8).plan() == pipelab.GPipe(4, 8).plan()

# %% [markdown]
# ## Predict: a larger lead everywhere
#
# So the lead takes us from the slowest schedule to one of the fastest. Perhaps 1 was just too small? On four ranks, a
# lead of 0 takes 96 units, and of 8 it takes 33. How long does a lead of **4** on every rank take, as many as there are
# ranks?

# %%
my_second_prediction = None  # units

# %% tags=["answer"]
print(f"predicted {my_second_prediction}")
for same in range(9):

    class SameLead(Loop):
        def lead(self, rank, same=same):
            return same

    trace = pipelab.simulate(SameLead(4, 8), cost)
    print(f"lead {same}: {trace.makespan:3g} units, {max(trace.peak_activations)} activations")
    lead = min(same, 7)
    assert trace.makespan == (4 * 8 - (4 - 1) * lead) * 3 == 96 - 9 * lead

# %% [markdown] tags=["answer"]
# Each step of the lead saves 9 units, and costs an activation on every rank. So a lead of 4 takes 60 units, far more
# than 33. The size of the lead is not the problem.

# %% [markdown]
# ## Neighbours
#
# Look at two neighbours with the *same* lead. When rank 1 has finished a backward, it wants a forward next. That
# forward comes from rank 0, and rank 0 runs it only after the backward that rank 1 has just sent. So rank 1 waits for
# one backward and one forward of rank 0, every time.
#
# This is also why one rank's code cannot tell you whether a schedule is good. It is the *differences* between ranks
# that let them work at the same time. Which differences are large enough is the exercise.
#
# ## Exercise: the lead of 1F1B
#
# Return the lead of a rank. The same function must work for any number of ranks.
#
# - **Par on four ranks: 33 units, with 10 activations**, the peaks of all ranks added up.
# - **Par on eight ranks: 45 units, with 36 activations.**
#
# GPipe has the same 33 and 45 units, and holds 32 and 64 activations. The function below is the practical's loop: the
# starting point, not the solution.


# %%
def answer(rank, ranks):
    """Return how many forwards a rank is ahead of its backwards."""
    return 1


# %%
def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""

    class Mine(Loop):
        def lead(self, rank):
            return answer(rank, self.ranks)

    reached = []
    for ranks, par, held in ((4, 33, 10), (8, 45, 36)):
        if faults := pipelab.check(Mine(ranks, 8)):
            print(f"{ranks} ranks: {faults[0]}")
            return False
        trace = pipelab.simulate(Mine(ranks, 8), cost)
        total = sum(trace.peak_activations)
        print(f"{ranks} ranks: {trace.makespan:g} units, par {par}; {total} activations, par {held}")
        reached.append(trace.makespan <= par and total <= held)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: try a lead that *grows* with the rank, and read what the check says. Teachers have the solution,
# `teacher/solutions/option_c.py`.
#
# The practical's loop comes with pipelab as `pipelab.DelayedBackward`, and the true one as `pipelab.OneFOneB`, so
# `pipelab compare delayed 1f1b` draws both. The same exercise on real devices, with its questions, is [Practical
# 9](../labs.md).
