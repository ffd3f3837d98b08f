"""Grades as text, JSON, a table, and in the formats of Gradescope and Classroom 50. Needs no PyTorch."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pipelab
import pipelab_course
from pipelab.table import Column, Table
from pipelab_course.grading.tasks import Grade, Mark


def as_text(grade: Grade) -> str:
    """Return a grade for its student: each task, and for those that failed what was expected and found, and a hint."""
    head = f"{grade.submission}: {grade.score} of {grade.max_score} points, {_word(grade.passed)}"
    parts = [head, grade.reason, grade.note, grade.to_read]
    if not grade.reason:
        several = sum(not mark.passed for mark in grade.marks) > 1
        parts.append("Begin with the first task that failed; the others may follow from it." if several else "")
        parts.append("\n".join(line for mark in grade.marks for line in _lines(mark)))
    return "\n\n".join(filter(None, parts))


def as_line(grade: Grade) -> str:
    """Return a grade in one line, for a folder of them."""
    why = "; ".join(f"{status}: {names}" for status in ("failed", "not reached") if (names := grade.named(status)))
    said = "passed" if grade.passed else grade.reason or why
    return f"{grade.score:3} of {grade.max_score}  {said}  {grade.to_read}".rstrip()


def _lines(mark: Mark) -> list[str]:
    points = f"{mark.score} of {mark.task.points}"
    lines = [f"{mark.status:11}  {points:>8}  {mark.task.name}"]
    if mark.status == "failed":
        explained = {"expected": mark.expected, "found": mark.found, "effect": mark.effect, "hint": mark.hint}
        lines += [f"    {name:8}  {said}" for name, said in explained.items() if said]
    return lines


def _word(passed: bool) -> str:
    return "passed" if passed else "failed"


def as_json(grade: Grade) -> dict[str, Any]:
    """Return everything that is known about a grade."""
    totals = {"passed": grade.passed, "score": grade.score, "max_score": grade.max_score}
    known = {name: value for name, value in asdict(grade).items() if name != "marks"}
    tasks = [
        {"name": mark.task.name, "max_score": mark.task.points, "hidden": mark.task.hidden}
        | {"status": mark.status, "passed": mark.passed}
        | {name: value for name, value in asdict(mark).items() if name not in ("task", "reached")}
        for mark in grade.marks
    ]
    return known | totals | {"tasks": tasks}


def table(grades: Sequence[Grade], skipped: Mapping[str, str]) -> Table:
    """Return one row for each submission, with the points of each task, and one for each hand-in that was skipped."""
    rows: list[dict[str, Any]] = [
        {
            "submission": grade.submission,
            "passed": "yes" if grade.passed else "no",
            "score": grade.score,
            "max_score": grade.max_score,
            **{mark.task.name: mark.score for mark in grade.marks},
            "failed": grade.named("failed"),
            "not reached": grade.named("not reached"),
            "reason": "; ".join(filter(None, (grade.reason or grade.note, grade.to_read))),
            "seconds": round(grade.seconds, 2),
        }
        for grade in sorted(grades, key=lambda grade: grade.submission)
    ]
    rows += [{"submission": name, "reason": f"skipped: {why}"} for name, why in skipped.items()]
    heads = {"score": "points", "failed": "failed tasks", "reason": "why"}
    shown = ("submission", "passed", "score", "failed", "not reached", "reason")
    return Table(rows, [Column(key, heads.get(key, "")) for key in shown])


def failures(grades: Sequence[Grade]) -> Table:
    """Return how many submissions failed each task, and how many did not reach it."""
    marks = [mark for grade in grades if not grade.reason for mark in grade.marks]
    names = dict.fromkeys(mark.task.name for grade in grades for mark in grade.marks)
    rows: list[dict[str, Any]] = [
        {"task": name, "of": len(grades)}
        | {each: sum((m.task.name, m.status) == (name, each) for m in marks) for each in ("failed", "not reached")}
        for name in names
    ]
    rows.append({"task": "not gradable", "failed": sum(bool(grade.reason) for grade in grades), "of": len(grades)})
    return Table(rows, [Column("task"), Column("failed"), Column("not reached"), Column("of")])


def gradescope(grade: Grade) -> dict[str, Any]:
    """Return a grade as Gradescope's `results.json`. Hidden sizes are shown once the grades are published."""
    return {
        "score": grade.score,
        "execution_time": round(grade.seconds, 3),
        "output": "\n".join(filter(None, (grade.reason, grade.note, grade.to_read))) or _word(grade.passed),
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": [
            {
                "name": mark.task.name if mark.reached else f"{mark.task.name} (not reached)",
                "number": str(place),
                "score": mark.score,
                "max_score": mark.task.points,
                "status": _word(mark.passed),
                "output": "\n".join(_lines(mark)),
                "visibility": "after_published" if mark.task.hidden else "visible",
            }
            for place, mark in enumerate(grade.marks, 1)
        ],
    }


def write_bundle(folder: Path, homework: str, schedule: str, options: Sequence[str], marks: str = "") -> Path:
    """Write what Gradescope takes, `autograder.zip`; return its path.

    The archive holds pipelab and the course, so Gradescope only has to install what they need. There it grades the
    named schedule, or the homework, with these options of `pipelab grade`, and with these marks if there are any.
    """
    options = [*options, *(["--marks", "/autograder/source/marks.toml"] if marks else [])]
    target = shlex.quote("/autograder/submission" + f":{schedule}" * bool(schedule))
    path = folder / "autograder.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        run = _RUN.format(homework=homework, target=target, options=shlex.join(options))
        command = "[pipelab.commands]\ngrade = pipelab_course.grading.command:grade_command\n"
        texts = {"setup.sh": _SETUP, "run_autograder": run, "marks.toml": marks}
        for name, text in (texts | {"pipelab_course-0.dist-info/entry_points.txt": command}).items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = 0o755 << 16
            archive.writestr(entry, text)
        for package in (Path(str(each.__file__)).parent for each in (pipelab, pipelab_course)):
            for file in sorted(package.rglob("*")):
                if file.is_file() and not {"__pycache__", "teacher"} & {*file.relative_to(package).parts}:
                    archive.write(file, file.relative_to(package.parent))
    return path


_SETUP = """#!/usr/bin/env bash
# Gradescope runs this once, when it builds the autograder's image. pipelab and its course are in the archive.
set -euo pipefail
apt-get update
apt-get install -y python3 python3-pip
python3 -c 'import sys; assert sys.version_info >= (3, 11), "choose an image with Python 3.11 or newer"'
pip="python3 -m pip install --break-system-packages"
$pip --index-url https://download.pytorch.org/whl/cpu "torch>=2.12"
$pip "numpy" "networkx>=3.2" "graphviz>=0.20" "matplotlib>=3.8" "rich>=13.7" "typer>=0.19"
"""

_RUN = """#!/usr/bin/env bash
# Gradescope runs this for each submission.
export PYTHONPATH=/autograder/source
mkdir -p /autograder/results
python3 -m pipelab grade {homework} {target} {options} --gradescope /autograder/results
exit 0  # what was found is in results.json; another exit code would hide it
"""


def classroom50(grade: Grade, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return a grade as Classroom 50's `result.json`; its runner says in the environment what is graded.

    It has the keys of the published schema, `schemas/result-v1.schema.json` in foundation50/classroom50, and no other.
    A test may have more keys, so `output` holds the hints. Where the runner says nothing, a text is "unknown".
    """

    def told(*names: str) -> str:
        return next((environment[name] for name in names if environment.get(name)), "unknown")

    tag = told("SUBMISSION_TAG")
    form = "%Y-%m-%dT%H:%M:%SZ"
    now = at = datetime.now(UTC).strftime(form)
    if shutil.which("git"):  # when the commit was made: the time of the submission, which stays if it is graded again
        command = ["git", "show", "-s", "--format=%cd", f"--date=format-local:{form}", "--end-of-options"]
        command.append(environment.get("GITHUB_SHA", ""))
        made = subprocess.run(command, env=os.environ | {"TZ": "UTC"}, capture_output=True, text=True, check=False)  # noqa: S603
        at = made.stdout.strip() or now
    tests = [
        {"test-name": mark.task.name, "passed": mark.passed, "score": mark.score, "max-score": mark.task.points}
        | {"status": mark.status, "output": "\n".join([*filter(None, [grade.reason]), *_lines(mark)])}
        for mark in grade.marks
    ]
    return {
        "schema": "classroom50/result/v1",
        "classroom": told("CLASSROOM"),
        "assignment": told("ASSIGNMENT"),
        "assignment_type": environment.get("ASSIGNMENT_TYPE") or "individual",
        "owner": told("OWNER", "USERNAME", "GITHUB_ACTOR"),
        "submission": tag if tag.startswith("submit/") else f"submit/{tag}",
        "commit": told("COMMIT_URL", "GITHUB_SHA"),
        "release": told("RELEASE_URL"),
        "review": told("REVIEW_URL", "COMMIT_URL", "GITHUB_SHA"),
        "datetime": at,
        "graded_at": now,
        "score": grade.score,
        "max-score": grade.max_score,
        "tests": tests,
    }
