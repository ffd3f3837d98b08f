"""Ring all-reduces over processes, and as the communication hook of PyTorch's DistributedDataParallel."""

from __future__ import annotations

import processes
import pytest

pytestmark = [pytest.mark.dist, pytest.mark.torch]


@pytest.fixture(scope="module")
def said():
    """What each of three processes said, by case."""
    ended = processes.run_in(3, "ring.py")
    assert [each.code for each in ended] == [0, 0, 0], processes.shown(ended)
    return [{fact["case"]: fact for fact in each.facts} for each in ended]


def test_processes_end_with_the_bits_of_the_ring_in_one_process(said):
    for facts in said:
        reductions = [fact for fact in facts.values() if "equal" in fact]
        assert len(reductions) == 5 * 2 * 4
        assert all(fact["equal"] and fact["fed_back"] and fact["alike"] for fact in reductions)


def test_without_a_codec_the_mean_is_that_of_pytorchs_all_reduce(said):
    for facts in said:
        for case, fact in facts.items():
            if case.startswith("none"):
                assert fact["error"] <= (2e-2 if "bfloat16" in case else 1e-6), case


@pytest.mark.parametrize("case", ["a column", "even and odd", "even and odd, one of each"])
def test_numbers_that_are_apart_in_memory_travel_like_others(said, case):
    assert [facts[case]["told"] for facts in said] == [""] * 3


def test_a_group_is_a_ring_of_its_own_processes(said):
    assert [facts["group"]["mean"] for facts in said] == [1.0, 1.0, 1.0]
    assert said[1]["stranger"]["kind"] == "UsageError"


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("shapes", "rank 1 is float32 [3]"),
        ("codecs", "rank 1 is float32 [3] with codec int8"),
        ("type", "rank 2 is a tensor of int64 [3]"),
        ("feedback", "rank 2 is feedback="),
    ],
)
def test_what_one_process_gets_wrong_is_refused_on_all(said, case, told):
    for facts in said:
        assert facts[case]["kind"] == "UsageError"
        assert told in facts[case]["told"]
        assert facts["afterwards"]["mean"] == 2.0


def test_a_process_that_is_gone_ends_the_wait_of_the_others(said):
    assert all(facts["gone"]["kind"] == "RuntimeError" for facts in said[1:])
    assert all(facts["gone"]["seconds"] < 30 for facts in said[1:])


@pytest.fixture(scope="module")
def hooked():
    """What each of two processes with DistributedDataParallel said, by case."""
    ended = processes.run_well(2, "codec_hook.py")
    return [{fact["case"]: fact for fact in each.facts} for each in ended]


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "int8", "int8-ef"])
def test_ddp_with_a_codec_trains_equal_replicas_near_those_without(hooked, codec):
    near = {"none": 0.0, "fp16": 1e-4, "bf16": 1e-3}.get(codec, 5e-3)
    for facts in hooked:
        for cap in ("25", "1e-05"):
            assert facts[f"{codec} {cap}"]["same"]
            assert facts[f"{codec} {cap}"]["from_plain"] <= near


def test_with_feedback_ddp_learns_from_gradients_that_int8_loses(hooked):
    for facts in hooked:
        assert facts["small int8"]["mean"] == 0
        assert facts["small int8-ef"]["mean"] == pytest.approx(0.003, rel=0.1)


@pytest.mark.parametrize(
    ("case", "told"), [("no group", "model.process_group"), ("codecs", "with codec int8"), ("sparse", "sparse")]
)
def test_a_hook_that_would_compute_a_wrong_mean_is_refused(hooked, case, told):
    for facts in hooked:
        assert told in facts[case]["told"], facts[case]
