"""One exception for everything that pipelab says about your input, with all faults in it."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
from strategies import written

import pipelab
from pipelab import B, F, Fault, Plan, ScheduleError, errors
from pipelab.errors import StageError, require_size


def test_every_error_is_a_pipelab_error():
    for name in errors.__all__:
        if name[0].islower() or name.isupper():  # a function or a number
            continue
        assert issubclass(getattr(errors, name), pipelab.PipelabError)
        assert getattr(errors, name).__doc__
        assert getattr(pipelab, name) is getattr(errors, name)
        assert name in pipelab.__all__


def test_a_schedule_error_counts_its_faults_and_numbers_them():
    with pytest.raises(ScheduleError) as refusal:
        pipelab.simulate(Plan([[F(0), "B0", B(7, 0)], [F(0)]], 2, 1))
    error = refusal.value
    assert [fault.code for fault in error.faults] == ["not-an-action", "out-of-range", "missing"]
    lines = str(error).splitlines()
    assert lines[0] == "3 faults in Plan(ranks=2, stages=2, microbatches=1)"
    assert lines[1] == " 1. not-an-action: rank 0, position 1 holds 'B0', a str, not an action"
    assert lines[2] == "      try: yield B(0), an action, not its text"
    assert [line[:3] for line in lines if line[2:3] == "."] == [" 1.", " 2.", " 3."]


def test_one_fault_is_not_called_faults_and_many_alike_are_not_a_wall_of_text():
    one = ScheduleError([Fault("refused", None, None, None, "too small")], "GPipe")
    assert str(one) == "1 fault in GPipe\n 1. refused: too small"
    with pytest.raises(ScheduleError) as refusal:
        written(lambda *_: [F(0)] * 16)(ranks=4, microbatches=16).plan()
    assert len(refusal.value.faults) == 4 * 15 + 8
    text = str(refusal.value)
    assert text.startswith("68 faults in Mine(ranks=4, microbatches=16)")
    assert "… and 59 more like it: error.faults holds all" in text
    assert len(text.splitlines()) <= 20


@pytest.mark.parametrize(
    "error",
    [
        ScheduleError([Fault("missing", 0, None, None, "no F")], "the plan"),
        StageError("stage 1 raised", 1, 2, F(0, 2)),
    ],
)
def test_an_error_crosses_processes(error):
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - made in the line itself
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_a_size_is_returned_as_pythons_own_number(value):
    size = require_size("ranks", value)
    assert (size, type(size)) == (3, int)


@pytest.mark.parametrize("value", [0, np.int64(0), True, np.True_, 3.0, np.float64(3), "3", [3], np.array([3]), None])
def test_a_size_is_a_whole_number_from_one_on(value):
    with pytest.raises(pipelab.UsageError, match=re.escape(f"ranks={value!r}: expected a whole number, at least 1")):
        require_size("ranks", value)
