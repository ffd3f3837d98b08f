"""Pipelines times replicas on six processes: each trains what one device trains on the same batches."""

from __future__ import annotations

import plain
import torch
from facts import say
from torch import nn

import pipelab
from pipelab import Pipeline

mse = nn.functional.mse_loss

for stages, replicas in ((3, 2), (2, 3)):
    plan = pipelab.replicate(pipelab.OneFOneB(stages, 4), replicas).plan()
    model, alone = plain.mlp(2 * stages), plain.mlp(2 * stages)
    losses, expected, largest = [], [], 0.0
    with Pipeline(model, plan, mse, engine="torch", timeout=60) as pipe:
        own, plains = (torch.optim.SGD(each, lr=0.1) for each in (list(pipe.parameters()), alone.parameters()))
        for number in range(4):
            x, y = plain.batch(2 * plan.microbatches + 1, seed=number)  # rows that the micro-batches do not divide
            own.zero_grad()
            plains.zero_grad()
            losses.append(float(pipe.step(x, y).loss))
            expected.append(float(plain.at_once(alone, mse, x, y)))
            ours = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
            largest = max(largest, plain.difference(ours, {name: alone.get_parameter(name).grad for name in ours}))
            own.step()
            plains.step()
        state = pipe.state_dict()
    weights = plain.difference(state, dict(alone.named_parameters()))
    say(stages=stages, replicas=replicas, losses=losses, expected=expected, gradients=largest, weights=weights)

plan = pipelab.replicate(pipelab.OneFOneB(2, 1), 3).plan()
with Pipeline(pipelab.emulated(2, 1, 2, all_reduce_ms=[20, 5]), plan, mse, engine="torch", timeout=60) as pipe:
    trace = pipe.step(torch.ones(3, 1), torch.ones(3, 1)).trace
reduces = [[event.action.stage, event.duration] for event in trace.events if event.action.kind == "R"]
say(reduces=reduces)
