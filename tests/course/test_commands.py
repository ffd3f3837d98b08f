"""`pipelab lab` and `pipelab grade`: entry points, found by the command."""

from __future__ import annotations

import re

from commands import one_line_each


def test_every_lab_is_one_line_of_the_help(succeeds, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert one_line_each(succeeds("lab", "--help")) > 5
    for name in ("practical9", "hw1", "hw3"):
        assert "csv txt md html; png svg pdf: the plot" in " ".join(
            succeeds("lab", name, "--help").replace("│", " ").split()
        )


def test_what_homework_4_asks_for_is_told_before_it_is_begun(pipelab_command, folder):
    code, shown, _ = pipelab_command("lab", "hw4", "--no-answers")
    assert (code, list(folder.iterdir())) == (0, [])
    points = [int(line.split()[-1]) for line in shown.splitlines() if re.search(r" \d+$", line)]
    assert sum(points) == 100
    assert "pipelab lab hw4 --start" in shown
