"""A failure in one process of a 2 x 2 mesh: the others wait for it in their own pipeline, or inside a stage."""

from __future__ import annotations

import sys

import plain
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pipelab


def block():
    def does(self, x):
        if sys.argv[1] == "raises" and dist.get_rank() == 3:
            raise ValueError("odd")
        return self.down(torch.relu(self.up(x)))

    return plain.Made(does, up=nn.Linear(8, 8), down=nn.Linear(8, 8))


mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
torch.manual_seed(0)
blocks = nn.Sequential(block(), block())
how = {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=sys.argv[1] == "raises")}
for block in blocks:
    parallelize_module(block, mesh["tp"], how)
group = mesh["pp"].get_group()
with pipelab.Pipeline(blocks, pipelab.OneFOneB(2, 2), nn.MSELoss(), engine="torch", group=group, timeout=60) as pipe:
    pipe.step(torch.randn(4, 8), torch.randn(4, 8))
