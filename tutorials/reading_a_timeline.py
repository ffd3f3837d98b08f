# %% [markdown]
# # Reading a measured timeline
#
# Your pipeline runs. Its gradients are right, and a step takes nearly 40 % longer than the simulation says. Its ranks
# wait for 40 % of their time. One colleague proposes a better schedule, another one a faster network.
#
# On this page you find out why a measured step is slow, in three moves: ask where the time went, ask what it would be
# without one cause, and compare with a prediction. At the end you do the same with a job that has never heard of
# pipelab.
#
# It takes about 20 minutes, and you need [Your first schedule](first_schedule.md) before it. Run it with
# `pipelab tutorial reading_a_timeline`, which asks for your predictions before it shows the answers.
#
# ## A job to look at
#
# Four ranks run 1F1B with eight micro-batches. To see the same on every machine, the stages sleep instead of computing:
# each takes 10 ms forward and 20 ms backward. One of them takes longer, and you do not know which one.

# %%
import torch

import pipelab
from pipelab.hub import profiles
from pipelab_course.tutorial import TUTORIALS

SLOW = 2  # do not look
stages = pipelab.emulated(4, [16 if s == SLOW else 10 for s in range(4)], [32 if s == SLOW else 20 for s in range(4)])
rows = torch.ones(8, 1)
with pipelab.Pipeline(stages, pipelab.OneFOneB(4, 8), torch.nn.functional.mse_loss, devices=["cpu"] * 4) as pipe:
    pipe.step(rows, rows)  # the first step warms up
    measured = pipe.step(rows, rows).trace
print(f"{measured.makespan:.0f} ms")

# %% [markdown]
# With 1 and 2 units, [Your first schedule](first_schedule.md) simulated this order: 33 units. Here a unit is 10 ms, so
# it should take 330 ms.
#
# ## Predict: does the slow rank wait?
#
# Does the rank with the slow stage wait more than the others, or less?

# %%
my_prediction = None  # more or less

# %% tags=["answer"]
print(f"predicted {my_prediction}")
print(measured.ledger)
idle = [sum(measured.ledger[rank].values()) for rank in range(4)]
assert idle.index(min(idle)) == SLOW

# %% [markdown] tags=["answer"]
# The **ledger** splits each rank's time into work and waiting, by reason. Rank 2 is the one that hardly waits. **A rank
# that waits is a victim; look for the one that does not.** Before its first action a rank waits for `fill`, and after
# its last one for `drain`. In between, the reason is `wait`: what the ranks need has not been computed yet.
# If the network were the cause, they would wait for `transfer`. With the reason `order`, all that a rank needs is
# there, and the machine is late. A poor schedule also gives `wait`, so we check it below.

# %% [markdown]
# ## Why does this rank wait, now?

# %%
measured

# %% [markdown]
# Rank 0 waits for its gradients, for instance before [`0B3`](#s=0:0B3.0). For one moment of one rank, `why` follows the
# chain back to its root:

# %%
middle = next(event.start for event in measured.events if str(event.action) == "0B3")
print(measured.why(rank=0, at=middle - 1))

# %% [markdown]
# In the picture above, and on the page that `measured.save("job.html")` writes, a click on the gap gives the same
# sentences.
#
# ## Predict: what would it save?
#
# Suppose the slow stage were as quick as the others. How long would the step take? And if it stayed as slow, and all
# *other* stages became twice as quick?

# %%
my_second_prediction = None  # two numbers of ms

# %% tags=["answer"]
print(f"predicted {my_second_prediction}")
for rank in range(4):
    print(pipelab.what_if(measured, rank))
delays = [pipelab.what_if(measured, rank).delay for rank in range(4)]
assert delays.index(max(delays)) == SLOW
assert pipelab.what_if(measured, SLOW).trace.makespan < measured.makespan
quick = {"forward": [16 if s == SLOW else 5 for s in range(4)], "backward": [32 if s == SLOW else 10 for s in range(4)]}
others = pipelab.simulate(measured.plan, pipelab.Cost(**quick))
print(f"all other stages twice as quick: {others.makespan:g} ms")
assert others.makespan == 414

# %% [markdown] tags=["answer"]
# Nearly 330 ms, so no other cause is worth looking for. Without the delay of any *other* rank, the step would take as
# long as now. And three stages of four that are twice as quick save less than a tenth of the step.
#
# The slow rank has 8 × 18 = 144 ms more to do than the others. Nearly all of it makes the step longer; the rest falls
# into times in which rank 2 would have waited.

# %% [markdown]
# ## Theory above, practice below
#
# `Cost.fit` reads from the trace how long each stage takes. Simulated with these times, the same order should take as
# long as it did. `pipelab.diff` lists the remaining differences, action by action:

# %%
predicted = pipelab.simulate(measured.plan, pipelab.Cost.fit(measured))
found = pipelab.diff(predicted, measured, names=["predicted", "measured"])
print(found.sentence)

# %%
pipelab.compare(predicted, measured, names=["predicted", "measured"])

# %% [markdown]
# With the fitted times, you can compare schedules without measuring again. Would another order help here?

# %%
cost = pipelab.Cost.fit(measured)
for schedule in (pipelab.GPipe(4, 8), pipelab.OneFOneB(4, 8), pipelab.OneFOneB(4, 16)):
    trace = pipelab.simulate(schedule, cost)
    print(f"{schedule}: {trace.makespan:.0f} ms, {trace.makespan / schedule.microbatches:.1f} ms per micro-batch")
bound = pipelab.lower_bound(pipelab.OneFOneB(4, 8), cost)
print(f"no order of these actions takes less than {bound:.0f} ms")
assert bound > 8 * 48  # what the slow stage has to do

# %% [markdown]
# No order can: the slow stage alone has 8 × 48 = 384 ms to do. So neither the schedule nor the network is to blame. The
# *cut* is, or the device.
#
# ## Another team's job
#
# The files in `tutorials/somebodys_job` are from a job that uses PyTorch's own pipelining and knows nothing of pipelab:
# two processes with two stages each, profiled with `torch.profiler`. You do not know what is wrong with it.

# %%
job = profiles.load(f"{TUTORIALS}/somebodys_job/rank*.json.gz")
job

# %%
print(job.ledger)
for rank in range(job.ranks):
    print(pipelab.what_if(job, rank))
assert pipelab.what_if(job, 1).trace.makespan < 0.5 * job.makespan
assert pipelab.what_if(job, 0).delay == 0

# %% [markdown]
# Rank 0 works for a third of the time, and rank 1 nearly always: rank 0 [waits 15 ms](#s=0:idle.0.22.07198) for the
# first gradient alone. If rank 1 were as quick as rank 0, the step would take
# 70 ms instead of 172. Look for this first in your own profiles: a device that is throttled or shared, or a stage that
# got more than its share. [Read a trace of another job](../profiles.md) says how to profile yours.

# %%
assert (round(job.makespan), round(pipelab.what_if(job, 1).trace.makespan)) == (172, 70)

# %% [markdown]
# ## Exercise: cut it again
#
# Two jobs train models of equal layers, on unequal devices. You have one trace of each, and you know how many layers
# each rank held in it. Return a better cut: how many layers each rank should hold. A layer takes as long as before on
# the device on which it runs, and every rank needs at least one.
#
# - **Par of the first job, 16 layers: 370.5 ms** instead of 458.
# - **Par of the second job, 24 layers: 538.5 ms** instead of 711.
#
# The function below leaves the cut as it is. It is the starting point, not the solution.


# %%
def answer(trace, layers):
    """Return how many layers each rank should hold, given a trace and how many it held there."""
    return layers


# %%
def run(layers, forward_ms):
    """Return the trace of a job in which a layer's forward takes so long on each rank, and its backward twice that."""
    forward = [count * time for count, time in zip(layers, forward_ms, strict=True)]
    times = pipelab.Cost(forward=forward, backward=[2 * time for time in forward], unit="ms")
    return pipelab.simulate(pipelab.OneFOneB(len(layers), 8), times)


def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    for layers, forward_ms, par in (((4,) * 4, (2.5, 2.5, 4, 2.5), 370.5), ((6,) * 4, (2, 3, 2.5, 4), 538.5)):
        cut = tuple(answer(run(layers, forward_ms), layers))
        if len(cut) != 4 or sum(cut) != sum(layers) or min(cut) < 1:
            print(f"{cut} is not a cut of {sum(layers)} layers over 4 ranks")
            return False
        trace = run(cut, forward_ms)
        print(f"{sum(layers)} layers, cut {cut}: {trace.makespan:g} ms, par {par}")
        reached.append(trace.makespan <= par)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: is the cut with the shortest step also the one in which the slowest rank has the least to do?
# Teachers have the solution, `teacher/solutions/reading_a_timeline.py`.
