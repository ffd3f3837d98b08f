"""A plan leaves pipelab as a CSV file and runs in plain PyTorch, in processes that cannot import pipelab."""

from __future__ import annotations

import json
import os

import processes
import pytest

import pipelab

pytestmark = pytest.mark.dist

PLAIN_PYTORCH = """
import sys

sys.modules["pipelab"] = None  # whoever imports it is told that there is none

import json, os
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

try:
    import pipelab
except ImportError:
    pass
else:
    raise SystemExit("pipelab is there")

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
for path, held, count, microbatches in json.loads(sys.argv[1]):
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count)]
    x, y = torch.randn(2 * microbatches, 6), torch.randn(2 * microbatches, 6)

    def loss_fn(output, target):
        return nn.functional.mse_loss(output, target) / microbatches

    expected = 0.0
    for rows, targets in zip(x.chunk(microbatches), y.chunk(microbatches)):
        loss = loss_fn(nn.Sequential(*modules)(rows), targets)
        loss.backward()
        expected += float(loss)
    gradients = {stage: [parameter.grad for parameter in modules[stage].parameters()] for stage in held[rank]}
    for module in modules:
        module.zero_grad()
    stages = [PipelineStage(modules[stage], stage, count, torch.device("cpu")) for stage in held[rank]]
    for stage in stages:  # up to torch 2.11, two neighbours on one rank would make it greet itself, which gloo refuses
        stage._get_init_p2p_neighbors_ops = list
    schedule = _PipelineScheduleRuntime(stages, microbatches, loss_fn=loss_fn, scale_grads=False)
    schedule._load_csv(path, format="compute_only")
    losses = []
    first = [x] if 0 in held[rank] else []
    last = {"target": y, "losses": losses} if count - 1 in held[rank] else {}
    schedule.step(*first, **last)
    print(json.dumps({
        "equal": all(
            torch.allclose(parameter.grad, gradient, atol=1e-7)
            for stage in held[rank]
            for parameter, gradient in zip(modules[stage].parameters(), gradients[stage])
        ),
        "loss": float(sum(losses)) if losses else None,
        "expected": expected,
    }))
dist.destroy_process_group()
"""


def test_an_exported_plan_runs_in_plain_pytorch_with_the_gradients_of_plain_training(tmp_path):
    cases = []
    for plan in (pipelab.OneFOneB(2, 4).plan(), pipelab.ZBV(2, 4).plan(), pipelab.DualPipeV(2, 4).plan()):
        path = plan.to_csv(tmp_path / f"{len(cases)}.csv")
        held = [[stage for stage, ranks in plan.replicas.items() if rank in ranks] for rank in range(2)]
        cases.append([str(path), held, plan.stages, plan.microbatches])
        assert pipelab.Plan.from_csv(path) == plan
    assert "OVERLAP_F_B" in (tmp_path / "2.csv").read_text()
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    ended = processes.run_in(2, PLAIN_PYTORCH, json.dumps(cases), env=env)
    assert [each.code for each in ended] == [0, 0], processes.shown(ended)
    for each in ended:
        found = [json.loads(line) for line in each.out.splitlines()]
        assert [fact["equal"] for fact in found] == [True] * 3
        for fact in found:
            assert fact["loss"] is None or fact["loss"] == pytest.approx(fact["expected"], rel=1e-6)
    assert sum(json.loads(line)["loss"] is not None for each in ended for line in each.out.splitlines()) == 3
