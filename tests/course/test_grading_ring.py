"""The hybrid simulator's start file: its ring is compared bit for bit, and each wrong ring fails what it should."""

from __future__ import annotations

import base64

import pytest
from homework import differs_only_in_holes, graded, solution_of

from pipelab_course.grading import ring, server
from pipelab_course.grading.tasks import HOMEWORKS

SOLUTION = solution_of("hybrid")
SEND = "encode(chunks[r][(r - step) % replicas])"
ADD = "chunks[r][(r - 1 - step) % replicas] += decode(messages[r - 1])"
DIVIDE = "encode(chunks[r][own] / replicas)"
KEEP = "chunks[r][own] = decode(finished[r])"
ONWARD = "finished = [finished[r - 1] for r in range(replicas)]"
STORE = "chunks[r][(r - step) % replicas] = decode(finished[r])"
FIRST = "    replicas = len(gradients)\n"
WHOLE = "    return [sum(gradients) / replicas for _ in gradients]\n"
# What replaces what in the solution, and the first task that fails.
WRONG = {
    "the file with its holes": ((SOLUTION, HOMEWORKS["hybrid"].template.read_text(encoding="utf-8")), "mean"),
    "the all-gather stores another chunk": ((STORE, STORE.replace("r - step", "r - step - 1")), "mean"),
    "finished messages stay where they are": ((ONWARD, "pass"), "mean"),
    "always the same chunk is sent": ((SEND, SEND.replace("r - step", "r")), "mean"),
    "no division": ((DIVIDE, "encode(chunks[r][own])"), "mean"),
    "what arrives replaces what is there": ((ADD, ADD.replace("+=", "=")), "mean"),
    "four replicas are fixed": ((DIVIDE, "encode(chunks[r][own] / 4)"), "mean"),
    "the owner keeps what it had": ((KEEP, "chunks[r][own] = chunks[r][own] / replicas"), "same bits"),
    "the division is a multiplication": ((DIVIDE, "encode(chunks[r][own] * (1 / replicas))"), "bit for bit"),
    "divided before it is added": ((DIVIDE, "encode(chunks[r][own])"), "bit for bit"),
    "no ring at all": ((FIRST, FIRST + WHOLE), "bit for bit"),
    "the whole gradient travels": ((SEND, "(encode(torch.cat(chunks[r])), " + SEND + ")[1]"), "messages"),
    "it computes in the gradients": (("gradient.clone()", "gradient"), "inputs"),
    "an empty chunk is not expected": (
        (DIVIDE, "encode(chunks[r][own] / replicas + chunks[r][own].max() * 0)"),
        "hidden sizes",
    ),
}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_solution_earns_all_points(seed):
    grade = graded(ring, "hybrid", SOLUTION, seed)
    assert (grade.passed, grade.score, grade.max_score, grade.note) == (True, 100, 100, "")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_ring_fails_its_task(name):
    (old, new), task = WRONG[name]
    assert old in SOLUTION
    text = SOLUTION.replace(old, new)
    if name == "divided before it is added":
        text = text.replace("list(gradient.clone()", "list((gradient / replicas)")
    grade = graded(ring, "hybrid", text)
    assert grade.named("failed").split(", ")[0] == task
    failed = next(mark for mark in grade.marks if mark.status == "failed")
    assert all((failed.expected, failed.found, failed.effect, failed.hint))
    assert grade.score < 100


def test_a_mean_without_a_ring_has_the_points_of_its_mean_and_no_message():
    old, new = WRONG["no ring at all"][0]
    grade = graded(ring, "hybrid", SOLUTION.replace(old, new))
    assert {mark.task.name: mark.status for mark in grade.marks}["mean"] == "passed"
    assert "messages" in grade.named("failed")


RING = "pipelab_course.ring.ring"
# How a submission calls pipelab's ring, with the codec's name, which is not what it is given.
OWN = {
    "by its name": ("import pipelab_course as p", "p.ring_all_reduce(given, name).tensors"),
    "when it is needed": ("", f"__import__('{RING}', fromlist=['a']).ring_all_reduce(given, name).tensors"),
    "read once more": (
        f"import runpy, {RING} as ring; ring = runpy.run_path(ring.__file__)",
        "ring['ring_all_reduce'](given, name).tensors",
    ),
    "with another detector": (
        f"import {RING} as ring, pipelab_course.ring.codecs as codecs",
        "[setattr(ring, 'codec_of', codecs.codec_of), ring.ring_all_reduce(given, name).tensors][1]",
    ),
    "a copy of its function": (
        f"import types, {RING} as r; own = types.FunctionType(r.ring_all_reduce.__code__, vars(r), 'mine', (None,))\n"
        "own.__kwdefaults__ = r.ring_all_reduce.__kwdefaults__",
        "own(given, name).tensors",
    ),
    "by the codec's own names": ("", "encode.__globals__['ring_all_reduce'](given, name).tensors"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("how", OWN)
def test_pipelabs_own_ring_is_looked_up(how):
    before, call = OWN[how]
    name = "{torch.float16: 'fp16', torch.int8: 'int8'}.get(encode(given[0][:1])[0].dtype, 'none')"
    own = f"import torch\n{before}\ndef ring_all_reduce(given, encode, decode):\n    name = {name}\n    return {call}"
    with pytest.raises(LookupError, match="looked up"):
        graded(ring, "hybrid", own)


LEADS = {
    "import runpy, math as m": "math, runpy",
    "from torch import sys": "torch.sys",
    "from .helper import *": "helper.*",
    "torch.sys.modules": "sys",
    "torch._C._sys": "_sys",
    "exec('1')": "exec",
    "getattr(torch, 's' + 'ys')": "getattr",
    "(lambda: 0).__globals__": "__globals__",
    "(x for x in ()).gi_frame.f_back": "gi_frame",
    "torch.ones(1).copy(); self.random(); random = copy = 1; 'import sys'": "",
    "class A(dict):\n    def __init__(self):\n        super().__init__()": "",
    "this is not Python": "",
    "(" * 5000: "",
    "x = 1\n" * 200_000: "1 MB of Python",
}


@pytest.mark.parametrize("line", LEADS, ids=range(len(LEADS)))
def test_whoever_grades_is_told_by_what_a_file_reaches_beyond_its_start_file(line):
    assert to_read({"ring_homework.py": line, "data.txt": "import os"}) == LEADS[line]


def to_read(files):
    coded = {name: base64.b64encode(text.encode()).decode() for name, text in files.items()}
    request = {"assignment": {"homework": "hybrid", "schedule": None}, "main": "ring_homework.py", "files": coded}
    return server._to_read(request).removeprefix("to read by eye: ")


def test_only_files_that_a_submission_reaches_are_read():
    beside = {"train.py": "import os; eval('1')", "more/__init__.py": "exec('1')", "torch_helper.py": "import sys"}
    assert to_read({"ring_homework.py": SOLUTION, **beside}) == ""
    reached = {"helper.py": "from package.deep import f", "package/__init__.py": "exec", "package/deep.py": "getattr"}
    assert (
        to_read({"ring_homework.py": "import helper", **reached, **beside}) == "exec, getattr, helper, package.deep.f"
    )
    assert to_read({"ring_homework.py": "from package import deep", **reached}) == "exec, getattr, package.deep"
    assert to_read({"ring_homework.py": SOLUTION, "sympy.py": "eval('1')"}) == "eval"  # PyTorch may import it
    assert to_read({"ring_homework.py": "torch.hub.load('.', 'f', source='local')"}) == "hub"


def test_pipelabs_ring_may_be_compared_with_when_the_file_is_imported():
    compared = "import pipelab_course\npipelab_course.ring_all_reduce([torch.ones(2)] * 2)\n"
    assert graded(ring, "hybrid", SOLUTION.replace("import torch\n", f"import torch\n{compared}", 1)).score == 100


def test_a_message_that_is_not_decoded_names_its_line():
    grade = graded(ring, "hybrid", SOLUTION.replace("+= decode(messages[r - 1])", "+= messages[r - 1]"))
    assert grade.note.startswith("at size 4, 8, mean: TypeError")
    assert "+= messages[r - 1]" in grade.note


def test_the_start_file_differs_only_in_its_holes_and_is_written_by_the_lab(succeeds, folder):
    assert differs_only_in_holes("hybrid") == 4
    succeeds("lab", "hybrid", "--start")
    assert (folder / "ring_homework.py").read_text() == HOMEWORKS["hybrid"].template.read_text()


@pytest.mark.dist
@pytest.mark.usefixtures("kept_servers")
def test_the_command_grades_it(pipelab_command, folder):
    (folder / "ring_homework.py").write_text(SOLUTION)
    code, out, _ = pipelab_command("grade", "ring_homework.py")
    assert (code, "100 of 100" in out, "by eye" in out) == (0, True, False)
    (folder / "all").mkdir()
    (folder / "all" / "ada.py").write_text(f"import runpy\n{SOLUTION}")
    out = pipelab_command("grade", "hybrid", "all", "--save", "all.csv")[1]
    assert "ada.py  100 of 100  passed  to read by eye: runpy" in out
    assert "to read by eye: runpy" in (folder / "all.csv").read_text()
