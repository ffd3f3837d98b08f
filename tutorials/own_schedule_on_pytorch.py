# %% [markdown]
# # Your own schedule on PyTorch's engine
#
# You have an idea for a schedule. PyTorch has seven schedules in `torch.distributed.pipelining`, and yours is not among
# them. To try it there you would have to read a file of more than 150 kB and write a subclass of something that begins
# with an underscore.
#
# On this page you check an order of ten lines, prove it on tensors, run it with a process for each rank on PyTorch's
# runtime, and in the end hand it to a script that has never heard of pipelab.
#
# It takes about 19 minutes, and you need [Your first schedule](first_schedule.md) before it. The exercise splits
# backwards, as in [Splitting the backward](splitting_the_backward.md). Run it with
# `pipelab tutorial own_schedule_on_pytorch`, which asks for your predictions before it shows the answers.
#
# ## The idea
#
# In 1F1B each rank changes between forwards and backwards all the time. Suppose that changing costs something on your
# device (caches, kernels). Then two forwards, two backwards might be better: *2F2B*.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import pipelab
from pipelab import B, F


class TwoFTwoB(pipelab.Schedule):
    """As 1F1B, with everything in twos. The number of micro-batches must be even."""

    def actions(self, rank):
        twos = self.microbatches // 2
        warmup = min(twos, self.ranks - rank)
        order = [("F", two) for two in range(warmup)]
        for two in range(twos - warmup):
            order += [("B", two), ("F", warmup + two)]
        order += [("B", two) for two in range(twos - warmup, twos)]
        for kind, two in order:
            for m in (2 * two, 2 * two + 1):
                yield F(m) if kind == "F" else B(m)


schedule = TwoFTwoB(ranks=2, microbatches=8)
pipelab.compare(schedule, pipelab.OneFOneB(2, 8))

# %% [markdown]
# It is legal. If changing costs nothing, it takes as long as 1F1B: rank 0 waits [1 unit](#s=0:idle.0.4) and later
# [2](#s=0:idle.0.21), in 1F1B [2](#s=1:idle.0.2) and later [1](#s=1:idle.0.24). It holds twice as many activations.
# Whether it gains anything on a device is a question for a device.

# %%
assert pipelab.check(schedule) == []
mine, theirs = (pipelab.simulate(each) for each in (schedule, pipelab.OneFOneB(2, 8)))
assert mine.makespan == theirs.makespan == 27
assert (mine.peak_activations, theirs.peak_activations) == ((4, 2), (2, 1))

# %% [markdown]
# ## On tensors
#
# First with a thread for each rank. `verify` compares the gradients with plain training.

# %%
torch.manual_seed(0)
model = torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(32, 32), torch.nn.Tanh())))
x, y = torch.randn(16, 32), torch.randn(16, 32)
with pipelab.Pipeline(model, schedule, torch.nn.functional.mse_loss) as pipe:
    pipe.step(x, y)
    print(pipe.verify(x, y))

# %% [markdown]
# ## In processes
#
# Now each rank becomes a process, as on a cluster, and PyTorch's runtime runs the plan: it sends, receives, and decides
# when each action runs.
#
# ## Predict: from threads to processes
#
# How many lines of the schedule have to change? And will the gradients equal plain training's in every bit, or within
# rounding?

# %%
my_prediction = None  # a number of lines, and "bits" or "rounding"

# %% tags=["answer"]
folder = Path(tempfile.mkdtemp())
written = (folder / "two_f_two_b.py").write_text(
    """
import torch
import pipelab
from pipelab import B, F


class TwoFTwoB(pipelab.Schedule):
    def actions(self, rank):
        twos = self.microbatches // 2
        warmup = min(twos, self.ranks - rank)
        order = [("F", two) for two in range(warmup)]
        for two in range(twos - warmup):
            order += [("B", two), ("F", warmup + two)]
        order += [("B", two) for two in range(twos - warmup, twos)]
        for kind, two in order:
            for m in (2 * two, 2 * two + 1):
                yield F(m) if kind == "F" else B(m)


torch.manual_seed(0)  # every process builds the same model and sees the same batch
model = torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(32, 32), torch.nn.Tanh())))
x, y = torch.randn(16, 32), torch.randn(16, 32)
with pipelab.Pipeline(model, TwoFTwoB(2, 8), torch.nn.functional.mse_loss, engine="torch") as pipe:
    step = pipe.step(x, y)
    proof = pipe.verify(x, y)
if torch.distributed.get_rank() == 0:
    print(proof)
"""
)


def launch(script):
    """Return what a script prints in two processes; in a terminal: pipelab launch script.py --ranks 2."""
    command = [sys.executable, "-m", "pipelab", "launch", script, "--ranks", "2"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=300).stdout


# %% tags=["answer"]
print(f"predicted {my_prediction}")
said = launch("two_f_two_b.py")
print(said)
assert "bit for bit" in said

# %% [markdown] tags=["answer"]
# No line of the schedule. The script has one more argument, `engine="torch"`, and you start it with `pipelab launch`,
# or with torchrun on as many machines as you like. Every bit is the same, because both engines run the same
# micro-batches through the same stages in an order that the plan fixes.

# %% [markdown]
# ## Without pipelab
#
# Perhaps your cluster's training code is PyTorch's own, and stays so. A plan is a small file in PyTorch's notation, a
# line for each rank:

# %%
plan = schedule.plan()
plan.to_csv(folder / "plan.csv")
print((folder / "plan.csv").read_text())

# %% [markdown]
# PyTorch's runtime reads it, adds the sends and receives, and runs it. The next script does not import pipelab. (The
# class is private in PyTorch 2.13, so its name may change; see the notes in [Several processes](../processes.md).)

# %%
written = (folder / "plain.py").write_text(
    """
import os
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)
halves = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(2)]
x, y = torch.randn(16, 32), torch.randn(16, 32)

stage = PipelineStage(halves[rank], rank, 2, torch.device("cpu"))
runtime = _PipelineScheduleRuntime([stage], 8, loss_fn=torch.nn.functional.mse_loss)
runtime._load_csv("plan.csv", format="compute_only")
runtime.step(*([x] if rank == 0 else []), **({"target": y} if rank == 1 else {}))
mine = halves[rank][0].weight.grad.clone()

for half in halves:
    half.zero_grad()
torch.nn.functional.mse_loss(torch.nn.Sequential(*halves)(x), y).backward()
difference = (mine - halves[rank][0].weight.grad).norm() / mine.norm()
print(f"rank {rank}: gradient differs from plain training by {difference:.0e} of its length\\n", end="", flush=True)
assert difference < 1e-5
dist.destroy_process_group()
"""
)
print(launch("plain.py"))

# %% [markdown]
# It works the other way round, too. What PyTorch's schedules write (`_dump_csv`) is a plan for pipelab, to be checked,
# simulated and drawn:

# %%
assert pipelab.Plan.from_csv(folder / "plan.csv").rows == plan.rows

# %% [markdown]
# ## Exercise: a pass over plans
#
# Compilers have *passes*: programs that read a program and write a better one. Write a pass for plans. It gets the file
# of a schedule with whole backwards, one line for each rank, and returns the file of a quicker plan.
#
# PyTorch knows two halves of a backward: `1I0` is the gradient of stage 1's input for micro-batch 0, `1W0` the gradient
# of its weights. The ranks before wait for the input's gradient only. Each of `F`, `I` and `W` takes one unit.
#
# - **Par for 1F1B on two ranks with 4 micro-batches: 13 units.** Whole backwards take 15.
# - **Par for 1F1B on four ranks with 8: 27 units, with at most 4 activations on any rank.** Whole backwards take 33.
#
# Nothing is quicker than these two: the last rank has 12 or 24 units of work, and its first input arrives after 1 or 3.
# The pass below writes `I` and `W` where `B` was: the starting point, not the solution. (Which ranks have time to put
# their `W` off? How many may a rank owe before it holds more than rank 0?)


# %%
def answer(lines):
    """Return the lines of a plan, with split backwards."""
    written = []
    for line in lines:
        words = []
        for word in line.split(","):  # such as 1B0: stage 1, backward, micro-batch 0
            words += [word.replace("B", "I"), word.replace("B", "W")] if "B" in word else [word]
        written.append(",".join(words))
    return written


# %%
def reaches_par(answer):
    """Print how far an answer is from par; return whether it reaches both pars."""
    reached = []
    cost = pipelab.Cost(forward=1, input_grad=1, weight_grad=1)
    for ranks, microbatches, par in ((2, 4, 13), (4, 8, 27)):
        pipelab.OneFOneB(ranks, microbatches).plan().to_csv(folder / "whole.csv")
        lines = answer((folder / "whole.csv").read_text().splitlines())
        (folder / "answer.csv").write_text("".join(f"{line}\n" for line in lines))
        plan = pipelab.Plan.from_csv(folder / "answer.csv")
        if faults := pipelab.check(plan, memory_cap=ranks):
            print(f"{ranks} ranks: {faults[0]}")
            return False
        if (plan.ranks, plan.microbatches) != (ranks, microbatches):
            print(f"{ranks} ranks: the plan is for {plan.ranks} ranks and {plan.microbatches} micro-batches")
            return False
        trace = pipelab.simulate(plan, cost)
        print(f"{ranks} ranks: {trace.makespan:g} units, par {par}; activations {trace.peak_activations}")
        reached.append(trace.makespan <= par)
    return all(reached)


print("par!" if reaches_par(answer) else "not yet")

# %% [markdown]
# When you are done: run your plan for two ranks with `plain.py`, which then needs a 4 where it has an 8. Are the
# gradients still right? And what does your pass do with `TwoFTwoB`? Teachers have the solution,
# `teacher/solutions/own_schedule_on_pytorch.py`.
