"""What notebooks show: pages in frames, as high as they are, several beside each other, and without scripts."""

from __future__ import annotations

import base64
import gzip
import html
import re
import sys

import pytest
from browsing import complaints_of, wait_until
from test_page import HOSTILE, renamed

import pipelab
from pipelab import F, Plan, check, compare, simulate

DEADLOCK = Plan.parse("0F0 0B0 0F1 0B1; 1F0 1F1 1B0 1B1")
SHOWN = {
    "trace": simulate(pipelab.OneFOneB(4, 8)),
    "comparison": compare(pipelab.GPipe(2, 4), pipelab.OneFOneB(2, 4)),
    "schedule": pipelab.OneFOneB(4, 8),
    "plan": pipelab.OneFOneB(2, 2).plan(),
    "plan with faults": DEADLOCK,
    "faults": check(DEADLOCK),
    "faults of transfers": check(pipelab.OneFOneB(2, 4), order="at-use", transport="rank"),
}


@pytest.fixture
def notebook(browser, tmp_path):
    """Return a function that shows things as cells of a notebook, and fails the test on any complaint."""
    tab = browser.new_page(viewport={"width": 1000, "height": 3000})
    complaints = complaints_of(tab, "file:", "about:")

    def opener(*things, style="color: #111"):
        cells = "".join(f"<div>{each._repr_html_()}</div>" for each in things)
        path = tmp_path / "notebook.html"
        path.write_text(f'<!DOCTYPE html><meta charset="utf-8"><body style="{style}">{cells}', encoding="utf-8")
        tab.goto(path.as_uri())
        return tab

    yield opener
    tab.close()
    assert complaints == []


@pytest.mark.parametrize("name", SHOWN)
def test_a_frame_is_as_high_as_its_page(notebook, name):
    tab = notebook(SHOWN[name])
    frame = tab.frames[1]
    wait_until(tab, "document.querySelector('iframe').style.height !== ''")
    tab.wait_for_timeout(300)
    inside = frame.evaluate("document.body.getBoundingClientRect().bottom + scrollY")
    assert tab.evaluate("document.querySelector('iframe').clientHeight") == pytest.approx(inside + 12, abs=2)
    assert frame.evaluate("document.documentElement.scrollHeight <= innerHeight")
    assert frame.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(("style", "theme"), [("color: #111", "light"), ("color: #ddd; background: #111", "dark")])
def test_a_page_is_dark_where_the_notebook_is(notebook, style, theme):
    tab = notebook(SHOWN["faults"], style=style)
    wait_until(tab.frames[1], f"document.documentElement.dataset.theme === '{theme}'")


def test_the_same_trace_twice_and_another_one_all_answer(notebook):
    tab = notebook(SHOWN["trace"], SHOWN["faults"], SHOWN["trace"])
    assert len(tab.frames) == 4
    for frame in (tab.frames[1], tab.frames[3]):
        frame.locator("[data-action='1B3']").click()
        wait_until(frame, "document.querySelector('#panel h3')?.textContent === '1B3'")
    wait_until(tab, "new Set([...document.querySelectorAll('iframe')].map(each => each.style.height)).size === 2")


@pytest.mark.parametrize("name", SHOWN)
def test_a_frame_has_a_title_and_something_for_viewers_without_scripts(name):
    shown = SHOWN[name]._repr_html_()
    (title,) = re.findall(r'<iframe [^>]*?title="([^"]+)"', shown)
    assert title
    assert 'sandbox="allow-scripts"' in shown
    still = re.search(r"<noscript>(.*)</noscript></div>$", shown, re.DOTALL)[1]
    if name == "trace":
        assert len(re.findall(r"M[\d.]+ [\d.]+h[\d.]+(?=[M\"])", still)) == 64
        assert len(re.findall(r"M[\d.]+ [\d.]+h[\d.]+v28h-[\d.]+z", still)) == len(SHOWN[name].idle)
        assert "wait 6 for B0 of rank 1" in still
        assert len(shown) < 40_000
    elif name == "comparison":
        assert still.count("<svg") == 2
        assert "All micro-batches forward, then all backward, in the same order. A step takes" in still
    else:
        assert "<pre" in still
    assert shown == SHOWN[name]._repr_html_()  # the same file for the same notebook


@pytest.mark.parametrize(
    ("shown", "live", "said"),
    [
        (simulate(pipelab.OneFOneB(4, 501)), True, '4,008 actions: trace.save("trace.html")'),
        (simulate(pipelab.OneFOneB(4, 500)), True, "</svg></noscript>"),
        (compare(pipelab.OneFOneB(4, 300), pipelab.GPipe(4, 300)), True, 'comparison.save("comparison.html")'),
        (pipelab.OneFOneB(4, 501), False, 'plan.save("plan.html")'),
    ],
)
def test_what_is_large_has_no_still_picture_but_how_to_save_it(shown, live, said):
    page = shown._repr_html_()
    assert ("<iframe" in page) == live
    assert said in page
    assert live is False or len(page) < 120_000


def test_without_matplotlib_there_is_the_page_or_text(monkeypatch):
    loaded = [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]
    for name in {"matplotlib", *loaded}:
        monkeypatch.setitem(sys.modules, name, None)
    assert "<iframe" in SHOWN["trace"]._repr_html_()
    assert "wait 6 for B0" in SHOWN["trace"]._repr_html_()
    assert "<iframe" in SHOWN["comparison"]._repr_html_()
    assert "<iframe" in simulate(pipelab.OneFOneB(4, 501))._repr_html_()
    assert "rank 0 | <span" in SHOWN["plan"]._repr_html_()
    assert "deadlock: rank 0 waits" in SHOWN["faults"]._repr_html_()
    assert "deadlock: rank 0 waits" in DEADLOCK._repr_html_()


def test_on_paper_a_wide_picture_is_whole(browser, tmp_path):
    tab = browser.new_page(viewport={"width": 700, "height": 900})
    tab.goto(pipelab.OneFOneB(4, 8).plan().save(tmp_path / "x.html").as_uri())
    width = "document.querySelector('.picture svg').getBoundingClientRect().width"
    assert tab.evaluate(width) > 700
    tab.emulate_media(media="print")
    assert tab.evaluate(width) <= 700
    tab.close()


@pytest.mark.parametrize("kind", ["trace", "comparison", "plan", "faults"])
def test_names_are_text_in_every_frame(notebook, kind):
    trace = renamed(SHOWN["trace"], HOSTILE)
    hostile = Plan([[F(0), HOSTILE]], name=HOSTILE)
    thing = {"trace": trace, "comparison": compare(trace, names=[HOSTILE]), "plan": hostile, "faults": check(hostile)}
    shown = thing[kind]._repr_html_()
    assert "<img src=x" not in shown
    packed, length = re.search(r'"([^" ]+)"\.match.*slice\(0, ?(\d+)\)', html.unescape(shown), re.DOTALL).groups()
    packed = base64.b85decode(packed.translate(str.maketrans(",./", "&<>")))
    assert "<img src=x" not in gzip.decompress(packed[: int(length)]).decode()
    tab = notebook(thing[kind])
    tab.wait_for_timeout(200)
    assert tab.title() != "owned"
    assert tab.frames[1].evaluate("document.querySelectorAll('img').length") == 0
