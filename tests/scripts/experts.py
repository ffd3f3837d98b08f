"""The page on experts, in two processes; and an auxiliary loss that stays on the module."""

from __future__ import annotations

import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from commands import ran
from facts import say
from torch import nn

import pipelab

with redirect_stdout(StringIO()):  # what the page prints
    made = ran(Path(__file__).parents[2] / "docs" / "how_to" / "balanced_experts.md")
proof = made["proof"]
say(losses=made["losses"], exact=proof.exact, parameters=proof.parameters)


class Left(nn.Linear):
    def forward(self, x):
        made = super().forward(x)
        self.aux = made.pow(2).mean()
        return made


stages = [nn.utils.spectral_norm(Left(8, 8)), Left(8, 8)]  # it leaves its weight there, with a history
for stage in stages:
    stage.aux = torch.zeros(())
x, y = torch.randn(16, 8), torch.randn(16, 8)
with (
    warnings.catch_warnings(record=True) as told,
    pipelab.Pipeline(
        stages,
        pipelab.OneFOneB(2, 4),
        lambda output, target: nn.functional.mse_loss(output, target) + sum(stage.aux for stage in stages),
        engine="torch",
    ) as pipe,
):
    warnings.simplefilter("always")
    pipe.evaluate(x, y)
    for _ in range(2):
        pipe.step(x, y)
say(told=[str(each.message) for each in told])
