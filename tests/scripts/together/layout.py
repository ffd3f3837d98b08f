"""Values lie in memory as they do in the threads engine, and the backwards of a frozen stage keep their place."""

from __future__ import annotations

import os

import plain
import torch
from facts import say
from torch import nn

import pipelab
from pipelab import Pipeline

rank = int(os.environ["RANK"])


class Turns(nn.Linear):
    def forward(self, x):
        return super().forward(x).transpose(1, 2)


plan = pipelab.OneFOneB(4, 4).plan()
squares = torch.randn(2, 8, 48, 48, generator=torch.Generator().manual_seed(0))
found = []
for engine in ("threads", "torch"):
    torch.manual_seed(0)
    stages = [Turns(48, 48).requires_grad_(stage > 0) for stage in range(4)]
    with Pipeline(stages, plan, nn.functional.mse_loss, engine=engine, timeout=60) as pipe:
        trace = pipe.step(*squares).trace
    frozen = all(parameter.grad is None for parameter in stages[0].parameters())
    found.append(plain.taken(stages[rank]))
at = {str(event.action): event for event in trace.events}
say(
    case="layout",
    same=plain.equal(*found),
    frozen=frozen,
    early=[f"0B{m}" for m in range(4) if at[f"0B{m}"].start < at[f"1B{m}"].end - 1e-6],
)
