"""Homework 1's start file: two processes run it, and each wrong script fails what it should."""

from __future__ import annotations

import pytest
from homework import differs_only_in_holes, solution_of

from pipelab_course.grading.runner import Limits, grade, submissions
from pipelab_course.grading.tasks import HOMEWORKS, Assignment, Grade

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("kept_servers")]

SOLUTION = solution_of("hw1")
SHARE = "slice(rank * BATCH // processes, (rank + 1) * BATCH // processes)"
RESULT = "median(ms for _, ms, _ in log[DROPPED:])"
BEGAN = "        began = time.perf_counter()\n"
STEP = "        optimizer.step()\n"
LOGGED = "        log.append((step, 1e3 * (time.perf_counter() - began), loss.item()))\n"
# What replaces what in the solution, in order, and the first task that fails.
WRONG: dict[str, tuple[list[tuple[str, str]], str]] = {
    "the file with its holes": ([(SOLUTION, HOMEWORKS["hw1"].template.read_text(encoding="utf-8"))], "steps"),
    "no seed of Python": ([("    random.seed(0)\n", "")], "seeds"),
    "no seed of PyTorch": ([("    torch.manual_seed(0)\n", "")], "seeds"),
    "another seed on each rank": ([("random.seed(0)", "random.seed(rank)")], "seeds"),
    "64 rows on each": ([(SHARE, "slice(0, BATCH)")], "shares"),
    "the first half on each": ([(SHARE, "slice(0, BATCH // processes)")], "shares"),
    "25 steps": ([("range(STEPS)", "range(STEPS - DROPPED)")], "steps"),
    "the log begins at 5": ([("*log])", "*log[DROPPED:]])")], "steps"),
    "the clock starts before the batch": (
        [(BEGAN, ""), ("        x, y = make_batch()\n", f"{BEGAN}        x, y = make_batch()\n")],
        "clock",
    ),
    "the clock stops before the optimizer": ([(STEP, ""), (LOGGED, LOGGED + STEP)], "clock"),
    "seconds instead of ms": ([("1e3 * (", "(")], "clock"),
    "nothing is thrown away": ([("log[DROPPED:]", "log")], "warm-up"),
    "the last ones are thrown away": ([("log[DROPPED:]", "log[:-DROPPED]")], "warm-up"),
    "the first step is returned": ([(RESULT, "log[0][1]")], "warm-up"),
    "all ranks report": ([("if rank == 0:", "if True:")], "rank 0"),
    "nobody prints": ([('        print(f"a step', '        str(f"a step')], "rank 0"),
}

CLOCKS = {
    "imported": ("from time import perf_counter_ns\n", "perf_counter_ns() / 1e9"),
    "renamed": ("from time import perf_counter as clock\n", "clock()"),
    "of_timeit": ("import timeit\n", "timeit.default_timer()"),
}


@pytest.fixture(scope="module")
def grades(kept_servers: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Grade]:
    folder = tmp_path_factory.mktemp("benchmarks")
    (folder / "right.py").write_text(SOLUTION)
    mean = SOLUTION.replace(RESULT, "sum(ms for _, ms, _ in log[DROPPED:]) / len(log[DROPPED:])")
    (folder / "mean.py").write_text(mean)
    (folder / "every.py").write_text(SOLUTION.replace(SHARE, "slice(rank, BATCH, processes)"))
    for name, (imports, clock) in CLOCKS.items():
        text = SOLUTION.replace("import time\n", imports).replace("time.perf_counter()", clock)
        (folder / f"{name}.py").write_text(text)
    for name, call in {"of_autograd": "torch.autograd.backward(loss)", "of_its_own": "backward(loss)"}.items():
        imported = SOLUTION.replace("import csv\n", "import csv\nfrom torch.autograd import backward\n")
        (folder / f"{name}.py").write_text(imported.replace("loss.backward()", call))
    (folder / "raises.py").write_text(SOLUTION.replace("loss.backward()", "1 / 0"))
    for name, (changes, _) in WRONG.items():
        text = SOLUTION
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (folder / f"{name}.py").write_text(text)
    found = grade(submissions(folder)[0], Assignment(homework="hw1"), Limits(seconds=60), workers=2)
    return {each.submission.removesuffix(".py"): each for each in found}


@pytest.mark.parametrize("name", ["right", "mean", "every", *CLOCKS, "of_autograd", "of_its_own"])
def test_a_right_benchmark_earns_all_points(name, grades):
    assert (grades[name].passed, grades[name].score, grades[name].max_score) == (True, 100, 100)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_benchmark_fails_its_task(name, grades):
    found = grades[name]
    assert found.reason == ""
    assert found.named("failed").split(", ")[0] == WRONG[name][1]
    failed = next(mark for mark in found.marks if mark.status == "failed")
    assert all((failed.expected, failed.found, failed.effect, failed.hint))
    assert found.score < 100


def test_a_wrong_time_says_what_is_in_it(grades):
    said = {name: next(mark.found for mark in grades[name].marks if mark.task.name == "clock") for name in WRONG}
    assert "1000 ms more: the batch is made in it" in said["the clock starts before the batch"]
    assert "1 ms less: the optimizer is not in it" in said["the clock stops before the optimizer"]


def test_an_error_in_a_process_is_named_with_its_line(grades):
    assert "ZeroDivisionError" in grades["raises"].note
    assert "1 / 0" in grades["raises"].note


def test_the_start_file_differs_only_in_its_holes_and_is_written_by_the_lab(succeeds, folder):
    assert differs_only_in_holes("hw1") == 4
    succeeds("lab", "hw1", "--start")
    assert (folder / "ddp_homework.py").read_text() == HOMEWORKS["hw1"].template.read_text()
