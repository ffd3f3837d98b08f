"""A stage on several processes: its copies stay alike, and what would let them part is refused."""

from __future__ import annotations

import processes
import pytest

from pipelab import Trace

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def said():
    """What each of two processes said."""
    ended = processes.run_well(2, "replicas.py", fresh=True)
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


@pytest.fixture(scope="module")
def hybrids():
    """What each of six processes said: 3 stages x 2 replicas, 2 stages x 3 replicas, emulated all-reduces."""
    ended = processes.run_well(6, "hybrids.py")
    return [each.facts for each in ended]


def test_stages_times_replicas_train_what_one_device_trains_on_the_same_batches(hybrids):
    for *layouts, _ in hybrids:
        assert [(fact["stages"], fact["replicas"]) for fact in layouts] == [(3, 2), (2, 3)]
        for fact in layouts:
            assert fact["losses"] == pytest.approx(fact["expected"], rel=1e-5)
            assert fact["gradients"] < 1e-5
            assert fact["weights"] < 1e-5


def test_emulated_all_reduces_take_their_time_on_every_process(hybrids):
    for *_, fact in hybrids:
        took = sorted(fact["reduces"])
        assert [stage for stage, _ in took] == [0, 0, 0, 1, 1, 1]
        assert min(took[:3])[1] >= 19.99
        assert min(took[3:])[1] >= 4.99


def test_a_hook_that_would_see_a_part_of_the_gradient_is_refused(said):
    for fact in said:
        assert fact["hooked"].startswith("stage 0 is on ranks 0, 1, and its 0.bias has a post-accumulate-grad hook")


def test_all_reduces_beside_computing_give_the_same_bits_and_are_moves_of_the_trace():
    ended = processes.run_well(2, "reduces_beside.py", silent=True)
    first, second = (each.facts[0] for each in ended)
    assert first["beside"]["gradients"] == second["beside"]["gradients"]
    for fact in (first, second):
        row, beside = (Trace.from_dict(fact[runs].pop("trace")) for runs in ("in-row", "beside"))
        assert fact["beside"] == fact["in-row"]
        assert fact["verified"] < 1e-6
        assert [each is None for each in fact["beside"]["gradients"]].count(True) == 3  # what no replica uses
        assert {each.action.kind for each in row.events} - {each.action.kind for each in beside.events} == {"R"}
        assert [(each.rank, str(each.action)) for each in beside.moves] == [(0, "1R"), (0, "0R"), (1, "1R"), (1, "0R")]
        for each in beside.moves:
            last = max(e.end for e in beside.events_of(each.rank) if e.action.stage == each.action.stage)
            assert last <= each.start < each.end
