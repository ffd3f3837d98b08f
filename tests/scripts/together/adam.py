"""Five steps of Adam, with a break: saved after three, and taken up again by another pipeline."""

from __future__ import annotations

import copy
import io

import plain
import torch
from facts import say
from torch import nn
from training import train

import pipelab
from pipelab import Pipeline

mse = nn.functional.mse_loss

for schedule in (pipelab.OneFOneB(4, 5), pipelab.ZBV(4, 8)):
    plan = schedule.plan()
    model = plain.mlp(2 * plan.stages)
    twin = copy.deepcopy(model)
    with Pipeline(twin, plan, mse) as pipe:
        expected = train(pipe, torch.optim.Adam(pipe.parameters(), lr=0.01), range(5))
    with Pipeline(model, plan, mse, engine="torch", timeout=60) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        figures = train(pipe, optimizer, range(3))
        file = io.BytesIO()
        torch.save({"model": pipe.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    again = plain.mlp(2 * plan.stages, seed=7)
    again.load_state_dict(saved["model"])
    with Pipeline(again, plan, mse, engine="torch", timeout=60) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        optimizer.load_state_dict(saved["optimizer"])
        figures += train(pipe, optimizer, [3, 4])
        state = pipe.state_dict()
    say(
        case="adam",
        schedule=type(schedule).__name__,
        figures=figures,
        expected=expected,
        parameters=plain.equal(state, twin.state_dict()),
    )
