"""`pipelab tutorial`: a tutorial shows no answer before its prediction, in the terminal and as a notebook."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
import zipfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

import pipelab
from pipelab.errors import UsageError
from pipelab_course import tutorial as course
from pipelab_course.tutorial import cells, notebook, tutorial

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in course.TUTORIALS.glob("*.py"))


@pytest.fixture
def terminal(monkeypatch, capsys, folder):
    """Run a tutorial in a terminal in which these lines are typed, then Ctrl-C; return what it shows."""

    def run(name, *typed):
        answers = iter(typed)

        def ask(prompt):
            sys.stdout.write(f"{prompt}\n")
            if (line := next(answers, None)) is None:
                raise KeyboardInterrupt
            return line

        monkeypatch.setattr(course, "input", ask, raising=False)
        monkeypatch.setattr(course, "_jupyter", lambda: "")
        for stream in ("stdin", "stdout"):
            monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True, raising=False)
        with suppress(typer.Exit):
            tutorial(name)
        return capsys.readouterr().out

    return run


def test_every_tutorial_is_listed_after_those_that_it_needs(capsys):
    tutorial()
    listed = re.findall(r"^(\w+), \d+ minutes: you ", capsys.readouterr().out, re.MULTILINE)
    assert sorted(listed) == NAMES
    assert listed.index("first_schedule") < listed.index("fill_and_drain") < listed.index("latency")


def test_an_answer_comes_after_its_prediction_and_a_trace_as_text(terminal):
    shown = terminal("option_c", "", "", "40", *[""] * 40)
    before, asked, after = shown.partition("Your prediction, units (only Enter: no guess)")
    assert asked
    assert "45" not in before
    assert "before it" in before
    assert "Run it with" not in before
    assert "predicted 40, simulated 45" in after
    assert "rank 1 │··F0F1B0─" in after
    assert "predicted nothing" in after  # only Enter
    assert shown.count("rank 1 │··F0F1B0─") == 1
    assert str(course.TUTORIALS / "option_c.py") in after  # for the exercise


def test_a_prompt_names_its_choices_after_the_rest_of_its_cell(terminal):
    shown = terminal("which_layout", *[""] * 40)
    assert shown.index("TIMED") < shown.index("Your prediction, pairs in the right order, of 120 (")
    assert "= None" not in shown
    assert "Your prediction, two numbers: GPipe, 1F1B (" in terminal("the_wire", *[""] * 40)


def test_ctrl_c_ends_it_kindly_and_without_the_answer(terminal):
    shown = terminal("option_c", "", "")
    assert "\nStopped. To begin again: pipelab tutorial option_c; --answers asks nothing" in shown
    assert "simulated 45" not in shown


def test_answers_without_questions_are_for_any_output(capsys, monkeypatch, folder):
    monkeypatch.setattr(course, "_jupyter", lambda: "jupyterlab")
    with pytest.raises(UsageError, match="no tutorial 'option_d'"):
        tutorial("option_d")
    tutorial("option_c", answers=True)
    assert "predicted nothing, simulated 45" in capsys.readouterr().out
    assert list(folder.iterdir()) == []


def test_a_notebook_that_is_there_stays(capsys, monkeypatch, folder):
    monkeypatch.setattr(course, "_jupyter", lambda: "")
    tutorial("latency", as_notebook=True)
    Path("latency.ipynb").write_text("mine")
    tutorial("latency", as_notebook=True)
    assert Path("latency.ipynb").read_text() == "mine"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_holds_no_answer_and_asks_before_each(name):
    code = (course.TUTORIALS / f"{name}.py").read_text(encoding="utf-8")
    made = json.loads(notebook(name, code))["cells"]
    text = "\n".join(cell["source"] for cell in made)
    answers = {cell.source for cell in cells(code) if cell.is_answer}
    assert [cell["source"] for cell in made if cell["source"] in answers] == []
    assert not any(cell.get("outputs") for cell in made)
    assert "Run it with" not in text
    calls = re.findall(rf'^show_answer\("{name}", (\d+), (my_\w+)\)$', text, re.MULTILINE)
    assert [int(number) for number, _ in calls] == list(range(len(calls)))
    for number, asked in calls:
        assert f"{asked} = None" in text.partition(f'show_answer("{name}", {number},')[0]


def test_an_answer_of_a_notebook_runs_in_it_once_the_prediction_is_there(monkeypatch):
    display = pytest.importorskip("IPython.display")
    shown = []
    monkeypatch.setattr(display, "display", shown.append)
    names = {"pipelab": pipelab, "my_prediction": None, "P": 4, "M": 8, "far": pipelab.Cost(latency=0.5)}
    here = SimpleNamespace(**names)
    monkeypatch.setattr(course, "__main__", here)
    with pytest.raises(course.NoPredictionError, match="in place of None"):
        course.show_answer("latency", 0, names["my_prediction"])
    assert shown == []
    course.show_answer("latency", 0, "36")
    assert here.gpipe.makespan == 36
    assert "Of the 48 transfers, 6 count" in shown[1].data


def test_the_command_is_an_entry_point_and_the_wheel_holds_the_tutorials(tmp_path):
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    module, _, name = entry["pipelab.commands"]["tutorial"].partition(":")
    assert getattr(importlib.import_module(module), name) is tutorial
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    (wheel,) = builder.build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as packed:
        held = {
            Path(file).stem for file in packed.namelist() if re.fullmatch(r"pipelab_course/tutorials/\w+\.py", file)
        }
    assert sorted(held) == NAMES
