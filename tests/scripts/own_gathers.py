"""Plans that say when FSDP2 gathers and frees a stage's weights: gradients are those of FSDP2's own hooks."""

from __future__ import annotations

import sys

import plain
import torch
import torch.distributed as dist
from facts import say
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pipelab

ranks = int(sys.argv[1])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (ranks, dist.get_world_size() // ranks), mesh_dim_names=("pp", "dp"))
looped = pipelab.LoopedBFS(ranks, 4, stages_per_rank=3).plan()
by_hand = [
    [
        each
        for item in row
        for each in ([pipelab.UNSHARD(item.stage), item, pipelab.RESHARD(item.stage)] if item.kind in "FB" else [item])
    ]
    for row in looped.rows
]
plans = {
    "hooks": looped,
    "2 active": pipelab.with_gathers(looped, 2),
    "around each": looped.with_rows(by_hand, "around each"),
}


def sharded():
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(looped.stages)]
    for block in blocks:
        fully_shard(block[2], mesh=mesh["dp"])  # a part of its own, as layers of a stage are
    return [fully_shard(block, mesh=mesh["dp"]) for block in blocks]


GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
gathers, all_gather = [], getattr(dist, GATHER)


def counted(*given, **named):
    gathers.append(given)
    return all_gather(*given, **named)


setattr(dist, GATHER, counted)  # FSDP2 calls it


def local(tensors):
    return [each.to_local() for each in tensors]


found, wanted = {}, {}
x, y = plain.batch(16)
mine = [each.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for each in (x, y)]
for name, plan in plans.items():
    stages, equal = sharded(), True
    with pipelab.Pipeline(
        stages, plan, nn.functional.mse_loss, engine="torch", group=mesh["pp"].get_group(), timeout=30
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, foreach=False)
        for number in range(2):
            optimizer.zero_grad()
            gathers.clear()
            step = pipe.step(*mine)
            many = len(gathers)
            now = [step.loss, *local(each.grad for each in pipe.parameters())]
            equal &= all(map(torch.equal, now, wanted.setdefault(number, now)))
            optimizer.step()
        forward = pipe.forward(mine[0])  # it learns the shapes, too
        gathers.clear()
        evaluation = pipe.evaluate(*mine)
        many = many, len(gathers)
        now = [forward, evaluation.loss, *local(pipe.parameters())]
        equal &= all(map(torch.equal, now, wanted.setdefault("after", now)))
        verified = pipe.verify(*mine).largest_difference
    found[name] = {"equal": equal, "verified": verified, "gathers": many}
    found[name] |= {"trace": step.trace.to_dict(), "evaluation": evaluation.trace.to_dict()}
say(**found)
dist.destroy_process_group()
