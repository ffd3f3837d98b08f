"""The torch engine on CUDA devices: two processes that share a GPU, and NCCL with a process per GPU."""

from __future__ import annotations

import json

import processes
import pytest
import torch

pytestmark = [
    pytest.mark.dist,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]

ON_GPUS = """
import copy, json, os, warnings
import plain, torch
from torch import nn
import pipelab
from pipelab import Pipeline

mse = nn.functional.mse_loss
ranks = int(os.environ["WORLD_SIZE"])
plan = (pipelab.ZBV(ranks, 2 * ranks) if ranks > 1 else pipelab.GPipe(1, 2)).plan()
model = plain.mlp(2 * plan.stages, 64)
twin = copy.deepcopy(model).cuda()
x, y = (tensor.cuda() for tensor in plain.batch(24, 64))
plain.one_after_another(twin, mse, x, y, plan.microbatches)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    pipe = Pipeline(model, plan, mse, engine="torch", timeout=60)
with pipe:
    optimizer = torch.optim.Adam(pipe.parameters())
    step = pipe.step(x, y)
    here = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    trace = step.trace
    facts = {
        "devices": sorted({str(gradient.device) for gradient in here.values()}),
        "difference": max(
            float((here[name] - twin.get_parameter(name).grad.to(here[name].device)).norm() / here[name].norm())
            for name in here
        ),
        "forward": torch.allclose(pipe.forward(x).cpu(), twin(x).cpu(), atol=1e-5),
        "proof": pipe.verify(x, y).largest_difference,
        "after": all(event.start < event.end for event in trace.events),
        "transfers": all(each.start <= each.end for each in trace.transfers),
        "backend": torch.distributed.get_backend(pipe.engine._connections.pipeline),
        "warned": [str(each.message) for each in warned if "NCCL" in str(each.message)],
    }
    optimizer.step()
    facts["state"] = sorted(pipe.state_dict()) == sorted(twin.state_dict())
print(json.dumps(facts))
"""


def said(ranks):
    ended = processes.run_in(ranks, ON_GPUS, env=processes.environment(LOCAL_WORLD_SIZE=str(ranks)))
    assert [each.code for each in ended] == [0] * ranks, processes.shown(ended)
    facts = [json.loads(each.out.splitlines()[-1]) for each in ended]
    for fact in facts:
        assert fact["difference"] < 1e-5
        assert fact["proof"] < 1e-5
        assert fact["forward"]
        assert fact["after"]
        assert fact["transfers"]
        assert fact["state"]
    return facts


def test_two_processes_share_a_gpu_by_way_of_the_processors_memory():
    if torch.cuda.device_count() > 1:
        pytest.skip("needs a machine with one GPU: two processes would have one each")
    for fact in said(2):
        assert fact["devices"] == ["cuda:0"]
        assert fact["backend"] == "gloo"
        assert "the processes share GPUs" in fact["warned"][0]


def test_nccl_connects_a_process_per_gpu():
    ranks = torch.cuda.device_count()
    for rank, fact in enumerate(said(ranks)):
        assert fact["devices"] == [f"cuda:{rank}"]
        assert fact["backend"] == "nccl"
        assert fact["warned"] == []
