"""Pages: one file that loads nothing, and says everything about the action under the pointer."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browsing import complaints_of, wait_until

import pipelab
from pipelab import B, Cost, F, Plan, R, draw
from pipelab.draw import colours, page, wording
from pipelab.draw.bars import Lanes
from pipelab.trace.waits import waits

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>{{data}}&\"'"


class Reader(HTMLParser):
    """The elements of a page, its text, and its data."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.attributes, self.inside, self.texts = [], [], [], {}
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.inside.append(tag)

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        self.texts.setdefault(self.inside[-1] if self.inside else "", []).append(data)

    @property
    def data(self):
        return json.loads(self.texts["script"][0])


def renamed(trace, name):
    return pipelab.Trace(trace.plan, trace.starts, trace.ends, trace.unit, trace.source, name=name)


def unpacked(numbers):
    """Return a list in which runs were written as [number, count]."""
    pairs = ([each, 1] if isinstance(each, int) else each for each in numbers)
    return [value for value, count in pairs for _ in range(count)]


def column(lane, name):
    """Return a number for each action, written as the difference from that of the action before of its sort."""
    last, found = dict.fromkeys(lane["order"], 0), []
    for sort, more in zip(lane["order"], unpacked(lane[name]), strict=True):
        last[sort] += more
        found.append(last[sort])
    return found


def ends_of(lane, tick):
    """Return when each action of a page's data ends."""
    spans = map(sum, zip(column(lane, "gaps"), column(lane, "lasts"), strict=True))
    return [tick * end for end in itertools.accumulate(spans)]


@pytest.fixture
def trace():
    return pipelab.simulate(pipelab.OneFOneB(4, 8))


def test_a_page_loads_nothing_from_anywhere(trace):
    source = page.page(trace)
    assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|url\((?!#)|fetch\(|XMLHttpRequest|import\(", source)
    assert not [each for each in Reader(source).attributes if each[1] in ("src", "href") and each[2][0] != "#"]
    assert "default-src 'none'" in source


def test_the_data_hold_every_action_once_with_start_and_end(trace):
    (drawn,) = Reader(page.page(trace)).data["traces"]
    for rank, lane in enumerate(drawn["ranks"]):
        events = trace.events_of(rank)
        assert [lane["sorts"][sort]["kind"] for sort in lane["order"]] == [event.action.kind for event in events]
        assert {sort["stage"] for sort in lane["sorts"].values()} == {rank}
        assert column(lane, "microbatches") == [event.action.microbatch for event in events]
        assert ends_of(lane, drawn["tick"]) == pytest.approx([event.end for event in events])


def test_the_head_is_one_sentence_and_without_javascript_there_is_a_text_timeline(trace):
    texts = Reader(page.page(trace)).texts
    assert texts["p"][0] == (
        "Fill the pipe, then one backward for every new forward. "
        "A step takes 33 units. The ranks idle 27.3 % of it (the bubble); rank 3 limits it. "
        "Rank 0 holds up to 4 activations (by rank: 4 3 2 1). F = 1, B = 2"
    )
    assert any("rank 0 │F0 F1" in each for each in texts["pre"])


def test_a_name_is_text_whatever_it_holds(trace):
    reader = Reader(page.page(renamed(trace, HOSTILE)))
    assert reader.tags.count("script") == 2
    assert "img" not in reader.tags
    assert reader.data["traces"][0]["name"] == f"{HOSTILE}, simulated"
    assert reader.texts["h1"][0] == f"{HOSTILE}, simulated"


def test_a_measured_trace_begins_at_zero():
    times = [[5000.25, 5001.5]], [[5001.5, 5003.25]]
    measured = pipelab.Trace(pipelab.OneFOneB(1, 1).plan(), *times, unit="ms", source="measured", lanes=["cpu"])
    (drawn,) = Reader(page.page(measured)).data["traces"]
    (lane,) = drawn["ranks"]
    assert (drawn["span"] * drawn["tick"], drawn["unit"], lane["lane"]) == (pytest.approx(3), "ms", "cpu")
    assert ends_of(lane, drawn["tick"]) == pytest.approx([1.25, 3])


@pytest.mark.thorough
def test_65536_actions_stay_below_a_megabyte_and_alike_ones_far_below():
    schedule, uneven = pipelab.OneFOneB(32, 1024), Cost(backward=[2 + rank / 1000 for rank in range(32)])
    assert len(page.page(pipelab.simulate(schedule, uneven))) < 1_000_000
    assert len(page.page(pipelab.simulate(schedule))) < 300_000


def waited(trace):
    """Return, by the names of actions, whom they waited for and when that was there."""
    name = trace.plan.bound.codes.action
    rows = zip(trace.events, itertools.chain(*waits(trace)), strict=True)
    return {(event.rank, str(event.action)): wait and (str(name(wait.giver)), wait.there) for event, wait in rows}


def test_an_action_waited_for_the_need_that_arrived_last():
    trace = pipelab.simulate(pipelab.OneFOneB(2, 2), Cost(latency=0.5))
    found = waited(trace)
    assert found[0, "0F0"] is None
    assert found[1, "1F0"] == ("0F0", 1.5)
    assert found[1, "1B0"] is None  # its own forward was just before it on its rank
    assert found[0, "0B0"] == ("1B0", 5.0)
    starts = {(event.rank, str(event.action)): event.start for event in trace.events}
    for needer, wait in found.items():  # in a simulation, whoever waits starts the moment the need is there
        assert wait is None or wait[1] == starts[needer]


def test_an_all_reduce_waits_for_the_rank_that_comes_last_and_both_halves_of_a_slot_for_the_same():
    both = Plan([[F(0, 0), B(0, 0), R(0)], [F(1, 0), B(1, 0), F(2, 0), B(2, 0), R(0)]])
    found = waited(pipelab.simulate(both, Cost(all_reduce=1)))
    assert (found[0, "0R"], found[1, "0R"]) == (("0B2", 6), None)
    plan = Plan([[F(0), F(1), F(2) & B(0), B(1), B(2)], [F(0), B(0), F(1), B(1), F(2), B(2)]])
    found = waited(pipelab.simulate(plan, Cost(pair=3)))
    assert found[0, "0F2"] == found[0, "0B0"] == ("1B0", 4)


def test_a_comparison_says_where_units_differ(trace):
    other = pipelab.simulate(pipelab.OneFOneB(2, 2), Cost(unit="ms"))
    assert "The units of time differ" in page.comparison_page(pipelab.compare(trace, other))
    assert "The units of time differ" not in page.comparison_page(pipelab.compare(trace, trace))


@pytest.fixture
def opened(browser, tmp_path):
    """Return a function that opens a page and fails the test on anything the browser complains about."""
    tab = browser.new_page(viewport={"width": 1300, "height": 800})
    complaints = complaints_of(tab, "file:")

    def opener(source):
        path = tmp_path / "page.html"
        path.write_text(source, encoding="utf-8")
        tab.goto(path.as_uri())
        wait_until(tab, "timelines.every(each => each.mark)")
        return tab

    yield opener
    tab.close()
    assert complaints == []


@pytest.fixture
def tab(opened, trace):
    """A tab with the page of 1F1B on 4 ranks with 8 micro-batches."""
    return opened(page.page(trace))


def panel(tab):
    """Return what the panel says, as a dictionary."""
    names = tab.locator("#panel dt").all_inner_texts()
    return dict(zip(names, tab.locator("#panel dd").all_inner_texts(), strict=True))


def title(tab):
    return tab.locator("#panel h3").inner_text()


def click(tab, name):
    tab.locator(f"[data-action='{name}']").first.click(force=True)


def test_every_bar_lies_where_its_times_say(tab, trace):
    read = "bars => bars.map(b => [b.dataset.action, ...['x', 'width', 'y'].map(name => +b.getAttribute(name))])"
    bars = tab.locator("#timelines .bar").evaluate_all(read)
    scale = tab.locator("#timelines svg").evaluate("svg => svg.clientWidth") / 33
    assert len(bars) == len({name for name, *_ in bars}) == len(trace.events)
    where = {name: (x, width, y) for name, x, width, y in bars}
    for event in trace.events:
        x, width, y = where[str(event.action)]
        assert (x, width) == pytest.approx((event.start * scale, event.duration * scale), abs=0.01)
        assert y // 52 == event.rank  # lanes of 34 pixels, with a memory strip of 18 each


def test_a_chosen_action_stays_and_says_what_it_needs_and_gives(tab):
    click(tab, "0B0")
    tab.mouse.move(5, 5)
    assert title(tab) == "0B0"
    told = panel(tab)
    assert told["what"] == "backward of micro-batch 0 on stage 0"
    assert told["when"] == "10 to 12 (2 units)"
    assert told["needs"].splitlines() == ["0F0 on rank 0, there at 1, 9 before", "1B0 on rank 1, there at 10: the last"]
    assert told["gives to"] == "nothing"
    assert told["waited for"] == "1B0, for which the rank was idle for 6 units"
    tab.locator("#panel dd[data-list=needs] button").last.click()
    assert title(tab) == "1B0"
    assert tab.locator("rect.needs").count() == 2
    assert tab.locator("path.arrow.gives").count() == 1
    tab.keyboard.press("Escape")
    assert not tab.locator("#panel").is_visible()


def test_a_tap_leaves_the_panel_open(browser, trace, tmp_path):
    path = trace.save(tmp_path / "page.html")
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    tab = context.new_page()
    tab.goto(path.as_uri())
    tab.locator("[data-action='1B3']").tap(force=True)
    tab.wait_for_timeout(300)
    assert tab.locator("#panel h3").inner_text() == "1B3"
    assert tab.locator("#timelines svg").bounding_box()["width"] >= 340
    sheet, chosen = (tab.locator(each).bounding_box() for each in ("#panel", "rect.chosen"))
    assert 0 <= chosen["y"] <= chosen["y"] + chosen["height"] <= sheet["y"]
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()


SIX = [pipelab.GPipe(4, 6), pipelab.OneFOneB(4, 8), pipelab.Interleaved1F1B(2, 4), pipelab.ZBH1(3, 5)]
SIX += [pipelab.DualPipe(4, 8), pipelab.ZBV(2, 4)]


class Sliced(pipelab.GPipe):
    """GPipe on sequences of three slices, whose backwards run from the last slice to the first."""

    slices = 3

    def actions(self, rank):
        """Yield a rank's row."""
        yield from (F(m) for m in range(self.microbatches))
        yield from (B(m) for m in reversed(range(self.microbatches)))


SIX.append(Sliced(3, 6))


@pytest.mark.parametrize("schedule", SIX, ids=lambda each: type(each).__name__)
def test_the_page_knows_the_needs_the_waits_and_the_idle_times_of_the_plan(opened, schedule):
    trace = pipelab.simulate(schedule, Cost(latency=0.25, all_reduce=1))
    tab, lanes = opened(page.page(trace)), Lanes(trace)
    bound, named = trace.plan.bound, trace.plan.bound.codes.action

    def of_each(what):
        return tab.evaluate(f"[...Array(models[0].count).keys()].map(each => {what})")

    names = of_each("models[0].name(each)")
    assert names == [str(event.action) for event in trace.events]
    needs = of_each("models[0].needs(each).map(at => models[0].name(at))")
    gives = of_each("models[0].gives(each).map(at => models[0].name(at))")
    waited = of_each("(w => w && [models[0].name(w[0]), w[1]])(models[0].waited(each))")
    expected = itertools.chain(*waits(trace))
    for at, (code, wait) in enumerate(zip(itertools.chain(*bound.computing), expected, strict=True)):
        if bound.codes.kind[code] != "R":
            assert sorted(needs[at]) == sorted(str(named(giver)) for _, giver in bound.inputs(code))
        assert all(names[at] in gives[names.index(giver)] for giver in needs[at])
        assert waited[at] == (wait and [str(named(wait.giver)), pytest.approx(wait.there, abs=1e-5)])
    idle = tab.evaluate("models[0].idle.map(each => [each.rank, each.reason, each.start, each.end])")
    near = [
        [each.rank, each.reason, *(pytest.approx(time, abs=1e-4) for time in (each.start, each.end))]
        for each in trace.idle
    ]
    assert idle == near
    gaps = [gap for rank in range(trace.ranks) for gap in lanes.gaps(rank)]
    assert tab.evaluate("models[0].idle.map((each) => models[0].words(each))") == [list(gap.words) for gap in gaps]
    longest, giver = lanes.longest_wait()
    found = tab.evaluate("(([idle, giver]) => [idle.rank, idle.start, models[0].name(giver)])(models[0].longestWait)")
    assert found == [longest.idle.rank, pytest.approx(longest.start, abs=1e-4), str(giver.action)]
    assert tab.locator(".arrow.first").count() == 1
    shown = tab.locator("#timelines .why").all_text_contents()
    assert shown
    assert not [each for each in shown if each[0].isdigit()]  # a bare number is a micro-batch
    path = tab.evaluate("[...models[0].critical].map(at => models[0].name(at))")
    assert path == [str(event.action) for event in trace.critical_path]
    slack = of_each("models[0].slack[each]")
    assert max(abs(slack[names.index(name)]) for name in path if "R" not in name) < 1e-5
    if isinstance(schedule, Sliced):
        click(tab, "1F1")
        needed = tab.locator("dd[data-list=needs] li").all_inner_texts()
        assert ["another slice" in each for each in needed] == [False, True]


@pytest.mark.parametrize("schedule", SIX, ids=lambda each: type(each).__name__)
def test_the_memory_strip_covers_the_times_at_which_activations_are_held(opened, schedule):
    trace = pipelab.simulate(schedule, Cost(latency=0.25))
    tab = opened(page.page(trace))
    held = tab.evaluate("models[0].lanes.map((_, rank) => Math.max(...models[0].memory(rank).map(each => each[1])))")
    assert tuple(held) == trace.peak_activations
    read = """rects => rects.map(each =>
      [Math.floor(each.getAttribute('y') / timelines[0].pitch), each.dataset.held * each.getAttribute('width')])"""
    strips = tab.locator(".memory").evaluate_all(read)
    scale = tab.evaluate("timelines[0].scale")
    for rank in range(trace.ranks):
        events = [event for event in trace.events_of(rank) if event.action.kind in "FBW"]
        taken = sum(-event.start if event.action.kind == "F" else event.end for event in events)
        assert sum(area for at, area in strips if at == rank) / scale == pytest.approx(taken, rel=1e-3)


def test_a_memory_cap_is_a_line_in_every_strip_and_in_the_legend(opened, trace):
    tab = opened(page.page(trace, cap=5))
    assert "up to 4 activations; red line: the cap, 5" in tab.locator(".legend").inner_text()
    heights = "all => all.map(each => Number(each.getAttribute('y')))"
    lines, tops = (tab.locator(at).evaluate_all(heights) for at in (".cap", ".memory[data-held='4']"))
    assert len(lines) == 4
    assert 0 < min(tops) - min(lines) < 8  # the cap of 5 is above the 4 of rank 0
    assert opened(page.page(trace)).locator(".cap").count() == 0


def test_memory_has_one_scale_in_a_comparison_its_peak_and_is_red_above_the_cap(opened, trace):
    tab = opened(page.comparison_page(pipelab.compare(pipelab.GPipe(4, 8), trace)))
    tallest = "[...document.querySelectorAll(`[data-trace='${at}'] .memory`)].map(b => b.height.baseVal.value)"
    eight, four = (max(tab.evaluate(f"at => {tallest}", at)) for at in (0, 1))
    assert (eight, four) == (pytest.approx(17), pytest.approx(17 / 2))
    assert "memory: up to 8 activations" in tab.locator(".legend").inner_text()
    tab = opened(page.page(trace, cap=3))
    assert tab.locator(".held").all_text_contents()[:2] == ["peak 4", "cap 3"]
    held = tab.locator(".memory[data-held='4']").count()
    assert tab.locator(".over").count() == held > 0


def test_every_wait_says_for_whom(opened, trace):
    tab = opened(page.page(trace))
    said = tab.locator(".why").all_text_contents()
    waits = [idle for idle in trace.idle if idle.reason == "wait"]
    assert sum(bool(re.search(r"of rank \d|^r\d|for rank \d", text)) for text in said) == len(waits)
    assert len(said) == len(trace.idle)  # no box is blank


def test_a_selection_moves_nothing_of_the_picture(opened):
    tab = opened(page.page(pipelab.simulate(pipelab.OneFOneB(4, 32))))
    where = "[timelines[0].left, timelines[0].svg.getBoundingClientRect().toJSON(), scrollY]"
    tab.evaluate("setLook('memory', false)")
    for zoom in (1, 4):
        tab.evaluate(f"timelines[0].setZoom({zoom}, 300)")
        wait_until(tab, "!timelines[0].dirty && !timelines[0].moving")
        before = tab.evaluate(where)
        for x, y in ((300, 20), (700, 90)):
            tab.locator("#timelines svg").click(position={"x": x, "y": y})
            wait_until(tab, "!timelines[0].dirty && !panel.hidden")
            assert tab.evaluate(where) == before
            assert not tab.locator("#tip").is_visible()
        tab.keyboard.press("Escape")


def test_a_narrower_window_keeps_the_time_at_the_left_edge(tab):
    tab.evaluate("timelines[0].show(10, 16)")
    wait_until(tab, "!timelines[0].dirty && timelines[0].zoom > 5")
    tab.set_viewport_size({"width": 900, "height": 800})
    wait_until(tab, "timelines[0].drawn.width < 750 && !timelines[0].dirty")
    assert tab.evaluate("timelines[0].left / timelines[0].scale") == pytest.approx(10, abs=0.05)


def test_every_control_acts_where_bars_are_thinner_than_pixels(opened):
    tab = opened(page.page(pipelab.simulate(pipelab.OneFOneB(16, 512))))
    assert tab.evaluate("timelines[0].crowded")
    drawn = "(timelines[0].draw(), timelines[0].canvas.toDataURL())"
    seen = [tab.evaluate(drawn)]
    for act in ("search('mb 3')", "look.hidden.add('rank 3')", "look.hidden.add('B')", "setLook('critical', true)"):
        tab.evaluate(act)
        seen.append(tab.evaluate(drawn))
    assert len(set(seen)) == 5
    assert tab.locator("#colour").is_disabled()  # there is nothing that it could colour
    assert "rank 15" in tab.locator("#panel h3").inner_text()  # whose time the critical path is


def test_the_critical_path_is_linked_and_says_whose_time_it_is(tab, trace):
    top = tab.evaluate("timelines[0].svg.getBoundingClientRect().top")
    tab.keyboard.press("c")
    wait_until(tab, "document.querySelectorAll('.arrow.path').length > 0")
    assert tab.locator("#panel h3").inner_text() == "Critical path: 24 of 33 units on rank 3"
    assert "52 of 64 actions" in tab.locator("#panel").inner_text()
    path = trace.critical_path
    assert tab.locator(".arrow").count() == sum(one.rank != other.rank for one, other in itertools.pairwise(path))
    outlined = tab.locator(".bar.critical").evaluate_all("all => all.map(each => each.dataset.action)")
    assert sorted(outlined) == sorted(str(event.action) for event in path)
    seen = "name => [...models[0].slack].map((each, at) => [each > 1e-6, timelines[0].opacity(at)])"
    assert {tuple(each) for each in tab.evaluate(seen)} == {(False, 1), (False, 0.4), (True, 0.15)}
    assert tab.locator(".why").count() == 0  # idle times are not the message
    assert tab.evaluate("timelines[0].svg.getBoundingClientRect().top") == top
    tab.keyboard.press("Escape")
    assert tab.locator("#panel").is_hidden()
    assert tab.locator("[data-layer=critical]").get_attribute("aria-pressed") == "false"


def test_an_idle_time_says_its_reason_and_its_root(tab):
    tab.locator("[data-idle='0:4']").click()
    assert title(tab) == "Rank 0 waits from 4 to 10"
    assert "6 units: wait" in tab.locator("#panel").inner_text()
    assert tab.locator("#panel .chain li").count() == 3
    tab.get_by_text("more, back to the root").click()
    last = tab.locator("#panel .chain li").last.inner_text()
    assert last == "0F0 begins at 0: it is its rank's first, and needs nothing"
    tab.keyboard.press("}")
    assert "idle from 27 to 33" in title(tab)
    tab.locator("[data-reason=fill]").click()
    assert title(tab) == "Rank 3 is idle from 0 to 3"


def test_zooming_keeps_the_chosen_action_in_the_window(tab):
    click(tab, "3B7")
    for _ in range(6):
        tab.keyboard.press("+")
    wait_until(tab, "!timelines[0].dirty && timelines[0].zoom > 6 && document.querySelector('rect.chosen')")
    boxes = "['rect.chosen', '.scroller'].map(each => document.querySelector(each).getBoundingClientRect().toJSON())"
    box, window = tab.evaluate(boxes)  # in one frame: a later one may draw the mark anew
    assert window["x"] <= box["x"] + box["width"] / 2 <= window["x"] + window["width"]


def test_an_all_reduce_without_time_lies_over_the_bars(opened):
    tab = opened(page.page(pipelab.simulate(pipelab.DualPipe(4, 8))))
    over = """marks => marks.map(mark => mark.getBoundingClientRect())
      .map(box => document.elementFromPoint(box.x + 1, box.y + 5).dataset.action)"""
    marks = tab.locator("[data-action$='R']")
    assert marks.count() == 8
    assert all(name.endswith("R") for name in marks.evaluate_all(over))


def test_a_hundred_wheel_events_in_a_frame_draw_once(tab):
    spun = """() => new Promise(done => requestAnimationFrame(() => {
      const before = draws.count, turn = { deltaY: -3, ctrlKey: true, clientX: 600 };
      for (let count = 0; count < 100; count += 1) timelines[0].scroller.dispatchEvent(new WheelEvent("wheel", turn));
      requestAnimationFrame(() => requestAnimationFrame(() => done(draws.count - before)));
    }))"""
    assert tab.evaluate(spun) <= 2  # one for the zoom, one for the scrolling that follows it


def shares(trace, rank, begin, end):
    """Return, by kind, how much of a span of time is an action of it."""
    found = {"F": 0.0, "B": 0.0}
    for event in trace.events_of(rank):
        found[event.action.kind] += max(0.0, min(event.end, end) - max(event.start, begin)) / (end - begin)
    return {**found, "idle": 1 - sum(found.values())}


def test_a_crowded_column_shows_the_exact_shares_of_its_time(opened):
    trace = pipelab.simulate(pipelab.OneFOneB(4, 2000), Cost(forward=[1, 2, 1, 1.5]))
    tab = opened(page.page(trace))
    read = """columns => {
      const [line] = timelines, { wide, data } = line.pixels, rows = Math.round(line.lane * 0.86);
      const mean = (rank, column) => {
        const top = Math.round(rank * line.pitch + line.lane * 0.07), sum = [0, 0, 0];
        for (let row = top; row < top + rows; row += 1) {
          [0, 8, 16].forEach((by, at) => { sum[at] += (data[row * wide + column] >> by) & 255; });
        }
        return sum.map(each => each / rows);
      };
      const rgb = name => [1, 3, 5].map(at => parseInt(css(name).slice(at, at + 2), 16));
      return { colours: { F: rgb("--F0"), B: rgb("--B0"), idle: rgb("--idle") }, step: 1 / line.scale,
        means: [0, 1, 2, 3].map(rank => columns.map(column => mean(rank, column))) };
    }"""
    columns = [3, 400, 1000]
    for zoom in (1, 3):
        tab.evaluate(f"setLook('memory', false); timelines[0].setZoom({zoom}, 0)")
        wait_until(tab, f"!timelines[0].dirty && timelines[0].crowded && timelines[0].zoom === {zoom}")
        found = tab.evaluate(read, columns)
        for rank, means in enumerate(found["means"]):
            for column, mean in zip(columns, means, strict=True):
                part = shares(trace, rank, column * found["step"], (column + 1) * found["step"])
                expected = [sum(part[each] * found["colours"][each][at] for each in part) for at in range(3)]
                assert mean == pytest.approx(expected, abs=1)


def test_the_axis_and_the_ranks_stay_in_sight(opened):
    tab = opened(page.page(pipelab.simulate(pipelab.OneFOneB(64, 32))))
    inside = (
        "all => all.map(each => each.getBoundingClientRect()).filter(box => box.top >= 0 && box.bottom <= 800).length"
    )
    for scrolled in (0, 300, 500):
        tab.evaluate(f"scrollTo(0, {scrolled})")
        assert tab.locator(".axis").evaluate_all(inside) >= 1
    assert tab.locator(".axis").evaluate_all(inside) == 2
    tab.evaluate("timelines[0].setZoom(8, 0)")
    assert tab.locator("[data-rank='40']").bounding_box()["x"] > 0


def dragged(tab, place, begin, end, height):
    """Drag over a place from one x to another; return the panel's text."""
    box = tab.locator(place).bounding_box()
    tab.mouse.move(box["x"] + begin, box["y"] + height)
    tab.mouse.down()
    tab.mouse.move(box["x"] + (begin + end) / 2, box["y"] + height)
    tab.mouse.move(box["x"] + end, box["y"] + height)
    tab.mouse.up()
    return tab.locator("#panel").inner_text()


def test_a_drag_moves_the_picture_and_selects_nothing(tab):
    tab.evaluate("timelines[0].setZoom(4, 0)")
    assert dragged(tab, ".scroller", 500, 300, 30) == ""
    assert tab.evaluate("timelines[0].left") == 200
    assert tab.locator("#panel").is_hidden()


def test_a_drag_on_the_axis_or_with_shift_sums_a_span(tab, trace, tmp_path):
    tab.evaluate("timelines[0].choose({ range: { from: 4, to: 16 } })")
    told = tab.locator("#panel").inner_text()
    assert "12 units on 4 ranks: 48 = work 36 + wait 12" in told
    rows = tab.locator("#panel tr").evaluate_all(
        "rows => rows.map(row => [...row.children].map(cell => cell.textContent))"
    )
    assert rows[0] == ["rank", "work", "wait", "idle"]
    for rank, row in enumerate(rows[1:]):
        lost = sum(max(0, min(idle.end, 16) - max(idle.start, 4)) for idle in trace.idle if idle.rank == rank)
        assert row[1:3] == [f"{12 - lost:g}", f"{lost:g}"]
    tab.keyboard.press("f")
    wait_until(tab, "timelines[0].zoom > 2.5")
    state = tab.evaluate("hashOf()")
    assert "s=0:from.4to16" in state
    tab.keyboard.press("0")
    tab.keyboard.press("Escape")
    scale = tab.evaluate("timelines[0].scale")
    assert "From " in dragged(tab, ".axis:not(.top)", 2, 6 * scale, 8)
    tab.keyboard.press("Escape")
    tab.keyboard.down("Shift")
    assert "From " in dragged(tab, ".scroller", 30, 200, 60)
    tab.keyboard.up("Shift")
    tab.goto("about:blank")
    tab.goto((tmp_path / "page.html").as_uri() + state)
    assert title(tab) == "From 4 to 16"


def test_a_hundred_ranks_are_bands_that_open(opened):
    trace = pipelab.simulate(pipelab.OneFOneB(96, 100))
    tab = opened(page.page(trace))
    assert tab.locator(".gutter .rank").count() == 6
    tab.get_by_role("button", name="ranks 16–31").click()
    assert tab.locator(".gutter .rank").count() == 6 + 16
    tab.evaluate("timelines[0].setZoom(3, 0)")
    wait_until(tab, "!timelines[0].dirty && timelines[0].rowOf[17] === 3")
    assert tab.evaluate("timelines[0].boxOf({ place: models[0].named('17F0')[0] }).y") // 20 == 3
    read = "rows => rows.map(row => timelines[0].pixels.data[timelines[0].pixels.wide * (20 * row + 10) + 9] !== 0)"
    bands = [0, 1, *range(18, 22)]  # the mean of an open band, 1, is there too; ranks may be elements
    assert all(tab.evaluate(read, bands))
    tab.locator(".scroller").click(position={"x": 10, "y": 10})
    assert tab.locator(".gutter .rank").count() == 6 + 32
    tab.keyboard.press("/")
    tab.keyboard.type("90B5")
    tab.keyboard.press("Enter")
    assert title(tab) == "90B5"
    assert tab.get_by_role("button", name="rank 90", exact=True).is_visible()


def test_two_fingers_zoom_about_the_time_between_them(tab):
    pinch = """() => {
      const line = timelines[0], target = line.scroller, left = target.getBoundingClientRect().left;
      const touch = (name, ...all) => {
        const touches = all.map((x, identifier) => new Touch({ identifier, target, clientX: left + x, clientY: 300 }));
        target.dispatchEvent(new TouchEvent(name, { touches, cancelable: true }));
      };
      const time = () => (line.left + 400) / line.scale, before = time();
      touch("touchstart", 350, 450); touch("touchmove", 300, 500); touch("touchmove", 200, 600); touch("touchend");
      return [line.zoom, time() - before];
    }"""
    zoom, moved = tab.evaluate(pinch)
    assert zoom == pytest.approx(4)
    assert moved == pytest.approx(0, abs=0.05)


def test_paper_shows_all_of_it(tab):
    tab.keyboard.press("+")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    labels = tab.locator(".print .label").evaluate_all("texts => texts.map(text => text.textContent)")
    assert labels.count("B7") == 4
    axis = tab.locator(".print .axis-text").evaluate_all("texts => texts.map(text => text.textContent)")
    assert {"0", "10", "20", "30"} <= set(axis)
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.locator(".print").count() == 0
    assert len(tab.pdf(format="A4")) > 5000


def test_the_address_holds_the_state(tab, tmp_path):
    click(tab, "2B3")
    tab.keyboard.press("c")
    tab.keyboard.press("+")
    wait_until(tab, "location.hash.includes('c')")
    state = tab.evaluate("hashOf()")
    assert "s=0:2B3.2" in state
    tab.goto("about:blank")
    tab.goto((tmp_path / "page.html").as_uri() + state)
    wait_until(tab, "timelines[0].zoom > 1.2")
    assert title(tab) == "2B3"
    assert tab.locator("[data-layer=critical]").get_attribute("aria-pressed") == "true"
    tab.goto("about:blank")
    tab.goto((tmp_path / "page.html").as_uri() + "#v=1&s=7:<img>.2&z=a,b&nobody=1&l=<b>")
    assert tab.locator("#panel").is_hidden()


def test_finding_and_playing(tab):
    tab.keyboard.press("/")
    tab.keyboard.type("idle > 5")
    assert tab.locator("#hits").inner_text() == "2 found"
    tab.keyboard.press("Enter")
    assert "waits from 4 to 10" in title(tab)
    tab.locator("#find").fill("F3")
    assert tab.locator("#hits").inner_text() == "4 found"
    tab.keyboard.press("Escape")
    tab.locator("#moment").fill("0")
    assert tab.locator("#now").inner_text().startswith("t = 0: rank 0 begins 0F0; rank 1 is idle, waiting for 0F0")
    tab.locator("#play").focus()
    tab.keyboard.press("t")
    wait_until(tab, "document.querySelectorAll('#actions tr').length === 65")


def saved(tab, kind, folder):
    """Press a button of the save menu; return the file."""
    if not tab.locator(".save").evaluate("menu => menu.open"):
        tab.locator(".save summary").click()
    with tab.expect_download() as download:
        tab.locator(f"[data-save={kind}]").click()
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


@pytest.mark.parametrize("kind", [pipelab.OneFOneB, pipelab.DualPipe])
def test_what_is_shown_is_saved_as_a_picture(opened, kind, tmp_path):
    trace = pipelab.simulate(kind(4, 8), Cost(latency=0.25, pair=3))
    tab = opened(page.page(pipelab.Trace.from_dict({**trace.to_dict(), "name": HOSTILE})))
    tab.evaluate("setLook('memory', false)")
    wait_until(tab, "!timelines[0].dirty")
    svg = ElementTree.fromstring(saved(tab, "svg", tmp_path).read_text())  # noqa: S314  # written by the page above
    names = [each.get("data-action") for each in svg.iter() if each.get("data-action")]
    assert sorted(names) == sorted(str(event.action) for event in trace.events)
    assert not [each for each in svg.iter() if "var(" in each.get("style", "")]
    picture = saved(tab, "png", tmp_path).read_bytes()
    assert picture[:4] == b"\x89PNG"
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    assert [width, height] == [round(2 * float(svg.get(name))) for name in ("width", "height")]


def test_what_moves_has_a_strip_for_each_channel_and_is_in_the_legend(opened, tmp_path):
    trace = pipelab.simulate(pipelab.PipeOffload(2, 4, sent=2), Cost(offload=2, load=2))
    tab = opened(page.page(trace))
    read = "each => each.map(b => ['x', 'width', 'y'].map(name => +b.getAttribute(name)))"
    boxes = sorted(tab.locator("#timelines .move").evaluate_all(read), key=lambda box: (box[2], box[0]))
    assert len(boxes) == len(trace.moves)
    assert len({y for *_, y in boxes}) == 4  # two ranks, each with offloads and loads
    for (x, width, y), (after, _, below) in itertools.pairwise(boxes):
        assert y != below or x + width <= after + 0.01
    assert {"OFFLOAD offload", "LOAD load"} <= {
        text.strip() for text in tab.locator(".legend button").all_inner_texts()
    }
    assert ">OFFLOAD offload<" in saved(tab, "svg", tmp_path).read_text()


@pytest.mark.parametrize(
    ("schedule", "marks", "words"),
    [
        (pipelab.DualPipe(4, 8), 6, ["→ way of F0, F4"]),
        (pipelab.SlimPipe(4, 8), 4, ["┌┐ 4 slices: a sequence"]),
        (pipelab.replicate(pipelab.Seq1F1B(2, 4), 2), 4, ["┌┐ 2 slices: a sequence"]),
        (pipelab.Interleaved1F1B(4, 8), 0, []),
    ],
)
def test_ways_and_slices_are_marked_on_the_page_and_in_what_it_saves(opened, schedule, marks, words, tmp_path):
    trace = pipelab.simulate(schedule)
    tab = opened(page.page(trace))
    assert tab.locator(".legend .mark").all_text_contents() == words
    assert tab.locator("path.way").count() == marks
    if "slices" in "".join(words):
        last = wording.brackets(trace)[0] - 1
        left, right = (tab.locator("[data-action^='0F']").nth(at).bounding_box() for at in (0, last))
        bracket = tab.locator("path.way").first.bounding_box()
        assert bracket["width"] == pytest.approx(right["x"] + right["width"] - left["x"], abs=4)
    svg = ElementTree.fromstring(saved(tab, "svg", tmp_path).read_text())  # noqa: S314  # written by the page above
    texts = [each.text for each in svg.iter() if each.tag.endswith("text")]
    assert {*words, wording.idea(trace)} <= {*texts}
    assert [each.get("class") for each in svg.iter()].count("arrow way") == marks


def test_a_gather_has_its_stage_written_on_it(opened):
    tab = opened(page.page(pipelab.simulate(pipelab.with_gathers(pipelab.LoopedBFS(2, 4), 1), Cost(gather=1))))
    names = tab.locator("rect.move[data-move$=UNSHARD]").evaluate_all("all => all.map((each) => each.dataset.move)")
    labels = tab.locator("rect.move + text").all_text_contents()
    assert labels == [name.removesuffix("UNSHARD") for name in names]
    assert len(labels) == 6
    assert "of the stage in it" in tab.locator(".legend").inner_text()


def test_rows_and_type_grow_with_the_window_and_presented_they_fill_it(tab):
    size = "parseFloat(getComputedStyle(document.querySelector('svg .label')).fontSize)"
    assert tab.evaluate(f"[timelines[0].lane, {size}]") == pytest.approx([35, 12.2], abs=0.1)
    tab.set_viewport_size({"width": 1920, "height": 1080})
    wait_until(tab, "timelines[0].svg.getBoundingClientRect().height > 270")  # a quarter of the window
    assert tab.evaluate(size) == 18
    tab.keyboard.press("b")
    wait_until(tab, "timelines[0].svg.getBoundingClientRect().height > 500")
    assert tab.evaluate(size) > 25
    seen = "[...document.querySelectorAll('body *')].filter(each => each.checkVisibility() && each.tabIndex >= 0)"
    assert tab.evaluate(f"{seen}.every(each => each.closest('.legend, .timeline, .skip'))")
    assert tab.evaluate("document.documentElement.scrollHeight <= innerHeight")
    tab.keyboard.press("Escape")
    wait_until(tab, "timelines[0].svg.getBoundingClientRect().height < 400")
    assert tab.locator("#play").is_visible()


def test_nothing_lies_over_a_short_timeline_or_over_the_play_bar(tab):
    box = "(name => document.querySelector(name).getBoundingClientRect())"
    tab.set_viewport_size({"width": 1300, "height": 330})
    assert tab.evaluate(f"{box}('.foot').top >= {box}('.scroller').bottom - 1")
    tab.set_viewport_size({"width": 1280, "height": 720})
    click(tab, "2B3")
    assert tab.evaluate(f"{box}('#panel').bottom <= {box}('.player').top")
    assert tab.evaluate(f"{box}('.player').bottom <= innerHeight + 1")
    wait_until(tab, f"{box}('rect.chosen').bottom <= {box}('#panel').top")
    tab.keyboard.press("Escape")
    tab.set_viewport_size({"width": 390, "height": 844})
    for name in ("0F0", "3B7"):
        tab.evaluate(f"select(timelines[0], {{ place: timelines[0].model.named('{name}')[0] }})")
        wait_until(tab, f"!timelines[0].dirty && {box}('rect.chosen').bottom <= {box}('#panel').top")


def test_the_play_bar_ends_where_the_step_ends(tab):
    assert tab.evaluate("[moment.value, moment.max].map(Number)") == [30, 30]
    style = "getComputedStyle(moment)"
    assert tab.evaluate(f"[{style}.paddingRight, {style}.borderRightWidth]") == ["0px", "0px"]


def test_a_search_marks_what_it_counts_in_every_timeline(opened, trace):
    tab = opened(page.comparison_page(pipelab.compare(pipelab.simulate(pipelab.GPipe(4, 8)), trace)))
    tab.fill("#find", "idle > 5")
    wait_until(tab, "document.querySelectorAll('.idle.found').length === 5")
    assert tab.locator("#hits").inner_text() == "5 found"
    tab.fill("#find", "2B3")
    wait_until(tab, "document.querySelectorAll('.bar.found').length === 2")
    found = tab.locator(".bar.found")
    assert [found.nth(at).get_attribute("data-action") for at in range(2)] == ["2B3", "2B3"]
    for at in (1, 2):
        tab.press("#find", "Enter")
        assert tab.locator("#hits").inner_text() == f"{at} of 2"
        assert tab.evaluate("timelines.indexOf(state.timeline)") == at - 1


def test_parts_of_the_ledger_have_their_word_however_small_they_are(opened):
    tab = opened(page.page(pipelab.simulate(pipelab.OneFOneB(4, 200))))
    for width in (1280, 390):
        tab.set_viewport_size({"width": width, "height": 800})
        cut = "[...document.querySelectorAll('.parts button')].filter(each => each.firstChild.offsetWidth"
        assert tab.evaluate(f"{cut} > each.clientWidth).length") == 0


def test_a_saved_picture_has_the_whole_legend_and_no_bar_outside_its_axes(tab, tmp_path):
    tab.evaluate("timelines[0].show(10, 16)")
    wait_until(tab, "!timelines[0].dirty && timelines[0].zoom > 5")
    picture = ElementTree.fromstring(saved(tab, "svg", tmp_path).read_text())  # noqa: S314 - our own
    words = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert set(tab.locator(".legend [data-paint]").all_inner_texts()) <= set(words)
    rects = [each for each in picture.iter("{http://www.w3.org/2000/svg}rect") if each.get("class")]
    assert len(rects) > 10
    width = float(picture.get("width")) - 72  # names, and air
    for each in rects:
        left, wide = float(each.get("x")), float(each.get("width"))
        assert 0 <= left <= left + wide <= width + 0.01, each.attrib


def test_on_paper_bars_end_at_their_line_and_do_not_cover_the_names_of_ranks(opened):
    tab = opened(page.page(pipelab.simulate(pipelab.OneFOneB(4, 64))))
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator(".print svg").count() > 2
    lefts = tab.evaluate("[...document.querySelectorAll('.print rect')].map(each => Number(each.getAttribute('x')))")
    assert min(lefts) >= -0.5
    tab.evaluate("dispatchEvent(new Event('afterprint'))")


def test_an_overview_names_what_it_draws(opened):
    tab = opened(page.page(pipelab.simulate(pipelab.OneFOneB(16, 512))))
    entries = tab.locator(".legend :is(button, span)").all_inner_texts()
    assert entries[1:] == ["B backward", "idle", "memory: up to 16 activations"]
    tab.evaluate("timelines[0].show(0, 60)")
    wait_until(tab, "document.querySelector('.legend').innerText.includes('wait')")


def test_a_forward_in_the_dark_has_an_edge_that_is_seen():
    css = page._file("page.css").partition('data-theme="dark"]')[2]
    paper, edge = (re.search(rf"--{name}: (#\w+)", css)[1] for name in ("paper", "edge"))
    assert (colours.luminance(edge) + 0.05) / (colours.luminance(paper) + 0.05) >= 3


@pytest.mark.parametrize("name", [path.name for path in Path(page.__file__).parent.glob("*.js")])
def test_a_page_has_every_text_of_its_scripts_as_it_was_written(name):
    written = page._file(name)
    lean = page.lean(written, "js")
    lines = [line for line in map(str.strip, written.splitlines()) if not line.startswith("//")]
    texts = [text for line in lines for text in re.findall(r'`.*`|"[^"]*"|/\S+/', line.partition("; //")[0])]
    assert texts
    assert [text for text in texts if text not in lean] == []
    assert len(lean) < 0.9 * len(written)


def test_a_screen_reader_reads_the_page(tab):
    click(tab, "2B3")
    golden = Path(__file__).parents[1] / "golden" / "page-1f1b-4x8.aria.yml"
    assert tab.locator("body").aria_snapshot() + "\n" == golden.read_text(encoding="utf-8")


def test_ten_tasks_with_the_keyboard_alone(tab):
    focus = "(each => each.getAttribute('aria-label') ?? each.textContent)(document.activeElement)"

    def press(*keys):
        for key in keys:
            tab.keyboard.press(key)

    def tab_to(name):
        for _ in range(60):
            press("Tab")
            if tab.evaluate(focus).startswith(name):
                assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
                return
        raise AssertionError(f"no {name!r}")

    def said():
        return tab.locator("#say").inner_text()

    press("Tab")  # 1: to the table, past the timelines
    assert tab.evaluate(focus) == "skip the timelines"
    press("Enter", "Tab")
    assert tab.evaluate(focus) == "All actions as a table"
    press("Enter")
    wait_until(tab, "document.querySelectorAll('#actions tr').length === 65")
    press("Enter")
    tab.evaluate("document.activeElement.blur(); scrollTo(0, 0); document.querySelector('.skip').focus()")
    tab_to("critical path")  # 2: a layer
    press(" ")
    assert tab.locator("[data-layer=critical]").get_attribute("aria-pressed") == "true"
    press(" ")
    tab_to("save")  # 3: a menu
    press("Enter")
    tab_to("save as PNG")
    press("Escape")
    assert not tab.locator("[data-save=png]").is_visible()
    assert tab.evaluate(focus) == "save"
    tab_to("rank 1")  # 4: dim a rank
    press("Enter")
    assert tab.evaluate(focus) == "rank 1"
    assert tab.locator("[data-rank='1']").get_attribute("aria-pressed") == "false"
    press("Enter")
    tab_to("timeline of")  # 5: an action
    press("End", "ArrowDown")
    assert said().startswith("1B7, backward of micro-batch 7 on stage 1, rank 1, 29 to 31")
    press("ArrowLeft", "ArrowRight")
    assert title(tab) == "1B7"
    press("n")  # 6: what it waited for, and back
    assert said().startswith("2B7, ")
    press("p", "n")
    assert title(tab) == "2B7"
    press("]")  # 7: an idle time and its root
    assert said().startswith("rank 2 is idle from 29 to 33")
    press("[")
    tab_to("close")
    tab_to("3B")
    press("Enter")
    assert tab.evaluate("document.activeElement.id") == "panel"
    press("Escape")
    assert tab.evaluate(focus).startswith("timeline of")
    press("Home", "Shift+ArrowRight", "Shift+ArrowRight")  # 8: a span and its sum
    assert said().startswith("from 0 to 3 (3 units): all ranks together work 6, fill 6")
    press("f")
    wait_until(tab, "timelines[0].zoom > 6")
    press("0")
    wait_until(tab, "timelines[0].zoom === 1")
    press("/")  # 9: find
    tab.keyboard.type("mb 3")
    press("Enter", "Shift+Enter")
    assert tab.locator("#hits").inner_text() == "8 of 8"
    press("Escape")
    tab_to("play")  # 10: step through
    press(".", ".")
    assert tab.locator("#now").inner_text().startswith("t = 1: rank 0 begins 0F1")


@pytest.mark.parametrize("width", [1280, 640, 390])
def test_text_of_twice_the_size_fits(tab, width):
    tab.set_viewport_size({"width": width, "height": 844})
    tab.add_style_tag(content=":root { font-size: 200% }")
    click(tab, "2B3")
    tab.wait_for_timeout(100)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator(".scroller").bounding_box()["width"] > 0.3 * width


def test_forced_colours_keep_the_bars_and_show_what_is_pressed(tab):
    colours = """() => ["[data-action='0F0']", "[data-layer=memory]", "[data-layer=critical]"].map(name => {
      const style = getComputedStyle(document.querySelector(name));
      return name.includes("layer") ? style.backgroundColor : style.fill;
    })"""
    bar, *_ = tab.evaluate(colours)
    tab.emulate_media(forced_colors="active")
    forced, pressed, released = tab.evaluate(colours)
    assert forced == bar
    assert pressed != released


def test_a_page_of_16384_actions_opens_and_zooms_to_single_actions(opened):
    trace = pipelab.simulate(pipelab.OneFOneB(16, 512))
    tab = opened(page.page(trace))
    assert tab.locator("#timelines .bar").count() == 0
    calls = """() => {
      const canvas = CanvasRenderingContext2D.prototype, calls = [];
      for (const name of ["fillRect", "strokeRect", "fillText", "drawImage", "putImageData"]) {
        const asked = canvas[name];
        canvas[name] = function (...values) { calls.push(name); return asked.apply(this, values); };
      }
      timelines[0].draw();
      return calls;
    }"""
    assert tab.evaluate(calls) == ["putImageData", *["fillText"] * 16]  # each rank's peak
    for _ in range(12):
        tab.locator("[data-zoom=in]").click()
    tab.locator("#timelines .bar").first.wait_for(state="attached")
    assert tab.locator("#timelines .label").first.text_content()[0] in "FB"
    tab.locator("#timelines svg").click(position={"x": 600, "y": 10})
    name = title(tab)
    (event,) = (event for event in trace.events if str(event.action) == name)
    assert panel(tab)["when"].startswith(f"{event.start:,.0f} to {event.end:,.0f}")


def test_a_comparison_fits_a_window_of_1280_pixels_with_every_label_inside_its_bar(opened):
    traces = [pipelab.simulate(kind(4, 8)) for kind in (pipelab.GPipe, pipelab.OneFOneB, pipelab.ZBV)]
    tab = opened(page.comparison_page(pipelab.compare(*traces)))
    tab.set_viewport_size({"width": 1280, "height": 900})
    wait_until(tab, "document.querySelector('#timelines svg').clientWidth < 1085")
    wider = "places => places.filter(place => place.scrollWidth > place.clientWidth).length"
    for place in ("html", ".figures", ".scroller"):
        assert tab.locator(place).evaluate_all(wider) == 0
    corners = "boxes => boxes.map(b => b.getBoundingClientRect()).map(b => [b.left, b.top, -b.right, -b.bottom])"
    for timeline, trace in zip(tab.locator("#timelines svg").all(), traces, strict=True):
        bars, labels = (timeline.locator(name).evaluate_all(corners) for name in (".bar", ".label"))
        assert len(labels) == len(bars) == len(trace.events)
        for label, bar in zip(labels, bars, strict=True):
            assert all(inner + 1 >= outer for inner, outer in zip(label, bar, strict=True))


def test_timelines_on_one_axis_zoom_together(opened):
    traces = [pipelab.simulate(kind(4, 8)) for kind in (pipelab.Naive, pipelab.OneFOneB)]
    tab = opened(page.comparison_page(pipelab.compare(*traces)))
    scale = "bars => bars.filter(bar => bar.dataset.action[1] === 'F').map(bar => +bar.getAttribute('width'))"
    tab.locator(".scroller").first.focus()
    tab.keyboard.press("+")
    tab.keyboard.press("Home")  # goes to 0F0, and so to time 0
    wait_until(tab, "timelines.every(each => each.scroller.scrollLeft === 0 && !each.dirty)")
    tab.wait_for_timeout(100)  # the panel has made the timelines narrower
    for timeline in tab.locator("#timelines svg").all():
        after = timeline.locator(".bar").evaluate_all(scale)
        one = timeline.evaluate("svg => svg.clientWidth") / traces[0].makespan
        assert after == pytest.approx([1.5 * one] * len(after), rel=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_readers_light_or_dark(tab, scheme):
    tab.emulate_media(color_scheme=scheme)
    paper = tab.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


def test_show_opens_a_page_and_prints_its_path_where_there_is_no_browser(trace, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    trace.show()
    assert opened == [path.as_uri() for path in tmp_path.iterdir()] != []
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("webbrowser.open", lambda _: False)
    path = draw.show_on_screen(trace)
    assert str(path) in capsys.readouterr().out
    assert path.read_text(encoding="utf-8") == page.page(trace)


def test_show_displays_the_figure_in_a_notebook(trace, monkeypatch):
    display = pytest.importorskip("IPython.display", reason="needs IPython: pip install ipython")
    shown = []
    monkeypatch.setattr(draw, "_in_notebook", lambda: True)
    monkeypatch.setattr(display, "display", shown.append)
    assert draw.show_on_screen(trace) is None
    (figure,) = shown
    assert "time (units)" in figure.data


def test_a_frame_shows_what_it_is_sent_and_keeps_zoom_and_selection(opened, trace):
    tab = opened(page.frame())
    send = "content => postMessage({ pipelabContent: content }, '*')"
    tab.evaluate(send, page.content(trace))
    wait_until(tab, "timelines.length === 1 && timelines[0].mark")
    assert tab.locator("#timelines .bar").count() == 64
    assert tab.locator(".subtitle").text_content() == page.content(trace)["subtitle"]
    click(tab, "1B3")
    tab.keyboard.press("+")
    wait_until(tab, "!timelines[0].dirty && timelines[0].zoom > 1")
    before = tab.evaluate("hashOf()")
    slower = pipelab.simulate(trace.plan, Cost(forward=1, backward=2, latency=1))
    shown = page.content(renamed(slower, HOSTILE))
    tab.evaluate(send, shown)
    wait_until(tab, f"document.querySelector('.subtitle').textContent === {shown['subtitle']!r}")
    after, shown = (re.split("[=,&]", each) for each in (tab.evaluate("hashOf()"), before))
    assert [after[:3], after[4:]] == [shown[:3], shown[4:]]
    assert float(after[3]) == pytest.approx(float(shown[3]), abs=1e-3)  # a pixel's rounding
    assert tab.locator("#panel h3").inner_text() == "1B3"
    assert HOSTILE in tab.locator("h1").text_content()
    assert tab.locator("img").count() == 0


def test_a_frame_goes_from_a_comparison_to_one_trace_and_back(opened, trace):
    tab = opened(page.frame())
    both = pipelab.compare(trace, pipelab.simulate(trace.plan, Cost(forward=2, backward=2)))
    others = pipelab.compare(pipelab.OneFOneB(2, 2), pipelab.ZBH1(2, 2))  # other actions: no difference, no views
    for shown, buttons, sections in ((both, 2, 2), (trace, 0, 1), (both, 2, 2), (others, 0, 2)):
        tab.evaluate("content => replace(content)", page.content(shown))
        assert tab.locator("[data-view-name]").count() == buttons
        assert tab.locator("#timelines section").count() == sections
        tab.keyboard.press("o")  # from stack to diff
        assert tab.evaluate("look.view") == ("diff" if buttons else "stack")
