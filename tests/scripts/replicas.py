"""A stage on two processes: what keeps its copies alike, and what is refused as they would part."""

from __future__ import annotations

import plain
import torch
import torch.distributed as dist
from facts import say
from torch import nn

import pipelab

mse = nn.functional.mse_loss
plan = pipelab.replicate(pipelab.OneFOneB(1, 2), 2).plan()
x, y = plain.batch(8)

# running statistics
statistics = {}
for engine in ("torch", "threads"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    with pipelab.Pipeline(model, plan, mse, engine=engine, replicated_buffers="lowest", timeout=60) as pipe:
        pipe.step(x, y)
        statistics[engine] = [buffer.tolist() for buffer in model.buffers()]

# gradients that are clipped stay alike, whatever their type
clipped = []
for dtype in (torch.float64, torch.bfloat16):
    model = plain.mlp(2).to(dtype)
    with pipelab.Pipeline(model, plan, mse, engine="torch", timeout=60) as pipe:
        pipe.step(x.to(dtype), y.to(dtype))
        norm = pipe.clip_grad_norm_(0.01)
        clipped.append([str(norm.dtype), model[0].weight.grad.tolist()])

# whoever ends PyTorch's process group may go on afterwards
dist.destroy_process_group()
model, twin = plain.mlp(2), plain.mlp(2)
with pipelab.Pipeline(twin, plan, mse) as pipe:
    pipe.step(x, y)
with pipelab.Pipeline(model, plan, mse, engine="torch", timeout=5) as pipe:
    hook = model[0].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    try:
        pipe.step(x, y)
        hooked = ""
    except pipelab.EngineError as error:
        hooked = str(error)
    hook.remove()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    pipe.step(x, y)
again = plain.equal(plain.taken(model), plain.taken(twin))


# a buffer that a stage writes into
class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mask", torch.ones(1, 6).expand(4, 6))
        self.register_buffer("small", torch.zeros(2, dtype=torch.int16))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.sum()
        return self.linear(x)


try:
    with pipelab.Pipeline([Counts()], plan, mse, engine="torch", timeout=60) as pipe:
        pipe.step(x, y)
        refused = ""
except pipelab.EngineError as error:
    refused = f"{type(error).__name__}: {error}"
say(statistics=statistics, clipped=clipped, again=again, hooked=hooked, refused=refused)
