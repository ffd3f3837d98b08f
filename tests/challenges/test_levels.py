"""The levels: their pars are proven, their references reach them, and what may be placed is what `check` allows."""

from __future__ import annotations

import pytest

import pipelab
from pipelab.challenges.levels import judge, level, levels
from pipelab.errors import UsageError

LEVELS = list(levels().values())


@pytest.mark.teacher
@pytest.mark.parametrize("each", LEVELS, ids=lambda each: each.name)
def test_the_reference_reaches_par_and_nothing_is_quicker(each):
    attempt = judge(each, each.solution)
    assert (attempt.reached, attempt.makespan) == ("par", each.par)
    best = pipelab.optimum(each.solution, each.cost, memory_cap=each.cap, seconds=60)
    assert best.proven
    assert best.trace.makespan == each.par


@pytest.mark.parametrize("each", LEVELS, ids=lambda each: each.name)
def test_a_level_says_all_that_a_learner_needs(each):
    assert each.par < each.good
    assert len(each.hints) == 3
    assert each.lesson.endswith(".")
    assert each.story.endswith(".")
    assert each.source


@pytest.mark.parametrize(
    ("name", "schedule", "said"),
    [
        ("four", pipelab.GPipe(4, 8), "memory-cap"),
        ("four", pipelab.GPipe(3, 8), "3 ranks"),
        ("four", pipelab.GPipe(4, 4), "4 micro-batches"),
        ("around", pipelab.GPipe(2, 4), "stages_per_rank"),
        ("four", pipelab.ZBH1(4, 8), "F and B only"),
        ("valley", pipelab.InterleavedZeroBubble(3, 6), "stage 3 is on rank 2"),
        ("fill", pipelab.Plan.parse(["0F0 0F1 0F2", "1F0 1F1 1F2", "2F0 2F1 2F2"]), "missing"),
    ],
)
def test_an_attempt_that_breaks_a_rule_is_refused_with_the_reason(name, schedule, said):
    attempt = judge(level(name), schedule)
    assert attempt.reached == "refused"
    assert said in attempt.refusals[0]


@pytest.mark.teacher
def test_a_built_schedule_is_recognised():
    assert judge(level("halves"), level("halves").solution).recognised == "zb-h1"
    assert judge(level("three"), level("three").solution).recognised is None


@pytest.mark.teacher
@pytest.mark.parametrize("name", ["fill", "four", "around", "halves", "no-bubble"])
def test_a_level_cites_the_section_that_the_catalogue_cites(name):
    each = level(name)
    reference = judge(each, each.solution).recognised
    assert each.source.rpartition("section ")[2] in pipelab.schedules[reference].source.replace(",", "").split()


@pytest.mark.teacher
def test_what_teachers_read_about_transfers_and_other_orders_holds():
    around, four = level("around"), level("four")
    plans = (pipelab.OneFOneB(2, 4), around.solution)
    assert [len(pipelab.simulate(plan, around.cost).transfers) for plan in plans] == [8, 24]
    assert "24 transfers instead of 8" in around.note

    greedy = pipelab.simulate(pipelab.Greedy(4, 8, memory_cap=4), four.cost)
    assert (greedy.makespan, greedy.peak_activations) == (33, (4, 4, 4, 1))
    assert "only order" in four.note


def test_levels_have_numbers_and_names():
    assert level("1") is LEVELS[0]
    for unknown in ("0", "13", "nine"):
        with pytest.raises(UsageError, match="fill"):
            level(unknown)
