"""Homework 4: the file that students get, its solution, and what the grader says of common mistakes."""

from __future__ import annotations

import difflib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from homework import BACKWARD, LAST, MOVE, ROOT, SOLUTION, changed, first

from pipelab.labs.grading import homework4
from pipelab.labs.grading.tasks import HOMEWORK4, TEMPLATE, Grade


def judged(text: str, folder: Path, seed: int = 0) -> Grade:
    path = folder / "handed_in.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("handed_in", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    marks, note = homework4.judge(module, seed, lambda _: None)
    return Grade("handed_in.py", marks, note=note)


def failed(grade: Grade) -> set[str]:
    return {mark.task.name for mark in grade.marks if not mark.passed}


def test_the_solution_earns_all_points(tmp_path):
    grade = judged(SOLUTION, tmp_path)
    assert grade.passed
    assert (grade.score, grade.max_score) == (100, 100)
    assert "sum" in grade.note


def test_the_solution_differs_from_what_students_get_only_in_the_three_holes():
    template = TEMPLATE.read_text(encoding="utf-8")
    lines = difflib.ndiff(template.splitlines(), SOLUTION.splitlines())
    removed = [line[2:].strip() for line in lines if line.startswith("- ")]
    assert removed == ["...", "...", "..."]
    assert MOVE not in template
    assert ".backward()" not in template


def test_the_package_has_neither_solution_nor_notes():
    package = ROOT / "pipelab"
    texts = [
        path.read_text(encoding="utf-8", errors="replace")
        for path in package.rglob("*")
        if path.suffix in (".py", ".txt", ".md")
    ]
    assert not [text for text in texts if MOVE in text or "Homework 4: notes for the teacher" in text]


@pytest.mark.parametrize("text", [TEMPLATE.read_text(encoding="utf-8"), SOLUTION], ids=["holes", "solution"])
def test_the_file_runs_with_and_without_its_holes_filled(text, tmp_path):
    (tmp_path / "pipeline_homework.py").write_text(text)
    run = subprocess.run(
        [sys.executable, "pipeline_homework.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ("gradient: 4.00 times" in run.stdout) == (text == SOLUTION)
    assert "step 0" in run.stdout


def test_start_writes_the_file_and_never_overwrites_one(pipelab_command, folder):
    code, out, _ = pipelab_command("lab", "hw4", "--start", "mine")
    path = folder / "mine" / "pipeline_homework.py"
    assert (code, path.read_text()) == (0, TEMPLATE.read_text())
    assert "pipelab grade" in out
    path.write_text("my work")
    code, _, err = pipelab_command("lab", "hw4", "--start", "mine")
    assert (code, path.read_text()) == (1, "my work")
    assert "exists" in err


def test_start_without_a_folder_writes_beside_you(pipelab_command, folder):
    assert pipelab_command("lab", "hw4", "--start")[0] == 0
    assert (folder / "pipeline_homework.py").exists()


DEVICES = "device = 'cuda:1' if torch.cuda.is_available() else 'cpu'\n    outputs, targets = [], []"


@pytest.mark.parametrize(
    "text",
    [
        changed((MOVE, "targets.append(micro_y.to(model.devices[1]))")),
        changed((MOVE, "targets.append(micro_y.to(device=model.devices[-1], non_blocking=True))")),
        changed((MOVE, "targets.append(micro_y.to(output))")),
        changed((MOVE, "targets.append(micro_y.to('cuda:1'))")),
        changed((MOVE, "targets.append(micro_y.cuda(1))")),
        changed((MOVE, "targets.append(micro_y.to(next(model.second.parameters()).device))")),
        changed((MOVE, "targets.append(micro_y.to(device))"), ("outputs, targets = [], []", DEVICES)),
        changed((MOVE, "print(i); targets.append(micro_y.to(output.device).float())")),
    ],
)
def test_every_way_to_move_the_targets_is_right(text, tmp_path):
    assert judged(text, tmp_path).passed


@pytest.mark.parametrize(
    "place",
    ["micro_y", "micro_y.to(micro_x.device)", "micro_y.to(model.devices[0])", "micro_y.cuda()", "micro_y.clone()"],
)
def test_a_target_elsewhere_fails_though_a_processor_would_not_notice(place, tmp_path):
    grade = judged(changed((MOVE, f"targets.append({place})")), tmp_path)
    assert {"targets", "hidden sizes"} <= failed(grade)
    assert "order" not in failed(grade)
    assert "0 of 4" in next(mark.effect for mark in grade.marks if mark.task.name == "targets")


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (").backward()", ").div(len(micro_batches)).backward()", "the mean of the micro-batches"),
        (").backward()", ").backward()", "the sum of the micro-batches"),
    ],
)
def test_a_sum_and_a_mean_of_the_losses_are_both_right_and_named(old, new, kind, tmp_path):
    grade = judged(changed((old, new)), tmp_path)
    assert grade.passed
    assert kind in grade.note


GPIPE = ("        if i > 0:", "    for i in range(1, len(outputs)):\n        if True:")
MISTAKES = {
    "gpipe": (changed(GPIPE), {"order", "hidden sizes"}),
    "no last backward": (
        changed((LAST, "pass")),
        {"order", "last backward", "gradients", "training", "hidden sizes"},
    ),
    "no condition": (
        changed(("if i > 0:", "if True:")),
        {"forwards", "order", "last backward", "no second backward", "gradients", "training", "hidden sizes"},
    ),
    "retained": (
        changed(("if i > 0:", "if True:"), (BACKWARD, BACKWARD.replace("()", "(retain_graph=True)"))),
        {"order", "no second backward", "gradients", "training", "hidden sizes"},
    ),
    "zero_grad in the loop": (
        changed(("output = model(micro_x)", "model.zero_grad(); output = model(micro_x)")),
        {"gradients", "training", "hidden sizes"},
    ),
    "only 4 micro-batches": (
        changed((LAST, LAST.replace("-1", "3"))),
        {"order", "last backward", "gradients", "hidden sizes"},
    ),
    "wrong targets": (changed(("targets[i - 1]", "targets[i]")), {"gradients", "training", "hidden sizes"}),
    "forward twice": (
        changed(("output = model(micro_x)", "model(micro_x); output = model(micro_x)")),
        {"forwards", "order", "hidden sizes"},
    ),
    "weights changed": (
        changed((LAST, LAST + "\n    [p.data.mul_(0.9) for p in model.parameters()]")),
        {"gradients", "training", "hidden sizes"},
    ),
    "state of the last call": (
        changed(
            ("    outputs, targets = [], []\n", ""), ("def make_data", "outputs, targets = [], []\n\n\ndef make_data")
        ),
        {"order", "last backward", "no second backward", "gradients", "training", "hidden sizes"},
    ),
    "half a loss": (changed((").backward()", ").mul(0.3).backward()")), {"gradients", "training", "hidden sizes"}),
    "not a number": (
        changed((").backward()", ").mul(float('nan')).backward()")),
        {"gradients", "training", "hidden sizes"},
    ),
    "no gradients wanted": (
        first("import torch; torch.set_grad_enabled(False)"),
        {"order", "last backward", "no second backward", "gradients", "training", "hidden sizes"} | {"forwards"},
    ),
    "a generator": (changed((BACKWARD, f"yield {BACKWARD}")), {task.name for task in HOMEWORK4}),
    "nothing": (TEMPLATE.read_text(encoding="utf-8"), {task.name for task in HOMEWORK4}),
    "seven at most": (changed(("enumerate(micro_batches)", "enumerate(micro_batches[:4])")), {"hidden sizes"}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_fails_its_tasks_and_no_others(name, tmp_path):
    text, tasks = MISTAKES[name]
    grade = judged(text, tmp_path)
    torch.set_grad_enabled(True)
    assert failed(grade) == tasks
    for mark in grade.marks:
        assert mark.passed or all((mark.expected, mark.found, mark.effect, mark.task.hint))


def test_what_is_printed_does_not_count(tmp_path):
    lies = "print('F0 F1 B0 F2 B1 F3 B2')\n    outputs, targets = [], []"
    text = changed(("outputs, targets = [], []", lies), GPIPE)
    assert failed(judged(text, tmp_path)) == {"order", "hidden sizes"}


def test_an_order_that_holds_more_says_how_much(tmp_path):
    (mark,) = [mark for mark in judged(changed(GPIPE), tmp_path).marks if mark.task.name == "order"]
    assert mark.expected == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert mark.found == "4 micro-batches: F0 F1 F2 F3 B0 B1 B2 B3"
    assert "up to 4" in mark.effect
    assert "holds 2" in mark.effect


def test_a_missing_backward_is_a_number_of_the_gradient_and_of_the_loss(tmp_path):
    marks = {mark.task.name: mark for mark in judged(changed((LAST, "pass")), tmp_path).marks}
    assert "1 1 1 0" in marks["gradients"].found
    assert "25%" in marks["last backward"].effect
    assert marks["training"].effect.startswith("the loss falls from")


def test_hidden_sizes_follow_from_the_seed_and_differ_in_rows():
    sizes = [homework4._hidden(seed) for seed in range(20)]
    assert all(len(first) == 7 and len(set(uneven)) > 1 for first, uneven in sizes)
    assert len({tuple(uneven) for _, uneven in sizes}) > 10


def test_hints_do_not_give_the_answer_away():
    answers = (".to(", "backward()", "outputs[-1]", "output.device")
    assert not [task.name for task in HOMEWORK4 if any(answer in task.hint for answer in answers)]
    assert sum(task.points for task in HOMEWORK4) == 100
    json.dumps([task.hint for task in HOMEWORK4])


def test_an_error_names_the_line_even_if_it_divides(tmp_path):
    note = judged(changed((BACKWARD, "loss_fn(outputs[0], 1 / 0 / 2)")), tmp_path).note
    assert note.startswith("with 4 micro-batches: ZeroDivisionError")
    assert "handed_in.py, line 60" in note
