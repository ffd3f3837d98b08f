"""Profiles that the installed PyTorch writes: labels and format are still those that pipelab reads."""

from __future__ import annotations

import pytest
from processes import run_in, shown

import pipelab
from pipelab.hub import profiles

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("name", "more", "kind"),
    [("1F1B", ["with_stack"], pipelab.OneFOneB), ("Interleaved1F1B", [], pipelab.Interleaved1F1B)],
)
def test_a_fresh_profile_shows_the_order_and_the_times(tmp_path, name, more, kind):
    ended = run_in(2, "profiled.py", str(tmp_path), name, "1", *more)
    assert [each.code for each in ended] == [0, 0], shown(ended)
    trace = profiles.load(tmp_path / "rank*.json.gz")
    action, plan = trace.plan.bound.codes.action, kind(2, 4).plan()
    ran = [[action(code) for code in row if action(code).kind != "R"] for row in trace.plan.bound.computing]
    assert ran == [[plan.bound.codes.action(code) for code in row] for row in plan.bound.computing]
    for event in trace.events:
        if event.action.kind != "R":
            assert event.duration >= (2 if event.action.kind == "F" else 4) * (3 if event.rank == 1 else 1)
