"""Stages that are spread over processes by DTensor or FSDP2, in a pipeline over the other dimension of the mesh."""

from __future__ import annotations

from itertools import chain

import processes
import pytest

from pipelab import Trace

pytestmark = pytest.mark.dist


CASES = ["tp interleaved-1f1b", "tp zb-h1", "fsdp gpipe", "fsdp interleaved-1f1b"]


@pytest.fixture(scope="module")
def said():
    """What each of four processes said, by case."""
    ended = processes.run_well(4, "parallel_stages.py", *CASES)
    return {case: [next(fact for fact in each.facts if fact["case"] == case) for each in ended] for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_stages_spread_over_processes_train_as_one_process_does(said, case):
    how, facts = case.split()[0], said[case]
    assert facts[0]["parameters"] == facts[1]["parameters"]
    assert len(set(chain(facts[0]["parameters"], facts[2]["parameters"]))) == 24
    for fact in facts:
        assert fact["bits"]  # loss and gradients, as the same stages run one after another without a pipeline
        assert fact["gradients"] < 1e-5  # as one process with plain tensors
        assert fact["weights"] < 1e-5
        assert fact["outputs"] < 1e-5
        assert max(fact["losses"]) < 1e-6
        assert fact["norms"] == pytest.approx([1, 1], rel=1e-5)
        assert fact["verified"][0] == 24
        assert fact["verified"][1] <= (0 if how == "tp" else 1e-6)  # verify reduces after every micro-batch
        assert fact["names"] == (["DTensor", "Tensor"] if how == "tp" else ["DTensor"])
        assert fact["reductions"] == (0 if how == "tp" else len(fact["parameters"]) // 6)  # once for each block
        assert "is a DTensor" in fact["threads"]
        assert "group= names processes" in fact["grouped"]
        assert "2 replicas" in fact["replicas"]
        assert "4 ranks and this process's group= has 2 processes" in fact["ranks"]
        assert ("splits backwards (" in fact["split"]) == (how == "fsdp")


def test_two_stages_two_replicas_and_two_shards_on_eight_processes_train_as_one_does():
    ended = processes.run_well(8, "eight.py", seconds=180)
    facts = [each.facts[0] for each in ended]
    assert all(fact["names"] == facts[4 * (rank // 4)]["names"] for rank, fact in enumerate(facts))
    assert len({*facts[0]["names"], *facts[4]["names"]}) == 24  # each process saves its own stage's
    for fact in facts:
        assert fact["gradients"] < 1e-5
        assert fact["figures"] < 1e-6  # of losses and norms
        assert fact["weights"] < 1e-5
        assert fact["held"] == [0.5]  # of every parameter of its stage
        assert fact["whole"].startswith("UsageError: this process does not have the whole model")
        assert fact["spread"].startswith("SplitError: layer '0.up' was spread over processes on the meta device")


def test_a_plan_says_when_the_weights_of_fsdp2_are_gathered_and_freed():
    """Bit-equal to FSDP2's own hooks, with no gather but the plan's, each in the trace before the stage's actions."""
    ended = processes.run_well(2, "own_gathers.py", "1")
    for each in ended:
        (facts,) = each.facts
        traces = {name: Trace.from_dict(fact["trace"]) for name, fact in facts.items()}
        gathers = {name: sum(move.action.kind == "UNSHARD" for move in trace.moves) for name, trace in traces.items()}
        assert gathers == {"hooks": 0, "2 active": 4, "around each": 24}
        for name, trace in traces.items():
            assert facts[name]["equal"], name
            assert facts[name]["verified"] < 1e-6
            evaluation = Trace.from_dict(facts[name]["evaluation"])
            many = [sum(move.action.kind == "UNSHARD" for move in each.moves) for each in (trace, evaluation)]
            assert facts[name]["gathers"] == [2 * each for each in many] or name == "hooks"  # two parts of each stage
            assert evaluation.plan.forwards_only
            assert many[1] == {"hooks": 0, "2 active": 3, "around each": 12}[name]
            for event in trace.events if trace.moves else ():
                mine = [move for move in trace.moves if move.action.stage == event.action.stage]
                last = max((move for move in mine if move.start <= event.start), key=lambda move: move.start)
                assert event.action.kind == "R" or (last.action.kind == "UNSHARD" and last.end <= event.start)


def test_the_script_of_the_documentation_trains_on_a_mesh(folder):
    ended = processes.run_well(4, str(processes.ROOT / "docs" / "train_2d.py"))
    assert [each.out.startswith("loss ") for each in ended] == [True, False, False, False]
    assert (folder / "model.pt").exists()


@pytest.mark.parametrize(
    ("how", "words"), [("raises", "1F0 on rank 1 failed: ValueError: odd"), ("returns", "stage 0 returned a DTensor")]
)
def test_a_failure_in_one_pipeline_of_a_mesh_ends_the_others(how, words):
    ended = processes.run_in(4, "parallel_failure.py", how, seconds=100)
    for each in ended:
        assert each.code == 1, processes.shown(ended)
        assert words in each.err
