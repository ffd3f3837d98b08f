"""A traced model whose mask is whole gives the numbers of the threads engine; parts cut apart are refused.

Other inputs and keywords, each in the process that needs it, are attacked at random: see `fuzz_inputs_in_processes`.
"""

from __future__ import annotations

import os

import plain
import torch
from facts import attempt, say
from torch import nn

import pipelab
from pipelab import Pipeline, microbatches, whole

mse, size = nn.functional.mse_loss, int(os.environ["WORLD_SIZE"])


class Traced(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, mask):
        for layer in self.layers:
            x = x + mask @ layer(x)
        return x


def first(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


mask = whole(torch.ones(5, 5).tril())
x, y = {"x": first(8, 5, 8), "mask": mask}, first(8, 5, 8)
torch.manual_seed(0)
stages, found = pipelab.split(Traced(), into=size, example={"x": first(2, 5, 8), "mask": mask}), []
for engine in ("threads", "torch"):
    stages.model.zero_grad()
    with Pipeline(stages, pipelab.OneFOneB(size, 4), mse, ["cpu"] * size, engine=engine) as pipe:
        own = x if pipe.is_first else None, y if pipe.is_last else None
        loss = float(pipe.step(*own).loss)
        gradients = {name: each.grad.clone() for name, each in pipe.named_parameters() if each.grad is not None}
        found.append((loss, gradients, str(pipe.verify(*own)), pipe.forward(own[0])))
(loss, gradients, proof, forward), (loss_here, here, proof_here, forward_here) = found
say(
    case="inputs, traced with a mask",
    same=(loss_here, proof_here) == (loss, proof) and torch.equal(forward_here, forward),
    gradients=bool(here) and plain.equal(here, {name: gradients[name] for name in here}),
)

with Pipeline([nn.Linear(8, 8) for _ in range(size)], pipelab.OneFOneB(size, 4), mse, engine="torch") as pipe:
    pieces = microbatches([first(many, 8) for many in (1, 3, 2, 2)])
    attempt(
        "inputs, cut apart", lambda: pipe.step(pieces if pipe.is_first else None, first(8, 8) if pipe.is_last else None)
    )
