"""Processes and their models: where they begin with other weights, rank 0 warns."""

from __future__ import annotations

import processes
import pytest

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def said():
    """What each of two processes said."""
    ended = processes.run_well(2, "in_turn.py", "other_weights.py", "late_connection.py", silent=True)
    return [each.facts for each in ended]


def test_processes_with_other_weights_are_told_before_the_first_step(said):
    (first, _), (second, _) = said
    warned = {case: told for case, told in first.items() if told}
    assert set(warned) == {"seed", "loaded once", "trained on", "gathered"}
    for (told,) in warned.values():
        assert told.startswith("other_weights.py: rank 1 has other weights than rank 0: ")
    assert not any(second.values())


def test_no_process_has_its_pipeline_before_all_are_connected(said):
    """Else it may close it at once, and the connection is lost in which the other process still waits."""
    assert min(last["seconds"] for _, last in said) > 0.5
