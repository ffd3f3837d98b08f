"""The command line over several numbers of micro-batches: a table."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from commands import RIGHT
from rich.console import Console

from pipelab.cli import measuring


def cells(output: str, head: str) -> dict[str, list[str]]:
    """Return one block of a table: what stands beside each name."""
    (block,) = [part for part in output.split("\n\n") if part.startswith(head)]
    return {name: rest for name, *rest in (line.split() for line in block.splitlines()[1:])}


def test_compare_over_micro_batches_shares_one_batch_among_them(pipelab_command):
    names, counts = ("naive", "gpipe", "delayed", "1f1b"), (1, 2, 4, 8)
    code, output, _ = pipelab_command("compare", *names, "-r", "2", "-m", "1,2,4,8", "-f", "8", "-b", "16")
    assert code == 0
    assert "for all of it a rank takes 8 forward and 16 backward" in output
    makespans = {
        "naive": [2 * 24 for _ in counts],
        "gpipe": [(m + 1) * 24 / m for m in counts],
        "delayed": [(2 * (m - 1) + 1) * 24 / m if m > 1 else 48 for m in counts],
        "1f1b": [(m + 1) * 24 / m for m in counts],
    }
    for name, told in cells(output, "time of a step, units").items():
        assert [float(each) for each in told] == makespans[name]
    assert cells(output, "bubble")["gpipe"] == ["50.0", "%", "33.3", "%", "20.0", "%", "11.1", "%"]
    assert cells(output, "peak")["1f1b"] == ["100", "%", "100", "%", "50", "%", "25", "%"]


def test_run_over_micro_batches_measures_one_batch_and_verifies_every_run(pipelab_command, folder):
    code, output, _ = pipelab_command(
        "run", "naive", "gpipe", "-m", "2,4", "--emulate", "8", "16", "-r", "2", "--steps", "1", "--batch", "8",
        "-o", "table.csv", "-o", "table.txt",
    )  # fmt: skip
    assert code == 0
    assert "All gradients of 4 runs match plain training with the same micro-batches bit for bit" in output
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


def test_a_table_tells_who_refuses_a_size(pipelab_command, folder):
    Path("mine.py").write_text(
        RIGHT.replace(
            "    def actions",
            "    @classmethod\n    def refusal(cls, ranks, microbatches):\n"
            "        return 'an even number, please' if microbatches % 2 else None\n\n    def actions",
            1,
        )
    )
    code, output, _ = pipelab_command("compare", "mine.py:MySchedule", "gpipe", "-m", "2,3")
    assert code == 0
    assert cells(output, "time of a step")["mine.py:MySchedule"][1] == "-"
    assert "mine.py:MySchedule with 3: an even number, please" in output
    code, output, _ = pipelab_command("compare", "mine.py:MySchedule", "-m", "3,5")
    assert code == 0
    assert output.count("an even number, please") == 2


def test_a_faulty_schedule_stops_a_table(pipelab_command, folder):
    Path("mine.py").write_text(RIGHT.replace("yield B(m)", "yield B(0)"))
    code, _, error = pipelab_command("compare", "gpipe", "mine.py:MySchedule", "-m", "2,4")
    assert code == 1
    assert "duplicate" in error


@pytest.mark.parametrize("numbers", ["x", "0", "2,-1", ",", "1.5"])
def test_numbers_of_micro_batches_that_are_none_are_refused(pipelab_command, numbers):
    for command in ("compare", "run"):
        code, _, error = pipelab_command(command, "gpipe", f"--microbatches={numbers}")
        assert code == 1
        assert f"--microbatches {numbers}: expected whole numbers, at least 1, such as 8 or 2,4,8" in error


@pytest.mark.parametrize("words", ["gpipe -m 2 4 8", "-m 2 4 8 gpipe", "-m 2, 4, 8 gpipe", "gpipe -m 2,4 8"])
def test_numbers_of_micro_batches_with_spaces_between_are_told_how_to_stand(pipelab_command, words):
    for command in ("compare", "run"):
        code, _, error = pipelab_command(command, *words.split())
        assert code == 1
        assert "several numbers of micro-batches stand together, with commas: -m 2,4,8" in error


def test_a_number_without_an_option_is_no_schedule(pipelab_command):
    code, _, error = pipelab_command("compare", "gpipe", "-r", "2", "4")
    assert code == 1
    assert error.startswith("4: a number is no schedule; several numbers of micro-batches stand together")


def test_a_table_is_no_picture(pipelab_command, folder):
    code, _, error = pipelab_command("compare", "gpipe", "-m", "2,4", "-o", "table.svg")
    assert code == 1
    assert "use one of .csv .txt" in error
