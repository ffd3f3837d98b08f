"""A weight of two stages in several processes: three steps of SGD equal plain training's, and every rank's weight."""

from __future__ import annotations

import sys

import plain
import torch
from facts import say
from torch import nn

import pipelab
from pipelab import Pipeline

plans = {
    "1f1b": pipelab.OneFOneB(4, 4),  # two ranks have nothing of the tied weight
    "interleaved-1f1b": pipelab.Interleaved1F1B(2, 4),
    "zbv": pipelab.ZBV(2, 4),
    "replicated": pipelab.replicate(pipelab.OneFOneB(2, 2), 2),
    "traced": pipelab.OneFOneB(2, 4),
}


def model() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Embedding(11, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))]
    head = nn.Linear(8, 11, bias=False)
    head.weight = layers[0].weight
    return nn.Sequential(*layers, head)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


for how in sys.argv[1:]:
    ours, alone = model(), model()
    if how == "traced":
        ours, alone = plain.unlisted(ours), plain.unlisted(alone)
    stages = pipelab.split(ours, into=2, example=torch.zeros(2, 5, dtype=torch.long)) if how == "traced" else ours
    first = "layers.0.weight" if how == "traced" else "0.weight"
    largest, norms = 0.0, []
    with Pipeline(stages, plans[how], loss, engine="torch", timeout=60) as pipe:
        optimizers = [torch.optim.SGD(each, lr=0.1) for each in (list(pipe.parameters()), alone.parameters())]
        for number in range(3):
            torch.manual_seed(number)
            x, y = torch.randint(0, 11, (8, 5 + number)), torch.randint(0, 11, (8, 5 + number))
            for optimizer in optimizers:
                optimizer.zero_grad()
            for _ in range(2):  # two steps add up
                pipe.step(x, y)
                loss(alone(x), y).backward()
            there = {name: each.grad for name, each in ours.named_parameters() if each.grad is not None}
            largest = max(largest, plain.difference(there, {name: alone.get_parameter(name).grad for name in there}))
            theirs = nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            norms.append(float(pipe.clip_grad_norm_(0.5) / theirs))
            for optimizer in optimizers:
                optimizer.step()
        verification = pipe.verify(x, y)
        state = pipe.state_dict()
    own = ours.get_parameter(first).detach().double().sum().item() if first in there else None
    weights = plain.difference(state, alone.state_dict())
    say(how=how, gradients=largest, norms=norms, weights=weights, parameters=verification.parameters, tied=own)
