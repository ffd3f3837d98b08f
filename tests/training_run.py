"""A training run with several kinds of optimizer, for pipelines that stop and go on; and plain PyTorch's."""

from __future__ import annotations

import plain
import torch
from torch import nn

KINDS = ("adamw", "sgd", "groups")
LAYERS = 8


def make(kind, seed=0):
    """Return the model with its weights of the start."""
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(LAYERS)]
    if kind == "bare":  # every second layer has no parameters
        layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()]
    if kind == "tied":
        layers[-1][0].weight = layers[0][0].weight
    return nn.Sequential(*layers)


def batch(step):
    """Return the batch of one step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


def make_optimizer(kind, holder, model):
    """Return an optimizer over what a pipeline or a model holds, and its scheduler."""
    held = list(holder.parameters())
    if kind == "sgd":
        optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
    elif kind == "groups":  # the first layer learns slowly; of other ranks the group is empty
        slow = set(model[0].parameters())
        groups = [{"params": [each for each in held if each in slow], "lr": 0.01}]
        groups += [{"params": [each for each in held if each not in slow], "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
    else:
        optimizer = torch.optim.AdamW([{"params": held}], lr=0.05)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def plain_run(kind, steps):
    """Return the model's state after so many steps in one process that never stopped, and the optimizer."""
    model = make(kind)
    optimizer, scheduler = make_optimizer(kind, model, model)
    for step in range(steps):
        optimizer.zero_grad()
        plain.one_after_another(model, nn.functional.mse_loss, *batch(step), 4)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return model.state_dict(), optimizer
