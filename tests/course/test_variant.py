"""A student's own numbers: the same for the same name, in homework 4's file and in Practical 9."""

from __future__ import annotations

import pytest

from pipelab.errors import UsageError
from pipelab_course import practical9
from pipelab_course.grading.tasks import Assignment, Variant, variant

NAMES = [f"student {number}" for number in range(100)]


def test_names_differ_in_their_numbers_and_none_of_them_is_out_of_bounds():
    found = [variant(name) for name in NAMES]
    assert len(set(found)) > 90
    assert {each.microbatches for each in found} == {5, 6, 7, 8, 9}
    assert all(each.forward < each.backward for each in found)
    assert variant(" Student 7") == found[7]


def test_homework_4_has_the_numbers_of_the_name(succeeds, folder):
    own = variant("ada")
    output = succeeds("lab", "hw4", "--start", "--variant", "ada")
    assert "pipelab grade pipeline_homework.py --variant ada" in output
    text = (folder / "pipeline_homework.py").read_text()
    assert f"MICRO_BATCHES, ROWS = {own.microbatches}, {own.rows}\n" in text


def test_practical_9_has_the_costs_of_the_name(pipelab_command, refused, monkeypatch):
    seen = []

    def measurements(*_, emulate, **__):
        seen.append(emulate)
        yield from ()

    monkeypatch.setattr(practical9, "measurements", measurements)
    pipelab_command("lab", "practical9", "--variant", "ada")
    assert seen == [(variant("ada").forward, variant("ada").backward)]
    assert "choose one" in refused("lab", "practical9", "--variant", "ada", "--emulate", "1", "2")


def test_what_has_no_numbers_of_its_own_is_refused():
    assert Assignment(variant="ada").own == ["ada"]
    assert Assignment().own == []
    for other in ({"homework": "hw3"}, {"schedule": "Mine"}):
        with pytest.raises(UsageError, match="only homework 4"):
            Assignment(variant="ada", **other)
    assert variant("") == Variant()
