"""`pipelab run`, which needs PyTorch."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from rich.console import Console

import pipelab
from pipelab.cli import measuring
from pipelab.cli.measuring import Work
from pipelab.cli.running import core_share, run_all
from pipelab.engine import emulation


def test_run_executes_verifies_and_draws(succeeds, folder):
    arguments = ("--width", "8", "--depth", "4", "--batch", "12", "--steps", "2", "-m", "3", "-o", "run.html")
    output = succeeds("run", "1f1b", *arguments)
    assert "measured" in output
    assert "bit for bit" in output
    assert Path("run.html").exists()


WORK = ("--width", "4", "--depth", "4", "--batch", "8", "--steps", "1", "-m", "2")


@pytest.mark.parametrize(("options", "ranks"), [("", 2), ("--emulate 1 1", 4), ("-r 3", 3), ("--emulate 1 2 -r 3", 3)])
def test_run_takes_two_ranks_unless_they_are_emulated_or_given(succeeds, options, ranks):
    output = succeeds("run", "gpipe", *WORK, *options.split())
    assert f"GPipe(ranks={ranks}, microbatches=2)" in output
    assert f"rank {ranks - 1}" in output


def test_run_lays_several_schedules_side_by_side(succeeds, folder):
    output = succeeds("run", "gpipe", "1f1b", *WORK, "-o", "both.svg")
    assert output.count("gpipe, measured") == output.count("1f1b, measured") == 2  # in the table, and above its lanes
    assert "all 2 runs" in output
    assert "bit for bit" in output
    assert Path("both.svg").stat().st_size > 500


def test_run_refuses_fewer_layers_than_stages(refused):
    assert "too few layers for 4 stages, 2" in refused("run", "1f1b", "-r", "4", "--depth", "2")


def test_run_over_micro_batches_measures_one_batch_and_verifies_every_run(succeeds, folder):
    output = succeeds(
        "run", "naive", "gpipe", "-m", "2,4", "--emulate", "8", "16", "-r", "2", "--steps", "1", "--batch", "8",
        "-o", "table.csv", "-o", "table.txt",
    )  # fmt: skip
    assert "all 4 runs" in output
    assert "bit for bit" in output
    table = list(csv.DictReader(Path("table.csv").read_text().splitlines()))
    assert [(row["schedule"], row["microbatches"]) for row in table] == [
        ("naive", "2"), ("naive", "4"), ("gpipe", "2"), ("gpipe", "4"),
    ]  # fmt: skip
    assert all(float(row["step_time"]) >= 48 for row in table[:2])  # what is emulated takes no less
    assert {row["unit"] for row in table} == {"ms"}
    losses = [float(row["loss"]) for row in table]
    assert losses == pytest.approx([losses[0]] * 4)
    assert Path("table.txt").read_text().startswith("time of a step, ms")


def test_run_shows_on_a_terminal_how_far_it_is_and_is_quiet_in_a_pipe(pipelab_command, monkeypatch):
    work = ("run", "naive", "gpipe", "-m", "2,4", "--emulate", "1", "1", "-r", "2", "--steps", "2", "--batch", "4")
    _, piped, error = pipelab_command(*work)
    assert error == ""
    screen = io.StringIO()
    monkeypatch.setattr(
        measuring, "Console", lambda **_: Console(file=screen, force_terminal=True, color_system=None, width=100)
    )
    _, output, _ = pipelab_command(*work)
    assert output.splitlines()[0] == piped.splitlines()[0]  # what is printed is no other
    shown = screen.getvalue()
    assert "Naive(ranks=2, microbatches=2)" in shown
    assert "verifying GPipe(ranks=2, microbatches=4)" in shown  # the gradients' turn is part of it
    assert "100%" in shown


@pytest.mark.parametrize("counts", ["2", "2,4"])
def test_too_few_cores_are_reported_before_the_results_with_what_needs_none(succeeds, monkeypatch, counts):
    monkeypatch.setattr(measuring, "cores", lambda: 2)
    work = (*WORK[:-1], counts)
    prose = " ".join(succeeds("run", "naive", "gpipe", *work, "-r", "4").split())
    assert prose.startswith("4 ranks and other programs take turns on 2 cores")
    assert f"pipelab run naive gpipe -r 4 -m {counts} --emulate 20 40" in prose
    assert "take turns" not in prose.partition("bubble")[2]
    for enough in (("-r", "2"), ("-r", "4", "--emulate", "1", "1")):
        assert "take turns" not in succeeds("run", "gpipe", *work, *enough)


def test_emulated_time_passes_only_in_the_measured_steps():
    jobs = Work(emulate=(2, 4), batch=4).jobs([pipelab.Naive(2, 2).plan(), pipelab.GPipe(2, 2).plan()], [1, 1])
    slept: list[float] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(emulation, "_sleep_until", lambda moment: slept.append(moment))
        patched.setattr(emulation, "since", lambda: 0)
        results = run_all(jobs, steps=3)
    one_step_ns = 2 * 2 * (2 + 4) * 10**6
    assert sum(slept) == 2 * 3 * one_step_ns
    assert all(result.proof.exact for result in results)
    assert repr(jobs[0].model[0]) == "EmulatedStage(forward_ms=2, backward_ms=4)"  # as before


def test_ranks_that_share_a_core_have_it_for_half_of_their_work():
    trace = pipelab.Trace(pipelab.OneFOneB(1, 1).plan(), [[0.0, 10.0]], [[10.0, 40.0]], unit="ms")
    assert core_share(0.02, [trace]) == 0.5
    assert core_share(0.05, [trace]) == 1


def test_a_run_is_written_as_a_table_of_its_figures(succeeds, folder):
    succeeds("run", "1f1b", *WORK, "-o", "r.csv", "-o", "r.json", "-o", "r.txt")
    predicted, measured = csv.DictReader(Path("r.csv").read_text().splitlines())
    assert (predicted["source"], measured["source"]) == ("simulated", "measured")
    assert measured["makespan"] == str(pipelab.Trace.load("r.json").makespan)
    assert "predicted" in Path("r.txt").read_text()
