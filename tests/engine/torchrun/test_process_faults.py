"""When a process of several goes wrong: all others end soon, and name it."""

from __future__ import annotations

import re

import processes
import pytest

pytestmark = pytest.mark.dist

SITUATIONS = [f"faults/{name}.py" for name in ("different_pipelines", "different_calls", "odd_stages", "leaving")]
"""Scripts that run in the same three processes, one after another. The last one leaves them out of step."""


@pytest.fixture(scope="module")
def ends():
    """How each case ended on each of three processes."""
    ended = processes.run_well(3, "in_turn.py", *SITUATIONS, seconds=200, silent=True)
    facts = [{fact["case"]: fact for fact in each.facts} for each in ended]

    def of(case):
        return [each[case] for each in facts]

    return of


def assert_told(facts, kinds, told):
    """Assert that every process raised this kind of error, or its own of several kinds, with these words."""
    kinds = kinds.split() if " " in kinds else [kinds] * len(facts)
    for fact, kind in zip(facts, kinds, strict=True):
        assert fact["kind"] == kind, fact
        assert re.search(told, fact["told"]), fact


DIFFERENT_PIPELINES = {
    "version": r"^rank 1 has torch 2\.9\.1, rank 0 has torch [\d.]+$",
    "plan": r"^rank 1 has a plan with 0F3 at position 3 of row 0, rank 0 has a plan with 0B0 at ",
    "sizes": r"ranks=3, stages=3, microbatches=5, rank 0 has a plan with ranks=3, stages=3, microbatches=4$",
    "model": r"^rank 1 has a model with 0\.weight of stage 0: \[8, 8\] float32, rank 0 has",
    "reduction": r"^rank 1 has reduction sum, rank 0 has reduction mean$",
    "buffers": r"^rank 1 has replicated_buffers lowest, rank 0 has replicated_buffers refuse$",
}


@pytest.mark.parametrize("case", DIFFERENT_PIPELINES)
def test_what_differs_between_pipelines_is_told_on_all_processes(ends, case):
    assert_told(ends(case), "RankError", DIFFERENT_PIPELINES[case])


def test_a_process_that_refuses_its_plan_is_missed_by_those_who_were_given_another(ends):
    first, odd, last = ends("ranks")
    told = "the plan has 2 ranks and torchrun started 3 processes: there must be one process per rank"
    assert_told([odd], "EngineError", f"^{told}")
    assert_told([first, last], "RankError", "^rank 1 made no Pipeline within 1")
    assert_told(ends("all ranks"), "EngineError", f"^{told}")


def test_a_process_that_makes_no_pipeline_is_missed(ends):
    first, absent, last = ends("absent")
    assert_told([first, last], "RankError", r"^rank 1 made no Pipeline within 0\.\d+ s")
    assert absent["kind"] == ""


ABSENT = {
    "no rank 2": (2, r"rank 2 made no Pipeline within 1"),
    "only rank 1": (1, r"rank 0 has not opened a store at 127\.0\.0\.1:\d+, where all processes meet: "),
    "no port": (1, r"MASTER_ADDR='127\.0\.0\.1' and MASTER_PORT='' are not rank 0's address"),
}


@pytest.mark.parametrize("case", ABSENT)
def test_processes_that_do_not_come_are_missed_where_rank_0_holds_the_store_too(case):
    """Such as under mpirun; torchrun has a store of its own."""
    come, told = ABSENT[case]
    ended = processes.run_in(come, "faults/absent.py", case)
    assert [bool(re.match(told, each.out)) for each in ended] == [True] * come, processes.shown(ended)


DIFFERENT_CALLS = {
    "another call": r"^rank 1: state_dict\(\).*; rank 0: step\(x, y\)",
    "another batch": r"^rank 1: x 3 x \[3, 6\] \w+ and 1 x \[2, 6\] \w+; y [^;]*; weights [^;]*; rank 0: x 4 x ",
    "other rows": r"^rank 1 has other rows than rank 0, of the same shape: .*\n  try: no DistributedSampler",
    "one evaluates": r"^rank 1: evaluate\(x, y\); to evaluate; rank 0: step\(x, y\); to learn; frozen nothing\n",
    "another mode": r"^rank 1: modes train train train; rank 0: modes eval eval eval\n",
}


@pytest.mark.parametrize("case", DIFFERENT_CALLS)
def test_processes_that_do_not_mean_the_same_step_all_refuse_it_and_go_on(ends, case):
    assert_told(ends(case), "BatchError", DIFFERENT_CALLS[case])
    assert [fact["kind"] for fact in ends("disagree")] == [""] * 3


def test_a_stage_that_raises_is_told_on_every_process_with_what_it_was_waiting_for(ends):
    first, failed, last = ends("raises")
    lead = r"^1F0 on rank 1 failed: ValueError: a bug of mine\n  stage 1, micro-batch 0, on cpu\n  in layer 2, Odd\(\)"
    lead += r"\n  at .*odd_stages\.py, "
    assert_told([first, failed, last], "RankError StageError RankError", lead)
    assert re.search(r"\n  rank 0 waits, before 0B0 .*1B0 on rank 1$", first["told"])
    assert re.search(r"\n  rank 2 waits, before 2F0 .*1F0 on rank 1$", last["told"])


def test_shapes_that_do_not_fit_are_found_before_they_are_sent(ends):
    told = r"^2F0 on rank 2 failed: RuntimeError: .*mat1 and mat2 shapes cannot be multiplied \(3x4 and 6x6\)"
    assert_told(ends("narrow"), "RankError RankError StageError", told)
    told = r"^1F0 on rank 1 returned \[3, 4\] float32, .* of the same shape it returned \[3, 6\] float32: "
    assert_told(ends("narrow later"), "RankError StageError RankError", told)


def test_an_output_that_is_overwritten_later_is_refused(ends):
    told = r"^1F\d on rank 1 (returned a tensor that stage 1 wrote into|failed: the stage wrote into its output)"
    assert_told(ends("overwrites"), "RankError StageError RankError", told)


def test_a_stage_that_hangs_is_given_up_on_every_process(ends):
    for fact in ends("hangs"):
        assert fact["kind"] in ("StepTimeoutError", "RankError")
        assert re.search(r"^(nothing moved on rank 1 for 0\.\d+ s|rank 1 holds up the others): it ", fact["told"])
        assert re.search(r": it was running 1F0 .* at .*odd_stages\.py, line .*time\.sleep", fact["told"])


def test_an_interruption_is_told_to_the_others(ends):
    first, interrupted, last = ends("interrupted")
    assert interrupted["kind"] == "KeyboardInterrupt"
    assert_told([first, last], "RankError", r"^rank 1 was interrupted \(KeyboardInterrupt\)\n  rank \d waits, before ")


def test_a_process_that_leaves_is_missed(ends):
    first, left, last = ends("leaves")
    assert left["kind"] == ""
    told = (
        r"^rank 1 is gone: it closed its pipeline without this call, which every process must make\n"
        r"  rank \d waits for all processes in step\(x, y\)$"
    )
    assert_told([first, last], "RankError", told)


def test_a_script_that_fails_between_steps_is_told_to_the_others(ends):
    first, failed, last = ends("script")
    assert failed["kind"] == "KeyError"
    assert_told([first, last], "RankError", r"^rank 1 is gone: its script raised KeyError\('a slip of mine'\)\n  rank ")


def test_nobody_waits_long(ends):
    """Generous, for a busy machine: what is waited for at most adds up to it."""
    for case in ("raises", "narrow", "narrow later", "hangs", "interrupted", "leaves", "script"):
        assert max(fact["seconds"] for fact in ends(case)) < 40, case


IN_1F2 = "13"
"""The call of rank 1 in the second step, as one forward is to learn shapes."""

GONE = r"rank 1 is gone: process \d+ on \S+ was killed, or ended"


def without_prefix(text):
    """Return tracebacks without the rank that PyTorch writes before each of their lines."""
    return re.sub(r"^\[rank\d\]: ", "", text, flags=re.MULTILINE)


def test_a_process_that_is_killed_is_named_by_all_others():
    ended = processes.run_in(3, "misbehaving.py", "1", "SIGKILL", IN_1F2)
    assert [each.code for each in ended] == [1, -9, 1], processes.shown(ended)
    for rank in (0, 2):
        told = rf"RankError: {GONE}\n  rank {rank} (waits|was)\b.*rank \d"
        assert re.search(told, without_prefix(ended[rank].err)), processes.shown(ended)


def test_a_process_that_is_stopped_is_named_and_the_others_end():
    ended = processes.run_in(3, "faults/stopped.py")
    assert [each.code for each in ended] == [1, -9, 1], processes.shown(ended)
    for rank in (0, 2):
        told = r"(StepTimeout|Rank)Error: no sign of rank 1 in this call: "
        assert re.search(told, without_prefix(ended[rank].err)), processes.shown(ended)


def test_a_rank_that_cannot_be_sent_to_is_named_not_the_next_to_be_waited_for():
    ended = processes.run_in(3, "faults/killed_elsewhere.py")
    for rank in (0, 1):
        told = without_prefix(ended[rank].err)
        assert "RankError: rank 2 is gone: a connection to it was lost" in told, processes.shown(ended)
