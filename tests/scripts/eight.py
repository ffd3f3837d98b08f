"""2 stages x 2 replicas x 2 shards of FSDP2 on eight processes, each of which makes its own: as one process trains."""

from __future__ import annotations

import plain
import torch
import torch.distributed as dist
from facts import say
from spreading import Block, full, told
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pipelab

mse = nn.functional.mse_loss


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "replica", "shard"))
plan = pipelab.OneFOneB(2, 4).plan()
torch.manual_seed(1)
alone = nn.Sequential(*(Block() for _ in range(4)))
with pipelab.Pipeline([Block] * 4, plan, mse) as pipe:  # functions make the same weights everywhere
    alone.load_state_dict(pipe.state_dict())
torch.manual_seed(1 + dist.get_rank())  # rank 0's counts


def block():
    return fully_shard(Block(), mesh=mesh["replica", "shard"])


share = 2 * mesh["replica"].get_local_rank() + mesh["shard"].get_local_rank()
gradients, figures = [], []
group = mesh["pp"].get_group()
with pipelab.Pipeline([block] * 4, plan, mse, engine="torch", group=group, timeout=60) as pipe:
    optimizer = torch.optim.AdamW(pipe.parameters(), 0.01)
    theirs = torch.optim.AdamW(alone.parameters(), 0.01)
    for number in range(3):
        x, y = plain.batch(32, seed=number)
        own_x, own_y = x.chunk(4)[share], y.chunk(4)[share]
        for each in (optimizer, theirs):
            each.zero_grad()
        step = pipe.step(own_x if pipe.is_first else None, own_y if pipe.is_last else None)
        losses = torch.tensor([float(step.loss)])
        dist.all_reduce(losses)
        expected = mse(alone(x), y)
        expected.backward()
        there = {name: full(each.grad) for name, each in pipe.named_parameters()}
        gradients.append(plain.difference(there, {name: alone.get_parameter(name).grad for name in there}))
        figures.append(float(losses) / 8 / float(expected.detach()) - 1)
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        figures.append(float(pipe.clip_grad_norm_(0.1)) / float(norm) - 1)
        for each in (optimizer, theirs):
            each.step()
    weights = {name: full(each) for name, each in pipe.state_dict(whole=False).items()}
    whole = told(pipe.state_dict)
    held = [each.to_local().numel() / each.numel() for each in pipe.parameters()]
with torch.device("meta"):
    model = nn.Sequential(*(block() for _ in range(4)))
spread = told(lambda: pipelab.Pipeline(model, plan, mse, engine="torch", group=group))
say(
    gradients=max(gradients),
    figures=max(map(abs, figures)),
    weights=plain.difference(weights, {name: alone.state_dict()[name] for name in weights}),
    names=sorted(weights),
    held=sorted(set(held)),
    whole=whole,
    spread=spread,
)
dist.destroy_process_group()
