"""One step on CUDA devices, a process per rank: its numbers, times and devices."""

from __future__ import annotations

import copy
import os
import warnings

import plain
import torch
from facts import say
from torch import nn

import pipelab

mse = nn.functional.mse_loss
ranks = int(os.environ["WORLD_SIZE"])
plan = (pipelab.ZBV(ranks, 2 * ranks) if ranks > 1 else pipelab.GPipe(1, 2)).plan()
model = plain.mlp(2 * plan.stages, 64)
twin = copy.deepcopy(model).cuda()
x, y = (tensor.cuda() for tensor in plain.batch(24, 64))
plain.one_after_another(twin, mse, x, y, plan.microbatches)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    pipe = pipelab.Pipeline(model, plan, mse, engine="torch", timeout=60)
with pipe:
    optimizer = torch.optim.Adam(pipe.parameters())
    step = pipe.step(x, y)
    here = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    there = {name: twin.get_parameter(name).grad.to(gradient.device) for name, gradient in here.items()}
    trace = step.trace
    found = {
        "devices": sorted({str(gradient.device) for gradient in here.values()}),
        "difference": plain.difference(here, there),
        "forward": torch.allclose(pipe.forward(x).cpu(), twin(x).cpu(), atol=1e-5),
        "proof": pipe.verify(x, y).largest_difference,
        "after": all(event.start < event.end for event in trace.events),
        "transfers": all(each.start <= each.end for each in trace.transfers),
        "backend": torch.distributed.get_backend(pipe.engine._connections.values),
        "warned": [str(each.message) for each in warned if "NCCL" in str(each.message)],
    }
    optimizer.step()
    found["state"] = sorted(pipe.state_dict()) == sorted(twin.state_dict())
say(**found)
