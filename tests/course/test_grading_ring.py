"""The hybrid simulator's start file: its ring is compared bit for bit, and each wrong ring fails what it should."""

from __future__ import annotations

import pytest
from homework import differs_only_in_holes, graded, solution_of

from pipelab_course.grading import ring
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


def test_pipelabs_own_ring_is_looked_up_and_may_be_compared_with_when_the_file_is_imported():
    own = "import pipelab_course as p\n\ndef ring_all_reduce(given, *_):\n    return p.ring_all_reduce(given)"
    with pytest.raises(LookupError, match="looked up"):
        graded(ring, "hybrid", own)
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
    assert (code, "100 of 100" in out) == (0, True)
