"""The solution of homework 4, and what can be made of it."""

from __future__ import annotations

import difflib
import json
import linecache
import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pipelab_course.grading.tasks import HOMEWORKS, Grade, marks_of

ROOT = Path(__file__).resolve().parents[1]
SOLUTION = (ROOT / "teacher" / "homework4" / "pipeline_homework.py").read_text(encoding="utf-8")
MOVE = "targets.append(micro_y.to(output.device))"
BACKWARD = "loss_fn(outputs[i - 1], targets[i - 1]).backward()"
LAST = "loss_fn(outputs[-1], targets[-1]).backward()"


def changed(*pairs: tuple[str, str]) -> str:
    """Return the solution with some of its texts replaced."""
    text = SOLUTION
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


def first(line: str) -> str:
    """Return the solution with a line in front of it."""
    return f"{line}\n{SOLUTION}"


def inside(line: str) -> str:
    """Return the solution with a line at the beginning of its function."""
    return changed(("    outputs, targets = [], []", f"    {line}\n    outputs, targets = [], []"))


def solution_of(name: str) -> str:
    """Return the teacher's solution of a homework."""
    folder = {"hybrid": "hybrid"}.get(name, f"homework{name[-1]}")
    return (ROOT / "teacher" / folder / HOMEWORKS[name].file).read_text(encoding="utf-8")


def differs_only_in_holes(name: str) -> int:
    """Return how many holes a homework's start file has; fail if anything else differs from the solution."""
    template = HOMEWORKS[name].template.read_text(encoding="utf-8")
    lines = [*difflib.ndiff(template.splitlines(), solution_of(name).splitlines())]
    removed = [line[2:].strip() for line in lines if line.startswith("- ")]
    assert all(line == "..." or line.endswith(("= ...", "= [...]", "= 0.0")) for line in removed)
    return len(re.findall(r"# Hole \d", template))


def solution_of_variant(start: str, order: str, weights: str) -> str:
    """Return a start file of homework 4 with its holes filled as the key says, by these rules."""
    key = tomllib.loads((ROOT / "teacher" / "keys" / "hw4.toml").read_text(encoding="utf-8"))
    rules = {"order": HOMEWORKS["hw4"].orders[order], "weights": HOMEWORKS["hw4"].weights[weights]}
    hole_0, weight = re.findall("`(.+?)`", key["function"]["answer"][1].format_map(rules))
    text = start.replace("order = list(range(len(micro_batches)))", f"n = len(micro_batches); {hole_0}")
    backwards = [
        f"({weight} * {BACKWARD.removesuffix('.backward()')}).backward()".replace("i - 1", at) for at in ("i - 1", "-1")
    ]
    for hole in (f"output = model(micro_x); outputs.append(output); {MOVE}", *backwards):
        text = text.replace("...", hole, 1)
    return text


@cache
def recorded(homework: Any, text: str, seed: int, *own: str) -> str:
    """Return what a text does, in this process. No file: Python would take two of a second and a size for one."""
    module = ModuleType("handed_in")

    def load() -> ModuleType:
        linecache.cache["handed_in.py"] = (len(text), None, text.splitlines(keepends=True), "handed_in.py")
        exec(compile(text, "handed_in.py", "exec"), vars(module))  # noqa: S102
        return module

    return json.dumps(homework.record(load, seed, lambda _: None, *own))


def graded(
    homework: Any, name: str, text: str, seed: int = 0, points: dict[str, int] | None = None, own: Sequence[str] = ()
) -> Grade:
    """Return the grade of a text."""
    found, note = homework.judge(json.loads(recorded(homework, text, seed, *own)), seed, *own)
    return Grade("handed_in.py", marks_of(found, HOMEWORKS[name].weighed(points or {})), note=note)
