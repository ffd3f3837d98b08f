"""Inputs, each in the process that needs it, give the numbers of the threads engine; parts cut apart are refused.

Here are a traced model, and keywords that say how long an output is. Others are attacked at random: see
`fuzz_inputs_in_processes`.
"""

from __future__ import annotations

import os

import plain
import torch
from facts import attempt, say
from torch import nn

import pipelab
from pipelab import Pipeline, microbatches, whole

mse, size, rank = nn.functional.mse_loss, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


class Traced(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, mask):
        for layer in self.layers:
            x = x + mask @ layer(x)
        return x


class Widened(nn.Linear):
    """Its output is as long as a keyword says."""

    def forward(self, x, table):
        return super().forward(x)[:, None] + table


def first(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


torch.manual_seed(0)
mask, lengths = whole(torch.ones(5, 5).tril()), (5, 3, 5, 4)
traced = pipelab.split(Traced(), into=size, example={"x": first(2, 5, 8), "mask": mask})
pieces = [nn.Linear(8, 8), Widened(8, 8), *(nn.Linear(8, 8) for _ in range(size - 2))]
ready = microbatches([*first(8, 8).split(2)]), microbatches([first(2, length, 8) for length in lengths])
table = {"table": microbatches([whole(first(length, 8)) for length in lengths])}
cases = {
    "traced with a mask": (traced, ({"x": first(8, 5, 8), "mask": mask}, first(8, 5, 8)), {}),
    "keywords of ready pieces": (pieces, ready, table),
}
for case, (stages, (x, y), keywords) in cases.items():
    found = []
    for engine in ("threads", "torch"):
        named = keywords if engine == "threads" or rank == 1 else {}
        with Pipeline(stages, pipelab.OneFOneB(size, 4), mse, ["cpu"] * size, engine=engine) as pipe:
            own = x if pipe.is_first else None, y if pipe.is_last else None
            loss = float(pipe.step(*own, keywords=named).loss)
            gradients = {name: each.grad.clone() for name, each in pipe.named_parameters() if each.grad is not None}
            pipe.stages.model.zero_grad()
            proof, forward = str(pipe.verify(*own, keywords=named)), pipe.forward(own[0], keywords=named)
            found.append((loss, proof, forward if isinstance(forward, list) else [forward], gradients))
    (*numbers, forward, gradients), (*numbers_here, forward_here, here) = found
    say(
        case=f"inputs, {case}",
        same=numbers == numbers_here and all(map(torch.equal, forward, forward_here)),
        gradients=bool(here) and plain.equal(here, {name: gradients[name] for name in here}),
    )

with Pipeline([nn.Linear(8, 8) for _ in range(size)], pipelab.OneFOneB(size, 4), mse, engine="torch") as pipe:
    apart = microbatches([first(many, 8) for many in (1, 3, 2, 2)])
    attempt(
        "inputs, cut apart", lambda: pipe.step(apart if pipe.is_first else None, first(8, 8) if pipe.is_last else None)
    )
