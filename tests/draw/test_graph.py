"""Dependency graphs: what stands in the DOT text, and that Graphviz reads it."""

from __future__ import annotations

import itertools
import re

import graphviz
import pytest

import pipelab
from pipelab import Cost
from pipelab.draw import graph
from pipelab.errors import FormatError


@pytest.fixture
def plan():
    return pipelab.OneFOneB(2, 3).plan()


def edges(source):
    """Return (giver, needer) -> attributes, as text."""
    found = re.findall(r'^\s*"?([\w]+)"? -> "?([\w]+)"? ?(\[.*\])?$', source, re.MULTILINE)
    return {(giver, needer): look for giver, needer, look in found}


def nodes(source):
    """Return action -> attributes, as text."""
    return dict(re.findall(r'^\s*"?(\d[FBIWR]\d*)"? (\[.*\])$', source, re.MULTILINE))


def place(look):
    """Return the column and row of a node, in points."""
    return tuple(map(int, re.search(r'pos="(-?\d+),(-?\d+)!"', look).groups()))


def test_every_action_is_a_node_and_every_need_an_edge(plan):
    source = graph.dot(plan)
    drawn = edges(source)
    assert set(nodes(source)) == {str(action) for row in plan.rows for action in row}
    assert set(drawn) == {(str(giver), str(needer)) for giver, needer in plan.graph().edges}
    assert "out(0, 0)" in drawn["0F0", "1F0"]
    assert "dashed" not in drawn["0F0", "1F0"]
    assert "dashed" in drawn["0F0", "0F1"]
    assert "label" not in drawn["0F0", "0F1"]


@pytest.mark.parametrize("cost", [Cost(), Cost(forward=[9, 1], backward=1)])
def test_the_critical_path_is_bold_and_nothing_else(plan, cost):
    bold = {edge for edge, look in edges(graph.dot(plan, cost)).items() if "penwidth=3" in look}
    path = [str(event.action) for event in pipelab.simulate(plan, cost).critical_path]
    assert bold == set(itertools.pairwise(path))


def test_stages_are_rows_from_top_to_bottom_and_time_goes_right(plan):
    places = {name: place(look) for name, look in nodes(graph.dot(plan)).items()}
    assert len({y for name, (_, y) in places.items() if name.startswith("0")}) == 1
    assert places["0F0"][1] > places["1F0"][1]
    starts = {str(event.action): event.start for event in pipelab.simulate(plan).events}
    for one in places:
        for other in places:
            if starts[one] < starts[other]:
                assert places[one][0] < places[other][0]
    assert len(set(places.values())) == len(places)


def test_ranks_are_colours_also_where_a_rank_has_two_stages():
    looks = nodes(graph.dot(pipelab.Plan.parse(["0F0 2F0 2B0 0B0", "1F0 1B0"])))
    colour = {name: re.search(r'fillcolor="(#\w+)"', look)[1] for name, look in looks.items()}
    assert colour["0F0"] == colour["2F0"] != colour["1F0"]


def test_without_the_program_dot_the_text_is_written_and_the_error_says_so(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert plan.save_graph(tmp_path / "graph.gv").read_text(encoding="utf-8") == graph.dot(plan)
    with pytest.raises(FormatError) as caught:
        plan.save_graph(tmp_path / "graph.svg")
    beside = tmp_path / "graph.dot"
    assert beside.read_text(encoding="utf-8") == graph.dot(plan)
    for part in (str(beside), "apt install graphviz", "brew install graphviz", "conda install graphviz", "dot -Tsvg"):
        assert part in str(caught.value)
    assert not (tmp_path / "graph.svg").exists()


@pytest.mark.parametrize(
    ("plan", "suffix", "error", "told"),
    [
        (pipelab.OneFOneB(8, 256).plan(), "png", FormatError, r"4,096 actions, a picture at most 2,000: draw fewer"),
        (pipelab.OneFOneB(2, 3).plan(), "gif", FormatError, r"\.gif; use one of \.dot \.gv \.svg \.png \.pdf"),
        (pipelab.Plan.parse(["0F0"]), "dot", pipelab.ScheduleError, "missing"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_the_next_move(plan, suffix, error, told, tmp_path):
    with pytest.raises(error, match=told):
        plan.save_graph(tmp_path / f"graph.{suffix}")
    assert pipelab.OneFOneB(8, 256).plan().save_graph(tmp_path / "large.dot").exists()


@pytest.mark.dot
@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_graphviz_draws_it(plan, suffix, tmp_path):
    magic = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}[suffix]
    assert plan.save_graph(tmp_path / f"graph.{suffix}").read_bytes().startswith(magic)


@pytest.mark.dot
def test_graphviz_puts_stages_in_rows_and_reads_any_name(tmp_path):
    plan = pipelab.Plan(pipelab.OneFOneB(2, 2).plan().rows, name='<b>"quoted" \\N\n</b>')
    drawn = graphviz.Source(graph.dot(plan)).pipe(format="plain", encoding="utf-8")
    rows = {
        line.split()[1].strip('"'): float(line.split()[3]) for line in drawn.splitlines() if line.startswith("node")
    }
    assert rows["0F0"] == rows["0B1"] > rows["1F0"] == rows["1B1"]
    assert "quoted" in plan.save_graph(tmp_path / "graph.svg").read_text(encoding="utf-8")
