"""The command line over several numbers of micro-batches: a table."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import RIGHT

from pipelab.cli import measuring


def cells(output: str, head: str) -> dict[str, list[str]]:
    """Return one block of a table: what stands beside each name."""
    (block,) = [part for part in output.split("\n\n") if part.startswith(head)]
    return {name: rest for name, *rest in (line.split() for line in block.splitlines()[1:])}


def test_compare_over_micro_batches_shares_one_batch_among_them(succeeds):
    names, counts = ("naive", "gpipe", "delayed", "1f1b"), (1, 2, 4, 8)
    output = succeeds("compare", *names, "-r", "2", "-m", "1,2,4,8", "-f", "8", "-b", "16")
    assert "a rank takes 8 forward and 16 backward" in output
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


@pytest.mark.parametrize(
    ("ranks", "share", "slower", "reason"),
    [
        (2, 1.0, False, ""),
        (64, 0.1, False, "64 ranks take turns on 2 cores"),
        (2, 0.55, False, "55 %"),
        (2, 1.0, True, "all cores"),
    ],
)
def test_slow_ranks_get_a_reason_and_a_command_that_needs_no_cores(monkeypatch, ranks, share, slower, reason):
    monkeypatch.setattr(measuring.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    said = measuring.why_slow(ranks, share, "pipelab run gpipe 1f1b", slower)
    assert reason in said
    assert ("pipelab run gpipe 1f1b --emulate 20 40" in said) == bool(reason)


def test_a_table_tells_who_refuses_a_size(succeeds, folder):
    refusal = "return 'an even number, please' if microbatches % 2 else None"
    even = f"    @classmethod\n    def refusal(cls, ranks, microbatches):\n        {refusal}\n\n    def actions"
    Path("mine.py").write_text(RIGHT.replace("    def actions", even, 1))
    output = succeeds("compare", "mine.py:MySchedule", "gpipe", "-m", "2,3")
    assert cells(output, "time of a step")["mine.py:MySchedule"][1] == "-"
    assert "mine.py:MySchedule with 3: an even number, please" in output
    assert succeeds("compare", "mine.py:MySchedule", "-m", "3,5").count("an even number, please") == 2


def test_a_faulty_schedule_stops_a_table(refused, folder):
    Path("mine.py").write_text(RIGHT.replace("yield B(m)", "yield B(0)"))
    assert "duplicate" in refused("compare", "gpipe", "mine.py:MySchedule", "-m", "2,4")


@pytest.mark.parametrize("numbers", ["x", "0", "2,-1", ",", "1.5"])
def test_numbers_of_micro_batches_that_are_none_are_refused(refused, numbers):
    for command in ("compare", "run"):
        error = refused(command, "gpipe", f"--microbatches={numbers}")
        assert f"--microbatches {numbers}: expected whole numbers, at least 1, such as 8 or 2,4,8" in error


@pytest.mark.parametrize("words", ["gpipe -m 2 4 8", "-m 2 4 8 gpipe", "-m 2, 4, 8 gpipe", "gpipe -m 2,4 8"])
def test_numbers_of_micro_batches_with_spaces_between_are_told_how_to_stand(refused, words):
    for command in ("compare", "run"):
        assert "with commas: -m 2,4,8" in refused(command, *words.split())


def test_a_number_is_no_schedule_and_a_table_is_no_trace(refused, folder):
    assert refused("compare", "gpipe", "-r", "2", "4").startswith("4: a number is not a schedule")
    error = refused("compare", "gpipe", "-m", "2,4", "-o", "table.json")
    assert "use one of .csv .txt .md .html .png .svg .pdf" in error


def test_a_table_is_saved_as_a_plot_and_for_a_report(succeeds, folder):
    names = [f"table.{suffix}" for suffix in ("csv", "txt", "md", "html", "svg", "png", "pdf")]
    output = succeeds("compare", "gpipe", "-m", "2,4", *(word for name in names for word in ("-o", name)))
    assert all(f"wrote {name}" in output and (folder / name).stat().st_size for name in names)
