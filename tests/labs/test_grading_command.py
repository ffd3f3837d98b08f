"""`pipelab grade`: exit codes, folders, schedules with pars, and the formats of Gradescope and Classroom 50."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from types import ModuleType
from typing import Any

import pytest
from homework import LAST, ROOT, SOLUTION, changed, first

import pipelab
from pipelab.labs.grading import report, schedules
from pipelab.labs.grading.runner import Limits, grade, submissions
from pipelab.labs.grading.tasks import HOMEWORK4, Assignment, Grade, Mark

pytestmark = pytest.mark.dist

ONE_MORE = """
import pipelab
from pipelab import B, F


class OneMore(pipelab.Schedule):
    def actions(self, rank):
        warmup = min(self.microbatches, self.ranks - rank + 1)
        yield from (F(m) for m in range(warmup))
        for m in range(self.microbatches - warmup):
            yield B(m)
            yield F(warmup + m)
        yield from (B(m) for m in range(self.microbatches - warmup, self.microbatches))
"""
RIGHT = ONE_MORE.replace("OneMore", "Right").replace("rank + 1", "rank")
PARS = ("--par", "makespan=33", "--par", "peak=4", "--ranks", "4", "--microbatches", "8")


def test_a_right_file_passes_and_a_wrong_one_fails(pipelab_command, folder):
    (folder / "right.py").write_text(SOLUTION)
    code, out, _ = pipelab_command("grade", "right.py")
    assert code == 0
    assert "100 of 100" in out
    assert "sum" in out
    (folder / "wrong.py").write_text(changed((LAST, "pass")))
    code, out, _ = pipelab_command("grade", "wrong.py", "--json", "grade.json")
    assert code == 1
    assert "25% of the micro-batches" in out
    found = json.loads((folder / "grade.json").read_text())
    assert (found["score"], found["passed"], len(found["tasks"])) == (35, False, len(HOMEWORK4))
    assert all(task["hint"] for task in found["tasks"] if not task["passed"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("nowhere.py",),
        (),
        ("empty",),
        ("a.py", "--json", "nowhere/a.json"),
        ("a.py:X", "--par", "speed=3"),
        ("a.py:X", "--par", "makespan=fast"),
        (".", "--gradescope", "out"),
        (".", "--save", "a.xlsx"),
        (".", "--save", "a.png"),
    ],
)
def test_what_cannot_be_graded_has_exit_code_2(arguments, pipelab_command, folder):
    (folder / "empty").mkdir()
    (folder / "a.py").write_text("")
    code, out, err = pipelab_command("grade", *arguments)
    assert (code, out, "could not grade" in err) == (2, "", True)


def test_a_folder_has_a_line_for_each_a_summary_and_a_table(pipelab_command, folder):
    handed_in = folder / "all"
    handed_in.mkdir()
    for name, text in {"ada": SOLUTION, "bob": changed((LAST, "pass")), "eve": first("import os; os._exit(0)")}.items():
        (handed_in / f"{name}.py").write_text(text)
    code, out, err = pipelab_command("grade", "all", "--save", "all.csv", "--json", "all.json")
    assert code == 1
    assert "graded: 2 of 3" in err
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert lines["ada.py"].endswith("passed")
    assert "last backward" in lines["bob.py"]
    assert "os._exit" in lines["eve.py"]
    rows = list(csv.DictReader((folder / "all.csv").read_text().splitlines()))
    assert [(row["submission"], row["score"], row["last backward"]) for row in rows] == [
        ("ada.py", "100", "10"),
        ("bob.py", "35", "0"),
        ("eve.py", "0", "0"),
    ]
    assert lines["last"].split()[-2:] == ["2", "3"]  # last backward: failed by 2 of 3
    assert lines["not"].split()[-2:] == ["1", "3"]
    assert len(json.loads((folder / "all.json").read_text())) == 3


def test_a_schedule_earns_less_in_proportion_above_its_par(pipelab_command, folder):
    (folder / "my.py").write_text(ONE_MORE + RIGHT)
    code, out, _ = pipelab_command("grade", "my.py:Right", *PARS)
    assert (code, "100 of 100" in out) == (0, True)
    code, _, _ = pipelab_command("grade", "my.py:OneMore", *PARS, "--json", "a.json")
    tasks = {task["name"]: task for task in json.loads((folder / "a.json").read_text())["tasks"]}
    assert code == 1
    assert (tasks["makespan"]["score"], tasks["peak"]["score"]) == (20, 16)  # 33 at par 33, 5 at par 4
    assert tasks["hidden sizes"]["passed"]


WRONG = {
    "deadlock": (RIGHT.replace("self.ranks - rank", "rank + 1"), "deadlock"),
    "missing": (RIGHT.replace("yield F(warmup + m)", "pass"), "missing"),
    "one_size": (RIGHT.replace("self.microbatches - warmup", "8 - warmup"), ""),
    "two": (ONE_MORE + RIGHT, "it holds OneMore, Right"),
    "none": ("x = 1", "no class that derives from pipelab.Schedule"),
    "replaces_simulate": (RIGHT + "\npipelab.simulate = None\n", "replaces pipelab.simulate"),
    "replaces_makespan": (RIGHT + "\nfrom pipelab.trace.trace import Trace\nTrace.makespan = 1\n", "Trace.makespan"),
    "endless": (RIGHT.replace("        warmup =", "        while True: pass\n        warmup ="), "still running"),
    "exits": (RIGHT.replace("        warmup =", "        raise SystemExit(0)\n        warmup ="), "sys.exit"),
}


@pytest.fixture(scope="module")
def wrong_schedules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Grade]:
    folder = tmp_path_factory.mktemp("schedules")
    for name, (text, _) in WRONG.items():
        (folder / f"{name}.py").write_text(text)
    found = grade(submissions(folder), Assignment("", {"makespan": 33}), Limits(seconds=4), workers=2)
    return {each.submission.removesuffix(".py"): each for each in found}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_schedule_fails_with_its_reason(name, wrong_schedules):
    found = wrong_schedules[name]
    assert not found.passed
    assert WRONG[name][1] in found.reason + found.note
    assert not found.marks[-1].passed  # the hidden sizes


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zbv"])
def test_a_schedule_of_the_catalogue_is_at_its_own_par(name):
    kind = pipelab.schedules[name]
    trace = pipelab.simulate(kind(4, 8))
    pars = {"makespan": trace.makespan, "peak": max(trace.peak_activations), "bubble": trace.bubble}
    module = ModuleType("mine")
    vars(module)["Mine"] = type("Mine", (kind,), {"__module__": "mine"})
    marks, _ = schedules.judge(module, Assignment("Mine", pars), lambda _: None)
    assert all(mark.passed for mark in marks)


# ── Formats ─────────────────────────────────────────────────────────────────────────────────────────────────────────

VISIBILITY = {"visible", "hidden", "after_due_date", "after_published"}
Number = int | float
GRADESCOPE = {
    "score": Number,
    "execution_time": Number,
    "output": str,
    "visibility": VISIBILITY,
    "stdout_visibility": VISIBILITY,
    "tests": [
        {
            "name": str,
            "number": str,
            "score": Number,
            "max_score": Number,
            "status": {"passed", "failed"},
            "output": str,
            "visibility": VISIBILITY,
        }
    ],
    "leaderboard": [{"name": str, "value": Number, "order": {"asc", "desc"}}],
}
CLASSROOM50 = {
    "schema": {"classroom50/result/v1"},
    "classroom": str,
    "assignment": str,
    "usernames": [str],
    "submission": str,
    "commit": str,
    "release": str,
    "review": str,
    "datetime": str,
    "score": Number,
    "max-score": Number,
    "tests": [{"test-name": str, "passed": bool, "score": Number, "max-score": Number}],
}


def misfits(value: Any, schema: Any, place: str = "it") -> list[str]:
    """Return where a value does not fit a schema: dicts have exactly these keys, a set lists the values."""
    if isinstance(schema, dict):
        if not isinstance(value, dict) or value.keys() != schema.keys():
            return [f"{place} has other keys"]
        return [each for key in schema for each in misfits(value[key], schema[key], f"{place}.{key}")]
    if isinstance(schema, list):
        return [each for item in value for each in misfits(item, schema[0], f"{place}[]")]
    fits = value in schema if isinstance(schema, set) else isinstance(value, schema)
    return [] if fits and not (schema is Number and isinstance(value, bool)) else [f"{place}: {value!r}"]


def test_the_schemas_see_a_misfit():
    assert misfits({"name": 3, "value": 1, "order": "up"}, GRADESCOPE["leaderboard"][0]) == [
        "it.name: 3",
        "it.order: 'up'",
    ]
    assert misfits({"name": "x"}, GRADESCOPE["leaderboard"][0])


GRADES = [
    Grade("right.py", [Mark(task, task.points) for task in HOMEWORK4], note="a sum", seconds=1.5),
    Grade("half.py", [Mark(task, task.points / 2, "a", "b", "c") for task in HOMEWORK4]),
    Grade("none.py", [Mark(task, 0) for task in HOMEWORK4], reason="it ends the interpreter"),
    Grade("missing.py", reason="could not grade"),
]


@pytest.mark.parametrize("one", GRADES, ids=lambda grade: grade.submission)
def test_both_formats_fit_their_schema(one):
    gradescope = json.loads(json.dumps(report.gradescope(one)))
    assert misfits(gradescope, GRADESCOPE) == []
    assert gradescope["score"] == sum(test["score"] for test in gradescope["tests"])
    classroom = json.loads(json.dumps(report.classroom50(one)))
    assert misfits(classroom, CLASSROOM50) == []
    assert classroom["score"] == sum(test["score"] for test in classroom["tests"])


def test_hidden_sizes_are_shown_on_gradescope_only_once_published():
    tests = {test["name"]: test["visibility"] for test in report.gradescope(GRADES[0])["tests"]}
    assert {name for name, seen in tests.items() if seen != "visible"} == {"hidden sizes"}


def test_classroom50_says_in_the_environment_what_is_graded():
    environment = {
        "CLASSROOM": "cs50",
        "ASSIGNMENT": "hw4",
        "GITHUB_ACTOR": "ada",
        "SUBMISSION_TAG": "submit/1",
        "COMMIT_URL": "https://example.org/commit/1",
    }
    found = report.classroom50(GRADES[0], environment)
    assert (found["classroom"], found["assignment"], found["usernames"]) == ("cs50", "hw4", ["ada"])
    assert (found["submission"], found["commit"]) == ("submit/1", "https://example.org/commit/1")


def test_the_command_writes_both_formats(pipelab_command, folder):
    (folder / "a.py").write_text(changed((LAST, "pass")))
    code, _, _ = pipelab_command("grade", "a.py", "--gradescope", "out", "--classroom50", "result.json")
    assert code == 1
    assert misfits(json.loads((folder / "out" / "results.json").read_text()), GRADESCOPE) == []
    assert misfits(json.loads((folder / "result.json").read_text()), CLASSROOM50) == []


def test_gradescope_gets_results_even_if_there_is_nothing_to_grade(pipelab_command, folder):
    assert pipelab_command("grade", "nowhere.py", "--gradescope", "out")[0] == 2
    found = json.loads((folder / "out" / "results.json").read_text())
    assert misfits(found, GRADESCOPE) == []
    assert found["score"] == 0


def test_the_bundle_grades_as_gradescope_would_run_it(pipelab_command, folder):
    assert pipelab_command("grade", "--gradescope", "bundle", "--seed", "7")[0] == 0
    autograder = folder / "autograder"
    with zipfile.ZipFile(folder / "bundle" / "autograder.zip") as archive:
        archive.extractall(autograder / "source")
        names = archive.namelist()
    assert {"setup.sh", "run_autograder", "pipelab/__init__.py"} <= set(names)
    assert not [name for name in names if "teacher" in name or "__pycache__" in name]
    (autograder / "submission").mkdir()
    (autograder / "submission" / "my_file.py").write_text(SOLUTION)
    script = (autograder / "source" / "run_autograder").read_text()
    assert "--seed 7" in script
    script = script.replace("/autograder", str(autograder)).replace("python3", sys.executable)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(["bash", "-c", script], cwd=autograder, check=True, capture_output=True, env=environment)
    assert json.loads((autograder / "results" / "results.json").read_text())["score"] == 100
    for name in ("setup.sh", "run_autograder"):
        subprocess.run(["bash", "-n", str(autograder / "source" / name)], check=True)


def test_the_bundle_installs_what_the_project_needs():
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [need for need in needs if f'"{need}"' not in report._SETUP] == []
