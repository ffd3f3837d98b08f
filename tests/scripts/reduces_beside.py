"""Two replicas of a pipeline, their all-reduces in rows and beside computing: what each of two processes gets."""

from __future__ import annotations

import plain
import torch
from facts import say
from torch import nn

import pipelab

plan = pipelab.replicate(pipelab.LoopedBFS(1, 2, stages_per_rank=2), 2)


def layer():
    """Return a layer with a parameter that no replica uses, and one that a replica alone uses."""
    return plain.Made(
        lambda self, x: self.linear(x) + (self.seldom if x.flatten()[0] == 0 else 0),
        unused=nn.Parameter(torch.ones(3)),
        seldom=nn.Parameter(torch.ones(6)),
        linear=nn.Linear(6, 6),
    )


x, y = plain.batch(8)
x[2] = 0  # micro-batch 1: of the second replica
found = {}
for runs in ("in-row", "beside"):
    torch.manual_seed(0)
    model = nn.Sequential(layer(), layer())
    with pipelab.Pipeline(
        model, plan, nn.functional.mse_loss, engine="torch", timeout=60, all_reduce_runs=runs
    ) as pipe:
        losses = [pipe.step(x, y).loss.item() for _ in range(2)]  # the second adds to what is there
        step = pipe.step(x, y)
        gradients = [None if each.grad is None else each.grad.tolist() for each in pipe.parameters()]
        found[runs] = {
            "gradients": gradients,
            "losses": losses,
            "outputs": pipe.forward(x).tolist(),
            "trace": step.trace.to_dict(),
        }
model = plain.mlp(2)
with pipelab.Pipeline(
    model, plan, nn.functional.mse_loss, engine="torch", timeout=60, all_reduce_runs="beside"
) as pipe:
    verified = pipe.verify(*plain.batch(8)).largest_difference
say(**found, verified=verified)
