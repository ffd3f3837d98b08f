"""Pages: one file that loads nothing, and says everything about the action under the pointer."""

from __future__ import annotations

import json
import re
import shutil
import time
from html.parser import HTMLParser

import pytest

import pipelab
from pipelab import B, Cost, F, Plan, R, draw
from pipelab.draw.page import page
from pipelab.trace.waits import waits

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
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


@pytest.fixture
def trace():
    return pipelab.simulate(pipelab.OneFOneB(4, 8))


def test_a_page_loads_nothing_from_anywhere(trace):
    source = page.page(trace)
    assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|url\((?!#)|fetch\(|XMLHttpRequest|import\(", source)
    assert not [each for each in Reader(source).attributes if each[1] in ("src", "href")]
    assert "default-src 'none'" in source


def test_the_data_hold_every_action_once_with_start_and_end(trace):
    (drawn,) = Reader(page.page(trace)).data["traces"]
    found = [
        (rank, name, start, end)
        for rank, lane in enumerate(drawn["ranks"])
        for name, start, end in zip(lane["actions"].split(), lane["starts"], lane["ends"], strict=True)
    ]
    assert found == [(event.rank, str(event.action), event.start, event.end) for event in trace.events]


def test_the_header_holds_the_figures(trace):
    cells = Reader(page.page(trace)).texts["td"]
    assert [cell for cell in cells if cell.strip()][:5] == [
        "33 units",
        "27.3 %",
        "4 3 2 1",
        "50 38 25 13 %",
        "73 73 73 73 %",
    ]


def test_without_javascript_there_is_a_text_timeline(trace):
    assert any("rank 0 │F0 F1" in each for each in Reader(page.page(trace)).texts["pre"])


def test_a_name_is_text_whatever_it_holds(trace):
    reader = Reader(page.page(renamed(trace, HOSTILE)))
    assert reader.tags.count("script") == 2
    assert "img" not in reader.tags
    assert reader.data["traces"][0]["name"] == f"{HOSTILE}, simulated"
    assert reader.texts["h1"][0] == f"{HOSTILE}, simulated"


def test_a_measured_trace_begins_at_zero():
    plan = pipelab.OneFOneB(1, 1).plan()
    measured = pipelab.Trace(
        plan, [[5000.25, 5001.5]], [[5001.5, 5003.25]], unit="ms", source="measured", lanes=["cpu"]
    )
    (drawn,) = Reader(page.page(measured)).data["traces"]
    assert (drawn["span"], drawn["unit"], drawn["ranks"][0]["starts"]) == (3, "ms", [0, 1.25])
    assert drawn["ranks"][0]["lane"] == "cpu"


def test_65536_actions_stay_below_5_megabytes():
    source = page.page(pipelab.simulate(pipelab.OneFOneB(32, 1024), Cost(forward=1.2345, backward=2.3456, latency=0.1)))
    assert len(source) < 5_000_000


def test_an_action_waited_for_the_need_that_arrived_last():
    trace = pipelab.simulate(pipelab.OneFOneB(2, 2), Cost(latency=0.5))
    action = trace.plan.bound.codes.action
    found = {
        str(event.action): wait and (str(action(wait.giver)), wait.there)
        for event, wait in zip(trace.events, [each for row in waits(trace) for each in row], strict=True)
    }
    assert found["0F0"] is None
    assert found["1F0"] == ("0F0", 1.5)
    assert found["1B0"] is None  # its own forward was just before it on its rank
    assert found["0B0"] == ("1B0", 5.0)
    for event in trace.events:  # in a simulation, whoever waits starts the moment the need is there
        if found[str(event.action)]:
            assert found[str(event.action)][1] == event.start


def test_an_all_reduce_waits_for_the_rank_that_comes_last():
    both = Plan([[F(0, 0), B(0, 0), R(0)], [F(1, 0), B(1, 0), F(2, 0), B(2, 0), R(0)]])
    trace = pipelab.simulate(both, Cost(all_reduce=1))
    action = trace.plan.bound.codes.action
    first, second = (row[-1] for row in waits(trace))
    assert (str(action(first.giver)), first.there) == ("0B2", 6)
    assert second is None


def test_both_halves_of_a_slot_waited_for_the_same():
    plan = Plan([[F(0), F(1), F(2) & B(0), B(1), B(2)], [F(0), B(0), F(1), B(1), F(2), B(2)]])
    row = waits(pipelab.simulate(plan, Cost(pair=3)))[0]
    assert row[2] == row[3]
    assert row[2].there == 4


def test_a_comparison_says_where_units_differ(trace):
    other = pipelab.simulate(pipelab.OneFOneB(2, 2), Cost(unit="ms"))
    assert "The units of time differ" in page.comparison_page(pipelab.compare(trace, other))
    assert "The units of time differ" not in page.comparison_page(pipelab.compare(trace, trace))


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


def wait_until(tab, holds):
    """Wait until an expression holds. Playwright's own waiting needs an eval, which the page forbids."""
    deadline = time.monotonic() + 20
    while not tab.evaluate(holds):
        assert time.monotonic() < deadline, holds
        tab.wait_for_timeout(20)


@pytest.fixture
def opened(browser, tmp_path):
    """Return a function that opens a page and fails the test on anything the browser complains about."""
    complaints = []
    tab = browser.new_page(viewport={"width": 1300, "height": 800})
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("request", lambda request: request.url.startswith("file:") or complaints.append(request.url))

    def opener(source):
        path = tmp_path / "page.html"
        path.write_text(source, encoding="utf-8")
        tab.goto(path.as_uri())
        tab.wait_for_selector("#timelines svg .lane")
        return tab

    yield opener
    tab.close()
    assert complaints == []


def details(tab):
    """Return what the details box says, as a dictionary."""
    names = tab.locator("#details dt").all_inner_texts()
    return dict(zip(names, tab.locator("#details dd").all_inner_texts(), strict=True))


@pytest.mark.browser
def test_every_bar_lies_where_its_times_say(opened, trace):
    tab = opened(page.page(trace))
    read = "bars => bars.map(b => [b.dataset.action, ...['x', 'width', 'y'].map(name => +b.getAttribute(name))])"
    bars = tab.locator("#timelines .bar").evaluate_all(read)
    scale = tab.locator("#timelines svg").evaluate("svg => svg.clientWidth") / 33
    assert len(bars) == len({name for name, *_ in bars}) == len(trace.events)
    where = {name: (x, width, y) for name, x, width, y in bars}
    for event in trace.events:
        x, width, y = where[str(event.action)]
        assert (x, width) == pytest.approx((event.start * scale, event.duration * scale), abs=0.01)
        assert y // 34 == event.rank


@pytest.mark.browser
def test_pointing_at_an_action_says_everything_about_it(opened, trace):
    tab = opened(page.page(trace))
    tab.locator("[data-action='0B0']").hover(force=True)
    assert tab.locator("#details h3").inner_text() == "0B0, backward"
    assert details(tab) == {
        "stage": "0",
        "micro-batch": "0",
        "rank": "0",
        "start": "10 units",
        "end": "12 units",
        "duration": "2 units",
        "waited for": "1B0 on rank 1, there at 10; the rank was idle for 6 units",
    }
    assert tab.locator(".cause").count() == 1
    tab.locator("[data-action='0F1']").hover(force=True)
    assert details(tab)["waited for"] == "nothing: it started when its rank was free"
    tab.mouse.move(5, 5)
    assert not tab.locator("#details").is_visible()


@pytest.mark.browser
def test_pointing_at_idle_time_says_nothing(opened, trace):
    tab = opened(page.page(trace))
    box = tab.locator("#timelines svg").bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 7 / 33, box["y"] + 15)
    assert not tab.locator("#details").is_visible()


@pytest.mark.browser
def test_the_arrow_keys_go_from_action_to_action(opened, trace):
    tab = opened(page.page(trace))
    tab.locator(".scroller").focus()
    seen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "End", "ArrowLeft"):
        tab.keyboard.press(key)
        seen.append(tab.locator("#details h3").inner_text().split(",")[0])
    assert seen == ["0F0", "0F1", "1F0", "1B7", "1B6"]
    tab.keyboard.press("Escape")
    assert not tab.locator("#details").is_visible()


@pytest.mark.browser
def test_a_hostile_name_runs_nothing(opened, trace):
    tab = opened(page.page(renamed(trace, HOSTILE)))
    assert tab.title() == f"{HOSTILE}, simulated"
    assert tab.locator("img").count() == 0


@pytest.mark.browser
def test_the_page_of_65536_actions_opens_and_zooms_to_single_actions(opened):
    trace = pipelab.simulate(pipelab.OneFOneB(32, 1024))
    tab = opened(page.page(trace))
    assert tab.locator("#timelines .bar").count() == 0
    for _ in range(14):
        tab.locator("[data-zoom=in]").click()
    tab.locator("#timelines .bar").first.wait_for(state="attached")
    action = tab.locator("#timelines .label").first.text_content()
    assert action[0] in "FB"
    tab.locator("#timelines svg").hover(position={"x": 600, "y": 10})
    name = tab.locator("#details h3").inner_text().split(",")[0]
    (event,) = (event for event in trace.events if str(event.action) == name)
    assert details(tab)["start"] == f"{event.start:,.0f} units"


@pytest.mark.browser
def test_a_comparison_fits_a_window_of_1280_pixels_with_every_label_inside_its_bar(opened):
    traces = [pipelab.simulate(kind(4, 8)) for kind in (pipelab.GPipe, pipelab.OneFOneB, pipelab.ZBV)]
    tab = opened(page.comparison_page(pipelab.compare(*traces)))
    tab.set_viewport_size({"width": 1280, "height": 900})
    wait_until(tab, "document.querySelector('#timelines svg').clientWidth < 1085")
    for place in ("html", ".figures", ".scroller"):
        wider = "places => places.filter(place => place.scrollWidth > place.clientWidth).length"
        assert tab.locator(place).evaluate_all(wider) == 0
    corners = "boxes => boxes.map(b => b.getBoundingClientRect()).map(b => [b.left, b.right, b.top, b.bottom])"
    for timeline, trace in zip(tab.locator("#timelines svg").all(), traces, strict=True):
        bars = timeline.locator(".bar").evaluate_all(corners)
        labels = timeline.locator(".label").evaluate_all(corners)
        assert len(labels) == len(bars) == len(trace.events)
        for (left, right, top, bottom), (first, last, upper, lower) in zip(labels, bars, strict=True):
            assert first <= left + 1
            assert right <= last + 1
            assert upper <= top + 1
            assert bottom <= lower + 1


@pytest.mark.browser
def test_timelines_on_one_axis_zoom_together(opened):
    traces = [pipelab.simulate(kind(4, 8)) for kind in (pipelab.Naive, pipelab.OneFOneB)]
    tab = opened(page.comparison_page(pipelab.compare(*traces)))
    scale = "bars => bars.filter(bar => bar.dataset.action[1] === 'F').map(bar => +bar.getAttribute('width'))"
    before = tab.locator("#timelines .bar").evaluate_all(scale)
    tab.locator(".scroller").first.focus()
    tab.keyboard.press("+")
    tab.keyboard.press("Home")  # goes to 0F0, and so to time 0
    wait_until(tab, "[...document.querySelectorAll('.scroller')].every(each => each.scrollLeft === 0)")
    for timeline in tab.locator("#timelines svg").all():
        after = timeline.locator(".bar").evaluate_all(scale)
        assert after == pytest.approx([before[0] * 1.5] * len(after), rel=0.01)


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_readers_light_or_dark(opened, trace, scheme):
    tab = opened(page.page(trace))
    tab.emulate_media(color_scheme=scheme)
    paper = tab.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


def test_show_opens_a_page_and_prints_its_path_where_there_is_no_browser(trace, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    trace.show()
    (written,) = tmp_path.iterdir()
    assert opened == [written.as_uri()]
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("webbrowser.open", lambda _: False)
    path = draw.show(trace)
    assert str(path) in capsys.readouterr().out
    assert path.read_text(encoding="utf-8") == page.page(trace)


def test_show_displays_the_figure_in_a_notebook(trace, monkeypatch):
    display = pytest.importorskip("IPython.display", reason="IPython is not installed")
    shown = []
    monkeypatch.setattr(draw, "_in_notebook", lambda: True)
    monkeypatch.setattr(display, "display", shown.append)
    assert draw.show(trace) is None
    (figure,) = shown
    assert "time (units)" in figure.data
