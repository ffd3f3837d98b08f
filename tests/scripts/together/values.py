"""Stages that give several tensors, in dictionaries and of any type."""

from __future__ import annotations

import copy
import os

import plain
import torch
from facts import say
from torch import nn
from training import ROWS

import pipelab
from pipelab import Pipeline

mse = nn.functional.mse_loss
rank = int(os.environ["RANK"])
x, y = plain.batch(ROWS)


class Two(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.linear, self.aside, self.sometimes, self.first = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), first

    def forward(self, given):
        x, seen = (given, torch.zeros(len(given), dtype=torch.int64)) if self.first else (given["x"], given["seen"])
        if not self.first and x.sum() > 0:
            x = x + given["sometimes"]
        more = {"aside": self.aside(x), "sometimes": self.sometimes(x)}  # the next stage uses it never, and not always
        return {"x": self.linear(x), "seen": seen + 1, "skip": x, **more}


def last(self, given):
    assert bool((given["seen"] == 3).all())
    return self.linear(given["x"]) + given["skip"]


torch.manual_seed(0)
stages = [Two(first=True), Two(first=False), Two(first=False), plain.Made(last, linear=nn.Linear(6, 6))]
twins = copy.deepcopy(stages)
plan = pipelab.ZBH1(4, 4).plan()
with Pipeline(twins, plan, mse) as pipe:
    theirs = pipe.step(x, y)
with Pipeline(stages, plan, mse, engine="torch", timeout=60) as pipe:
    ours = pipe.step(x, y)
    state = pipe.state_dict()
here, there = plain.taken(stages[rank]), plain.taken(twins[rank])
none = [name for name, gradient in here.items() if gradient is None]
say(
    case="trees",
    loss=torch.equal(ours.loss, theirs.loss),
    gradients=plain.equal(here, there),
    none=none,
    keys=list(state)[:2],
)


def gives(self, x):
    made = self.linear(x)
    first, *rest = (piece.contiguous() for piece in made.chunk(3, dim=-1))
    small, whole = made.detach().to(torch.float8_e4m3fn), (made.detach().abs() * 10).to(torch.uint16)
    return first, rest, made[:, :1].repeat(1, 16), torch.complex(made, made), small, whole


def takes(self, given):
    first, (second, third), same, phases, small, whole = given
    scores = torch.softmax(first @ second.t(), dim=-1) @ third + same.sum(-1, keepdim=True) / 100
    made = self.linear(scores + phases.imag.sum(-1, keepdim=True) + small.float().sum(-1, keepdim=True) / 1e3)
    return made + whole.float().mean(), small


plan, found = pipelab.replicate(pipelab.OneFOneB(2, 3), 2).plan(), []
for engine in ("threads", "torch"):
    torch.manual_seed(0)
    stages = [plain.Made(gives, linear=nn.Linear(6, 48)), plain.Made(takes, linear=nn.Linear(16, 6))]
    with Pipeline(stages, plan, lambda made, y: mse(made[0], y), engine=engine, timeout=60) as pipe:
        pipe.step(x, y)
        made = pipe.forward(x)
    found.append((plain.taken(stages[rank % 2]), made))
(their_gradients, theirs), (our_gradients, ours) = found
say(
    case="kinds",
    gradients=plain.equal(our_gradients, their_gradients),
    made=[torch.equal(one.float(), other.float()) for one, other in zip(theirs, ours, strict=True)],
    dtype=str(ours[1].dtype),
)
