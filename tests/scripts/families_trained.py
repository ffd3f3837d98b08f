"""Two families of models in two processes: three AdamW steps, each process with its own data, as plain training.

One has experts, and of the other one, encoder and decoder, several values travel.
"""

from __future__ import annotations

import copy

import families
import torch
from facts import say

import pipelab


def plain(model, x, y):
    """Train on the micro-batches, one after another; return the losses."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5), []
    for _ in range(3):
        optimizer.zero_grad()
        pieces = [
            families.loss(model(**families.part(x, index)), y[2 * index : 2 * index + 2]) / 4 for index in range(4)
        ]
        for each in pieces:
            each.backward()
        losses.append(float(sum(pieces).detach()))
        optimizer.step()
    return losses


for name in ("MixtralForCausalLM", "T5ForConditionalGeneration"):
    model, (x, y) = families.made(name), families.batch(name)
    twin = copy.deepcopy(model)
    stages = pipelab.split(model, 2, by="parameters", example=families.part(x, 0))
    with pipelab.Pipeline(stages, pipelab.OneFOneB(2, 4), families.loss, engine="torch", timeout=60) as pipe:
        optimizer, losses = torch.optim.AdamW(pipe.parameters(), lr=1e-3, eps=1e-5), []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(float(pipe.step(x if pipe.is_first else None, y if pipe.is_last else None).loss))
            optimizer.step()
        state = pipe.state_dict()
    began = [each.clone() for each in twin.state_dict().values()]
    expected = plain(twin, x, y) if pipe.is_first else losses  # once is enough
    theirs = twin.state_dict()
    if pipe.is_first:
        say(
            case=name,
            losses=max(abs(one / other - 1) for one, other in zip(losses, expected, strict=True)),
            weights=families.distance(state.values(), [theirs[each] for each in state]),
            learned=families.distance(state.values(), began),
        )
