"""Gradients around a ring: what a device sends, that replicas are equal, and that they learn."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

import pipelab
from pipelab.errors import UsageError
from pipelab_course import compressed
from pipelab_course.hybrid import Hybrid

SCENARIO = Hybrid(stages=3, replicas=4, microbatches=6, forward=50, backward=80, ring_step=20)


@pytest.fixture(scope="module")
def rows():
    return list(compressed.trainings(codecs=("none", "fp16", "int8"), steps=20))


def test_a_device_sends_2_times_d_minus_1_of_d_parts_of_its_gradient(rows):
    numbers = 2 * (4 - 1) / 4 * 120
    _, none, half, byte = rows
    assert [row["payload_bytes"] for row in (none, half, byte)] == [4 * numbers, 2 * numbers, numbers]
    assert [row["scale_bytes"] for row in (none, half, byte)] == [0, 0, 4 * 2 * (4 - 1)]  # a scale for each message


def test_stages_times_replicas_learn_what_one_device_learns(rows):
    for row in rows:
        assert row["last_loss"] < 0.8 * row["first_loss"]
        assert row["last_loss"] == pytest.approx(row["alone_loss"], rel=1e-3)
    assert max(row["weights_off"] for row in rows[:2]) < 1e-6
    assert rows[2]["weights_off"] < rows[3]["weights_off"] < 1e-2


def test_the_loss_falls_from_step_to_step(rows):
    for row in rows:
        assert row["losses"] == sorted(row["losses"], reverse=True)
        assert (len(row["losses"]), row["losses"][0], row["losses"][-1]) == (21, row["first_loss"], row["last_loss"])
    assert [row["replicas_equal"] for row in rows[1:]] == [True, True, True]  # bit for bit


def test_the_table_has_the_bytes_of_all_devices_and_losses_on_the_way(rows):
    table = compressed.table(rows)
    assert "12 devices together send: none 8,640 bytes; fp16 4,320 bytes; int8 2,160 bytes, 2,448 with scales." in (
        table.notes
    )
    losses = rows[0]["losses"]
    assert " ".join(f"{losses[step]:.4f}" for step in (0, 5, 10, 15, 20)) in table.text(120)


@pytest.mark.parametrize("kind", [pipelab.GPipe, pipelab.Naive])
def test_any_schedule_with_one_stage_on_each_rank_trains_the_same(rows, kind):
    (first,) = compressed.trainings(codecs=(), steps=20, schedule=kind)
    assert first["last_loss"] == pytest.approx(rows[0]["last_loss"], rel=1e-6)


def test_an_unknown_codec_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(compressed, "Pipeline", lambda *_: pytest.fail("it trained"))
    with pytest.raises(UsageError, match="int4"):
        next(compressed.trainings(codecs=("none", "int4")))


def test_kept_bytes_are_what_pytorch_saves_for_a_micro_batch():
    (job, *_) = compressed.layouts(SCENARIO)
    stage, saved = compressed.model(1), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stage(torch.ones(job.rows, 10))
    weights = {parameter.data_ptr() for parameter in stage.parameters()}
    assert 3 * sum(each.nbytes for each in saved if each.data_ptr() not in weights) == job.activation
    assert job.weights == 3 * sum(parameter.nbytes for parameter in stage.parameters())


def test_layouts_of_the_scenario_do_the_same_work():
    jobs = compressed.layouts(SCENARIO)
    assert [(job.stages, job.replicas) for job in jobs] == [(1, 1), (3, 1), (1, 4), (3, 4)]
    assert {job.alone.makespan for job in jobs} == {24 * 3 * 130}
    assert jobs[-1].response_time == SCENARIO.response_time == (6 + 2) * 130 + 6 * 20


def test_the_command_shows_timeline_bytes_training_and_figures(pipelab_command, folder):
    code, output, error = pipelab_command(
        "lab", "hybrid", "-k", "2", "-d", "2", "-m", "2", "--codecs", "int8", "--training-steps", "3",
        "--measure", "--steps", "1", "-f", "5", "-b", "8", "--ring-step", "2", "-o", "t.csv",
        "--save-figures", "f.html", "--schedule", "gpipe",
    )  # fmt: skip
    assert code == 0, error
    assert "t =   0 ms: device (0, 0) does F0, (0, 1) F1" in output
    assert "t =  10 ms: device (1, 0) does F2, (1, 1) F3" in output  # 1F1B has B0 there
    assert "Measured speed-up of 2 x 2" in output
    one_model, ring = csv.DictReader(Path("t.csv").read_text().splitlines())
    assert (one_model["gradients"], ring["gradients"]) == ("R, one model", "ring, int8")
    assert ring["replicas_equal"] == "True"
    assert "memory efficiency" in Path("f.html").read_text()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--schedule", "nope", "not a registered schedule"),
        ("--schedule", "looped-bfs", "one stage on each rank"),
        ("--codecs", "int4", "int4"),
    ],
)
def test_a_schedule_or_a_codec_that_does_not_fit_is_refused(refused, option, value, said):
    assert said in refused("lab", "hybrid", option, value)
