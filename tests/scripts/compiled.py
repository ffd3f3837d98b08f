"""Train compiled stages in processes; say whether the weights are those of plain training, bit for bit."""

from __future__ import annotations

import plain
import torch
from facts import say
from torch import nn

import pipelab

for plan in (pipelab.OneFOneB(2, 4), pipelab.ZBH1(2, 4), pipelab.replicate(pipelab.OneFOneB(1, 1), 2)):
    torch.manual_seed(0)
    model, other = (nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))) for _ in range(2))
    other.load_state_dict(model.state_dict())
    size = len(model) // plan.stages
    parts = [nn.Sequential(*list(model)[size * stage : size * (stage + 1)]) for stage in range(plan.stages)]
    compiled = [torch.compile(part, backend="aot_eager") for part in parts]
    with pipelab.Pipeline(compiled, plan, nn.MSELoss(), engine="torch", timeout=60, whole_model=model) as pipe:
        names = [name for name, _ in pipe.named_parameters()]
        optimizer, reference = (torch.optim.AdamW(each.parameters(), lr=0.05) for each in (pipe, other))
        for _ in range(2):
            x, y = torch.randn(8, 6), torch.randn(8, 6)
            optimizer.zero_grad()
            reference.zero_grad()
            pipe.step(x, y)
            plain.one_after_another(other, nn.functional.mse_loss, x, y, plan.microbatches)
            optimizer.step()
            reference.step()
        exact = pipe.verify(x, y).exact
        state = pipe.state_dict()
    say(names=names, exact=exact, equal=plain.equal(state, other.state_dict()))
