"""A variant of homework 4: its own solution has all points; another one's has not, for a cause that is named."""

from __future__ import annotations

import runpy
from itertools import pairwise, product
from pathlib import Path

import pytest
from homework import SOLUTION, graded, solution_of_variant

from pipelab_course.grading import homework4
from pipelab_course.grading.tasks import HOMEWORKS, Grade, start_homework, variant

ORDERS, WEIGHTS = ([*filter(None, rules)] for rules in (HOMEWORKS["hw4"].orders, HOMEWORKS["hw4"].weights))
NAMES = {(own.order, own.weights): name for name in map(str, range(1000)) if (own := variant(name))}
FEW = [*zip(ORDERS, WEIGHTS, strict=True)]
MANY = [each for each in product(ORDERS, WEIGHTS) if each not in FEW]
ORDER_COPIED = [(own, (other, own[1])) for own, (other, _) in pairwise(FEW)]
WEIGHTS_COPIED = [(own, (own[0], other)) for own, (_, other) in pairwise(FEW)]
RULES = [*FEW, *(pytest.param(each, marks=pytest.mark.sweep) for each in MANY)]


def judged(rules: tuple[str, str], own: tuple[str, str], folder: Path) -> Grade:
    """Return the grade of a solution that follows some rules, in the variant of others."""
    text = start_homework("hw4", folder, NAMES[own]).read_text(encoding="utf-8")
    return graded(homework4, "hw4", solution_of_variant(text, *rules), own=[NAMES[own]])


def hints(grade: Grade) -> dict[str, str]:
    """Return the hint of each task that failed."""
    return {mark.task.name: mark.hint for mark in grade.marks if mark.status == "failed"}


def test_names_lead_to_every_order_and_every_weighting_and_the_start_file_has_all_that_they_change() -> None:
    assert set(NAMES) == {*FEW, *MANY}
    template = HOMEWORKS["hw4"].template.read_text(encoding="utf-8")
    assert not [old for old in HOMEWORKS["hw4"].variant if old not in template]


@pytest.mark.parametrize("rules", RULES)
def test_a_variants_own_solution_has_all_points(rules: tuple[str, str], tmp_path: Path) -> None:
    grade = judged(rules, rules, tmp_path)
    assert grade.passed, hints(grade)
    assert rules[1] in grade.note


@pytest.mark.parametrize(("own", "copied"), ORDER_COPIED)
def test_a_copied_order_is_named_beside_the_variants(
    own: tuple[str, str], copied: tuple[str, str], tmp_path: Path
) -> None:
    grade = judged(copied, own, tmp_path)
    found = hints(grade)
    assert [*found] == ["forwards"]
    assert [mark.effect.partition(", ")[2] for mark in grade.marks if mark.status == "failed"] == ["in another order"]
    assert all(order in found["forwards"] for order, _ in (own, copied))


@pytest.mark.parametrize(("own", "copied"), WEIGHTS_COPIED)
def test_copied_weights_are_named_beside_the_variants(
    own: tuple[str, str], copied: tuple[str, str], tmp_path: Path
) -> None:
    found = hints(judged(copied, own, tmp_path))
    assert [*found] == ["gradients"]
    assert all(weights in found["gradients"] for _, weights in (own, copied))


def test_the_courses_solution_is_no_variants() -> None:
    found = hints(graded(homework4, "hw4", SOLUTION, own=[NAMES[ORDERS[0], WEIGHTS[1]]]))
    assert [*found] == ["forwards", "gradients"]
    assert "the course" in found["forwards"]


@pytest.mark.parametrize("rules", FEW)
def test_the_file_of_a_variant_compares_with_its_own_weights(rules: tuple[str, str], tmp_path: Path, capsys) -> None:
    path = start_homework("hw4", tmp_path, NAMES[rules])
    text = path.read_text(encoding="utf-8")
    path.write_text(solution_of_variant(text, *rules), encoding="utf-8")
    runpy.run_path(str(path), run_name="__main__")
    assert "gradient: 1.00 times the weighted sum's, and 0% of something else" in capsys.readouterr().out
    assert rules[0] in text
    assert rules[1] in text


@pytest.mark.usefixtures("folder")
def test_a_variant_is_graded_as_it_was_given(pipelab_command) -> None:
    name = NAMES[ORDERS[0], WEIGHTS[2]]
    path = start_homework("hw4", Path(), name)
    right = solution_of_variant(path.read_text(encoding="utf-8"), ORDERS[0], WEIGHTS[2])
    path.write_text(right.replace("if i > 0:", "if i > 1:"), encoding="utf-8")
    _, output, _ = pipelab_command("grade", str(path), "--variant", name, "--seconds", "60")
    last = variant(name).microbatches - 1
    assert f"{last + 1} micro-batches: F{last} F{last - 1} F{last - 2} B{last - 1}" in output
    _, output, _ = pipelab_command("lab", "hw4", "--variant", name)
    assert f"F{last} F{last - 1} B{last}" in output
    assert HOMEWORKS["hw4"].weights[WEIGHTS[2]] in output


def test_a_folder_is_graded_by_the_variants_of_its_names(pipelab_command, folder) -> None:
    names = [NAMES[rules] for rules in FEW[:2]]
    for name, rules in zip(names, FEW, strict=False):
        start = start_homework("hw4", folder / name, name).read_text(encoding="utf-8")
        (folder / "all" / name).mkdir(parents=True)
        (folder / "all" / name / "mine.py").write_text(solution_of_variant(start, *rules), encoding="utf-8")
    code, output, error = pipelab_command("grade", "hw4", "all", "--variants", "--seconds", "60")
    assert (code, output.count("100 of 100")) == (0, 2), output + error
    code, _, error = pipelab_command("grade", "hw4", "all", "--variant", names[0])
    assert (code, "--variants" in error) == (2, True)
