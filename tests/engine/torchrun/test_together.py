"""The torch engine in several processes: the same numbers as in the threads engine, on every process."""

from __future__ import annotations

import re

import processes
import pytest
from fuzz.inputs import fuzz_inputs_in_processes

import pipelab

pytestmark = pytest.mark.dist

SITUATIONS = [
    "adam",
    "one_step",
    "values",
    "cut_gradients",
    "layout",
    "stage_state",
    "mesh",
    "differences",
    "placed_reduces",
    "both_ways",
    "own_data",
    "nothing_learns",
    "inputs",
]
"""Scripts that run in the same four processes, one after another."""


@pytest.fixture(scope="module")
def said():
    """What each of four processes said, by case."""
    ended = processes.run_well(4, "in_turn.py", *(f"together/{name}.py" for name in SITUATIONS), silent=True)
    return lambda case: [[fact for fact in each.facts if fact["case"] == case] for each in ended]


def test_five_steps_of_adam_with_a_reload_equal_the_threads_engines(said):
    for facts in said("adam"):
        assert [fact["schedule"] for fact in facts] == ["OneFOneB", "ZBV"]
        for fact in facts:
            assert fact["figures"] == fact["expected"]
            assert fact["parameters"]


def test_an_optimizer_works_in_a_process_where_no_parameter_learns(said):
    (first,), (relu,), (frozen,), (last,) = said("nothing learns")
    assert [first["rest"], relu["rest"], frozen["rest"], last["rest"]] == [
        [2, 2, ["0"]],
        [1, 0, []],  # of a stage without parameters, one without numbers
        [3, 2, ["2"]],
        [2, 2, ["3"]],
    ]
    assert all(each["same"] for each in (first, relu, frozen, last))


def test_loss_and_gradients_are_the_threads_engines_bit_for_bit(said):
    for rank, (fact,) in enumerate(said("bits")):
        assert fact["held"] == [rank, rank + 4]
        assert fact["parameters"] == 4
        assert fact["names"] == sorted(f"{2 * stage}.{kind}" for stage in fact["held"] for kind in ("weight", "bias"))
        assert fact["loss"]
        assert fact["gradients"]


def test_a_steps_outputs_stay_on_the_last_stages_rank_a_forwards_go_to_all(said):
    for rank, (fact,) in enumerate(said("bits")):
        if rank == 3:
            assert fact["outputs"].startswith("same")
        else:
            assert "on rank 3" in fact["outputs"]
            assert "try: pipe.forward(x)" in fact["outputs"]
        assert fact["forward"]


def test_an_evaluation_has_the_threads_engines_loss_and_a_trace_of_forwards(said):
    plan = pipelab.Interleaved1F1B(4, 8).forwards()
    for (fact,) in said("bits"):
        assert (fact["evaluated"], fact["its_outputs"], fact["its_gradients"]) == (True, True, True)
        trace = pipelab.Trace.from_dict(fact["its_trace"])
        assert trace.plan == plan
        assert all(event.start < event.end for event in trace.events)
        assert fact["its_trace"] == said("bits")[0][0]["its_trace"]


def test_every_process_verifies_all_parameters(said):
    for (fact,) in said("bits"):
        assert (fact["exact"], fact["compared"], fact["whole"]) == (True, 16, True)


def test_a_process_whose_rounding_decides_its_gradients_looks_again_alone(said):
    for rank, (fact,) in enumerate(said("rounding")):
        assert (fact["nearby"], fact["restored"], fact["goes_on"]) == (rank == 1, True, True)


def test_a_difference_that_one_process_sees_is_raised_alike_on_all(said):
    facts = [fact for each in said("stateful") for fact in each]
    assert len({fact["told"] for fact in facts}) == 1
    assert re.match(r"the gradient of 0\.weight \(stage 0\) differs .*\nmicro-batch 0 is the first", facts[0]["told"])
    assert all(fact["goes_on"] for fact in facts)


def test_a_difference_from_the_whole_batch_is_raised_alike_on_all(said):
    different, failed = zip(*said("whole"), strict=True)
    assert len({fact["told"] for fact in different}) == 1
    assert "their sum is not the whole batch's" in different[0]["told"]
    others = "VerificationError: MemoryError on another process: too much"
    assert [fact["told"] for fact in failed] == [others, others, "MemoryError: too much", others]
    assert all(fact["goes_on"] for fact in (*different, *failed))


def test_every_process_has_the_trace_of_all_with_the_error_of_its_clock(said):
    (first,), *others = said("trace")
    assert all(fact["rows"] == first["rows"] and fact["makespan"] == first["makespan"] for (fact,) in others)
    assert [row.split()[0] for row in first["rows"]] == ["0F0", "1F0", "2F0", "3F0"]
    assert first["after"]
    assert re.fullmatch(r"4 processes, clocks within [\d.e-]+ ms of rank 0's", first["note"])
    assert [lane.partition(",")[0] for lane in first["lanes"]] == ["cpu"] * 4
    assert len({*first["lanes"]}) == 4


def test_transfers_are_measured_and_end_before_they_are_needed(said):
    (fact,) = said("trace")[0]
    assert fact["transfers"] == 8 * 7 * 2  # every stage's border, forward and backward
    assert fact["takes_time"] >= 0
    assert fact["before_its_needer"]


def test_dictionaries_of_tensors_travel_with_what_learns_and_what_does_not(said):
    for rank, (fact,) in enumerate(said("trees")):
        assert fact["loss"]
        assert fact["gradients"]
        assert fact["none"][:2] == ["aside.weight", "aside.bias"] * (rank < 3)  # what nobody uses has no gradient
        assert fact["keys"] == ["0.linear.weight", "0.linear.bias"]


def test_tensors_of_every_type_travel(said):
    for (fact,) in said("kinds"):
        assert fact["gradients"]
        assert (fact["made"], fact["dtype"]) == ([True, True], "torch.float8_e4m3fn")


def test_what_is_before_a_stage_that_cuts_its_input_off_has_no_gradient(said):
    facts = said("cut")
    assert [[fact["none"] for fact in facts[rank]] for rank in (0, 3)] == [
        [["0 bias", "0 weight"], ["0 bias", "0 weight", "4 bias", "4 weight"], ["0 bias", "0 weight"]],
        [[], ["3 bias", "3 weight"], []],
    ]
    for fact in (fact for each in facts for fact in each):
        assert fact["none"] == fact["expected"]
        assert fact["gradients"]


def test_a_micro_batch_that_is_cut_off_gives_no_gradient_and_wakes_no_hook(said):
    facts = [fact for each in said("cut one") for fact in each]
    assert all(fact["gradients"] for fact in facts)
    assert facts[1]["none"] == [False, False, True, True]
    assert facts[0]["steps"] == [3, 3]


def test_values_lie_in_memory_as_in_the_threads_engine(said):
    assert [fact["same"] for (fact,) in said("layout")] == [True] * 4


def test_the_backwards_of_a_frozen_stage_wait_for_their_turn(said):
    for (fact,) in said("layout"):
        assert fact["frozen"]
        assert fact["early"] == []


def test_extra_state_and_buffers_of_any_type_are_gathered(said):
    for (fact,) in said("state"):
        assert fact["small"] == [[4, 4]] * 4  # learning the shapes left no trace
        assert fact["phases"] == [4] * 4
        assert fact["own"]
        assert fact["calls"] == [4] * 4
        assert fact["exact"]


def test_replicas_train_as_one_model_on_the_whole_batch_as_in_the_threads_engine(said):
    for (fact,) in said("replicas"):
        assert fact["figures"] == pytest.approx(fact["expected"], rel=1e-6)
        assert fact["parameters"]
        assert fact["gradients"] < 1e-6  # of two steps, added up
        assert fact["largest_difference"] < 1e-6
        assert fact["forward"]
        assert fact["evaluated"]
        assert fact["refused"].startswith("stage 0 is on ranks 0, 2, and its BatchNorm1d '' tracks running statistics")
        assert fact["reduces"] == ["0R", "1R", "0R", "1R"]


@pytest.mark.thorough
def test_the_script_of_the_documentation_runs_as_it_says(tmp_path):
    env = {key: value for key, value in processes.environment().items() if key != "OMP_NUM_THREADS"}
    found = processes.launched(2, processes.ROOT / "docs" / "train.py", cwd=tmp_path, env=env)
    assert (found.returncode, found.stderr) == (0, "")
    (result,) = processes.without_gloo(found.stdout).splitlines()
    assert re.match(
        r"loss 1\.\d+; All 16 gradients match plain training with the same 8 micro-batches bit for bit", result
    )
    assert (tmp_path / "1f1b.html").exists()
    assert (tmp_path / "model.pt").exists()


def test_all_reduces_placed_by_hand_run_beside_the_backwards_of_other_ranks(said):
    for (fact,) in said("placed reduces"):
        assert fact["parameters"] == 4  # two stages of one layer
        assert fact["difference"] < 1e-6
        assert fact["beside"]  # of the replica that came last at least


def test_micro_batches_that_enter_at_both_ends_give_the_gradients_of_plain_training(said):
    for rank, facts in enumerate(said("both ways")):
        assert [fact["schedule"].partition("(")[0] for fact in facts] == ["DualPipe", "Chimera", "BitPipe"]
        for fact in facts[:2]:
            assert fact["held"] == fact["parameters"] == sorted([rank, 3 - rank])
        for fact in facts:
            assert max(fact["gradients"], fact["verified"]) < 1e-6
            assert max(abs(fact["loss"]), fact["forward"]) < 1e-6
            assert fact["order"]


# ── A process needs only its own data ─────────────────────────────────────────────────────────────────────────────────

OWN_DATA = {
    "1f1b": [[True, False], [False, False], [False, False], [False, True]],
    "zbv": [[True, True], [False, False], [False, False], [False, False]],
    "replicas": [[True, False], [False, True]] * 2,
    "weights": [[True, False], [False, False], [False, False], [False, True]],
    "traced": [[True, False], [False, False], [False, False], [False, True]],
}


@pytest.fixture(scope="module")
def said_by_two():
    """What each of two processes said, by case."""
    ended = processes.run_well(2, "in_turn.py", "together/own_data.py")
    return lambda case: [[fact for fact in each.facts if fact["case"] == case] for each in ended]


@pytest.mark.parametrize("case", OWN_DATA)
def test_numbers_are_the_same_where_each_process_is_given_what_it_needs(said, said_by_two, case):
    four, two = (ask(f"own data, {case}") for ask in (said, said_by_two))
    for fact in (fact for each in (*four, *two) for fact in each):
        assert (fact["losses"], fact["gradients"], fact["forward"], fact["proof"]) == (True, True, True, True)
    assert [fact["told"] for (fact,) in four] == OWN_DATA[case]
    assert case == "replicas" or [fact["told"] for (fact,) in two] == OWN_DATA[case][:: 1 if case == "zbv" else 3][:2]


@pytest.mark.parametrize("case", ["traced with a mask", "keywords of ready pieces"])
def test_inputs_give_the_threads_engines_numbers_where_each_process_is_given_what_it_needs(said, case):
    for (fact,) in said(f"inputs, {case}"):
        assert (fact["same"], fact["gradients"]) == (True, True)


def test_inputs_and_keywords_of_every_kind_train_as_plainly_where_each_process_is_given_what_it_needs():
    assert fuzz_inputs_in_processes(7) is None  # with masks, keywords and ready pieces


def test_pieces_of_one_process_and_rows_of_another_are_refused_on_all(said):
    for (fact,) in said("inputs, cut apart"):
        assert fact["told"].startswith("the micro-batches of x have 1, 3, 2, 2 rows and those of y 2, 2, 2, 2\n  try: ")


MISSING = {
    "no inputs": r"^rank 0: x is missing, .* the first stage\n  try: .* pipe\.is_first",
    "no targets": r"^rank {last}: y is missing, .* the last stage\n  try: .* pipe\.is_last",
    "nothing": r"^rank 0: x is missing, ",
    "no rows to evaluate": r"^rank 0: x is missing, ",
    "other rows": r"^x has 8 rows and y has 6",
    "too few rows": r"^rank 0: a batch of 2 rows cannot fill 4 micro-batches",
    "no tensor": r"^rank 0: x holds no tensor",
    "uneven targets": r"^rank {last}: CrossEntropyLoss ignores targets that are -100 .* have 2, 0, 2, 2: ",
}


@pytest.mark.parametrize("case", MISSING)
def test_what_is_wrong_with_one_process_s_part_of_the_batch_is_raised_alike_on_all(said, said_by_two, case):
    for ask, last in ((said, 3), (said_by_two, 1)):
        facts = [fact for (fact,) in ask(case)]
        assert {fact["kind"] for fact in facts} == {"LossError" if case == "uneven targets" else "BatchError"}
        assert len({fact["told"] for fact in facts}) == 1
        assert re.match(MISSING[case].format(last=last), facts[0]["told"])
        assert all(fact["loss"] for (fact,) in ask("goes on"))


def test_two_loaders_with_one_seed_give_the_first_and_the_last_stage_the_same_rows(said):
    assert [fact["losses"] for (fact,) in said("recipe")] == [[0.0] * 5] * 4
