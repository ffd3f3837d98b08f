"""`pipelab challenge`: levels, attempts, best results, the teacher's sheet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelab import files
from pipelab.challenges import levels as levels_module
from pipelab.challenges.levels import levels

MINE = """
import pipelab
from pipelab import B, F

class MySchedule(pipelab.Schedule):
    def actions(self, rank):
        warmup = min(self.microbatches, self.ranks - rank)
        yield from map(F, range(warmup))
        for m in range(self.microbatches):
            yield B(m)
            if warmup + m < self.microbatches:
                yield F(warmup + m)
"""


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """Keep best results in a folder of the test's own; return their file."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "pipelab" / "challenges.json"


@pytest.fixture
def mine(folder):
    """Write a learner's 1F1B; return what to give the command."""
    Path("mine.py").write_text(MINE)
    return "mine.py:MySchedule"


def test_an_attempt_is_drawn_named_and_kept_if_it_is_the_best(succeeds, state, mine):
    output = succeeds("challenge", "four", mine)
    assert "33 units" in output
    assert "rank 3 │" in output
    assert "you built 1f1b: " in output
    assert levels()["four"].lesson in " ".join(output.split())
    assert json.loads(state.read_text()) == {"four": 33}
    succeeds("challenge", "four", "naive")
    assert json.loads(state.read_text()) == {"four": 33}
    assert "***" in succeeds("challenge")
    assert "your best so far: 33" in succeeds("challenge", "2")


def test_what_is_looked_up_is_marked_and_gives_way_to_what_is_written(succeeds, mine):
    assert "looked up" in succeeds("challenge", "four", "1f1b")
    listed = succeeds("challenge")
    assert ("looked up" in listed, "***" in listed) == (True, False)
    assert "your best so far: looked up" in succeeds("challenge", "four")
    assert "looked up" not in succeeds("challenge", "four", mine)
    succeeds("challenge", "four", "1f1b")
    listed = succeeds("challenge")
    assert ("looked up" in listed, "***" in listed) == (False, True)


def test_scores_may_be_moves_or_activations_and_listed_rows_are_shown(succeeds, folder):
    assert levels()["circle"].listed[2] in succeeds("challenge", "circle")
    one_f_one_b = succeeds("challenge", "light", "1f1b")
    assert "4 activations, good; par is 3" in one_f_one_b
    assert "2 moves" in succeeds("challenge")


def test_a_refused_attempt_ends_with_1_and_keeps_nothing(refused, state):
    error = refused("challenge", "four", "gpipe")
    assert "memory-cap: 0F4" in error
    assert "1 more" in error
    assert not state.exists()


def test_a_plan_in_a_file_counts(succeeds, folder):
    Path("mine.csv").write_text("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n2F0,2F1,2F2,2B0,2B1,2B2\n")
    assert "15 units" in succeeds("challenge", "fill", "mine.csv")


@pytest.mark.parametrize(
    ("broken", "stars", "kept"),
    [
        *((text, 0, {}) for text in ("{", "[]", '{"four": "x"}', '{"other": 3}')),
        *(
            (f'{{"four": {value}, "three": 33}}', 1, {"three": 33})
            for value in ("NaN", "-1", "true", "null", '"33"', "[]")
        ),
    ],
)
def test_a_broken_file_or_result_is_no_hindrance_and_takes_no_other_along(succeeds, state, broken, stars, kept, mine):
    state.parent.mkdir(parents=True)
    state.write_text(broken)
    assert succeeds("challenge").count("***") == stars
    succeeds("challenge", "four", mine)
    assert json.loads(state.read_text()) == {"four": 33, **kept}


def test_hints_come_one_by_one(succeeds):
    offered = {"0": "--hint 1", "2": "--hint 3", "3": ""}
    for count, more in offered.items():
        shown = succeeds("challenge", "fill", "--hint", count)
        assert shown.count("\n  hint ") == int(count)
        assert shown.count("--hint") == bool(more)
        assert more in shown


def test_without_the_teachers_folder_there_is_no_sheet(pipelab_command, monkeypatch, tmp_path):
    monkeypatch.setattr(files, "__file__", str(tmp_path / "pipelab" / "files.py"))
    levels_module._answers.cache_clear()
    code, output, error = pipelab_command("challenge", "--sheet")
    assert (code, output) == (1, "")
    assert "make teacher" in error


@pytest.mark.teacher
def test_the_sheet_has_all_answers(succeeds):
    sheet = succeeds("challenge", "--sheet")
    for each in levels().values():
        assert each.title in sheet
        assert str(each.solution) in sheet
        assert each.note in sheet
