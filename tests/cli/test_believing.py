"""Which measured figures are believed, and how much of the processor other programs use."""

from __future__ import annotations

import pytest

from pipelab.cli import believing
from pipelab.cli.believing import Watch, believable


def test_a_figure_is_believed_up_to_15_percent_off_in_both_directions():
    assert [believable(measured, 100, 0.0) for measured in (84, 86, 114, 116)] == [False, True, True, False]


def test_without_a_prediction_only_other_programs_make_a_figure_doubtful():
    assert [believable(5, None, others) for others in (0.0, 0.1, 0.11)] == [True, True, False]


@pytest.fixture
def machine(monkeypatch):
    """A machine with one core, whose seconds a test sets: this process's, all programs', and those of all cores."""
    seconds = [0.0, 0.0, 0.0]
    monkeypatch.setattr(believing, "_processor", lambda: tuple(seconds))
    monkeypatch.setattr(believing.os, "cpu_count", lambda: 1)
    return seconds


def test_others_are_what_is_left_of_all_programs_in_the_spans(machine):
    watch = Watch()
    for own, used, whole in ((1, 2, 4), (1, 4, 6)):
        with watch:
            machine[:] = [machine[0] + own, machine[1] + used, machine[2] + whole]
        machine[1] += 50  # between the spans
    assert watch.own == 2
    assert watch.others() == pytest.approx((6 - 2) / 10, abs=0.01)
    assert watch.others(own=6) == 0


def test_a_system_that_does_not_say_blames_nobody(monkeypatch):
    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(believing.Path, "read_text", missing)
    watch = Watch()
    with watch:
        sum(range(1000))
    assert watch.others() == 0
    assert watch.own > 0
