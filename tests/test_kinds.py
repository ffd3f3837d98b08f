"""The table of kinds: a kind of action that pipelab does not have is a row of it and a method of a stage."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import SCRIPTS, environment

import pipelab
from pipelab.plan.actions import PER_MICROBATCH, TRAITS

ROW = """    "X": Traits("update", needs=("gw(m,s)",), gives=("moved(m,s)",), method="advance", cost="weight_grad",
                colours=("#CC79A7", "#D694B8"), optional=True),
"""
METHOD = """    def advance(self, _microbatch: int, _given: None, _kept: dict[int, Any], _loss: Loss) -> None:
        with torch.no_grad():
            for each in self.module.parameters():
                each -= 0.1 * each.grad
                each.grad = None

"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what `updating.py` says of a copy of pipelab with `X`: an update after each micro-batch."""
    folder = tmp_path_factory.mktemp("updates")
    shutil.copytree(Path(pipelab.__file__).parent, folder / "pipelab", ignore=shutil.ignore_patterns("__pycache__"))
    insert(folder / "pipelab/plan/actions.py", '    "R": Traits(', ROW)
    insert(folder / "pipelab/engine/stage/stage.py", "    def evaluate(", METHOD)
    paths = {"PYTHONPATH": str(folder)}
    command = [sys.executable, SCRIPTS / "updating.py", folder]
    ended = subprocess.run(command, env=environment() | paths, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    facts = json.loads(ended.stdout)
    assert Path(facts["package"]).is_relative_to(folder)
    return facts | {"folder": folder}


def insert(path, before, text):
    """Insert a text before a line that the file has once."""
    source = path.read_text()
    assert source.count(before) == 1
    path.write_text(source.replace(before, text + before))


def test_a_plan_may_have_the_new_kind_or_not_and_only_then_has_codes_for_it(found):
    assert found["late"] == found["without"] == []
    assert found["kinds"] == {"late": ["F", "B", "I", "W", "X", "R"], "without": ["F", "B", "I", "W", "R"]}
    assert found["read"]
    assert "1,X,1,0,4.5,7.5" in (found["folder"] / "updates.events.csv").read_text()


@pytest.mark.parametrize(
    ("plan", "code", "names"),
    [
        ("early", "unordered", ("1X0", "1B0", "the weight gradient of micro-batch 0 from stage 1")),
        ("split", "unordered", ("0X0", "0W0", "the weight gradient of micro-batch 0 from stage 0")),
        ("lost", "duplicate", ("0X0", "rank 1")),
    ],
)
def test_a_new_kind_before_what_it_needs_or_twice_is_a_fault(found, plan, code, names):
    ((kind, message),) = found["faults"][plan]
    assert kind == code
    assert all(name in message for name in names)


def test_a_new_kind_occupies_its_rank_and_starts_when_its_own_stage_has_given_what_it_needs(found):
    assert found["starts"] == [["0X0", 7, 10], ["0X1", 17, 20], ["1X0", 4.5, 7.5], ["1X1", 14.5, 17.5]]
    assert found["peaks"] == [1, 1]
    assert found["bound"] <= found["makespan"] == 20


def test_a_new_kind_is_drawn_in_its_colour_with_its_word(found):
    rows = [line for line in found["text"].splitlines() if line.startswith("rank ")]
    assert len(rows) == 2
    assert all("X0" in row and "X1" in row for row in rows)
    figure = (found["folder"] / "updates.svg").read_text().lower()
    assert "#cc79a7" in figure
    assert "update" in figure


def test_the_page_knows_what_a_new_kind_needs(found, browser):
    tab = browser.new_page()
    tab.goto((found["folder"] / "updates.html").as_uri())
    names = "((places) => places.map((each) => models[0].name(each)))"
    assert tab.evaluate(f"{names}(models[0].needs(models[0].named('1X0')[0]))") == ["1B0"]
    assert tab.evaluate(f"{names}(models[0].gives(models[0].named('1B0')[0]))") == ["0B0", "1X0"]
    assert "X update" in tab.evaluate("document.querySelector('.legend').textContent")
    tab.close()


def test_threads_run_a_new_kind_and_train_as_plain_updates_do(found):
    assert found["ran"] == [[f"{stage}{kind}{m}" for m in (0, 1) for kind in "FBX"] for stage in (0, 1)]
    assert found["equal"]


def test_every_value_that_a_kind_needs_is_given_by_some_kind():
    given = {value for kind in TRAITS for value in TRAITS[kind].gives}
    for traits in TRAITS.values():
        assert {value.replace("s-1", "s").replace("s+1", "s") for value in traits.needs} <= given


def test_a_kind_that_releases_an_activation_never_runs_without_one_that_holds_it():
    sizes = [(TRAITS[kind].holds, TRAITS[kind].releases) for kind in PER_MICROBATCH]
    assert {released for _, released in sizes} == {held for held, _ in sizes}
