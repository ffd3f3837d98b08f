# %% [markdown]
# # Weights as a cache
#
# Each of your ranks holds four stages, and with the optimizer's state they do not fit. But the whole pipeline runs
# eight times, side by side, and all eight copies hold the same weights. So you let each copy keep an eighth of every
# stage's weights, as FSDP does. Before a rank uses a stage it **gathers** it: it fetches the other seven eighths.
# Afterwards it **frees** them.
#
# Now a rank's memory is a cache of weights. On this page you find out how often a pipeline gathers sharded weights,
# what decides it, and when a gather costs time.
#
# It takes about 22 minutes, and you need [Several stages per rank](interleaved.md) before it. Run it with
# `pipelab tutorial gathers`, which asks for your predictions before it shows the answers.
#
# ## One stage at a time
#
# Two actions do this: `UNSHARD(s)` gathers stage s, and `RESHARD(s)` frees it. `pipelab.with_gathers` puts them into a
# plan as PyTorch's runtime does. `max_active_stages` is the number of stages that a rank may keep gathered, its
# **room**. Here it is one, on two ranks with two stages each, and a gather takes as long as a forward of its stage:

# %%
import pipelab
from pipelab import RESHARD, UNSHARD, with_gathers

cost = pipelab.Cost(forward=1, backward=2, gather=1)  # of a rank; its stages share it
pipelab.simulate(with_gathers(pipelab.Interleaved1F1B(2, 2, stages_per_rank=2), max_active_stages=1), cost)

# %% [markdown]
# Gathers run on a separate channel, the grey boxes above each rank. A rank that computes with a stage needs the whole
# of it, so with room for one stage it can only wait while the next one comes.
#
# ## Predict: how many gathers?
#
# Now three ranks with four stages each. Rank 0 runs 48 actions: six forwards and six backwards on each stage. It begins
# with three forwards on each stage, and in the steady state it runs one forward and one backward in turn. How often
# does it gather, with room for one stage?

# %%
P, M = 3, 6  # ranks and micro-batches
interleaved = pipelab.Interleaved1F1B(P, M, stages_per_rank=4)
breadth_first = pipelab.LoopedBFS(P, M, stages_per_rank=4)

# %%
my_prediction = None  # gathers on rank 0


# %% tags=["answer"]
def gathers(plan):
    """Return how often each rank gathers."""
    return [sum(action.kind == "UNSHARD" for action in row) for row in plan.rows]


print(f"predicted {my_prediction}, counted {gathers(with_gathers(interleaved, 1))}")
assert gathers(with_gathers(interleaved, 1)) == [27, 29, 21]
assert pipelab.simulate(interleaved, cost).makespan == 19.5
assert pipelab.simulate(with_gathers(interleaved, 1), cost).makespan == 26.25

# %% [markdown] tags=["answer"]
# 27: each time that the rank goes to another stage. The warm-up is kind, with three forwards in a row. The steady
# state is not: forwards and backwards alternate, and belong to different stages. The step takes 26.25 units instead of
# 19.5.

# %% [markdown]
# ## Predict: another order
#
# [Looped BFS](../schedules/looped-bfs.md) stays with a stage as long as it can: six forwards on the first, six on the
# next one, and so on; then the backwards, in reverse. Again there is room for one stage. How many gathers?

# %%
my_second_prediction = None  # gathers on rank 0

# %% tags=["answer"]
print(f"predicted {my_second_prediction}, counted {gathers(with_gathers(breadth_first, 1))}")
assert gathers(with_gathers(breadth_first, 1)) == [7, 7, 7]
for schedule in (interleaved, breadth_first):
    trace = pipelab.simulate(with_gathers(schedule, 1), cost)
    print(f"{schedule}: {trace.makespan:g} units, activations {trace.peak_activations}")
assert pipelab.simulate(breadth_first, cost).peak_activations == (24, 24, 24)
assert pipelab.simulate(interleaved, cost).peak_activations == (14, 12, 10)

# %% [markdown] tags=["answer"]
# 7 = 2 x 4 - 1: one for each stage on the way down and one on the way back, but the last stage's backwards follow its
# forwards. No order needs less with room for one. The price is memory of another kind: 24 activations of a stage where
# interleaved 1F1B holds 14. That is Breadth-First Pipeline Parallelism (Lamy-Poirier 2022).

# %% [markdown]
# ## Predict: look ahead
#
# Keep interleaved 1F1B, and make room for two stages. Then a rank can gather the next stage while it computes with
# this one: it *looks ahead*. PyTorch does so by default. How many units does the step take? It took 19.5 without
# gathers, and 26.25 with room for one stage.

# %%
my_third_prediction = None  # units

# %% tags=["answer"]
ahead = with_gathers(interleaved, max_active_stages=2)
late = with_gathers(interleaved, max_active_stages=2, unshard_lookahead=[1] * P)
print(f"predicted {my_third_prediction}")
for what, plan in (("looks ahead", ahead), ("gathers only when it must", late)):
    print(f"{what}: {pipelab.simulate(plan, cost).makespan:g} units, {gathers(plan)} gathers")
assert (pipelab.simulate(ahead, cost).makespan, pipelab.simulate(late, cost).makespan) == (19.75, 22.5)
assert gathers(ahead) == gathers(late) == [12, 12, 12]

# %% [markdown] tags=["answer"]
# 19.75. Only the very first gather costs time, a quarter of a unit. All others run while the rank computes. Without
# looking ahead the same twelve gathers cost three units. And why twelve, not 27? When a rank alternates between two
# stages, both are there.

# %% tags=["answer"]
pipelab.simulate(ahead, cost)

# %% [markdown]
# A gathered stage is memory, too. The peak of a plan is a sum of both kinds, and which order needs less depends on the
# model. Say that a stage's whole weights are as large as four activations:

# %%
size = pipelab.Memory(gathered=4, activations=1)
for plan in (ahead, with_gathers(interleaved, 1), with_gathers(breadth_first, 1)):
    print(f"{plan.name}: {pipelab.memory_use(plan, size).peaks} at the peak, {sum(gathers(plan))} gathers")
assert [max(pipelab.memory_use(plan, size).peaks) for plan in (ahead, with_gathers(breadth_first, 1))] == [22, 28]

# %% [markdown]
# Here interleaved 1F1B needs less, even with two gathered stages. With more micro-batches it still does, because looped
# BFS holds all of them. It gathers no more often then, however, while interleaved 1F1B gathers again in every round.
#
# ## Exercise: the fewest gathers
#
# The order of the actions is given: interleaved 1F1B. You decide when to gather and when to free. PyTorch's rule
# gathers 12 times with room for two stages, and 11 times on rank 0 with room for three.
#
# - **Par with room for 2: 10 gathers on each rank.**
# - **Par with room for 3: 7 gathers on each rank.**
#
# The order below gathers before each use of another stage, and frees after it, whatever room there is. It is the
# starting point, not the solution. `pipelab.check(schedule, gather_cap=2)` says which gather does not fit, and which
# action lacks its weights.


# %%
def answer(actions, room):
    """Yield a rank's actions, with gathers and frees between them."""
    gathered = None
    for action in actions:
        if action.stage != gathered:
            if gathered is not None:
                yield RESHARD(gathered)
            yield UNSHARD(action.stage)
            gathered = action.stage
        yield action
    yield RESHARD(gathered)


# %%
def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    for room, par in ((2, 10), (3, 7)):

        class Mine(pipelab.Interleaved1F1B):
            def actions(self, rank, room=room):
                return answer(list(super().actions(rank)), room)

        schedule = Mine(P, M, stages_per_rank=4)
        faults = pipelab.check(schedule, gather_cap=room)
        if faults:
            print(faults)
            return False
        found = gathers(schedule.plan())
        print(f"room for {room}: {found} gathers, par {par}; {pipelab.simulate(schedule, cost).makespan:g} units")
        reached.append(max(found) <= par)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: your step with room for two takes longer than PyTorch's 19.75 units, although it gathers less.
# Which would you rather have, and on which network? Teachers have the solution, `teacher/solutions/gathers.py`.
