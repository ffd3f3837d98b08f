"""Plans as CSV files, between pipelab and PyTorch: what each reads of what the other wrote."""

from __future__ import annotations

import pytest

import pipelab
from pipelab import Plan, schedules
from pipelab.engine import native
from pipelab.engine.recording import NATIVE, RecordingStage, executed, native_place
from pipelab.labs.references import flat

MULTI = [name for name in NATIVE if name not in ("gpipe", "1f1b")]
"""The schedules whose class in PyTorch writes files."""


def load(path, plan):
    """Let PyTorch's runtime load a file, as rank 0."""
    stages = [RecordingStage(stage, plan.stages, 0, plan.ranks, []) for stage in range(plan.stages)]
    held = [stages[stage] for stage, ranks in plan.replicas.items() if 0 in ranks]
    runtime = native.load().runtime(held, plan.microbatches, loss_fn=lambda *_: None)
    runtime._load_csv(path, format="compute_only")
    return runtime


@pytest.mark.parametrize("name", [name for name in schedules if name != "dualpipe"])
def test_pytorch_loads_every_plan_that_keeps_each_stage_on_one_rank(name, tmp_path):
    plan = schedules[name](2, 4).plan()
    loaded = load(plan.to_csv(tmp_path / "plan.csv"), plan).pipeline_order
    assert [[str(action) for action in loaded[rank]] for rank in range(2)] == [
        [str(item) for item in row] for row in plan.rows
    ]


@pytest.mark.parametrize("schedule", [pipelab.DualPipe(2, 4), pipelab.replicate(pipelab.OneFOneB(2, 2), 2)])
def test_pytorch_says_why_it_does_not_load_a_plan_with_replicated_stages(schedule, tmp_path):
    plan = schedule.plan()
    with pytest.raises(AssertionError, match=r"Stage 0 is assigned to both rank \d and rank 0"):
        load(plan.to_csv(tmp_path / "plan.csv"), plan)


@pytest.mark.parametrize("name", MULTI)
def test_what_pytorchs_schedules_write_is_read(name, tmp_path):
    stages_per_rank = schedules[name](2, 4).stages_per_rank
    count = 2 * stages_per_rank
    held = [index for index in range(count) if native_place(NATIVE[name], 2, index) == 0]
    recorders = [RecordingStage(index, count, 0, 2, []) for index in held]
    theirs = native.schedule_class(NATIVE[name])(recorders, 4, loss_fn=lambda *_: None)
    theirs._dump_csv(tmp_path / "plan.csv", format="compute_only")
    read = flat(Plan.from_csv(tmp_path / "plan.csv"))
    assert read == list(executed(NATIVE[name], 2, 4, stages_per_rank).rows)
