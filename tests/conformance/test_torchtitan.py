"""Plans for torchtitan: what its own functions make of the file and the options, without torchtitan."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

import pipelab
from pipelab import Plan
from pipelab.errors import UsageError
from pipelab.hub import torchtitan

from .recording import RecordingStage

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "other_tools.md"


def options_of(text):
    """Return the options by name, without their section."""
    lines = [line.removeprefix("--").split(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name.partition(".")[2]: value for name, value in lines}


def stages_made(name, rank, degree):
    """Return which stages torchtitan makes on a rank, and how many there are, where no layers per stage are given.

    As `_get_pipeline_metadata` and `_get_pp_rank_to_stage_indices_mapping` have it in
    `torchtitan/distributed/pipeline_parallel.py`, commit b5bcd76; 0.3.0 has the same.
    """
    kind = get_schedule_class(name)
    count = degree * (1 if issubclass(kind, PipelineScheduleSingle) else 2)
    if kind in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
        return (rank, count - 1 - rank), count
    return tuple(range(rank, count, degree)), count


TWO_PER_RANK = {"interleaved-1f1b": "Multi", "looped-bfs": "Multi", "zbv": "V", "dualpipev": "V", "v-half": "V"}
NAMES = dict.fromkeys(("gpipe", "1f1b", "delayed", "zb-h1", "zb-h2"), "Single") | TWO_PER_RANK


@pytest.mark.parametrize(("schedule", "shape"), NAMES.items())
def test_torchtitan_makes_the_stages_of_the_plan_and_reads_its_order(schedule, shape, tmp_path):
    plan = pipelab.schedules[schedule](4, 8).plan()
    options = options_of(torchtitan.export(plan, tmp_path / "plan.csv"))
    name, degree = options["pipeline_parallel_schedule"], int(options["pipeline_parallel_degree"])
    assert name == ("ZBVZeroBubble" if shape == "V" else f"PipelineSchedule{shape}")
    microbatches = int(options["local_batch_size"]) // int(options["pipeline_parallel_microbatch_size"])
    assert os.path.isfile(options["pipeline_parallel_schedule_csv"])
    for rank in range(degree):
        held, count = stages_made(name, rank, degree)
        stages = [RecordingStage(stage, count, rank, degree, []) for stage in held]
        made = _PipelineScheduleRuntime(stages, microbatches, loss_fn=lambda *_: None, scale_grads=False)
        made._load_csv(options["pipeline_parallel_schedule_csv"])  # which refuses another number of micro-batches
        assert [list(map(str, made.pipeline_order[each])) for each in range(degree)] == [
            list(map(str, row)) for row in plan.rows
        ]
        assert {stage for stage, on in made.stage_index_to_group_rank.items() if on == rank} == set(held)


def test_more_than_two_stages_per_rank_need_a_number_of_layers(tmp_path):
    plan = pipelab.Interleaved1F1B(2, 4, stages_per_rank=3)
    text = torchtitan.export(plan, tmp_path / "plan.csv")
    assert "pipeline_parallel_layers_per_stage to an L with which (layers + 2) / L, rounded up, is 6" in text


REFUSED = {
    "on several ranks: 0…3": pipelab.DualPipe(4, 8),
    "reads F, B, I, W and pairs of F and B only": pipelab.PipeDream(2, 4),
    "a plan without UNSHARD": pipelab.with_gathers(pipelab.OneFOneB(2, 4)),
    "slices of sequences": pipelab.schedules["seq1f1b"](2, 4),
    "in the order 1, 0, and": Plan.parse("0F1 0F0 0B1 0B0; 1F1 1F0 1B1 1B0"),
    "the plan has 1 rank": pipelab.GPipe(1, 4),
    "stage 0 is on rank 1": Plan.parse("1F0 1B0; 0F0 0B0"),
    "3 stages are on 2 ranks": Plan.parse("0F0 2F0 2B0 0B0; 1F0 1B0"),
}


@pytest.mark.parametrize(("fact", "plan"), REFUSED.items())
def test_a_plan_that_torchtitan_would_not_run_is_refused_before_a_file_is_written(fact, plan, tmp_path):
    with pytest.raises(UsageError, match=r"\n  try: ") as refused:
        torchtitan.export(plan, tmp_path / "plan.csv")
    assert fact in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_what_the_reader_refuses_is_what_pytorch_refuses(tmp_path):
    gathers = pipelab.with_gathers(pipelab.OneFOneB(2, 4)).to_csv(tmp_path / "gathers.csv")
    updates = pipelab.PipeDream(2, 4).plan().to_csv(tmp_path / "updates.csv")
    for path, words in ((gathers, "UNSHARD"), (updates, "Invalid action string: 0U")):
        made = _PipelineScheduleRuntime([RecordingStage(0, 2, 0, 2, [])], 4, loss_fn=lambda *_: None)
        with pytest.raises((ValueError, RuntimeError), match=words):
            made._load_csv(path)


def test_the_command_writes_the_file_and_prints_the_options(pipelab_command, folder):
    shown = re.search(r"\$ pipelab (export torchtitan .*)\n((?:.*\n)+?)```", PAGE.read_text(encoding="utf-8"))
    assert pipelab_command(*shown[1].split()) == (0, shown[2], "")
    assert pipelab_command("check", "zbv.csv")[0] == 0
    code, _, error = pipelab_command("export", "torchtitan", "zbv.csv", "-o", "v.json")
    assert (code, "use one of .csv" in error) == (1, True)
