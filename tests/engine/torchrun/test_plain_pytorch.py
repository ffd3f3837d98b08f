"""A plan leaves pipelab as a CSV file and runs in plain PyTorch, in processes that cannot import pipelab."""

from __future__ import annotations

import json
import os

import processes
import pytest

import pipelab

pytestmark = pytest.mark.dist


def test_an_exported_plan_runs_in_plain_pytorch_with_the_gradients_of_plain_training(tmp_path):
    cases = []
    for plan in (pipelab.OneFOneB(2, 4).plan(), pipelab.ZBV(2, 4).plan(), pipelab.DualPipeV(2, 4).plan()):
        path = plan.to_csv(tmp_path / f"{len(cases)}.csv")
        held = [[stage for stage, ranks in plan.replicas.items() if rank in ranks] for rank in range(2)]
        cases.append([str(path), held, plan.stages, plan.microbatches])
        assert pipelab.Plan.from_csv(path) == plan
    assert "OVERLAP_F_B" in (tmp_path / "2.csv").read_text()
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    ended = processes.run_well(2, "plain_pytorch.py", json.dumps(cases), env=env)
    for each in ended:
        assert [fact["equal"] for fact in each.facts] == [True] * 3
        for fact in each.facts:
            assert fact["loss"] is None or fact["loss"] == pytest.approx(fact["expected"], rel=1e-6)
    assert sum(fact["loss"] is not None for each in ended for fact in each.facts) == 3
