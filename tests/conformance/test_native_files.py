"""Plans as CSV files, between pipelab and PyTorch: what each reads of what the other wrote."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from strategies import ONE_COPY
from torch.distributed.pipelining import schedules as native

import pipelab
from pipelab import Plan, schedules

from .recording import NATIVE, RUNTIME, RecordingStage, executed, held_by, on_recorders
from .report import flat
from .steps import fixed_model, fixed_task, group_of_one, step_of_plan

MULTI = [name for name in NATIVE if name not in ("gpipe", "1f1b")]
"""The schedules whose class in PyTorch writes files."""


def load(path, plan):
    """Let PyTorch's runtime load a file, as rank 0."""
    stages = [RecordingStage(stage, plan.stages, 0, plan.ranks, []) for stage in range(plan.stages)]
    held = [stages[stage] for stage, ranks in plan.replicas.items() if 0 in ranks]
    made = getattr(native, RUNTIME)(held, plan.microbatches, loss_fn=lambda *_: None)
    made._load_csv(path, format="compute_only")
    return made


@pytest.mark.parametrize("name", ONE_COPY)
def test_pytorch_loads_every_plan_that_keeps_each_stage_on_one_rank(name, tmp_path):
    plan = schedules[name](2, 4).plan()
    with pytest.warns(UserWarning, match="slices of one sequence") if plan.after else nullcontext():
        path = plan.to_csv(tmp_path / "plan.csv")
    loaded = load(path, plan).pipeline_order
    assert [[str(action) for action in loaded[rank]] for rank in range(2)] == [
        [str(item) for item in row] for row in plan.rows
    ]


@pytest.mark.parametrize("schedule", [pipelab.DualPipe(2, 4), pipelab.replicate(pipelab.OneFOneB(2, 2), 2)])
def test_pytorch_says_why_it_does_not_load_a_plan_with_replicated_stages(schedule, tmp_path):
    plan = schedule.plan()
    with pytest.raises(AssertionError, match=r"Stage 0 is assigned to both rank \d and rank 0"):
        load(plan.to_csv(tmp_path / "plan.csv"), plan)


@pytest.mark.parametrize("row", ["0F0 0C0 0B0", "0F0 0B0 0U0", "0F0 0OFFLOAD0 0LOAD0 0B0", "0UNSHARD 0F0 0B0 0RESHARD"])
def test_pytorch_loads_only_forwards_backwards_and_pairs(row, tmp_path):
    plan = Plan.parse(row)
    refused = r"Invalid action string: 0[CUOL]|Expected compute-only schedule but found .*'0UNSHARD'"
    with pytest.raises((RuntimeError, ValueError), match=refused):
        load(plan.to_csv(tmp_path / "plan.csv"), plan)


def test_a_file_that_pytorch_loads_and_then_fails_on_is_written_with_a_warning(tmp_path):
    plan = Plan.parse(["0F1 0F0 0B0 0B1", "1F1 1F0 1B0 1B1"])
    with pytest.warns(UserWarning, match=r"last stage's forwards run in the order 1, 0, and PyTorch's runtime") as told:
        path = plan.to_csv(tmp_path / "plan.csv")
    assert told[0].filename == __file__
    assert Plan.from_csv(path) == plan
    with group_of_one(), pytest.raises(RuntimeError, match="Failed to run stage backward"):
        step_of_plan(plan, list(fixed_model(2)), fixed_task(2))
    with group_of_one():  # other stages may take them in any order
        step_of_plan(Plan.parse(["0F1 0F0 0B0 0B1", "1F0 1F1 1B0 1B1"]), list(fixed_model(2)), fixed_task(2))


@pytest.mark.parametrize("order", ["F0 F1 B1 B0", "F0 B0 F1 B1"])
def test_a_file_that_pytorch_runs_is_written_without_a_warning(order, tmp_path):
    rows = [" ".join(f"{stage}{action}" for action in order.split()) for stage in range(2)]
    Plan.parse(rows).to_csv(tmp_path / "plan.csv")  # warnings are errors
    alone_on_its_rank = Plan.parse(["0F1 0F0 0B0 0B1"])
    alone_on_its_rank.to_csv(tmp_path / "plan.csv")  # one stage has nobody who waits for another gradient
    with group_of_one():
        ours, ascending = (
            step_of_plan(plan, list(fixed_model(1)), fixed_task(2))
            for plan in (alone_on_its_rank, Plan.parse(["0F0 0F1 0B0 0B1"]))
        )
    assert ours.difference(ascending) < 1e-6


@pytest.mark.parametrize("name", MULTI)
def test_what_pytorchs_schedules_write_is_read(name, tmp_path):
    stages_per_rank = schedules[name](2, 4).stages_per_rank
    theirs = on_recorders(NATIVE[name], held_by(NATIVE[name], 2, stages_per_rank), 0, 4, [])
    theirs._dump_csv(tmp_path / "plan.csv", format="compute_only")
    read = flat(Plan.from_csv(tmp_path / "plan.csv"))
    assert read == list(executed(NATIVE[name], 2, 4, stages_per_rank).rows)
