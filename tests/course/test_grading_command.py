"""`pipelab grade`: exit codes, folders, schedules with pars, and the formats of Gradescope and Classroom 50."""

from __future__ import annotations

import base64
import contextlib
import csv
import json
import os
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
from commands import ran
from homework import LAST, MOVE, ROOT, SOLUTION, changed, first, solution_of

import pipelab
from pipelab.errors import NO_TORCH, UsageError
from pipelab_course.grading import command as grading
from pipelab_course.grading import report, runner, schedules
from pipelab_course.grading.runner import Limits, grade, submissions
from pipelab_course.grading.tasks import HOMEWORKS, Assignment, Grade, Mark

HOMEWORK4 = HOMEWORKS["hw4"].tasks

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("kept_servers")]

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


def test_a_right_file_passes_and_a_wrong_one_fails(pipelab_command, succeeds, folder):
    (folder / "right.py").write_text(SOLUTION)
    out = succeeds("grade", "right.py")
    assert "100 of 100" in out
    assert "sum" in out
    (folder / "wrong.py").write_text(changed((LAST, "pass")))
    code, out, _ = pipelab_command("grade", "wrong.py", "--json", "grade.json")
    assert code == 1
    assert "25% of the micro-batches" in out
    found = json.loads((folder / "grade.json").read_text())
    assert (found["score"], found["passed"], len(found["tasks"])) == (55, False, len(HOMEWORK4))
    assert [task["name"] for task in found["tasks"] if task["hint"]] == ["last backward"]
    assert "not reached   0 of 15  gradients" in out
    assert "Begin with the first" in out


@pytest.mark.parametrize(
    "words",
    [
        *(
            "nowhere.py",
            "",
            "empty",
            "a.py --json nowhere/a.json",
            "a.py:X --par speed=3",
            "a.py:X --par makespan=fast",
        ),
        *("a.py:X --par bubble=27.3", "notebook.ipynb", ". --save a.xlsx", ". --save a.png"),
    ],
)
def test_what_cannot_be_graded_has_exit_code_2(words, pipelab_command, folder):
    (folder / "empty").mkdir()
    (folder / "a.py").write_text("")
    (folder / "notebook.ipynb").write_text("{}")
    code, out, err = pipelab_command("grade", *words.split())
    assert (code, out, "could not grade" in err) == (2, "", True)


@pytest.mark.parametrize("name", HOMEWORKS)
def test_a_homework_is_recognised_by_what_it_defines(name, folder):
    (folder / "p1.py").write_text(solution_of(name))
    (folder / "all" / "ada").mkdir(parents=True)
    (folder / "all" / "ada" / "mine.py").write_text(solution_of(name))
    assert [grading._named([target])[0] for target in ("p1.py", "all")] == [name, name]
    assert grading._named(["hw4", "p1.py"])[0] == "hw4"


def test_a_file_that_may_be_any_homework_or_several_is_not_graded(pipelab_command, folder):
    (folder / "p1.py").write_text("# SpreadStack\nclass SpredStack: pass\n")
    (folder / "p2.py").write_text("class SpreadStack: pass\ndef run_1F1B_homework(): pass\n")
    for name, said in (
        ("p1.py", "none of benchmark (hw1), SpreadStack (hw3)"),
        ("p2.py", "SpreadStack (hw3) and run_"),
    ):
        code, out, err = pipelab_command("grade", name)
        assert (code, out) == (2, "")
        assert said in err
        assert f"pipelab grade hw3 {name}" in err


def test_help_is_short_for_students_and_whole_for_teachers(succeeds):
    shown = succeeds("grade", "--help")
    assert "--variant" in shown
    assert "--latency" not in shown
    assert ("--gradescope" in shown) == (Path(__file__).parents[2] / "teacher").is_dir()


@pytest.mark.parametrize("target", ["a.py", "."])
def test_without_pytorch_one_sentence_says_what_is_missing(target, folder):
    (folder / "a.py").write_text(SOLUTION)
    code = f"import sys; sys.modules['torch'] = None; sys.argv = ['pipelab', 'grade', '{target}']\n"
    code += "from pipelab.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"could not grade: {NO_TORCH}\n")


def test_a_folder_has_a_line_for_each_a_summary_and_a_table(pipelab_command, folder):
    (folder / "all").mkdir()
    for name, text in {"ada": SOLUTION, "bob": changed((LAST, "pass")), "eve": first("import os; os._exit(0)")}.items():
        (folder / "all" / f"{name}.py").write_text(text)
    code, out, err = pipelab_command("grade", "all", "--save", "all.csv", "--json", "all.json")
    assert code == 1
    assert err.count("graded: ") == 1
    assert "graded: 1 of 3, about" in err
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert lines["ada.py"].endswith("passed")
    assert "last backward" in lines["bob.py"]
    assert "not reached: gradients, training" in lines["bob.py"]
    assert "os._exit" in lines["eve.py"]
    rows = list(csv.DictReader((folder / "all.csv").read_text().splitlines()))
    assert [[row[name] for name in ("submission", "score", "last backward", "not reached")] for row in rows] == [
        ["ada.py", "100", "10", ""],
        ["bob.py", "55", "0", "gradients, training, hidden sizes"],
        ["eve.py", "0", "0", ""],
    ]
    assert lines["last"].split()[-3:] == ["1", "0", "3"]  # last backward: failed by bob, not reached by none, of 3
    assert lines["gradients"].split()[-3:] == ["0", "1", "3"]
    assert lines["not"].split()[2] == "1"  # not gradable
    assert len(json.loads((folder / "all.json").read_text())) == 3


def test_what_is_graded_is_saved_before_the_rest_is(pipelab_command, folder, monkeypatch):
    (folder / "all").mkdir()
    for name in ("ada", "bob"):
        (folder / "all" / f"{name}.py").write_text("x = 1")
    saved: list[int] = []
    echo = grading.echo

    def spy(text: str, **options: Any) -> None:
        saved.append((folder / "all.csv").read_text().count(".py") if (folder / "all.csv").exists() else 0)
        echo(text, **options)

    monkeypatch.setattr(grading, "echo", spy)
    pipelab_command("grade", "all", "--workers", "1", "--save", "all.csv")
    assert saved[-2:] == [0, 1]  # when each line was printed


def test_names_and_reasons_run_in_no_spreadsheet_and_no_page(tmp_path):
    hostile = ["=cmd|' /C calc'!A1", "+1", "-1", "@SUM(A1)", "<img src=x>", "[a](javascript:b)", "a|b"]
    grades = [Grade(name, [Mark(HOMEWORK4[0], 0)], reason=name) for name in hostile]
    table = report.table(grades, {"=skipped": "=why"})
    rows = list(csv.DictReader(table.save(tmp_path / "a.csv").read_text().splitlines()))
    assert len(rows) == len(hostile) + 1
    assert not [cell for row in rows for cell in row.values() if cell.startswith(("=", "+", "-", "@"))]
    page = table.save(tmp_path / "a.md").read_text()
    assert "<img" not in page.replace("\\<", "")
    assert "[a]" not in page.replace("\\[", "")


def test_a_submission_that_is_a_link_is_not_read(kept_servers, tmp_path):
    (tmp_path / "solution").write_text(SOLUTION)
    handed_in = tmp_path / "all"
    (handed_in / "bob").mkdir(parents=True)
    (handed_in / "ada.py").symlink_to(tmp_path / "solution")
    (handed_in / "bob" / "pipeline_homework.py").write_text("from helper import *")
    (handed_in / "bob" / "helper.py").symlink_to(tmp_path / "solution")
    (handed_in / "cleo").symlink_to(handed_in / "bob")
    found, skipped = submissions(handed_in)
    assert skipped.keys() == {"ada.py", "cleo"}
    reasons = {each.submission: each.reason for each in grade(found, Assignment())}
    assert "imports helper" in reasons["bob"]


def test_a_submission_sees_no_secrets_of_whoever_grades(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text(first("import os; print(os.environ)"))
    monkeypatch.setenv("MY_TOKEN", "a-secret")
    with contextlib.closing(runner._Server()) as server:
        monkeypatch.setattr(runner, "_Server", lambda: server)
        (found,) = grade(submissions(tmp_path)[0], Assignment())
    assert "environ" in found.output
    assert "a-secret" not in found.output


def test_each_hand_in_of_a_folder_is_graded_or_skipped_with_the_reason(pipelab_command, folder):
    ok = ["ada.py", "bob/pipeline_homework.py", "cleo/hw4/pipeline_homework.py", "dan/mine.py", "eve/a/deep.py"]
    texts = dict.fromkeys(ok, "x = 1") | dict.fromkeys(("dan/notes.txt", "two/a.py", "two/b.py", ".git/config"), "")
    texts |= dict.fromkeys(("fay.zip", "gus.ipynb", "notes.md", "zip/all.zip", "a/b/c/far.py", "__MACOSX/x.py"), "")
    for name, text in texts.items():
        (folder / "all" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "all" / name).write_text(text)
    (folder / "all" / "empty").mkdir()
    code, out, _ = pipelab_command("grade", "all", "--save", "all.csv")
    assert code == 1
    rows = {row["submission"]: row["reason"] for row in csv.DictReader((folder / "all.csv").read_text().splitlines())}
    skipped = {name: reason for name, reason in rows.items() if reason.startswith("skipped: ")}
    assert rows.keys() - skipped.keys() == {"ada.py", "bob", "cleo/hw4", "dan", "eve/a"}
    reasons = {"fay.zip": "unpack", "gus.ipynb": "notebook", "notes.md": "not a Python file", "empty": "empty folder"}
    reasons |= {"zip": "unpack", "two": "2 Python files", "a/b": "without a Python file"}
    assert skipped.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert reason in skipped[name]
        assert f"skipped: {name} ({skipped[name].removeprefix('skipped: ')})" in out


def test_a_folder_that_is_a_submission_is_graded_as_one(succeeds, folder):
    (folder / "helper.py").write_text("import torch\n")
    (folder / "pipeline_homework.py").write_text(first("import helper"))
    assert succeeds("grade", ".").startswith(f"{folder.name}: 100 of 100")


def test_two_schedules_without_a_name_cannot_be_graded(pipelab_command, folder):
    (folder / "my.py").write_text(ONE_MORE + RIGHT)
    code, out, err = pipelab_command("grade", "my.py", *PARS, "--gradescope", "out")
    assert (code, "points" in out) == (2, False)
    assert "2 schedules" in err
    assert "my.py:OneMore" in err
    assert json.loads((folder / "out" / "results.json").read_text())["score"] == 0


def test_an_illegal_schedule_shows_its_fault_first_and_nothing_else_was_reached(pipelab_command, folder):
    (folder / "my.py").write_text(RIGHT.replace("self.ranks - rank", "rank + 1"))
    code, out, _ = pipelab_command("grade", "my.py:Right", *PARS)
    assert code == 1
    assert out.split("\n\n")[1].startswith("deadlock")
    missed = [line.split()[-1] for line in out.splitlines() if line.startswith("not reached")]
    assert missed == ["makespan", "peak", "sizes"]
    assert out.count("hint") == 1


def test_points_are_whole_numbers_whatever_the_pars():
    for pars in ({}, {"peak": 4}, {"makespan": 33, "peak": 4, "bubble": 0.2}):
        tasks = Assignment("", pars).tasks()
        assert sum(task.points for task in tasks) == 100
        assert all(isinstance(task.points, int) for task in tasks)


def test_the_lines_that_make_schedule_variants_grade_a_right_file_with_all_points(succeeds, folder, capsys):
    ran(ROOT / "docs" / "teach" / "copying.md")
    (folder / "ada.py").write_text(RIGHT)
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("pipelab grade ada.py ")
    assert "100 of 100" in succeeds(*line.split()[1:])


def test_a_schedule_earns_less_in_proportion_above_its_par(pipelab_command, folder):
    (folder / "my.py").write_text(ONE_MORE + RIGHT)
    code, out, _ = pipelab_command("grade", "my.py:Right", *PARS)
    assert (code, "100 of 100" in out) == (0, True)
    code, _, _ = pipelab_command("grade", "my.py:OneMore", *PARS, "--json", "a.json")
    tasks = {task["name"]: task for task in json.loads((folder / "a.json").read_text())["tasks"]}
    assert code == 1
    assert (tasks["makespan"]["score"], tasks["peak"]["score"]) == (20, 16)  # 33 at par 33, 5 at par 4
    assert tasks["hidden sizes"]["passed"]


MINE = "\nfrom pipelab_course.grading import schedules\n"
WRONG = {
    "deadlock": (RIGHT.replace("self.ranks - rank", "rank + 1"), "deadlock"),
    "missing": (RIGHT.replace("yield F(warmup + m)", "pass"), "missing"),
    "one_size": (RIGHT.replace("self.microbatches - warmup", "8 - warmup"), ""),
    "two": (ONE_MORE + RIGHT, "it holds 2 schedules, OneMore, Right"),
    "none": ("x = 1", "no class that derives from pipelab.Schedule"),
    "replaces_makespan": (
        RIGHT.replace("self.ranks - rank)", "1)") + "\nfrom pipelab.trace.trace import Trace\nTrace.makespan = 1\n",
        "",
    ),
    "replaces_check": (
        RIGHT.replace("yield F(warmup + m)", "pass") + MINE + "schedules.check = lambda *a: []\n",
        "cannot be judged",
    ),
    "sends_another_size": (
        RIGHT + MINE + "schedules.as_plan = lambda *a: pipelab.Plan.parse('0F0 0B0')\n",
        "cannot be judged",
    ),
    "endless": (RIGHT.replace("        warmup =", "        while True: pass\n        warmup ="), "still running"),
    "exits": (RIGHT.replace("        warmup =", "        raise SystemExit(0)\n        warmup ="), "sys.exit"),
}


@pytest.fixture(scope="module")
def wrong_schedules(kept_servers: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Grade]:
    folder = tmp_path_factory.mktemp("schedules")
    for name, (text, _) in WRONG.items():
        (folder / f"{name}.py").write_text(text)
    found = grade(submissions(folder)[0], Assignment("", {"makespan": 33}), Limits(seconds=2), workers=2)
    return {each.submission.removesuffix(".py"): each for each in found}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_schedule_fails_with_its_reason(name, wrong_schedules):
    found = wrong_schedules[name]
    assert not found.passed
    assert WRONG[name][1] in found.reason + found.note
    assert found.score < 100


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zbv", "greedy"])
def test_a_schedule_of_the_catalogue_is_at_its_own_par(name):
    kind = pipelab.schedules[name]
    trace = pipelab.simulate(kind(4, 8))
    pars = {"makespan": trace.makespan, "peak": max(trace.peak_activations), "bubble": trace.bubble}
    module = ModuleType("mine")
    vars(module)["Mine"] = type("Mine", (kind,), {"__module__": "mine"})
    given = Assignment("Mine", pars)
    sent = json.loads(json.dumps(schedules.record(lambda: module, given, lambda _: None)))
    marks, note = schedules.judge(sent, given)
    assert [mark.status for mark in marks] == ["passed", "failed", "not reached", "not reached", "not reached"]
    assert f"pipelab's own {name}" in note
    marks, _ = schedules.judge(sent | {"asked": []}, given)  # as if its actions were written there
    assert all(mark.passed for mark in marks)


LOOKED_UP = {
    "an empty subclass": "class Mine(pipelab.OneFOneB): pass",
    "a subclass that asks its parent": """
class Mine(pipelab.schedules["1f1b"]):
    def actions(self, rank):
        yield from super().actions(rank)
""",
    "another schedule's actions": """
class Mine(pipelab.Schedule):
    def actions(self, rank):
        return pipelab.OneFOneB(self.ranks, self.microbatches).actions(rank)
""",
    "a plan's rows": """
class Mine(pipelab.Schedule):
    def actions(self, rank):
        yield from pipelab.OneFOneB(self.ranks, self.microbatches).plan().rows[rank]
""",
}
OWN = {
    "written by hand": RIGHT,
    "compared with the catalogue's": f"{RIGHT}\nassert len(pipelab.OneFOneB(4, 8).plan().rows) == 4",
    "a subclass that changes the order": """
class Mine(pipelab.GPipe):
    def actions(self, rank):
        order = list(super().actions(rank))
        yield from order[: self.microbatches]
        yield from reversed(order[self.microbatches :])
""",
}


def _graded(text: str) -> Grade:
    module = ModuleType("mine")

    def load() -> ModuleType:
        exec(f"import pipelab\n{text}", vars(module))  # noqa: S102
        return module

    given = Assignment("", {"makespan": 33})
    marks, note = schedules.judge(schedules.record(load, given, lambda _: None), given)
    return Grade("mine", marks, note=note)


@pytest.mark.parametrize("text", LOOKED_UP.values(), ids=LOOKED_UP)
def test_a_schedule_that_was_looked_up_gets_nothing_for_its_pars(text):
    found = _graded(text)
    assert "looked up: it is pipelab's own 1f1b" in found.note
    assert [(mark.task.name, mark.score, mark.status) for mark in found.marks] == [
        ("legal", 40, "passed"),
        ("makespan", 0, "failed"),
        ("hidden sizes", 0, "not reached"),
    ]


@pytest.mark.parametrize("text", OWN.values(), ids=OWN)
def test_a_schedule_of_ones_own_is_not_taken_for_one_that_was_looked_up(text):
    found = _graded(text)
    assert (found.passed, found.note) == (True, "")


# ── Formats ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def only(properties: dict[str, Any], further: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the schema of an object that has these keys, maybe further ones, and no other."""
    known = properties | (further or {})
    return {"type": "object", "required": [*properties], "properties": known, "additionalProperties": False}


def list_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


TEXT, NUMBER = {"type": "string"}, {"type": "number"}
SEEN = {"enum": ["visible", "hidden", "after_due_date", "after_published"]}
ONE_TEST = {"name": TEXT, "number": TEXT, "score": NUMBER, "max_score": NUMBER, "output": TEXT, "visibility": SEEN}
GRADESCOPE = only(
    {"score": NUMBER, "execution_time": NUMBER, "output": TEXT, "visibility": SEEN, "stdout_visibility": SEEN}
    | {"tests": list_of(only(ONE_TEST | {"status": {"enum": ["passed", "failed"]}}))}
)
# The rules of foundation50/classroom50, schemas/result-v1.schema.json, in November 2026. No other key is allowed.
WORD, TIME = {"type": "string", "minLength": 1}, {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"}
POINTS = {"type": "integer", "minimum": 0}
TEST = {"test-name": WORD, "passed": {"type": "boolean"}, "score": POINTS, "max-score": POINTS}
CLASSROOM50 = only(
    {
        "schema": {"const": "classroom50/result/v1"},
        **dict.fromkeys(("classroom", "assignment", "owner", "commit", "release", "review"), WORD),
        "assignment_type": {"enum": ["individual", "group"]},
        "submission": {"type": "string", "pattern": "^submit/"},
        "datetime": TIME,
        "score": POINTS,
        "max-score": POINTS,
        "tests": list_of({"type": "object", "required": [*TEST], "properties": TEST}),
    },
    {"graded_at": TIME, "submitted_by": {"type": "object", "required": ["username"]}},
)


def fits_classroom50(value: Any) -> bool:
    """Raise if a result does not fit Classroom 50's schema, or has more points than there are."""
    jsonschema.validate(value, CLASSROOM50)
    return all(each["score"] <= each["max-score"] for each in (value, *value["tests"]))


GRADES = [
    Grade("right.py", [Mark(task, task.points) for task in HOMEWORK4], note="a sum", seconds=1.5),
    Grade("half.py", [Mark(task, task.points // 2, "a", "b", "c") for task in HOMEWORK4]),
    Grade("far.py", [Mark(task, 0, reached=task.name == "forwards") for task in HOMEWORK4]),
    Grade("none.py", [Mark(task, 0) for task in HOMEWORK4], reason="it ends the interpreter"),
    Grade("missing.py", reason="could not grade"),
]


@pytest.mark.parametrize("one", GRADES, ids=lambda grade: grade.submission)
def test_both_formats_fit_their_schema(one):
    gradescope = json.loads(json.dumps(report.gradescope(one)))
    jsonschema.validate(gradescope, GRADESCOPE)
    classroom = json.loads(json.dumps(report.classroom50(one, {})))
    assert fits_classroom50(classroom)
    for found in (gradescope, classroom):
        assert found["score"] == sum(test["score"] for test in found["tests"])


def test_classroom50_shows_the_hints_and_the_reason_and_allows_no_other_key():
    task = HOMEWORK4[0]
    one = report.classroom50(Grade("a.py", [Mark(task, 0, "F0 F1", "F0", "half", task.hint)]), {})
    assert task.hint in one["tests"][0]["output"]
    assert GRADES[3].reason in report.classroom50(GRADES[3], {})["tests"][0]["output"]
    with pytest.raises(jsonschema.ValidationError, match="usernames"):
        fits_classroom50(one | {"usernames": ["ada"]})
    with pytest.raises(jsonschema.ValidationError, match="submit/"):
        fits_classroom50(one | {"submission": "a.py"})


def test_hidden_sizes_are_shown_on_gradescope_only_once_published():
    tests = {test["name"]: test["visibility"] for test in report.gradescope(GRADES[0])["tests"]}
    assert {name for name, seen in tests.items() if seen != "visible"} == {"hidden sizes"}


def test_gradescope_names_what_was_not_reached_and_counts_it_as_failed():
    tests = report.gradescope(GRADES[2])["tests"]
    assert {test["status"] for test in tests} == {"failed"}
    assert [test["name"] for test in tests][:2] == ["forwards", "targets (not reached)"]


def test_classroom50_says_in_the_environment_what_is_graded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    committer = {"GIT_COMMITTER_DATE": "2026-06-01T16:32:01+0200"}
    names = ("-c", "user.name=ada", "-c", "user.email=ada@example.org")
    for command in (["init", "-q"], [*names, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *command], check=True, env=os.environ | committer)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    environment = {"CLASSROOM": "cs50", "ASSIGNMENT": "hw4", "ASSIGNMENT_TYPE": "group", "OWNER": "ada"}
    environment |= {"GITHUB_ACTOR": "a-teacher", "GITHUB_SHA": commit, "SUBMISSION_TAG": "submit/1"}
    environment |= {"COMMIT_URL": "https://example.org/commit/1", "RELEASE_URL": "https://example.org/releases/1"}
    found = report.classroom50(GRADES[0], environment)
    assert fits_classroom50(found)
    same = {"classroom": "CLASSROOM", "assignment": "ASSIGNMENT", "assignment_type": "ASSIGNMENT_TYPE"}
    same |= {"owner": "OWNER", "submission": "SUBMISSION_TAG", "commit": "COMMIT_URL", "review": "COMMIT_URL"}
    same |= {"release": "RELEASE_URL"}
    assert {key: found[key] for key in same} == {key: environment[name] for key, name in same.items()}
    assert found["datetime"] == "2026-06-01T14:32:01Z"  # of the commit; grading again does not change it
    assert found["graded_at"] > found["datetime"]


def test_the_step_for_github_classroom_makes_what_its_reporter_reads(folder):
    grade = report.as_json(Grade("a.py", [Mark(task, 0, hint=task.hint) for task in HOMEWORK4]))
    (folder / "grade.json").write_text(json.dumps(grade))
    page = (ROOT / "docs" / "grading.md").read_text(encoding="utf-8")
    script = textwrap.dedent(page.partition("<<'END' >> \"$GITHUB_OUTPUT\"\n")[2].partition("          END\n")[0])
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    result = json.loads(base64.b64decode(said.removeprefix("result=")))
    assert (result["status"], result["max_score"], len(result["tests"])) == ("fail", 100, len(HOMEWORK4))
    assert {(each["status"], each["score"]) for each in result["tests"]} == {("fail", 0)}
    assert result["tests"][0]["message"] == HOMEWORK4[0].hint


def _on_page(name: str) -> str:
    page = (ROOT / "docs" / "how_to" / f"{name}.md").read_text(encoding="utf-8")
    return page.partition("[start:test] -->\n```python\n")[2].partition("```")[0]


def test_otters_test_file_has_a_case_for_each_task_that_fails_with_its_hint(folder, monkeypatch):
    class Case(dict[str, Any]):
        def __call__(self, function: Callable[[], None]) -> Case:
            return Case(self, run=function)

    otter = ModuleType("otter.test_files")
    vars(otter)["test_case"] = Case
    monkeypatch.setitem(sys.modules, "otter", ModuleType("otter"))
    monkeypatch.setitem(sys.modules, "otter.test_files", otter)
    (folder / "pipeline_homework.py").write_text(changed((LAST, "pass")))
    made: dict[str, Any] = {}
    exec(_on_page("otter"), made)  # noqa: S102
    cases = {each["name"]: each for each in made.values() if isinstance(each, Case)}
    assert {name: each["points"] for name, each in cases.items()} == {each.name: each.points for each in HOMEWORK4}
    cases["order"]["run"]()
    with pytest.raises(AssertionError, match="hint: Count on paper"):
        cases["last backward"]["run"]()


def test_nbgraders_cell_ends_with_the_score(folder, capsys):
    (folder / "pipeline_homework.py").write_text(changed((LAST, "pass")))
    *lines, last = _on_page("nbgrader").splitlines()
    made: dict[str, Any] = {}
    exec("\n".join(lines), made)  # noqa: S102
    assert eval(last, made) == 55  # noqa: S307
    printed = capsys.readouterr()
    assert ("hint" in printed.out, printed.err) == (True, "")


def test_the_command_writes_both_formats_and_nothing_else(pipelab_command, succeeds, folder):
    (folder / "a.py").write_text(changed((LAST, "pass")))
    # Classroom 50 takes any other exit code for a failure of the grader
    succeeds("grade", "a.py", "--gradescope", "out", "--classroom50", "result.json")
    jsonschema.validate(json.loads((folder / "out" / "results.json").read_text()), GRADESCOPE)
    assert fits_classroom50(json.loads((folder / "result.json").read_text()))
    assert [path.name for path in (folder / "out").iterdir()] == ["results.json"]
    assert pipelab_command("grade", "nowhere.py", "--classroom50", "result.json")[0] == 2


def test_gradescope_gets_results_even_if_there_is_nothing_to_grade(pipelab_command, folder):
    assert pipelab_command("grade", "nowhere.py", "--gradescope", "out")[0] == 2
    found = json.loads((folder / "out" / "results.json").read_text())
    jsonschema.validate(found, GRADESCOPE)
    assert found["score"] == 0


def test_a_reader_that_has_gone_does_not_change_the_results(folder):
    (folder / "a.py").write_text(SOLUTION)
    command = ["-m", "pipelab", "grade", "a.py", "--gradescope", "out", "--save", "all.csv", "--json", "all.json"]
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(120) == 0
    assert json.loads((folder / "out" / "results.json").read_text())["score"] == 100
    assert json.loads((folder / "all.json").read_text())["score"] == 100
    assert "100,100" in (folder / "all.csv").read_text()


def test_a_folder_alone_is_one_submission_whatever_its_file_is_called(folder):
    for place in ("mine/file.py", "deep/er/file.py", "two/a.py", "two/b.py", "both/x/a.py", "both/y/a.py"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text("")
    for name, where in {"mine": "mine", "deep": "deep/er"}.items():
        ((found,), _) = submissions(folder / name, alone=True)
        assert (found.folder, found.main) == (folder / where, "file.py")
    for name in ("two", "both"):
        with pytest.raises(UsageError):
            submissions(folder / name, alone=True)


def test_the_bundle_grades_as_gradescope_would_run_it(succeeds, folder):
    succeeds("grade", "--gradescope", "bundle", "--seed", "7")
    assert [path.name for path in (folder / "bundle").iterdir()] == ["autograder.zip"]
    autograder = folder / "autograder"
    with zipfile.ZipFile(folder / "bundle" / "autograder.zip") as archive:
        archive.extractall(autograder / "source")
        names = archive.namelist()
        modes = {each.filename: each.external_attr >> 16 & 0o777 for each in archive.infolist()}
    assert modes["setup.sh"] == modes["run_autograder"] == 0o755
    assert {"pipelab/__init__.py", "pipelab_course/__init__.py"} <= {*names}
    assert not [each for each in names if "teacher" in each or "__pycache__" in each]
    (autograder / "submission").mkdir()
    (autograder / "submission" / "helper.py").write_text("def place(y, output): return y.to(output.device)")
    text = "from helper import place\n" + changed((MOVE, "targets.append(place(micro_y, output))"))
    (autograder / "submission" / "pipeline_homework.py").write_text(text)
    script = (autograder / "source" / "run_autograder").read_text()
    assert "--seed 7" in script
    script = script.replace("/autograder", str(autograder)).replace("python3", sys.executable)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(["bash", "-c", script], cwd=autograder, check=True, capture_output=True, env=environment)
    assert json.loads((autograder / "results" / "results.json").read_text())["score"] == 100
    for each in ("setup.sh", "run_autograder"):
        subprocess.run(["bash", "-n", str(autograder / "source" / each)], check=True)


def test_the_points_are_printed_as_a_file_that_changes_them(pipelab_command, succeeds, folder):
    code, out, _ = pipelab_command("grade", "hw4")
    points = tomllib.loads(out)["hw4"]
    assert (code, sum(points.values()), len(points)) == (0, 100, len(HOMEWORK4) + 1)
    assert all("#" in line for line in out.splitlines() if "=" in line)  # each has its reason
    (folder / "marks.toml").write_text(out.replace('"order" = 20', '"order" = 50'))
    (folder / "a.py").write_text(
        changed(("        if i > 0:", "    for i in range(1, len(outputs)):\n        if True:"))
    )
    code, out, _ = pipelab_command("grade", "hw4", "a.py", "--marks", "marks.toml")
    assert (code, "70 of 130 points" in out) == (1, True)
    succeeds("grade", "hw4", "--marks", "marks.toml", "--gradescope", "bundle")
    with zipfile.ZipFile(folder / "bundle" / "autograder.zip") as archive:
        assert tomllib.loads(archive.read("marks.toml").decode())["hw4"]["order"] == 50
        assert b"pipelab grade hw4 /autograder/submission --marks /autograder/source/marks.toml" in archive.read(
            "run_autograder"
        ).replace(b" --seed 0 --seconds 5.0 --memory 1024", b"")


@pytest.mark.parametrize("text", ["[hw4", "[hw3]\norder = 3", "[hw4]\norders = 3"])
def test_a_file_of_marks_that_is_none_is_refused(text, pipelab_command, folder):
    (folder / "marks.toml").write_text(text)
    (folder / "a.py").write_text(SOLUTION)
    assert pipelab_command("grade", "a.py", "--marks", "marks.toml")[0] == 2


def test_the_bundle_installs_what_the_project_needs():
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [need for need in needs if f'"{need}"' not in report._SETUP] == []
