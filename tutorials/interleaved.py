# %% [markdown]
# # Several stages per rank
#
# Your pipeline of four ranks waits for 27 % of the time. More micro-batches would help, but the batch must not grow,
# and smaller micro-batches would only be slower. A colleague says: cut the model into *eight* stages and give each rank
# two of them.
#
# On this page you find out why several stages per rank help, how many to choose, and what a group of micro-batches
# has to do with it.
#
# It takes about 24 minutes, and you need [Latency](latency.md) before it. Run it with `pipelab tutorial interleaved`,
# which asks for your predictions before it shows the answers.
#
# ## Interleaved 1F1B: round and round
#
# Eight stages on four ranks: rank 0 holds stages 0 and 4, rank 1 holds 1 and 5, and so on. A micro-batch passes every
# rank twice. This is interleaved 1F1B (Narayanan et al. 2021, section 2.2.2), with eight micro-batches. A rank's share
# of the model takes 1 unit forward and 2 backward, so each of its two stages takes 0.5 and 1.

# %%
import pipelab
from pipelab import B, F

P, M = 4, 8  # ranks and micro-batches
cost = pipelab.Cost(forward=1, backward=2)  # of a rank's share of the model, however many stages it is cut into
one = pipelab.simulate(pipelab.OneFOneB(P, M), cost)
two = pipelab.simulate(pipelab.Interleaved1F1B(P, M, stages_per_rank=2), cost)
two

# %% [markdown]
# It takes 28.5 units instead of 33. Each rank has the same 24 units of work. What got shorter is the waiting: the last
# rank [begins after three *stages*](#s=0:idle.3.0), and a stage takes half as long.

# %%
print(two.ledger)
assert (one.makespan, two.makespan) == (33, 28.5)
assert one.ledger[P - 1]["fill"] == P - 1 == 3
assert two.ledger[P - 1]["fill"] == (P - 1) / 2 == 1.5

# %% [markdown]
# ## Predict: as good as how many micro-batches?
#
# With one stage per rank, each rank waits for 9 units. With two, it waits for 4.5. Now take four stages per rank. With
# how many micro-batches of this size has 1F1B as small a bubble?

# %%
my_prediction = None  # a number of micro-batches, where interleaved 1F1B has 8

# %% tags=["answer"]
print(f"predicted {my_prediction}")
for v in (1, 2, 4, 8):
    trace = pipelab.simulate(pipelab.Interleaved1F1B(P, M, stages_per_rank=v), cost)
    waits = sum(trace.ledger[0].values())
    print(f"{v} stages per rank: each rank waits {waits:g}, makespan {trace.makespan:g}, bubble {trace.bubble:.1%}")
    assert waits == (P - 1) * (1 + 2) / v
    assert abs(trace.bubble - (P - 1) / (v * M + P - 1)) < 1e-12
    assert abs(trace.bubble - pipelab.simulate(pipelab.OneFOneB(P, v * M), cost).bubble) < 1e-12

# %% [markdown] tags=["answer"]
# 32. With v stages per rank, the waiting is (P - 1) × (F + B) / v, and the bubble (P - 1) / (v M + P - 1). That is as
# good as v times as many micro-batches, without making them smaller or the batch larger.

# %% [markdown]
# ## Predict: the price
#
# There is a price. With one stage per rank, 48 values travel in a step: eight micro-batches cross three boundaries,
# there and back. How many travel with two stages per rank, and with four?

# %%
my_second_prediction = None  # two numbers of transfers

# %% tags=["answer"]
print(f"predicted {my_second_prediction}")
for v in (1, 2, 4):
    count = len(pipelab.simulate(pipelab.Interleaved1F1B(P, M, stages_per_rank=v), cost).transfers)
    print(f"{v} stages per rank: {count} transfers")
    assert count == 2 * M * (v * P - 1)

# %% [markdown] tags=["answer"]
# 112 and 240, that is 2.3 and 5 times as many: there are v P - 1 boundaries now, because the way from the last rank
# back to the first one is a boundary, too. And no value is smaller than before: each cut carries as many numbers as it
# did.

# %% [markdown]
# The second price is memory. A stage's activation is half as large with two stages per rank, so we count in shares of a
# rank:

# %%
print("1F1B:                       ", one.peak_activations)
print("interleaved, 2 stages each: ", tuple(peak / 2 for peak in two.peak_activations))
assert one.peak_activations == (4, 3, 2, 1)
assert tuple(peak / 2 for peak in two.peak_activations) == (5.5, 4.5, 3.5, 2.5)

# %% [markdown]
# ## Predict: with a slow network
#
# Now each transfer takes 0.25 units. Which is the quickest: one, two, four or eight stages per rank?

# %%
my_third_prediction = None  # 1, 2, 4 or 8

# %% tags=["answer"]
slow = pipelab.Cost(forward=1, backward=2, latency=0.25)
print(f"predicted {my_third_prediction}")
print(f"1F1B: {pipelab.simulate(pipelab.OneFOneB(P, M), slow).makespan:g}")
makespans = {}
for v in (1, 2, 4, 8):
    makespans[v] = pipelab.simulate(pipelab.Interleaved1F1B(P, M, stages_per_rank=v), slow).makespan
    print(f"interleaved, {v} stages per rank: {makespans[v]:g}")
assert makespans == {1: 34.5, 2: 32, 4: 33.75, 8: 44.5}
assert pipelab.simulate(pipelab.OneFOneB(P, M), slow).makespan == 37

# %% [markdown] tags=["answer"]
# Two. The waiting that more stages save gets smaller and smaller, and every extra stage adds transfers to wait for.
# With eight stages per rank, the step takes longer than without any of this. (With one stage per rank, "interleaved" is
# 1F1B with twice as many forwards ahead. That is why it takes 34.5 here, and 1F1B itself 37.)

# %% [markdown]
# ## Breadth first
#
# Why does the latency hurt so much? Look at rank 0 with four stages. It runs micro-batches 0 to 3 on its first stage,
# and then waits for micro-batch 0 to come round for its second one: the tour takes four stages *and four transfers*,
# and the rank has work for four stages only.

# %%
pipelab.simulate(pipelab.Interleaved1F1B(P, M, stages_per_rank=4), slow)

# %% [markdown]
# So give it more work. **Looped breadth-first** (Lamy-Poirier 2022) sends *all* micro-batches through the first stage
# of a rank before the second one begins:

# %%
breadth = pipelab.simulate(pipelab.LoopedBFS(P, M, stages_per_rank=4), slow)
breadth

# %%
print("breadth first, 4 stages each:", tuple(peak / 4 for peak in breadth.peak_activations))
assert breadth.makespan == 27.75
assert tuple(peak / 4 for peak in breadth.peak_activations) == (8, 8, 8, 8)

# %% [markdown]
# 27.75 instead of 33.75, and you may guess the price: like GPipe, it holds everything. (It has another advantage. A
# rank works on one stage for a long time, so sharded weights of a stage are fetched only twice.)
#
# ## Groups
#
# Between the two extremes is one number: how many micro-batches go through a stage before the rank's next stage has its
# turn. Megatron-LM calls it `microbatch_group_size_per_vp_stage`. A **group** of P is interleaved 1F1B, and a group of
# M is breadth first in its warm-up.


# %%
class Grouped(pipelab.Schedule):
    """Interleaved 1F1B whose micro-batches go in groups of any size."""

    group = 4

    def actions(self, rank):
        stages = [rank + turn * self.ranks for turn in range(self.stages_per_rank)]
        starts = range(0, self.microbatches, self.group)
        groups = [range(start, min(start + self.group, self.microbatches)) for start in starts]
        forwards = [F(m, s) for each in groups for s in stages for m in each]
        backwards = [B(m, s) for each in groups for s in reversed(stages) for m in each]
        ahead = (self.stages_per_rank - 1) * len(groups[0]) + 2 * (self.ranks - 1 - rank)
        warmup = min(ahead, len(forwards))
        yield from forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            yield forward
            yield backward
        yield from backwards[len(forwards) - warmup :]


assert Grouped(P, M, stages_per_rank=2).plan().rows == pipelab.Interleaved1F1B(P, M, stages_per_rank=2).plan().rows

# %% [markdown]
# ## Exercise: just large enough
#
# A micro-batch that leaves a rank comes back to it after P stages and P transfers. Meanwhile the rank runs the rest of
# the group. If the group is too small, the rank waits. If it is too large, the rank holds more than it needs.
#
# Write a function that returns the smallest group that is large enough, for any latency. It must divide the number of
# micro-batches, so that no group is smaller than the others. The check has four ranks and 24 micro-batches. It adds up
# the makespans with six latencies, and what the fullest rank holds (in activations of its whole share).
#
# - **Par with two stages per rank, latencies from 0 to 0.5: 468 units with 41 activations.**
# - **Par with four stages per rank, latencies from 0 to 0.25: 450 units with 40.5 activations.**
#
# No divisor of 24 is quicker with any of these latencies. Groups of eight are as quick, and hold 45 and 46.5. The
# function below is interleaved 1F1B, whose groups are as large as there are ranks: the starting point, not the
# solution. (`forward` is what *one stage* takes. You need not simulate anything.)


# %%
def answer(ranks, microbatches, forward, latency):
    """Return how many micro-batches a group should have."""
    return ranks


# %%
def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    for stages, step, par, most in ((2, 0.1, 468, 41), (4, 0.05, 450, 40.5)):
        time = holds = 0
        for latency in (step * count for count in range(6)):
            schedule = Grouped(4, 24, stages_per_rank=stages)
            schedule.group = answer(4, 24, 1 / stages, latency)
            if schedule.group not in range(1, 25) or 24 % schedule.group:
                print(f"latency {latency:g}: a group of {schedule.group} does not divide 24")
                return False
            if faults := pipelab.check(schedule):
                print(f"latency {latency:g}, groups of {schedule.group}: {faults[0]}")
                return False
            trace = pipelab.simulate(schedule, pipelab.Cost(forward=1, backward=2, latency=latency))
            time += trace.makespan
            holds += max(trace.peak_activations) / stages
        print(f"{stages} stages per rank: {time:g} units, par {par}; {holds:g} activations, par {most}")
        reached.append(time <= par + 1e-6 and holds <= most)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: with 16 micro-batches and no latency, two stages per rank take 52.5 units in groups of four, and
# 57.5 in groups of five. Why? Teachers have the solution, `teacher/solutions/interleaved.py`.
#
# On some machines, many transfers have a third price: they wait in one queue. [The wire](the_wire.md) is about that.
