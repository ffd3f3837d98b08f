"""Diagnose PyTorch's own 1F1B in a process that trains one stage: right, and then without scaled gradients."""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from facts import say
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from pipelab import diagnose

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(0)
model, loss_fn = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), nn.MSELoss()
x, y = torch.randn(16, 6), torch.randn(16, 6)
mine = copy.deepcopy(model)[:2] if rank == 0 else copy.deepcopy(model)[2:]
for scaled in (True, False):
    stage = PipelineStage(mine, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn, scale_grads=scaled)

    def step(x, y, schedule=schedule):
        schedule.step(x) if rank == 0 else schedule.step(target=y)

    found = diagnose(step, model, x, y, loss_fn, microbatches=4, trained=[mine])
    say(code=found.code, factor=found.factor, right=[each.right for each in found.parameters.values()])
dist.destroy_process_group()
