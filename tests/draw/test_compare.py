"""Pages that compare traces: one over the other, and by what changed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import test_page
from browsing import wait_until
from test_figure import lab
from test_page import HOSTILE, Reader, panel, renamed

import pipelab
from pipelab import Cost, Trace
from pipelab.draw import colours, page

opened = test_page.opened
READY = "timelines.every(each => !each.dirty)"


@pytest.fixture
def pair():
    """A prediction, and what was measured: stage 2 is slower, and values travel."""
    plan = pipelab.OneFOneB(4, 8).plan()
    slower = Cost(forward=[1, 1, 1.5, 1], backward=[2, 2, 2.5, 1.5], latency=0.25, unit="ms")
    measured = pipelab.simulate(plan, slower)
    measured = Trace(plan, measured.starts, measured.ends, "ms", "measured", transfers=measured.transfers)
    return pipelab.simulate(plan, Cost(unit="ms")), measured


def boxes(tab, selector):
    """Return x and width of elements, in units of the axis, by their action's name."""
    read = (
        "([each, scale]) => each.map(b => [b.dataset.before ?? b.dataset.action,"
        "...['x', 'width'].map(name => +b.getAttribute(name) / scale)])"
    )
    handle = tab.evaluate_handle(f"[[...document.querySelectorAll({selector!r})], timelines[1].scale]")
    return {name: (x, width) for name, x, width in tab.evaluate(read, handle)}


def test_the_data_hold_how_each_trace_differs_from_the_first(pair):
    found = pipelab.diff(*pair)
    (data,) = Reader(page.diff_page(found)).data["diffs"]
    assert data["parts"] == list(found.parts)
    assert data["notes"][0] == found.sentence
    events = pair[1].events
    effects = {(events[at].rank, events[at].action): sum(values) for at, *values in data["effects"]}
    assert effects == {(each.rank, each.action): pytest.approx(each.effect, rel=1e-6) for each in found if each.effects}


def test_effects_that_cancel_out_are_still_there():
    found = pipelab.diff(*(pipelab.simulate(kind(4, 8)) for kind in (pipelab.GPipe, pipelab.OneFOneB)))
    (data,) = Reader(page.diff_page(found)).data["diffs"]
    assert found.longer == 0
    assert data["parts"] == ["order"]
    assert len(data["effects"]) == sum(each.effect != 0 for each in found) > 0
    assert sum(value for _, value in data["effects"]) == 0


def test_traces_of_other_actions_are_not_compared_and_say_why(pair):
    first = pipelab.simulate(pipelab.OneFOneB(4, 8))
    others = [pipelab.simulate(kind(4, 8)) for kind in (pipelab.ZBH1, pipelab.GPipe)]
    refused, compared = Reader(page.comparison_page(pipelab.compare(first, *others))).data["diffs"]
    assert "other actions" in refused["refusal"]
    assert "notes" in compared
    (units,) = Reader(page.comparison_page(pipelab.compare(first, pair[1]))).data["diffs"]
    assert "units" in units["refusal"]


@pytest.mark.parametrize("vision", ["full", "no red", "no green", "no blue"])
def test_less_and_more_are_told_apart_by_everybody(vision):
    seen = [lab(colour, vision) for colour in colours.DIVERGING]
    middle = len(seen) // 2
    for less, more in itertools.product(range(middle), range(middle + 1, len(seen))):
        assert np.linalg.norm(seen[less] - seen[more]) > 12, f"{colours.DIVERGING[less]} {colours.DIVERGING[more]}"
    for side in (seen[: middle + 1], seen[middle:][::-1]):
        lightness = [each[0] for each in side]
        assert lightness == sorted(lightness)  # the more it is, the darker
        assert all(np.linalg.norm(one - two) > 7 for one, two in itertools.pairwise(side))


def test_the_first_trace_lies_as_outlines_behind_the_second(opened, pair):
    tab = opened(page.comparison_page(pipelab.compare(*pair)))
    assert tab.locator(".outline").count() == 0
    stacked = tab.evaluate("timelines[1].height")
    tab.locator("[data-view-name=diff]").click()
    wait_until(tab, f"document.querySelectorAll('.outline').length === 64 && {READY}")
    assert not tab.locator("section").first.is_visible()
    assert tab.evaluate("timelines[1].height") == stacked + 4 * 8
    for trace, selector in zip(pair, ("[data-before]", "[data-trace='1'] .bar"), strict=True):
        found = boxes(tab, selector)
        assert found == {
            str(event.action): (pytest.approx(event.start, abs=1e-3), pytest.approx(event.duration, abs=1e-3))
            for event in trace.events
        }
    classes = "rects => rects.map(each => each.className.baseVal.split(' ')[0])"
    drawn = tab.locator("[data-trace='1'] rect[class]").evaluate_all(classes)
    assert len(drawn) - 1 - drawn[::-1].index("outline") < drawn.index("bar")
    tab.keyboard.press("o")
    wait_until(tab, f"look.view === 'stack' && {READY}")
    assert tab.locator("section").first.is_visible()
    assert tab.locator(".outline").count() == 0


@pytest.mark.parametrize("what", ["shift", "change", "effect"])
def test_the_colour_of_a_bar_is_what_changed(opened, pair, what):
    found = pipelab.diff(*pair)
    tab = opened(page.diff_page(found))
    tab.locator("#colour").select_option(what)
    wait_until(tab, f"look.colour === '{what}' && {READY}")
    bars = tab.locator("[data-trace='1'] .bar").evaluate_all("each => each.map(b => [b.dataset.action, b.style.fill])")
    most = max(abs(getattr(each, what)) for each in found)
    for name, fill in bars:
        (change,) = (each for each in found if str(each.action) == name)
        step = 4 * getattr(change, what) / most
        shown = int(fill.removeprefix("var(--diff").removesuffix(")")) - 4
        assert abs(shown - step) <= 0.5 + 1e-4, name
    ends = tab.locator(".scale i").all_inner_texts()
    assert [float(ends[at]) for at in (0, 4, 8)] == pytest.approx([-most, 0, most], rel=1e-3)


def test_the_table_lists_every_effect_and_its_links_select_in_all_traces(opened, pair):
    found = pipelab.diff(*pair, names=["predicted", "measured"])
    tab = opened(page.diff_page(found))
    assert tab.locator(".sentence").inner_text() == found.sentence
    tab.locator(".changes > button").click()
    rows = tab.locator("tr[data-changed]").evaluate_all(
        "rows => rows.map(row => [row.dataset.changed, row.children[1].textContent, row.children[2].textContent])"
    )
    assert len(rows) == 64
    effects = {(str(each.action), str(each.rank)): each.effect for each in found}
    assert {(name, rank) for name, rank, _ in rows} == effects.keys()
    for name, rank, effect in rows:
        assert float(effect) == pytest.approx(effects[name, rank], rel=1e-3, abs=1e-6)
    shown = [abs(float(effect)) for *_, effect in rows]
    assert shown == sorted(shown, reverse=True)
    name = rows[0][0]
    tab.locator(f"tr[data-changed='{name}'] button").click()
    selected = "timelines.map(each => each.chosen && each.model.name(each.chosen.place))"
    assert tab.evaluate(selected) == [name, name]
    wait_until(tab, "document.querySelectorAll('.outline.chosen').length === 1")
    assert panel(tab)["effect"].startswith(f"{float(rows[0][2]):+g} on the makespan")
    assert "→" in panel(tab)["change"]


def test_the_link_to_a_comparison_shows_the_same_view(opened, pair):
    source = page.comparison_page(pipelab.compare(*pair))
    tab = opened(source)
    tab.locator("[data-view-name=diff]").click()
    tab.locator("#colour").select_option("effect")
    address = "location.hash.includes('w=diff') && location.hash.includes('k=effect')"
    wait_until(tab, address)
    tab.reload()
    wait_until(tab, "timelines.every(each => each.mark)")
    assert tab.evaluate("[look.view, look.colour]") == ["diff", "effect"]
    assert tab.locator("#colour").input_value() == "effect"


def test_an_all_reduce_is_compared_rank_by_rank(opened):
    plan = pipelab.replicate(pipelab.OneFOneB(2, 2), 2).plan()
    usual = pipelab.simulate(plan, Cost(all_reduce=1))
    before, after = (
        Trace(plan, usual.starts, [[*row[:-1], row[-1] + late] for row, late in zip(usual.ends, lates, strict=True)])
        for lates in ((3, 1, 2, 0), (4, 3, 5, 4))
    )
    tab = opened(page.diff_page(pipelab.diff(before, after)))
    found = tab.evaluate("[...differences[1].change].filter(each => each)")
    assert found == pytest.approx([1, 2, 3, 4])


def test_paper_shows_both_traces_whatever_their_names_hold(opened, pair):
    names = [f"{HOSTILE}1", f"{HOSTILE}2"]
    tab = opened(page.diff_page(pipelab.diff(*(renamed(each, HOSTILE) for each in pair), names=names)))
    assert tab.title() == f"{names[1]} compared with {names[0]}"
    assert tab.locator("img").count() == 0
    assert names[0] in tab.locator(".sentence").inner_text()
    wide = tab.evaluate("timelines[1].scale")
    tab.locator("[data-zoom=in]").click()
    wait_until(tab, f"timelines.every(each => Math.abs(each.scale / {wide} - 1.5) < 0.01)")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("section:not(.first-trace) .print .outline").count() >= 64
