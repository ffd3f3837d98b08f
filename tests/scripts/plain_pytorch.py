"""Run exported plans in plain PyTorch, in a process that has no pipelab."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from facts import say
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

assert "pipelab" not in sys.modules
sys.modules["pipelab"] = None  # as if it were not installed

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")


def compare(path, held, count, microbatches):
    """Train one step by an exported plan, and say how it compares with plain training."""
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count)]
    x, y = torch.randn(2 * microbatches, 6), torch.randn(2 * microbatches, 6)

    def loss_fn(output, target):
        return nn.functional.mse_loss(output, target) / microbatches

    expected = 0.0
    for rows, targets in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        loss = loss_fn(nn.Sequential(*modules)(rows), targets)
        loss.backward()
        expected += float(loss)
    gradients = {stage: [parameter.grad for parameter in modules[stage].parameters()] for stage in held}
    for module in modules:
        module.zero_grad()
    stages = [PipelineStage(modules[stage], stage, count, torch.device("cpu")) for stage in held]
    schedule = _PipelineScheduleRuntime(stages, microbatches, loss_fn=loss_fn, scale_grads=False)
    schedule._load_csv(path, format="compute_only")
    losses = []
    first = [x] if 0 in held else []
    last = {"target": y, "losses": losses} if count - 1 in held else {}
    schedule.step(*first, **last)
    equal = all(
        torch.allclose(parameter.grad, gradient, atol=1e-7)
        for stage in held
        for parameter, gradient in zip(modules[stage].parameters(), gradients[stage], strict=True)
    )
    say(equal=equal, loss=float(sum(losses)) if losses else None, expected=expected)


for path, held_by_rank, count, microbatches in json.loads(sys.argv[1]):
    compare(path, held_by_rank[rank], count, microbatches)
dist.destroy_process_group()
