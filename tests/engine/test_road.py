"""A micro-batch passes few files and few calls from `Pipeline.step` to the module."""

from __future__ import annotations

import processes
import pytest


def test_the_road_in_threads_is_short():
    ((road,),) = (each.facts for each in processes.run_well(1, "road.py", "threads", "2"))
    assert len(road["files"]) <= 14, road["files"]
    assert road["depth"] <= 9  # `_run` is the forward of F and of C


@pytest.mark.dist
def test_the_road_between_processes_is_short():
    ended = processes.run_well(2, "road.py", "torch", "2")
    (road,) = ended[0].facts
    assert len(road["files"]) <= 22, road["files"]  # store.py: the supervisor may look while the step runs
    assert road["depth"] <= 16
