"""Grades as text, JSON, a table, and in the formats of Gradescope and Classroom 50. Needs no PyTorch."""

from __future__ import annotations

import json
import os
import shlex
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pipelab
from pipelab.draw.table import Column, Table
from pipelab.draw.wording import number
from pipelab.files import write
from pipelab.labs.grading.tasks import HOMEWORK, Grade, Mark

__all__ = ["as_json", "as_text", "classroom50", "failures", "gradescope", "table", "write_bundle", "write_json"]


def as_text(grade: Grade) -> str:
    """Return a grade for its student: each task, and for those that failed what was expected and found, and a hint."""
    head = f"{grade.submission}: {_points(grade.score, grade.max_score)} points, {_word(grade.passed)}"
    parts = [head, grade.reason, grade.note]
    if not grade.reason:
        parts.append("\n".join(line for mark in grade.marks for line in _lines(mark)))
    return "\n\n".join(filter(None, parts))


def _lines(mark: Mark) -> list[str]:
    lines = [f"{_word(mark.passed)}  {_points(mark.score, mark.task.points):>7}  {mark.task.name}"]
    if not mark.passed:
        explained = {"expected": mark.expected, "found": mark.found, "effect": mark.effect, "hint": mark.task.hint}
        lines += [f"    {name:8}  {said}" for name, said in explained.items() if said]
    return lines


def _points(score: float, most: float) -> str:
    return f"{number(score)} of {number(most)}"


def _word(passed: bool) -> str:
    return "passed" if passed else "failed"


def as_json(grade: Grade) -> dict[str, Any]:
    """Return everything that is known about a grade."""
    return {
        "submission": grade.submission,
        "passed": grade.passed,
        "score": grade.score,
        "max_score": grade.max_score,
        "reason": grade.reason,
        "note": grade.note,
        "seconds": round(grade.seconds, 3),
        "tasks": [
            {
                "name": mark.task.name,
                "passed": mark.passed,
                "score": mark.score,
                "max_score": mark.task.points,
                "hidden": mark.task.hidden,
                "expected": mark.expected,
                "found": mark.found,
                "effect": mark.effect,
                "hint": "" if mark.passed else mark.task.hint,
            }
            for mark in grade.marks
        ],
        "output": grade.output,
    }


def table(grades: Sequence[Grade]) -> Table:
    """Return one row for each submission, with the points of each task."""
    grades = sorted(grades, key=lambda grade: grade.submission)
    rows = [
        {
            "submission": grade.submission,
            "passed": "yes" if grade.passed else "no",
            "score": grade.score,
            "max_score": grade.max_score,
            **{mark.task.name: mark.score for mark in grade.marks},
            "failed": ", ".join(mark.task.name for mark in grade.marks if not mark.passed and not grade.reason),
            "reason": grade.reason or grade.note,
            "seconds": round(grade.seconds, 2),
        }
        for grade in grades
    ]
    columns = [
        Column("submission"),
        Column("passed"),
        Column("score", "points", number),
        Column("failed", "failed tasks"),
        Column("reason", "why"),
    ]
    return Table(rows, columns)


def failures(grades: Sequence[Grade]) -> Table:
    """Return how many submissions failed each task; those without marks failed all of them."""
    tasks = {mark.task.name: mark.task for grade in grades for mark in grade.marks}
    rows = [
        {
            "task": name,
            "failed": sum(not m.passed for g in grades for m in g.marks if m.task.name == name),
            "of": len(grades),
        }
        for name in tasks
    ]
    rows.append({"task": "not gradable", "failed": sum(bool(grade.reason) for grade in grades), "of": len(grades)})
    return Table(rows, [Column("task"), Column("failed"), Column("of")])


def gradescope(grade: Grade) -> dict[str, Any]:
    """Return a grade as Gradescope's `results.json`. Hidden sizes are shown once the grades are published."""
    return {
        "score": grade.score,
        "execution_time": round(grade.seconds, 3),
        "output": "\n".join(filter(None, (grade.reason, grade.note))) or _word(grade.passed),
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": [
            {
                "name": mark.task.name,
                "number": str(place),
                "score": mark.score,
                "max_score": mark.task.points,
                "status": _word(mark.passed),
                "output": "\n".join(_lines(mark)),
                "visibility": "after_published" if mark.task.hidden else "visible",
            }
            for place, mark in enumerate(grade.marks, 1)
        ],
        "leaderboard": [{"name": "points", "value": grade.score, "order": "desc"}],
    }


def write_bundle(folder: Path, schedule: str, options: Sequence[str]) -> list[Path]:
    """Write what Gradescope takes, `autograder.zip`, and the two scripts in it; return their paths.

    The archive holds pipelab itself, so Gradescope only has to install what pipelab needs.

    Args:
        folder: where to.
        schedule: the name of the schedule's class, if one is graded.
        options: the options of `pipelab grade` on Gradescope.
    """
    target = f'"$work"{shlex.quote(f":{schedule}") if schedule else ""}'
    run = _RUN.format(homework=HOMEWORK, target=target, options=shlex.join(options))
    scripts = {"setup.sh": _SETUP, "run_autograder": run}
    for name, text in scripts.items():
        write(folder / name, text).chmod(0o755)
    package = Path(pipelab.__file__).parent
    with zipfile.ZipFile(folder / "autograder.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in scripts:
            archive.write(folder / name, name)
        for path in sorted(package.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, str(path.relative_to(package.parent)))
    return [folder / name for name in (*scripts, "autograder.zip")]


_SETUP = """#!/usr/bin/env bash
# Gradescope runs this once, when it builds the autograder's image. pipelab itself is in the archive.
set -euo pipefail
apt-get update
apt-get install -y python3 python3-pip
python3 -c 'import sys; assert sys.version_info >= (3, 11), "choose an image with Python 3.11 or newer"'
pip="python3 -m pip install --break-system-packages"
$pip --index-url https://download.pytorch.org/whl/cpu "torch>=2.10"
$pip "numpy" "networkx>=3.2" "graphviz>=0.20" "matplotlib>=3.8" "rich>=13.7" "typer>=0.12"
"""

_RUN = """#!/usr/bin/env bash
# Gradescope runs this for each submission.
export PYTHONPATH=/autograder/source
work=/autograder/submission/{homework}
if [ ! -f "$work" ]; then
    for file in /autograder/submission/*.py; do work="$file"; done
fi
mkdir -p /autograder/results
python3 -m pipelab grade {target} {options} --gradescope /autograder/results
exit 0  # what was found is in results.json; another exit code would hide it
"""


def classroom50(grade: Grade, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return a grade as Classroom 50's `result.json`; its runner says in the environment what is graded."""
    actor = environment.get("GITHUB_ACTOR", "")
    commit = environment.get("COMMIT_URL") or environment.get("GITHUB_SHA", "")
    tests = [
        {
            "test-name": mark.task.name,
            "passed": mark.passed,
            "score": mark.score,
            "max-score": mark.task.points,
        }
        for mark in grade.marks
    ]
    return {
        "schema": "classroom50/result/v1",
        "classroom": environment.get("CLASSROOM", ""),
        "assignment": environment.get("ASSIGNMENT", ""),
        "usernames": [actor] if actor else [],
        "submission": environment.get("SUBMISSION_TAG") or grade.submission,
        "commit": commit,
        "release": environment.get("RELEASE_URL", ""),
        "review": environment.get("REVIEW_URL") or commit,
        "datetime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "score": grade.score,
        "max-score": grade.max_score,
        "tests": tests,
    }


def write_json(path: Path, value: object) -> Path:
    """Write a value as JSON; return the path."""
    return write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
