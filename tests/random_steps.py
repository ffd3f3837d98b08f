"""Steps of models that draw random numbers, the same for threads and processes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import pipelab


class Checkpointed(nn.Module):
    """A layer and a function that drop, under a checkpoint."""

    def __init__(self, **way):
        super().__init__()
        self.linear, self.drop, self.way = nn.Linear(6, 6), nn.Dropout(0.5), way

    def inner(self, x):
        return dropout(self.drop(torch.tanh(x)), 0.3)

    def forward(self, x):
        return checkpoint(self.inner, self.linear(x), **self.way)


MODELS = {
    "dropout": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)),
    "not reentrant": lambda: Checkpointed(use_reentrant=False),
    "reentrant": lambda: Checkpointed(use_reentrant=True),
}
SCHEDULES = [pipelab.GPipe(2, 4), pipelab.OneFOneB(2, 4), pipelab.Interleaved1F1B(2, 4), pipelab.ZBV(2, 4)]


def told(name, schedule, engine, seed):
    """Return what three steps and two forwards leave; `seed` counts in rank 0's process alone."""
    torch.manual_seed(0)
    model = nn.Sequential(*(MODELS[name]() for _ in range(4)))
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    with pipelab.Pipeline(model, schedule, nn.functional.mse_loss, engine=engine, timeout=60) as pipe:
        torch.manual_seed(seed)
        losses = [pipe.step(x, y).loss.item() for _ in range(3)]
        outputs = [pipe.forward(x).sum().item() for _ in range(2)]
        drawn = torch.rand(()).item()
        gradients = {key: each.grad.sum().item() for key, each in pipe.named_parameters()}
    return {"losses": losses, "outputs": outputs, "gradients": gradients, "drawn": drawn}
