"""The frontier: what a search over building blocks finds beside the catalogue."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise, product

import pytest

import pipelab
from pipelab.catalogue.building_block import first_fit


@pytest.fixture(scope="module")
def found():
    return pipelab.frontier(3, 6)


def test_each_point_takes_less_time_and_holds_more_than_the_one_before_and_is_a_legal_plan(found):
    for before, after in pairwise(found.points):
        assert before.held < after.held
        assert before.makespan > after.makespan
    for point in found.points:
        assert point.makespan == pipelab.simulate(point.block.plan(6)).makespan
        assert 3 * max(point.trace.peak_activations) / 6 == point.held <= 3


def test_every_schedule_that_accepts_the_sizes_is_there_and_nothing_beats_the_best(found):
    fits = {name for name, kind in pipelab.schedules.items() if not kind.refusal(3, 6)}
    assert {point.name for point in found.schedules} == fits
    assert "chimera" not in fits
    for point in (*found.schedules, *found.points):
        assert any(best.held <= point.held and best.makespan <= point.makespan for best in found.best)


def test_the_picture_names_every_schedule_and_the_table_has_every_row(found, tmp_path):
    picture = found.save(tmp_path / "curve.svg").read_text(encoding="utf-8")
    assert all(name in picture for name in ("1F1B", "ZB-V", "V-Min", "GPipe"))
    assert picture.count("<circle") <= len(found.schedules)
    assert len(re.findall("H[0-9.]+V", picture)) == len(found.points)
    lines = found.save(tmp_path / "curve.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + len(found.schedules) + len(found.points)


def test_other_costs_and_whole_backwards_give_other_blocks():
    whole = pipelab.frontier(2, 4, pipelab.Cost(forward=2, backward=3), split=False)
    assert {action.kind for point in whole.points for row in point.trace.plan.rows for action in row} == {"F", "B"}
    assert all(
        pipelab.simulate(point.trace.plan, pipelab.Cost(forward=2, backward=3)).makespan == point.makespan
        for point in whole.points
    )


def test_a_pass_without_a_free_slot_gives_no_block():
    assert first_fit([0, 0], 3, (1, 1)) is None


def test_blocks_that_are_made_slot_by_slot_are_right_as_they_are():
    made = 0
    for split, interval, down, back, turn in product((True, False), (6, 7, 9, 12), (1, 4), (2, 3, 5), (0, 2)):
        block = first_fit([0, 1, 2, 2, 1, 0], interval, (down, 2, back, 3), turn, split=split)
        made += block is not None and replace(block) == block  # a copy is checked
    assert made > 50


def test_one_rank_and_one_micro_batch_have_a_picture():
    assert "<circle" in pipelab.frontier(1, 1)._repr_svg_()


def test_with_many_micro_batches_the_blocks_are_those_of_a_search_with_all_of_them():
    found = pipelab.frontier(3, 24, pipelab.Cost(forward=1, backward=2, latency=0.5))
    assert [(each.held, each.makespan) for each in found.points] == [(1, 171.5), (1.5, 160), (2, 91), (3, 77.5)]
