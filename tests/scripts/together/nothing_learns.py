"""Every process has an optimizer that works, also where no parameter learns: a stage without any, and a frozen one."""

from __future__ import annotations

import copy

import plain
import torch
from facts import say
from torch import nn

import pipelab
from pipelab import Pipeline


def trained(model, **engine):
    """Return the model's state after two steps of Adam with a scaler, whose gradients are clipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with Pipeline(model, pipelab.OneFOneB(4, 4), nn.functional.mse_loss, **engine) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            pipe.step(x, y, scaler)
            scaler.unscale_(optimizer)
            pipe.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
        saved = pipe.optimizer_state_dict(optimizer)
        pipe.load_optimizer_state_dict(optimizer, saved)
        names = sorted({key.split(".")[1] for key in saved})
        return pipe.state_dict(), len(list(pipe.parameters())), len(list(pipe.named_parameters())), names


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6))
x, y = plain.batch(8)
expected = trained(copy.deepcopy(model))[0]
state, *rest = trained(model, engine="torch", timeout=60)
say(case="nothing learns", rest=rest, same=plain.equal(state, expected))
