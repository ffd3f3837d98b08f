"""DistributedDataParallel with pipelab's codecs as communication hooks, beside DDP without one."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from facts import attempt, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipelab_course import codec_hook
from pipelab_course.ring.codecs import CODECS

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, ranks = dist.get_rank(), dist.get_world_size()
STEPS = 4


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(5, 6, generator=generator) for _ in range(ranks)] for _ in range(STEPS)]


def with_ddp(hook, **settings):
    model = DistributedDataParallel(module(), **settings)
    if hook is not None:
        model.register_comm_hook(model.process_group, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for rows in batches():
        model.zero_grad()
        model(rows[rank]).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


plain = with_ddp(None)
for codec in CODECS:
    # PyTorch makes other buckets after the first step: here, a bucket for each parameter
    for cap in (25, 1e-5):
        weights = with_ddp(codec_hook(codec), bucket_cap_mb=cap)
        everyone = [torch.empty_like(weights) for _ in range(ranks)]
        dist.all_gather(everyone, weights)
        say(
            case=f"{codec} {cap}",
            same=all(torch.equal(each, weights) for each in everyone),
            from_plain=float((weights - plain).abs().max()),
        )

for codec in ("int8", "int8-ef"):
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    model.register_comm_hook(model.process_group, codec_hook(codec))
    x = torch.tensor([[1.0, 0.003, 1.0, 0.003]])
    sums = torch.zeros_like(x)
    for _ in range(50):
        model.zero_grad()
        model(x).sum().backward()  # the gradient is x
        sums += model.module.weight.grad
    say(case=f"small {codec}", mean=(sums / 50)[0, 1].item())


def step_with(state, codec, layer=None):
    model = DistributedDataParallel(layer or module())
    model.register_comm_hook(model.process_group if state == "own" else state, codec_hook(codec))
    inputs = torch.tensor([[0, 1]]) if layer else torch.zeros(2, 6)
    model(inputs).sum().backward()


attempt("no group", lambda: step_with(None, "int8"))
attempt("codecs", lambda: step_with("own", "int8" if rank else "fp16"))
attempt("sparse", lambda: step_with("own", "int8", nn.Embedding(4, 2, sparse=True)))
dist.barrier()
os._exit(0)
