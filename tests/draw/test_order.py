"""Pictures of faults: what runs, where it stops, the cycle as numbered arrows, and what is missing."""

from __future__ import annotations

import html
import pickle
import re

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

import pipelab
from pipelab import B, F, Plan, check
from pipelab.draw import figure, order_figure
from pipelab.draw.notebook import faults_page
from pipelab.draw.order import _said, drawings
from pipelab.plan.order import traverse

DEADLOCK = Plan.parse("0F0 0B0 0F1 0B1; 1F0 1F1 1B0 1B1")
THROUGH_AN_ALL_REDUCE = Plan.parse("1F2 2F2 2B2 2F0 2B0 2R 1B2; 1F0 1B0 2F1 2B1 2R; 0F2 0F0 0F1 0B2 0B0 0B1; 1F1 1B1")
HOSTILE = "</svg></pre><script>alert(1)</script><img src=x onerror=alert(1)>$x$"

WITH_ITEM_FAULTS = {
    "not-an-action": Plan([[F(0), "<b>", B(0)]]),
    "out-of-range": Plan([[F(0), B(0), F(7)]], 1, 1),
    "ambiguous-stage": Plan([[F(0, 0), F(0, 1), B(0), B(0, 1), B(0, 0)]]),
    "wrong-rank": Plan.parse("0F0 1B0; 1F0 0B0"),
    "duplicate": Plan.parse("0F0 0B0 0F0"),
    "endless": Plan([[F(0)] * 200]),
}
WITH_CYCLES = {
    "unordered": check(Plan.parse("0B0 0F0; 1F0 1B0")),
    "deadlock": check(DEADLOCK),
    "three ranks": check(Plan.parse("0F0 0B0 0F1 0B1; 1F0 1F1 1B0 1B1; 2F0 2B0 2F1 2B1")),
    "all-reduce": check(Plan.parse("0F0 0B0 0R 1F1 1B1 1R; 0F1 0B1 1F0 1B0 1R 0R")),
    "transfers": check(pipelab.OneFOneB(2, 4), order="at-use", transport="rank"),
    "transfers and all-reduce": check(THROUGH_AN_ALL_REDUCE, order="at-use", transport="rank"),
    "transfers of pairs": check(Plan([[F(0) & B(0)], [F(0), B(0)]]), transport="rank"),
}


def cells(drawing):
    return [(rank, cell) for rank, row in enumerate(drawing.rows) for cell in row]


@pytest.mark.parametrize("faults", WITH_CYCLES.values(), ids=WITH_CYCLES)
def test_the_arrows_are_the_faults_cycle_closed_and_numbered(faults):
    drawn = [drawing for drawing in drawings(faults) if drawing.arrows]
    cycles = [fault.cycle for fault in faults if fault.cycle]
    assert len(drawn) == len(cycles) > 0
    for drawing, cycle in zip(drawn, cycles, strict=True):
        assert [arrow.number for arrow in drawing.arrows] == [*range(1, len(cycle) + 1)]
        for arrow, link in zip(drawing.arrows, cycle, strict=True):
            rank, column = arrow.end
            assert (rank, link.name in drawing.rows[rank][column].names) == (link.rank, True)
        assert (
            [arrow.start for arrow in drawing.arrows]
            == [  # from giver to waiter, as in timelines
                arrow.end for arrow in (*drawing.arrows[1:], drawing.arrows[0])
            ]
        )
        assert drawing.notes == [_said(link.words) for link in cycle]


def test_a_fault_is_told_without_python_and_names_of_values():
    before, _ = drawings(check(DEADLOCK))
    assert before.notes == [
        "0B0 needs the gradient of micro-batch 0 from stage 1, given by 1B0",
        "1B0 comes after 1F1 on rank 1",
        "1F1 needs the output of micro-batch 1 from stage 0, given by 0F1",
        "0F1 comes after 0B0 on rank 0",
    ]


def test_the_two_arrows_of_a_cycle_in_one_row_have_their_numbers_apart():
    (drawing,) = drawings(WITH_CYCLES["unordered"])
    (ax,) = order_figure.plot([drawing], "").axes
    one, other = (each.get_window_extent() for each in ax.texts if each.get_text() in "12")
    assert not one.padded(4).overlaps(other.padded(4))


@pytest.mark.parametrize(
    ("rows", "hint"),
    [
        ("0F0 2F0 0B0 2B0; 1F0 1B0 3F0 3B0", "on rank 0, run 2B0 before 0B0; on rank 1, run 3F0 and 3B0 before 1B0"),
        ("0F0 0UNSHARD 0B0 0RESHARD", "run the gather of the weights of stage 0 before it: one gather before each use"),
    ],
)
def test_a_picture_names_actions_as_its_cells_do_and_says_what_they_are(rows, hint):
    every = drawings(check(Plan.parse(rows)))
    assert hint in [each.hint or each.title.removeprefix("try: ") for each in every]
    key = order_figure.key_of(every[0])
    assert "0F0 = stage 0, forward, micro-batch 0" in key
    assert ("UNSHARD: gather" in key) is ("UNSHARD" in rows)


@pytest.mark.parametrize("faults", WITH_CYCLES.values(), ids=WITH_CYCLES)
def test_the_picture_and_the_page_show_every_arrow_and_sentence(faults, tmp_path):
    every = drawings(faults)
    drawn = [drawing for drawing in every if drawing.arrows]
    source = faults.save(tmp_path / "x.svg").read_text()
    assert source.count('id="arrow ') == sum(len(drawing.arrows) for drawing in drawn)
    shown = faults_page(faults)
    assert all(words in shown for drawing in drawn for words in drawing.notes)
    titles = re.findall(r"<svg [^>]*>\s*<title>(.+?)</title>", shown)  # for who does not see it
    assert list(map(html.unescape, titles)) == [drawing.title for drawing in every]


@given(strategies.catalogue_plans(), st.data())
def test_each_step_of_a_cycle_waits_for_the_next(plan, data):
    rows = [list(row) for row in plan.rows]
    for _ in range(data.draw(st.integers(1, 4))):
        row = data.draw(st.sampled_from(rows))
        item = row.pop(data.draw(st.integers(0, len(row) - 1)))
        row.insert(data.draw(st.integers(0, len(row))), item)
    mixed = Plan(rows, plan.stages, plan.microbatches, plan.place)
    faults = check(mixed)
    graph = mixed.graph()
    action = {str(each): each for each in graph}
    places = {
        (rank, str(each)): at
        for rank, row in enumerate(mixed.bound.computing)
        for at, each in enumerate(map(mixed.bound.codes.action, row))
    }
    for fault in (fault for fault in faults if fault.cycle):
        for link, after in zip(fault.cycle, [*fault.cycle[1:], fault.cycle[0]], strict=True):
            needs = graph.has_edge(action[after.name], action[link.name])
            meets = link.name == after.name and link.name[1] == "R"
            behind = link.rank == after.rank and places[link.rank, after.name] < places[link.rank, link.name]
            assert needs or meets or behind
    for fault in (fault for fault in faults if fault.tried is not None and fault.code == "deadlock"):
        assert bool(traverse(fault.tried.bound).stuck) <= ("check again" in fault.hint or len(faults) > 1)


def test_faults_of_a_plan_with_functions_can_be_pickled():
    swapped = type("Swapped", (pipelab.GPipe,), {"place": lambda self, stage, microbatch: stage})
    for faults in (check(Plan(DEADLOCK.written, place=lambda _, stage: stage)), check(swapped(2, 3))):
        assert any(fault.tried for fault in faults)
        copy = pickle.loads(pickle.dumps(faults))  # noqa: S301 - the test's own
        assert copy == faults
        assert [fault.cycle for fault in copy] == [fault.cycle for fault in faults]
        assert str(copy) == str(faults)


def test_what_is_blocked_is_what_the_walk_is_stuck_at():
    before, after = drawings(check(DEADLOCK))
    assert [cell.label for _, cell in cells(before) if cell.state == "blocked"] == ["0B0", "1F1"]
    assert [cell.label for _, cell in cells(before) if cell.state == "ran"] == ["0F0", "1F0"]
    assert {cell.state for _, cell in cells(after)} == {"ran"}
    assert [cell.label for _, cell in cells(after) if cell.moved] == ["0F1"]
    assert after.title == "try: run F1 before B0 on rank 0"


def test_moves_run_as_far_as_their_rank_does_and_stay_with_their_actions():
    before, after = drawings(check(Plan.parse("0UNSHARD 0F0 0B0 0UNSHARD 0F1 0RESHARD 0B1; 1F0 1F1 1B0 1B1")))[1:]
    states = [(cell.label, cell.state) for cell in before.rows[0]]
    assert states[:4] == [("0UNSHARD", "ran"), ("0F0", "ran"), ("0B0", "blocked"), ("0UNSHARD", "waiting")]
    assert [cell.label for cell in after.rows[0]] == ["0UNSHARD", "0F0", "0UNSHARD", "0F1", "0RESHARD", "0B0", "0B1"]
    assert {cell.state for row in drawings(check(pipelab.PipeOffload(2, 4)))[0].rows for cell in row} == {"ran"}


def test_what_was_tried_has_the_slices_of_the_plan():
    rows = "0F0 0F1 0B1 0B0 0F2 0F3 0B3 0B2; 1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0"
    plan = Plan.parse(rows, after=lambda microbatch, _: range(microbatch - microbatch % 2, microbatch))
    (tried,) = (fault.tried for fault in check(plan))
    assert tried.bound.codes.more_needs == plan.bound.codes.more_needs != {}


@pytest.mark.parametrize(
    ("rows", "missing"),
    [
        ("0F0 0B0 0F1; 1F0 1F1 1B1", [(0, "0B1"), (1, "1B0")]),
        ("0F0 0I0; 1F0 1I0 1W0", [(0, "0W0")]),
        ("0F0 1F0 1B0 0B0 0R; 0F1 1F1 1B1 0B1", [(1, "0R")]),
        ("0F0; 1F0 1B0", [(0, "0B0")]),
        ("0F0 0B0; 2F0 2B0", [(2, "1B0"), (2, "1F0")]),  # no rank is known: the row after the last
    ],
)
def test_the_dotted_cells_are_what_is_missing(rows, missing):
    faults = check(Plan.parse(rows))
    (drawing,) = drawings(faults)
    assert sorted((rank, cell.label) for rank, cell in cells(drawing) if cell.state == "missing") == missing
    lacking = [(rank, str(action)) for fault in faults for rank, action in fault.lacking]
    assert sorted((2 if rank is None else rank, name) for rank, name in lacking) == missing
    source = figure.svg_of(order_figure.plot([drawing], "x"))
    assert sorted(re.findall(r'id="missing (\w+)"', source)) == sorted(name for _, name in missing)
    assert (">no rank<" in source) is (missing[0][0] == 2)


@pytest.mark.parametrize("code", WITH_ITEM_FAULTS)
def test_what_may_not_stand_there_is_struck_out(code):
    faults = check(WITH_ITEM_FAULTS[code])
    places = {(fault.rank, fault.position) for fault in faults if fault.code == code}
    assert places
    struck = {(rank, cell.position) for drawing in drawings(faults) for rank, cell in cells(drawing) if cell.struck}
    assert places <= struck
    assert 'id="struck ' in figure.svg_of(order_figure.plot(drawings(faults), "x"))


def test_the_forward_over_a_memory_cap_is_marked():
    (drawing,) = drawings(check(pipelab.GPipe(2, 8), memory_cap=[8, 4]))
    assert [(rank, cell.label) for rank, cell in cells(drawing) if cell.over] == [(1, "1F4")]


def test_a_mistake_is_drawn_beside_what_was_meant():
    swapped = strategies.written(lambda self, rank: [make(rank, m) for make in (F, B) for m in range(3)])
    before, after = drawings(check(swapped(2, 3)))
    assert any(cell.struck for _, cell in cells(before))
    assert {cell.state for _, cell in cells(after)} == {"ran"}


def test_the_order_by_time_is_the_second_picture_of_transfers():
    before, after = drawings(check(pipelab.OneFOneB(2, 4), order="at-use", transport="rank"))
    by_time = pipelab.lower(pipelab.OneFOneB(2, 4), order="by-time").rows
    assert [[cell.names[0] for cell in row] for row in after.rows] == list(map(list, by_time))
    blocked = {cell.label for _, cell in cells(before) if cell.state == "blocked"}
    assert blocked == {"0SEND_F1", "0B0", "1SEND_B0", "1F1"}


def test_without_faults_the_rows_are_drawn_with_their_all_reduces():
    plan = pipelab.replicate(pipelab.OneFOneB(2, 2), 2).plan()
    (drawing,) = drawings(check(plan))
    assert [[cell.label for cell in row] for row in drawing.rows] == [list(map(str, row)) for row in plan.rows]
    assert {cell.state for _, cell in cells(drawing)} == {"ran"}


def test_a_schedule_that_writes_no_plan_has_no_picture_but_a_page(tmp_path):
    faults = check(pipelab.DualPipe(3, 2))
    assert drawings(faults) == []
    for suffix in ("html", "svg", "txt"):
        assert "DualPipe(ranks=3, microbatches=2)" in faults.save(tmp_path / f"x.{suffix}").read_text()


def test_of_a_long_plan_the_part_around_the_fault_is_drawn():
    rows = [list(row) for row in pipelab.OneFOneB(20, 128).plan().rows]
    rows[10].insert(149, rows[10].pop(152))  # a backward before the forward that it waits for on the next rank
    faults = check(Plan(rows))
    assert [fault.code for fault in faults] == ["deadlock"]
    drawing = drawings(faults)[0]
    shown, columns = drawing.view
    assert len(shown) == 16
    assert 10 < len(columns) < 40
    assert {place for arrow in drawing.arrows for place in (arrow.start, arrow.end)} <= {
        (rank, column) for rank in shown for column in columns
    }
    assert f"{len(columns)} of 256 columns are shown" in order_figure.key_of(drawing)
    assert len(faults_page(faults)) < 1_000_000


def test_faults_of_one_cause_are_one_picture_or_one_note():
    backwards_first = [[B(m) for m in range(8)] + [F(m) for m in range(8)] for _ in range(4)]
    (drawn,) = drawings(check(Plan(backwards_first)))
    assert drawn.title.endswith("; and 31 more like it")
    twice = [[F(m) for m in range(8)] + [B(0)] * 8 for _ in range(4)]
    (drawn,) = drawings(check(Plan(twice)))
    assert [re.findall(r"^\w+|; and \d+ more", note) for note in drawn.notes] == [
        ["duplicate", "; and 27 more"],
        ["missing", "; and 3 more"],
    ]


@pytest.mark.parametrize("suffix", ["html", "svg"])
def test_names_are_text_whatever_they_hold(suffix, tmp_path):
    hostile = Plan([[F(0), HOSTILE, B(0)], [F(HOSTILE), HOSTILE]], name=HOSTILE)
    source = check(hostile).save(tmp_path / f"x.{suffix}").read_text()
    assert "<script>alert" not in source
    assert "<img" not in source
    assert "&lt;script&gt;" in source
    assert "<script>alert" not in check(hostile)._repr_html_()


def test_a_plan_saves_its_rows_and_refuses_other_formats(tmp_path):
    plan = pipelab.OneFOneB(2, 2).plan()
    assert Plan.from_csv(plan.save(tmp_path / "x.csv")) == plan
    assert plan.save(tmp_path / "x.txt").read_text() == "rank 0 | 0F0 0F1 0B0 0B1\nrank 1 | 1F0 1B0 1F1 1B1\n"
    assert ">1B1<" in plan.save(tmp_path / "x.svg").read_text()
    assert plan.save(tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    assert 'id="arrow 4"' in DEADLOCK.save(tmp_path / "x.html").read_text()
    with pytest.raises(pipelab.FormatError, match="pdf"):
        plan.save(tmp_path / "x.json")
