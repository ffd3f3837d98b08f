"""A process makes its own stages only, from functions or a meta model, and the numbers are those of one process."""

from __future__ import annotations

import processes
import pytest

pytestmark = pytest.mark.dist

CASES = ("meta", "v-shape", "functions", "tied", "stages", "replicas")


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each of four processes said, then each of two that go on from the four's checkpoint, by case."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    every = [processes.run_in(ranks, "own_stages.py", folder) for ranks in (4, 2)]
    for ended in every:
        assert [each.code for each in ended] == [0] * len(ended), processes.shown(ended)
        assert [each.err for each in ended] == [""] * len(ended)
    facts = [fact for ended in every for each in ended for fact in each.facts]
    return lambda case: [fact for fact in facts if fact["case"] == case]


@pytest.mark.parametrize("case", CASES)
def test_three_steps_of_adamw_equal_one_process_which_makes_all_stages(said, case):
    facts = said(case)
    assert len(facts) == (4 if case == "replicas" else 6)
    assert [(fact["losses"], fact["state"]) for fact in facts] == [(True, True)] * len(facts)
    assert all(fact["exact"] is True or fact["exact"] < 1e-6 for fact in facts)
    assert all(fact["exact"] is True for fact in facts) or case in ("tied", "replicas")


@pytest.mark.parametrize("case", CASES)
def test_only_the_parameters_of_its_own_stages_exist_in_a_process_after_verify_too(said, case):
    for fact in said(case):
        assert (fact["own"], fact["few"]) == (True, True)
        assert fact["alone"]  # what `state_dict(whole=False)` has
        assert fact["left"] > 0  # and what it leaves out
        assert (fact["random"], fact["again"]) == (True, True)


def test_two_ranks_go_on_with_what_each_of_four_saved_of_its_own(said):
    assert [(fact["same"], fact["state"]) for fact in said("resumed")] == [(True, True)] * 2


def test_what_nothing_could_fill_is_refused_by_all_before_they_meet(said):
    facts = said("refused")
    assert len(facts) == 6
    for fact in facts:
        assert fact["kind"] == "SplitError"
        assert fact["told"].startswith("layer '3', Made, is on the meta device and has no reset_parameters()")
