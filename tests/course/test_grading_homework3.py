"""Homework 3's start file: its solution earns all points, and each wrong constructor fails what it should."""

from __future__ import annotations

import pytest
from homework import differs_only_in_holes, graded, solution_of
from torch import nn

from pipelab.engine.stage.streams import Streams
from pipelab_course.grading import homework3
from pipelab_course.grading.tasks import HOMEWORKS

SOLUTION = solution_of("hw3")
LIST = '[torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]'
RULE = "self.devices[i * len(self.devices) // depth]"
MOVE = "            x = x.to(place)\n"
# What replaces what in the solution, and the tasks that fail and that are not reached.
WRONG = {
    "the file with its holes": ((SOLUTION, HOMEWORKS["hw3"].template.read_text()), "layers"),
    "halves: i < depth // 2": ((RULE, "self.devices[0 if i < depth // 2 else 1]"), "all GPUs"),
    "round robin": ((RULE, "self.devices[i % len(self.devices)]"), "crossings"),
    "the remainder on the last": (
        (RULE, "self.devices[min(i // (depth // len(self.devices)), len(self.devices) - 1)]"),
        "even",
    ),
    "two devices are fixed": ((LIST, '[torch.device("cuda:0"), torch.device("cuda:1")]'), "all GPUs"),
    "the last device is forgotten": ((LIST, LIST.replace("count())", "count() - 1)")), "all GPUs"),
    "a ceiling for each": ((RULE, "self.devices[i // -(-depth // len(self.devices))]"), "hidden sizes"),
    "x is never moved": ((MOVE, ""), "forward"),
    "x is moved once": ((MOVE, "            x = x.to(self.devices[0])\n"), "forward"),
    "x goes back to the first": ((MOVE, "            x = x.to(self.devices[0]).to(place)\n"), "crossings"),
    "no layer is moved": (("            layer.to(place)\n", ""), "layers"),
    "on the processor without asking": ((LIST, '[torch.device("cpu")]'), "layers"),
    "twenty layers are fixed": ((RULE, "self.devices[i * len(self.devices) // 20]"), "hidden sizes"),
    "the order is turned round": (
        ("in zip(self.layers, self.places)", "in zip(self.layers[::-1], self.places[::-1])"),
        "crossings",
    ),
}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_solution_earns_all_points_and_its_copies_are_counted(seed):
    grade = graded(homework3, "hw3", SOLUTION, seed)
    assert (grade.passed, grade.score, grade.max_score) == (True, 100, 100)
    said = "20 on 2 GPUs, of which 2 copy; 20 on 3 GPUs, of which 3 copy; 20 on 5 GPUs, of which 5 copy"
    assert grade.note == f"calls of .to() in a forward: {said}"


NUMBERS = (LIST, "list(range(torch.cuda.device_count()))")
RIGHT = {
    "numbers": [NUMBERS],
    "device=": [NUMBERS, ("layer.to(place)", "layer.to(device=place)"), ("x.to(place)", "x.to(device=place)")],
    "made there": [
        NUMBERS,
        ("nn.Linear(width, width)", "nn.Linear(width, width, device=place)"),
        (
            "            layer = n",
            "            place = self.devices[i * len(self.devices) // depth]\n            layer = n",
        ),
        ("            layer.to(place)\n", ""),
    ],
    "hooks move": [
        ("layer.to(place)", "layer.to(place).register_forward_pre_hook(lambda module, x, place=place: x[0].to(place))"),
        (MOVE, ""),
    ],
    "torch.accelerator": [(LIST, '[torch.device("cuda", i) for i in range(torch.accelerator.device_count())]')],
    "properties": [
        (LIST, "[i for i in range(9) if i < torch.cuda.device_count() and torch.cuda.get_device_properties(i).name]")
    ],
}


@pytest.mark.parametrize("name", RIGHT)
def test_every_way_to_name_the_gpus_is_right(name):
    text = SOLUTION
    for old, new in RIGHT[name]:
        assert old in text
        text = text.replace(old, new)
    assert graded(homework3, "hw3", text).score == 100


def test_layers_that_draw_where_a_pipeline_has_run_are_right():
    Streams(nn.Linear(1, 1))  # from now on, what draws in this process goes through pipelab
    assert graded(homework3, "hw3", SOLUTION).score == 100


def test_pipelabs_own_stack_is_looked_up():
    text = """
import torch
from pipelab_course.hw3 import LinearStack, evenly

class SpreadStack(LinearStack):
    def __init__(self, width, depth):
        counts = evenly(depth, torch.cuda.device_count())
        super().__init__(width, [torch.device("cuda", i) for i, count in enumerate(counts) for _ in range(count)])
        for layer, place in zip(self.layers, self.devices):
            layer.to(place)
"""
    with pytest.raises(LookupError, match="looked up"):
        graded(homework3, "hw3", text)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_constructor_fails_its_task(name):
    (old, new), task = WRONG[name]
    assert old in SOLUTION
    grade = graded(homework3, "hw3", SOLUTION.replace(old, new))
    assert grade.named("failed").split(", ")[0] == task
    failed = next(mark for mark in grade.marks if mark.status == "failed")
    assert all((failed.expected, failed.found, failed.effect, failed.hint))
    assert grade.score < 100


def test_a_forward_on_two_devices_says_what_a_gpu_says():
    grade = graded(homework3, "hw3", SOLUTION.replace(MOVE, ""))
    assert "Expected all tensors to be on the same device, but found cpu and cuda:0" in grade.note
    assert "x = layer(x)" in grade.note


def test_the_start_file_differs_only_in_its_holes_and_is_written_by_the_lab(succeeds, folder):
    assert differs_only_in_holes("hw3") == 3
    succeeds("lab", "hw3", "--start", "mine")
    assert (folder / "mine" / "placement_homework.py").read_text() == HOMEWORKS["hw3"].template.read_text()


@pytest.mark.dist
@pytest.mark.usefixtures("kept_servers")
def test_the_command_knows_the_homework_by_its_file_or_its_name(pipelab_command, folder):
    (folder / "placement_homework.py").write_text(SOLUTION)
    (folder / "all").mkdir()
    (folder / "all" / "ada.py").write_text(SOLUTION)
    for words in (("placement_homework.py",), ("hw3", "all"), (".",)):
        code, out, _ = pipelab_command("grade", *words)
        assert (code, "100 of 100" in out) == (0, True)
    assert "no function run_1F1B_homework" in pipelab_command("grade", "hw4", "placement_homework.py")[1]
