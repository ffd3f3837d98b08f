"""A stage on several processes: its copies stay alike, and what would let them part is refused."""

from __future__ import annotations

import processes
import pytest

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def said():
    """What each of two processes said."""
    ended = processes.run_in(2, "replicas.py", fresh=True)
    assert [each.code for each in ended] == [0, 0], processes.shown(ended)
    return [fact for each in ended for fact in each.facts]


def test_all_processes_have_the_lowest_ranks_running_statistics(said):
    for fact in said:
        assert fact["statistics"]["torch"] == fact["statistics"]["threads"]
        assert fact["statistics"]["torch"][2] == 2  # its own micro-batches


def test_a_buffer_that_is_written_into_is_refused_by_name_on_every_process(said):
    for fact in said:
        assert "stage 0 writes into its buffer 'seen', and rank 1 runs a copy of the stage" in fact["refused"]
    assert said[1]["refused"].startswith("EngineError: ")
    assert said[0]["refused"].startswith("RankError: ")


def test_replicas_are_clipped_alike_to_the_last_bit(said):
    first, second = (fact["clipped"] for fact in said)
    assert [dtype for dtype, _ in first] == ["torch.float64", "torch.bfloat16"]
    assert first == second


def test_a_pipeline_works_after_the_process_group_was_destroyed(said):
    assert [fact["again"] for fact in said] == [True, True]


def test_a_hook_that_would_see_a_part_of_the_gradient_is_refused(said):
    for fact in said:
        assert fact["hooked"].startswith("stage 0 is on ranks 0, 1, and its 0.bias has a post-accumulate-grad hook")
