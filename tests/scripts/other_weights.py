"""Pipelines whose processes begin with the same weights, or with others: what each of them is warned of."""

from __future__ import annotations

import os
import warnings

import plain
import torch
from facts import say
from torch import nn

import pipelab

rank = int(os.environ["RANK"])
found = {}


def made(case, model, *, steps=False, gathers=False):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = pipelab.OneFOneB(2, 2)
        with pipelab.Pipeline(model, plan, nn.functional.mse_loss, engine="torch", timeout=60) as pipe:
            if steps:
                pipe.step(*plain.batch(4))
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            if gathers:
                pipe.state_dict()
    found[case] = [f"{os.path.basename(each.filename)}: {each.message}" for each in caught]


class Own(nn.Parameter):
    pass


same = plain.mlp(4)
made("same", same, steps=True)
made("trained on", same, steps=True)
made("gathered", same, steps=True, gathers=True)
made("after that", same)
torch.manual_seed(rank)
made("seed", nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))))
loaded = plain.mlp(4, seed=9 if rank == 0 else 0)
made("loaded once", loaded)
made("half floats", plain.mlp(4).to(torch.bfloat16))
with torch.device("meta"):
    empty = nn.Linear(6, 6)
made("own stages only", [[nn.Linear(6, 6), empty], [empty, nn.Linear(6, 6)]][rank])
of_a_class = plain.mlp(4)
of_a_class[0].weight = Own(torch.full((6, 6), 1.0 + rank))
made("of a class", of_a_class)
say(**found)
