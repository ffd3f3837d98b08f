"""Homework 4: the file that students get, its solution, and what the grader says of common mistakes."""

from __future__ import annotations

import difflib
import re
import runpy
from functools import cache
from pathlib import Path

import pytest
import torch
from homework import BACKWARD, LAST, MOVE, ROOT, SOLUTION, changed, first, graded

from pipelab.errors import UsageError
from pipelab_course.grading import homework4
from pipelab_course.grading.tasks import HOMEWORKS, Grade, Mark

TEMPLATE = HOMEWORKS["hw4"].template
HOMEWORK4 = HOMEWORKS["hw4"].tasks


def judged(text: str, seed: int = 0, points: dict[str, int] | None = None) -> Grade:
    return graded(homework4, "hw4", text, seed, points)


def failed(grade: Grade) -> set[str]:
    """Return the tasks that failed and those that were not reached."""
    return {mark.task.name for mark in grade.marks if not mark.passed}


def mark_of(grade: Grade, name: str) -> Mark:
    return next(mark for mark in grade.marks if mark.task.name == name)


def test_the_solution_earns_all_points_and_hints_do_not_give_it_away():
    grade = judged(SOLUTION)
    assert (grade.passed, grade.score, grade.max_score) == (True, 100, 100)
    assert "sum" in grade.note
    answers = (".to(", "backward()", "outputs[-1]", "output.device")
    assert not [task.name for task in HOMEWORK4 if any(answer in task.hint for answer in answers)]
    assert "True 1F1B" in TEMPLATE.read_text(encoding="utf-8")  # it says kindly that its order is another


def test_the_solution_differs_from_what_students_get_only_in_the_three_holes():
    template = TEMPLATE.read_text(encoding="utf-8")
    lines = difflib.ndiff(template.splitlines(), SOLUTION.splitlines())
    removed = [line[2:].strip() for line in lines if line.startswith("- ")]
    assert removed == ["...", "...", "..."]
    assert MOVE not in template
    assert ".backward()" not in template


@pytest.mark.parametrize("text", [TEMPLATE.read_text(encoding="utf-8"), SOLUTION], ids=["holes", "solution"])
def test_the_file_runs_with_and_without_its_holes_filled(text, tmp_path, capsys):
    (tmp_path / "pipeline_homework.py").write_text(text)
    runpy.run_path(str(tmp_path / "pipeline_homework.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert ("gradient: 4.00 times" in printed) == (text == SOLUTION)
    assert "step 0" in printed


def test_start_writes_the_file_and_never_overwrites_one(succeeds, refused, folder):
    assert "pipelab grade" in succeeds("lab", "hw4", "--start", "mine")
    path = folder / "mine" / "pipeline_homework.py"
    assert path.read_text() == TEMPLATE.read_text()
    path.write_text("my work")
    error = refused("lab", "hw4", "--start", "mine")
    assert path.read_text() == "my work"
    assert "exists" in error
    assert f"pipelab grade {Path('mine') / 'pipeline_homework.py'}" in error
    succeeds(*re.search(r"pipelab (lab hw4 --start \S+)", error).group(1).split())  # as it advises
    succeeds("lab", "hw4", "--start")
    assert (folder / "pipeline_homework.py").exists()


DEVICES = "device = 'cuda:1' if torch.cuda.is_available() else 'cpu'\n    outputs, targets = [], []"


@pytest.mark.sweep
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
        changed(("1], targets", "1].squeeze(), targets"), ("1]).backward()", "1].squeeze()).backward()")),
        changed((MOVE, "print(i); targets.append(micro_y.to(output.device).float())")),
    ],
)
def test_every_way_to_move_the_targets_is_right(text):
    assert judged(text).passed


ELSEWHERE = {
    "micro_y": "on the cpu",
    "micro_y.to(micro_x.device)": "on the cpu",
    "micro_y.to(model.devices[0])": "on the first GPU",
    "micro_y.cuda()": "on the first GPU",
    "micro_y.clone()": "on the cpu",
    "micro_y.to('cpu')": "on the cpu",
    "micro_y.to('cuda:0' if torch.cuda.is_available() else 'cpu')": "on the first GPU",
    "micro_y.to(torch.device('cuda' if torch.cuda.device_count() else 'cpu'))": "on the first GPU",
    "torch.tensor(micro_y.tolist(), device='cuda')": "on the first GPU",
}


@pytest.mark.sweep
@pytest.mark.parametrize("place", ELSEWHERE)
def test_a_target_elsewhere_fails_though_a_processor_would_not_notice(place):
    grade = judged(changed((MOVE, f"targets.append({place})")))
    assert {"targets", "hidden sizes"} <= failed(grade)
    assert "order" not in failed(grade)
    assert "0 of 4" in mark_of(grade, "targets").effect
    assert "on two GPUs the first loss raises" in mark_of(grade, "targets").effect
    assert f"0 {ELSEWHERE[place]}" in mark_of(grade, "targets").found


def test_a_script_that_moves_everything_to_gpus_when_it_is_imported_is_graded_on_a_laptop():
    text = (ROOT / "tests" / "scripts" / "option_c_homework.py").read_text(encoding="utf-8")
    assert judged(text).passed
    grade = judged(text.replace("micro_y.to(device1", "micro_y.to(device0"))
    assert failed(grade) == {"targets", "hidden sizes"}
    with pytest.raises(RuntimeError, match="there is no cuda:2: the GPUs are cuda:0 to cuda:1"):
        judged(text.replace('torch.device("cuda:1")', 'torch.device("cuda:2")'))


def test_a_pretended_gpu_is_gone_when_the_submission_is_done():
    before = (torch.cuda.is_available, torch.cuda.device_count, torch.nn.Parameter.__new__)
    judged(first("import torch; print(torch.cuda.is_available())"))
    assert (torch.cuda.is_available, torch.cuda.device_count, torch.nn.Parameter.__new__) == before


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (").backward()", ").div(len(micro_batches)).backward()", "the mean of the micro-batches"),
        (").backward()", ").backward()", "the sum of the micro-batches"),
    ],
)
def test_a_sum_and_a_mean_of_the_losses_are_both_right_and_named(old, new, kind):
    grade = judged(changed((old, new)))
    assert grade.passed
    assert kind in grade.note


GPIPE = ("        if i > 0:", "    for i in range(1, len(outputs)):\n        if True:")
OUTSIDE = (
    ("    outputs, targets = [], []\n", ""),
    ("def make_data", "outputs, targets = [], []\n\n\ndef make_data"),
)
DETACHED = changed(("outputs.append(output)", "outputs.append(output.detach())"))
# What the notes for teachers call it, and its file. The notes say which tasks fail and are not reached.
MISTAKES = {
    "`micro_y` is not moved": changed((MOVE, "targets.append(micro_y)")),
    "`micro_y` is moved to `model.devices[0]`": changed((MOVE, "targets.append(micro_y.to(model.devices[0]))")),
    "all forwards, then all backwards (GPipe)": changed(GPIPE),
    "the backward of i, not of i - 1": changed((BACKWARD, BACKWARD.replace("i - 1", "i"))),
    "hole 2 is empty": changed((BACKWARD, "pass")),
    "hole 3 is empty": changed((LAST, "pass")),
    "holes 2 and 3 are empty": changed((BACKWARD, "pass"), (LAST, "pass")),
    "all holes are empty": TEMPLATE.read_text(encoding="utf-8"),
    "no condition": changed(("if i > 0:", "if True:")),
    "`output.detach()` is stored": DETACHED,
    "no condition, and `retain_graph=True`": changed(
        ("if i > 0:", "if True:"), (BACKWARD, BACKWARD.replace("()", "(retain_graph=True)"))
    ),
    "`model.zero_grad()` in the loop": changed(
        ("output = model(micro_x)", "model.zero_grad(); output = model(micro_x)")
    ),
    "`range(4)` for the loop": changed(("enumerate(micro_batches)", "zip(range(4), micro_batches)")),
    "`outputs[3]` in hole 3": changed((LAST, LAST.replace("-1", "3"))),
    "the target of i with the output of i - 1": changed(("targets[i - 1]", "targets[i]")),
    "the model runs twice": changed(("output = model(micro_x)", "model(micro_x); output = model(micro_x)")),
    "the function changes the weights": changed((LAST, LAST + "\n    [p.data.mul_(0.9) for p in model.parameters()]")),
    "the lists are outside the function": changed(*OUTSIDE),
    "a loss times 0.3": changed((").backward()", ").mul(0.3).backward()")),
    "a loss that is not a number": changed((").backward()", ").mul(float('nan')).backward()")),
    "`torch.set_grad_enabled(False)`": first("import torch; torch.set_grad_enabled(False)"),
    "`yield`": changed((BACKWARD, f"yield {BACKWARD}")),
    "an unknown name in hole 1": changed((MOVE, "targets.append(micro_y.to(divice))")),
    "an unknown name in hole 3": changed((LAST, LAST.replace("outputs", "output_list"))),
    "`nn.functional.mse_loss` instead of `loss_fn`": changed(("    loss_fn(", "    nn.functional.mse_loss(")),
}
NOTES = (ROOT / "teacher" / "homework4" / "NOTES.md").read_text(encoding="utf-8")


@cache
def mistaken(name: str) -> Grade:
    try:
        return judged(MISTAKES[name])
    finally:
        torch.set_grad_enabled(True)


@pytest.mark.sweep
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_fails_the_tasks_in_the_teachers_table_and_no_others(name):
    grade = mistaken(name)
    row = f"| {name} | {grade.named('failed')} | {grade.named('not reached')} | {grade.score} |"
    assert row in NOTES.splitlines()
    assert grade.named("failed")  # there is something to begin with
    for mark in grade.marks:
        explained = all((mark.expected, mark.found, mark.effect, mark.hint))
        assert explained if mark.status == "failed" else not mark.hint


def test_the_teachers_table_has_no_other_rows():
    assert sum(line.startswith("| ") for line in NOTES.splitlines()) == len(MISTAKES) + 1


def test_a_teacher_weighs_the_tasks():
    total = changed(
        ("        if i > 0:", "    total = 0\n    for i in range(1, len(outputs)):\n        if True:"),
        (BACKWARD, BACKWARD.replace("loss_fn", "total = total + loss_fn").replace(".backward()", "")),
        (LAST, f"(total + {LAST.removesuffix('.backward()')}).backward()"),
    )
    defaults = [judged(text).score for text in (changed(GPIPE), total, DETACHED)]
    assert defaults == [70, 70, 25]
    assert judged(DETACHED, points={"not_reached": 50}).score == 52
    points = {"order": 60, "not_reached": 50}
    weighed = [judged(text, points=points) for text in (changed(GPIPE), total, DETACHED, SOLUTION)]
    assert [(grade.score, grade.max_score) for grade in weighed] == [(75, 140), (75, 140), (52, 140), (140, 140)]
    assert [mark.task.name for mark in judged(SOLUTION, points={"hidden sizes": 0}).marks][-1] == "training"


@pytest.mark.parametrize(
    "points", [{"orders": 3}, {"order": -1}, {"order": 2.5}, {"order": True}, {"not_reached": 100}]
)
def test_other_names_and_numbers_are_no_points(points):
    with pytest.raises(UsageError, match="whole points of one of forwards, targets"):
        HOMEWORKS["hw4"].weighed(points)


@pytest.mark.parametrize(
    ("name", "words", "there"),
    [
        ("no condition", "i - 1", True),
        ("the backward of i, not of i - 1", "i - 1", False),
        ("an unknown name in hole 3", "error", True),
        ("`output.detach()` is stored", "Which line made", True),
        ("`outputs[3]` in hole 3", "right with 4", True),
        ("`nn.functional.mse_loss` instead of `loss_fn`", "loss_fn", True),
    ],
)
def test_each_cause_has_its_own_hint(name, words, there):
    hint = next(mark.hint for mark in mistaken(name).marks if mark.status == "failed")
    assert (words in hint) == there


@pytest.mark.parametrize("loss", ["nn.functional.mse_loss(", "(lambda a, b: ((a - b) ** 2).mean())("])
def test_a_loss_of_ones_own_is_not_taken_for_a_target_that_was_not_moved(loss):
    grade = judged(changed(("    loss_fn(", f"    {loss}")))
    assert failed(grade) == {"hidden sizes"}
    assert "never calls loss_fn" in grade.note
    unmoved = judged(changed(("    loss_fn(", f"    {loss}"), (MOVE, "targets.append(micro_y)")))
    assert {"targets"} <= failed(unmoved)
    assert "0 of 4" in mark_of(unmoved, "targets").effect


def test_other_targets_are_a_fault_of_the_gradients_and_not_of_a_device():
    scaled = changed(("targets[i - 1])", "2 * targets[i - 1])"), ("targets[-1])", "2 * targets[-1])"))
    assert judged(scaled).named("failed") == "gradients"


def test_an_output_that_goes_back_to_its_targets_device_is_right():
    back = changed((MOVE, "outputs[-1] = output.to(model.devices[0]); targets.append(micro_y.to(model.devices[0]))"))
    assert judged(back).passed


def test_what_is_printed_does_not_count_and_an_order_that_holds_more_says_how_much():
    lies = "print('F0 F1 B0 F2 B1 F3 B2')\n    outputs, targets = [], []"
    grade = judged(changed(("outputs, targets = [], []", lies), GPIPE))
    assert failed(grade) == {"order", "hidden sizes"}
    mark = mark_of(grade, "order")
    assert mark.expected == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert mark.found == "4 micro-batches: F0 F1 F2 F3 B0 B1 B2 B3"
    assert "held: 4" in mark.effect
    assert "right order: 2" in mark.effect


IN_A_THREAD = """
import threading

its_own = run_1F1B_homework


def run_1F1B_homework(model, micro_batches, loss_fn):
    thread = threading.Thread(target=its_own, args=(model, micro_batches, loss_fn))
    thread.start()
    thread.join()
"""
HALVES = ("output = model(micro_x)", "output = model.second(model.first(micro_x).to(model.devices[1]))")


@pytest.mark.parametrize(
    "text",
    [
        changed(HALVES),
        changed((BACKWARD, BACKWARD.replace("()", "(retain_graph=True)"))),
        changed(("    for i, ", "    ahead = [model.first(x) for x, _ in micro_batches]\n    for i, "), HALVES),
        SOLUTION.replace('if __name__ == "__main__"', IN_A_THREAD + '\nif __name__ == "__main__"'),
    ],
    ids=["halves", "retained", "halves twice", "thread"],
)
def test_odd_ways_to_run_it_are_right(text):
    assert judged(text).passed


def test_backwards_whose_gradients_are_removed_get_a_reason_that_says_so():
    with pytest.raises(ValueError, match="zero_grad"):
        judged(changed((LAST, f"{LAST}; model.zero_grad()")))


def test_a_missing_backward_is_a_number_of_the_gradient_and_of_the_loss():
    marks = {mark.task.name: mark for mark in judged(changed((LAST, "pass"))).marks}
    assert "1 1 1 0" in marks["gradients"].found
    assert "25%" in marks["last backward"].effect
    assert [name for name, mark in marks.items() if mark.status == "failed"] == ["last backward"]
    assert marks["training"].effect.startswith("the loss falls from")


def test_hidden_sizes_follow_from_the_seed_and_differ_in_rows():
    sizes = [homework4._hidden(seed) for seed in range(20)]
    assert all(len(first) == 7 and len(set(uneven)) > 1 for first, uneven in sizes)
    assert len({tuple(uneven) for _, uneven in sizes}) > 10


def test_an_error_names_the_line_even_if_it_divides():
    note = judged(changed((BACKWARD, "loss_fn(outputs[0], 1 / 0 / 2)"))).note
    assert note.startswith("with 4 micro-batches: ZeroDivisionError")
    assert "handed_in.py, line 61" in note
