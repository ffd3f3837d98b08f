# %% [markdown]
# # V shapes, and pipelines in both directions
#
# In 1F1B the first rank of four holds four activations, and the last one holds one. You bought four equal devices: the
# first one is full, and the last one is nearly empty. Two papers have the same answer to this: let every rank be first
# *and* last.
#
# On this page you fold a pipeline into a V, halve its memory, and find out what DeepSeek's DualPipe costs.
#
# It takes about 25 minutes, and you need [Several stages per rank](interleaved.md) and [Splitting the
# backward](splitting_the_backward.md) before it. Run it with `pipelab tutorial v_shapes`, which asks for your
# predictions before it shows the answers.
#
# ## Fold it
#
# Cut the model into eight stages for four ranks. Interleaving puts stages 0 and 4 on rank 0. A **V** puts 0 and *7*
# there: the stages go down the ranks and come back up.
#
# A micro-batch's activation on stage 0 lives long: it is needed until the very last backward. On stage 7 it is needed
# only briefly. Folded, each rank has one of the long ones and one of the short ones, and together they live as long on
# every rank. This is **ZB-V** (Qi et al. 2023, section 6), with split backwards. Here is one micro-batch:

# %%
import pipelab
from pipelab import B, F

P, M = 4, 8  # ranks and micro-batches
zbv = pipelab.simulate(pipelab.ZBV(P, M))
pipelab.simulate(pipelab.ZBV(P, 1))

# %% [markdown]
# Costs are the same as before: a rank's share of the model takes 1 unit for a forward, 1 for `I` and 1 for `W`, so each
# of its two stages takes a half. A forward starts on rank 0 and [ends on rank 0](#s=0:7F0.0), and there its backward
# [starts immediately](#s=0:7I0.0).
#
# ## Predict: the memory
#
# [Splitting the backward](splitting_the_backward.md) ends with ZB-H2: no rank waits between its first action and its
# last, but each holds 7 activations. In ZB-V no rank waits in between, either. How many activations does each rank
# hold, in shares of a rank?

# %%
my_prediction = None  # for each rank, in shares of a rank

# %% tags=["answer"]
print(f"predicted {my_prediction}")
for schedule in (pipelab.OneFOneB(P, M), pipelab.ZBH2(P, M), pipelab.ZBV(P, M)):
    trace = pipelab.simulate(schedule)
    held = tuple(peak / schedule.stages_per_rank for peak in trace.peak_activations)
    print(f"{schedule}: makespan {trace.makespan:g}, own spans {trace.spans}, holds {held}")
assert zbv.spans == (24, 24, 24, 24)
assert tuple(peak / 2 for peak in zbv.peak_activations) == (4, 4, 4, 4)
assert (zbv.makespan, pipelab.simulate(pipelab.ZBH2(P, M)).makespan) == (25.5, 27)

# %% tags=["answer"]
zbv

# %% [markdown] tags=["answer"]
# Four, as much as 1F1B's first rank, and little more than half of ZB-H2's. And the step is shorter than ZB-H2's 27
# units, because the last rank begins after three *half* stages: 24 + 1.5.

# %% [markdown]
# What does it cost? There are twice as many stages, and so more boundaries. But where the V turns, at the last rank, a
# value stays where it is.

# %%
print(len(pipelab.simulate(pipelab.OneFOneB(P, M)).transfers), "transfers in 1F1B,", len(zbv.transfers), "in ZB-V")
assert len(pipelab.simulate(pipelab.OneFOneB(P, M)).transfers) == 2 * M * (P - 1) == 48
assert len(zbv.transfers) == 2 * M * (2 * P - 2) == 96

# %% [markdown]
# ## Less memory
#
# How long does an activation live in a V? Follow one micro-batch: forward down the ranks, forward back up, then the
# input gradients down and up. Those are four **legs**. If on each leg it spends one *slot* on each rank (a slot is the
# time of one action), and never pauses, it lives as briefly as possible. Send the next micro-batch six slots later,
# because each rank has six actions for each: two forwards, two `I`, two `W`. The `W` fill the remaining slots.
#
# That is **V-Min** (Qi et al. 2024, Pipeline Parallelism with Controllable Memory), with one exception. If 3 divides
# the number of ranks, two actions of a rank fall into the same of the six slots. Then the micro-batch pauses for two
# slots at the turn from its forwards to its backwards.
#
# Such a plan is a **building block**: the slot in which each pass of one micro-batch starts, and how many slots later
# the next one does the same. Its memory follows before anything is simulated:


# %%
def legs(ranks, speed=1, pause=0):
    """Return the block of a micro-batch that goes down and up the ranks twice, at so many slots per rank."""
    stages = range(2 * ranks)
    way = [f"{s}F" for s in stages] + [f"{s}I" for s in reversed(stages)]
    passes, slot = {}, 0
    for number, each in enumerate(way, 1):
        passes[each] = slot
        slot += 1 if number % ranks == 0 else speed  # at a turn the next pass is on the same rank
        slot += pause if number == 2 * ranks else 0
    return pipelab.building_block(passes, interval=6, place=[*range(ranks), *reversed(range(ranks))])


block = legs(P)
print("each rank holds", block.peaks, "halves")
v_min = pipelab.simulate(block.plan(M, "V-Min"))

# %%
for ranks in (4, 5, 6, 8, 9):
    most = max(legs(ranks, pause=0 if ranks % 3 else 2).peaks)
    print(f"{ranks} ranks: V-Min holds {most / 2:g} shares, 1F1B {ranks}")
    assert most == 2 * ((ranks + 4) // 3)
try:
    legs(6)  # without the pause
except pipelab.UsageError as error:
    print(error)

# %% [markdown]
# ## Predict: half of the memory
#
# It holds 4 half activations: 2 shares, which is half of what 1F1B's first rank holds. 1F1B takes 33 units. How long
# does this one take?

# %%
my_second_prediction = None  # units

# %% tags=["answer"]
print(f"predicted {my_second_prediction}, computed {v_min.makespan:g} units, holds {v_min.peak_activations} halves")
assert v_min.peak_activations == (4, 4, 4, 4)
assert v_min.makespan == 29.5

# %% tags=["answer"]
v_min

# %% [markdown] tags=["answer"]
# Half of the memory on four ranks, a third on many, and three and a half units less. But before you throw 1F1B away,
# let `I` take 1.2 and `W` 0.8, as in a transformer:

# %% tags=["answer"]
uneven = pipelab.Cost(forward=1, input_grad=1.2, weight_grad=0.8)
for schedule in (pipelab.OneFOneB(P, M), pipelab.VMin(P, M), pipelab.ZBV(P, M)):
    print(f"{schedule}: {pipelab.simulate(schedule, uneven).makespan:.1f} units")
assert round(pipelab.simulate(pipelab.VMin(P, M), uneven).makespan, 6) == 34.4
assert round(pipelab.simulate(pipelab.OneFOneB(P, M), uneven).makespan, 6) == 33

# %% [markdown] tags=["answer"]
# Now it is slower than 1F1B. An order tuned to one set of times fits only those. A rank that holds few activations has
# nothing else to run when a value is late.

# %% [markdown]
# V-Min is one end of a dial. A micro-batch that takes two or three slots per rank holds more, and leaves fewer gaps:

# %%
for speed, halves, expected in ((2, 6, 28.5), (3, 8, 26.5)):
    trace = pipelab.simulate(legs(P, speed).plan(M))
    print(f"{speed} slots per rank: {trace.makespan:g} units, holds {max(trace.peak_activations)} halves")
    assert (trace.makespan, max(trace.peak_activations)) == (expected, halves)

# %% [markdown]
# `pipelab.frontier(P, M)` searches over four such speeds, one for each leg, and draws the [curve of memory and
# bubble](../reference/schedules.md#how-do-i-write-a-building-block-instead-of-an-order) with all schedules on it.

# %% [markdown]
# ## Both directions
#
# DeepSeek's **DualPipe** (DeepSeek-V3, 2024, section 3.2.1) makes every rank first and last without folding. Half of
# the micro-batches enter at rank 0 and run down the ranks. The others enter at the last rank and run up.

# %%
dual = pipelab.DualPipe(P, M)
pipelab.simulate(dual, pipelab.Cost(pair=2.5))

# %% [markdown]
# ## Predict: how many parameters?
#
# Rank 0 is the first stage for one half of the micro-batches, and the last stage for the others. How many *parameters*
# does it hold, in shares of a rank? And a rank in 1F1B, in ZB-V, in DualPipeV (DualPipe folded into a V)?

# %%
my_third_prediction = None  # four numbers

# %% tags=["answer"]
print(f"predicted {my_third_prediction}")
found = []
for schedule in (pipelab.OneFOneB(P, M), pipelab.ZBV(P, M), pipelab.DualPipeV(P, M), dual):
    here = sorted({s for m in range(M) for s in range(schedule.stages) if schedule.place(m, s) == 0})
    parameters = len(here) * P / schedule.stages
    trace = pipelab.simulate(schedule)
    held = max(trace.peak_activations) / schedule.stages_per_rank
    print(f"{schedule}: rank 0 holds stages {here} of {schedule.stages}, {parameters:g} shares of the parameters")
    print(f"    {trace.makespan:g} units, up to {held:g} activations, {len(trace.transfers)} transfers")
    found.append((parameters, trace.makespan, held))
assert found == [(1, 33, 4), (1, 25.5, 4), (1, 25.5, 4.5), (2, 25, 5)]

# %% [markdown] tags=["answer"]
# DualPipe holds everything twice: two stages of a whole share each. The two copies of a stage need an all-reduce, too,
# as replicas do. DualPipeV takes half a unit longer here, and holds one copy.
#
# DeepSeek's report says that the second copy costs them little, because most of their parameters are experts, which are
# spread over many other devices. If yours are not, use the V.

# %% [markdown]
# So why DualPipe at all? Look at the wide boxes in its picture: a forward of one direction *together with* a backward
# of the other one. While one of them sends, the other one computes. If such a pair takes 2.5 units instead of 1 + 2,
# the whole step takes 24. If it takes 3, the pairs are a loss, because the forward's output has to wait for the pair's
# end:

# %%
for pair in (2.5, 3):
    print(f"a pair takes {pair}: DualPipe {pipelab.simulate(dual, pipelab.Cost(pair=pair)).makespan:g} units")
assert [pipelab.simulate(dual, pipelab.Cost(pair=pair)).makespan for pair in (2.5, 3)] == [24, 26]

# %% [markdown]
# ## Exercise: enter from both ends
#
# Now build a pipeline in both directions yourself, with whole backwards, where a forward and a backward take one slot
# each. A micro-batch never pauses: it enters in some slot, runs down its stages, one slot on each rank, turns around,
# and comes back. Say for each micro-batch in which direction it goes, and in which slot it enters. No two actions of a
# rank may fall into the same slot.
#
# - **Par on four ranks with 4 micro-batches: 10 units.** 1F1B takes 14.
# - **Par on six ranks with 12 micro-batches: 28 units.** 1F1B takes 34.
#
# The function below sends all micro-batches down, as 1F1B does: the starting point, not the solution. (Draw the ranks
# as rows and the slots as columns. In which slots does rank 0 work for a micro-batch that enters at slot 0, and the
# last rank? Which slots are free for one from the other end? A rank has 2 P actions for P micro-batches.)


# %%
class BothWays(pipelab.Schedule):
    """Every micro-batch enters at one of the ends in some slot, and never pauses."""

    enter = None  # of a micro-batch and the number of ranks: whether it goes down, and its first slot

    def place(self, microbatch, stage):
        down, _ = self.enter(microbatch, self.ranks)
        return stage if down else self.ranks - 1 - stage

    def slots(self, rank):
        """Return the actions of a rank by slot, as lists."""
        found = {}
        for m in range(self.microbatches):
            down, slot = self.enter(m, self.ranks)
            s = rank if down else self.ranks - 1 - rank
            found.setdefault(slot + s, []).append(F(m, s))
            found.setdefault(slot + 2 * self.ranks - 1 - s, []).append(B(m, s))
        return found

    def actions(self, rank):
        for _, actions in sorted(self.slots(rank).items()):
            yield from actions


def answer(microbatch, ranks):
    """Return whether a micro-batch goes down the ranks, and the slot in which it enters."""
    return True, 2 * microbatch


# %%
def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    for ranks, microbatches, par in ((4, 4, 10), (6, 12, 28)):
        schedule = type("Mine", (BothWays,), {"enter": staticmethod(answer)})(ranks, microbatches)
        for rank in range(ranks):
            for slot, actions in sorted(schedule.slots(rank).items()):
                if len(actions) > 1:
                    print(f"{ranks} ranks: in slot {slot}, rank {rank} has {' and '.join(map(str, actions))}")
                    return False
        trace = pipelab.simulate(schedule, pipelab.Cost(forward=1, backward=1))
        print(f"{ranks} ranks: {trace.makespan:g} units, par {par}; holds {trace.peak_activations}")
        reached.append(trace.makespan <= par)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# This is Chimera (Li and Hoefler 2021, section 3). When you are done: how much of the gain remains if a backward takes
# twice as long as a forward? And what do both copies of a stage need at the end, which 1F1B does not? Teachers have the
# solution, `teacher/solutions/v_shapes.py`.
