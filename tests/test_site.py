"""The documentation's own tools, and the site that they build."""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from browsing import served, wait_until
from commands import ran

import pipelab

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "site"
SOURCES = {".py", ".md", ".yml", ".js", ".css", ".html", ".svg", ".toml"}

TUTORIAL = """# %% [markdown]
# # A title
#
# A story; before it comes [another](first_schedule.md#here).

# %%
print("question")

# %% tags=["answer"]
import pipelab

print("printed")
pipelab.simulate(pipelab.GPipe(2, 2))

# %% [markdown] tags=["answer"]
# Because.

# %%
1 + 1
"""


def test_answers_of_a_tutorial_are_folded_and_its_notebook_waits() -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("mkdocs", reason="needs the tools of documentation: make site")
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    page, written, _ = hooks["render"](Path("small.py"), TUTORIAL)

    assert page.startswith("# A title\n\n[Notebook](small.ipynb){ download } In a terminal: `pipelab tutorial small`\n")
    before, folded, after = (page.split("<details", 1)[0], *page.split("<details", 1)[1].split("</details>"))
    assert "question" in before
    assert "Because." not in before + after
    assert all(text in folded for text in ("show the answer", 'print("printed")', "small-2.html", "Because."))
    assert "```text\n2\n```" in after

    book = nbformat.reads(written, as_version=4)
    nbformat.validate(book)
    assert "another (`pipelab tutorial first_schedule`)" in book.cells[0].source
    assert [cell.cell_type for cell in book.cells] == ["markdown", "code", "code", "code"]
    assert 'show_answer("small", 0, ' in book.cells[2].source
    assert not any(cell.outputs for cell in book.cells[1:])


def test_the_schedules_of_the_slides_can_be_edited_in_the_playground() -> None:
    pytest.importorskip("mkdocs", reason="needs the tools of documentation: make site")
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    slides = hooks["on_page_markdown"]((ROOT / "docs" / "teach" / "slides.md").read_text(encoding="utf-8"))
    assert len(re.findall(r'"../../playground/#code=[\w-]+"', slides)) == 2
    with pytest.raises(hooks["PluginError"], match="nothing of this"):
        hooks["editable"]("print(1)\n")


def test_teachs_table_says_what_each_tutorial_says_itself() -> None:
    pytest.importorskip("mkdocs", reason="needs the tools of documentation: make site")
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    table = (ROOT / "docs" / "teach" / "index.md").read_text(encoding="utf-8")
    asked = re.findall(r"tutorials/(\w+)\.md\) \| <!-- minutes (\w+) --> \|.*\| <!-- before (\w+) --> \|", table)
    assert sorted(asked) == [(path.stem,) * 3 for path in sorted((ROOT / "tutorials").glob("*.py"))]
    shown = hooks["on_page_markdown"](table)
    text = (ROOT / "tutorials" / "latency.py").read_text(encoding="utf-8")
    minutes = re.search(r"It takes about (\d+) minutes, and you need \[The single loop, dissected\]", text)[1]
    assert re.search(rf"\| {minutes} \|.*\| \[The single loop, dissected\]\(\.\./tutorials/option_c\.md\) \|", shown)
    assert "<!-- minutes" not in shown
    assert "<!-- before" not in shown


def built() -> Path:
    """Return the folder of the site that `make site` built from the files as they are now."""
    sources = [path for folder in ("docs", "tutorials", "pipelab", "teacher") for path in (ROOT / folder).rglob("*")]
    newest = max(path.stat().st_mtime for path in (*sources, ROOT / "mkdocs.yml") if path.suffix in SOURCES)
    home = SITE / "index.html"
    if not home.is_file() or home.stat().st_mtime < newest:
        reason = "needs the site as the files are now: make site"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return SITE


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """Serve the built site; return its address."""
    with served(built()) as address:
        yield address


class Parts(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in {"href", "src"}:
                self.links.append(value)
            if value and name in {"id", "name"}:
                self.anchors.add(value)


def pages() -> list[Path]:
    """Return all pages of the site: each folder's own, without the pictures that stand in frames."""
    return sorted(path for path in built().rglob("*.html") if "md-content" in path.read_text(encoding="utf-8"))


def test_every_link_of_the_site_leads_to_something_that_is_there() -> None:
    parts = {page: Parts(page) for page in pages() if page.name != "404.html"}
    assert len(parts) > 30
    broken = []
    for page, found in parts.items():
        for link in found.links:
            path, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", link):  # another site, or an address of mail
                continue
            there = (page.parent / path.partition("?")[0]).resolve() if path else page
            there = there / "index.html" if there.is_dir() else there
            known = (
                anchor == ""
                or there not in parts
                or anchor in parts[there].anchors
                or anchor.startswith(("schedule=", "code="))
            )
            if not there.is_file() or not known:
                broken.append(f"{page.relative_to(SITE)}: {link}")
    assert broken == []


def test_every_schedule_has_a_card_and_a_page_with_its_own_code() -> None:
    gallery = (built() / "schedules" / "index.html").read_text(encoding="utf-8")
    for name, kind in pipelab.schedules.items():
        assert f'src="{name}.svg"' in gallery
        page = (SITE / "schedules" / name / "index.html").read_text(encoding="utf-8")
        assert f'src="../{name}{"" if name == "1f1b" else "_and_1f1b"}.html"' in page
        assert f'<a href="{name}/">' in gallery  # a dot of the scatter
        assert kind.__name__ in page


class Visit:
    """A tab that keeps what its pages asked for, and what went wrong."""

    def __init__(self, chromium: Any, site: str, width: int, height: int, scheme: str = "light") -> None:
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.site = site
        self.tab = context.new_page()
        self.wrong: list[str] = []
        self.responses: list[Any] = []
        context.route("**/*", self._route)
        self.tab.on("response", lambda response: self.responses.append(response))
        self.tab.on("console", lambda said: said.type == "error" and self.wrong.append(f"{self.tab.url}: {said.text}"))
        self.tab.on("pageerror", lambda error: self.wrong.append(f"{self.tab.url}: {error}"))

    def _route(self, route: Any) -> None:
        if route.request.url.startswith((self.site, "data:", "blob:")):
            route.continue_()
        else:
            self.wrong.append(f"{self.tab.url} asks for {route.request.url}")
            route.abort()

    def open(self, page: str) -> None:
        self.responses.clear()
        self.tab.goto(self.site + page, wait_until="load")


ALL = """() => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  for (const each of document.querySelectorAll("iframe[loading]")) each.loading = "eager";
}"""
FITS = """() => [...document.querySelectorAll("iframe.page")].every((frame) => {
  const inside = frame.contentDocument;
  return inside?.getElementById("looks") && inside.documentElement.dataset.theme
    && frame.clientHeight >= inside.body.getBoundingClientRect().height
    && inside.documentElement.scrollWidth <= frame.clientWidth + 1;
})"""
FIRST = """() => {
  const frame = document.querySelector("iframe.page"), lanes = frame.contentDocument.querySelector(".scroller");
  return frame.getBoundingClientRect().top + lanes.getBoundingClientRect().top;
}"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 844)])
def test_every_page_fits_the_screen_and_asks_nobody_else(browser: Any, site: str, width: int, height: int) -> None:
    visit = Visit(browser, site, width, height)
    too_wide = []
    for page in pages():
        visit.open(page.relative_to(SITE).as_posix().removesuffix("index.html"))
        visit.tab.evaluate(ALL)
        wait_until(visit.tab, FITS)
        if visit.tab.evaluate("document.documentElement.scrollWidth > innerWidth"):
            too_wide.append(visit.tab.url)
        visit.wrong += [f"{each.url}: {each.status}" for each in visit.responses if each.status >= 400]
    assert too_wide == []
    assert visit.wrong == []


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 844)])
def test_home_and_every_schedule_show_a_picture_first(browser: Any, site: str, width: int, height: int) -> None:
    visit = Visit(browser, site, width, height)
    for page in ["", *(f"schedules/{name}/" for name in pipelab.schedules)]:
        visit.open(page)
        wait_until(visit.tab, FITS)
        assert visit.tab.evaluate(FIRST) < height - 100, page  # and a rank of it
        if page == "":
            assert visit.tab.evaluate("document.querySelector('iframe').getBoundingClientRect().top") < 300


def test_home_is_light_and_its_frame_is_as_dark_as_the_site(browser: Any, site: str) -> None:
    visit = Visit(browser, site, 1280, 720, "dark")
    visit.open("")
    wait_until(visit.tab, FITS)
    visit.tab.wait_for_load_state("networkidle")
    assert len(visit.responses) <= 12
    assert sum(len(each.body()) for each in visit.responses) <= 500_000

    shown = "document.querySelector('iframe').contentDocument.documentElement.dataset.theme"
    wait_until(visit.tab, f"{shown} === 'dark'")
    visit.tab.locator("label[title='Light']").click()
    wait_until(visit.tab, f"{shown} === 'light'")

    visit.tab.locator("input.md-search__input").fill("interleaved")
    visit.tab.locator(".md-search-result__link").first.wait_for()
    assert visit.wrong == []


def test_the_search_finds_what_learners_read_before_what_teachers_read(browser: Any, site: str) -> None:
    visit = Visit(browser, site, 1280, 720)
    for word, first in (("bubble", "tutorials/"), ("deadlock", "tutorials/"), ("draw", "reference/drawing/")):
        visit.open("")
        visit.tab.locator("input.md-search__input").fill(word)
        link = visit.tab.locator(".md-search-result__link").first
        link.wait_for()
        assert (link.get_attribute("href") or "").removeprefix(site).startswith(first), word
    assert visit.wrong == []


def test_no_file_is_there_that_no_reader_loads() -> None:
    assert [path for path in built().rglob("*") if path.suffix == ".map" or path.name == "wordcut.js"] == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_axe_finds_nothing_serious(browser: Any, site: str, width: int, scheme: str) -> None:
    axe = ROOT / "build" / "pyodide" / "node_modules" / "axe-core" / "axe.min.js"
    if not axe.is_file():
        pytest.skip("axe-core is not there: npm brings it where the site is built")
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, bypass_csp=True)
    context.add_init_script(path=axe)  # in frames, too
    tab, found = context.new_page(), []
    names = (
        "tutorials/what_1f1b_buys/",
        "schedules/",
        "schedules/zb-h1/",
        "playground/",
        "challenges/",
        "reference/plans/",
    )
    names += ("grading/", "how_to/read_the_picture/", "glossary/", "404.html")  # each template of the site
    for page in ("", *names, "schedules/1f1b.html", "misconceptions.html", "reference/diff.html"):
        tab.goto(site + page, wait_until="load")
        tab.wait_for_timeout(300)  # frames draw, and the theme is passed to them
        seen = tab.evaluate("axe.run(document, { resultTypes: ['violations'] })")
        for each in seen["violations"]:
            if each["impact"] in ("serious", "critical"):
                found += [f"{page}: {each['id']}: {node['html'][:120]}" for node in each["nodes"][:3]]
    context.close()
    assert found == []


def test_words_of_a_tutorial_light_what_they_speak_of(browser: Any, site: str) -> None:
    visit, said = Visit(browser, site, 1280, 800), 0
    for page in sorted((SITE / "tutorials").glob("*/index.html")):
        if 'class="lights"' not in page.read_text(encoding="utf-8"):
            continue
        visit.open(f"tutorials/{page.parent.name}/")
        for at in range(visit.tab.locator("a.lights").count()):
            visit.open(f"tutorials/{page.parent.name}/")  # anew, so that nothing is selected
            visit.tab.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
            link = visit.tab.locator("a.lights").nth(at)
            frame = f"iframe[name='{link.get_attribute('target')}']"
            visit.tab.locator(frame).scroll_into_view_if_needed()
            inside = visit.tab.frame_locator(frame)
            inside.locator(".scroller").first.wait_for()
            critical = link.get_attribute("href").endswith("l=c")
            lit = inside.locator("[data-layer='critical'][aria-pressed='true']" if critical else "#panel")
            assert not lit.is_visible()
            link.click()
            lit.wait_for()
            said += 1
    assert said >= 12
    assert visit.wrong == []


RING = """() => {
  let inside = document, at = document.activeElement;
  for (; at.tagName === "IFRAME"; at = inside.activeElement) inside = at.contentDocument;
  if (at.matches("body, .md-search *")) return 21; // the search is an open box, not a ring
  const shown = at.matches(".md-option") ? at.nextElementSibling : (at.closest(".cm-editor") ?? at);
  const light = (colour) => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((each) =>
      each <= 10 ? each / 3295 : ((each / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const style = inside.defaultView.getComputedStyle(shown);
  if (style.outlineStyle === "none" || parseFloat(style.outlineWidth) < 2) return 0;
  let [around, view] = [shown.parentElement, inside.defaultView], ground = "";
  for (; around && !ground; around = around.parentElement ?? view.frameElement, view = view.parent) {
    const paper = around.ownerDocument.defaultView.getComputedStyle(around).backgroundColor;
    if (!/, 0\\)$/.test(paper)) ground = paper;
  }
  const [ring, paper] = [light(style.outlineColor), light(ground || "white")];
  return Math.max(ring, paper) / Math.min(ring, paper);
}"""


def reach(tab: Any, there: str, most: int = 60) -> None:
    """Press Tab until the focus is where a selector says, in the page or in a frame; all on the way have a ring."""
    find = f"""() => {{
      let at = document.activeElement;
      while (at.tagName === "IFRAME") at = at.contentDocument.activeElement;
      return at.matches({there!r});
    }}"""
    for _ in range(most):
        tab.keyboard.press("Tab")
        what = tab.evaluate("document.activeElement.outerHTML.slice(0, 120)")
        assert tab.evaluate(RING) >= 3, what
        if tab.evaluate(find):
            return
    raise AssertionError(f"{most} times Tab do not lead to {there}, but to {what}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_keyboard_alone_leads_through_the_site(browser: Any, site: str, scheme: str) -> None:
    visit = Visit(browser, site, 1280, 800, scheme)
    tab, keys = visit.tab, visit.tab.keyboard

    visit.open("")  # play the picture
    wait_until(tab, FITS)
    reach(tab, ".md-skip", 1)
    keys.press("Enter")
    reach(tab, "#play", 30)  # fewer than without skipping
    keys.press("Enter")
    tab.frame_locator(".home").locator("#now:not(:empty)").wait_for()
    reach(tab, "body")  # out of the frame, and once around

    visit.open("tutorials/fill_and_drain/")  # words light a gap
    reach(tab, ".md-skip", 1)
    keys.press("Enter")
    reach(tab, "a.lights")
    keys.press("Enter")
    tab.frame_locator("iframe.page >> nth=0").locator("#panel").wait_for()

    visit.open("schedules/")  # open a schedule
    reach(tab, "a[href='zb-h1/']", 90)
    keys.press("Enter")
    tab.wait_for_url("**/schedules/zb-h1/")

    visit.open("playground/")  # pass the editor, edit, move a slider, select an action
    tab.locator("#pg-share:enabled").wait_for()
    reach(tab, "#pg-load")
    keys.press("Shift+Tab")
    keys.type("# ")
    assert "# " in (tab.locator("#pg-code").text_content() or "")
    keys.press("Escape")
    reach(tab, "[name=ranks]")
    keys.press("ArrowRight")
    assert tab.locator("label:has([name=ranks]) output").text_content() == "5"
    reach(tab, ".scroller")
    keys.press("ArrowRight")
    tab.frame_locator(".pg-frame").locator("#panel").wait_for()

    visit.open("glossary/")  # search
    keys.press("/")
    keys.type("interleaved")
    tab.locator(".md-search-result__link").first.wait_for()
    keys.press("ArrowDown")
    keys.press("Enter")
    tab.wait_for_url(lambda address: "glossary/" not in address)
    assert visit.wrong == []


def test_the_playground_shows_all_lanes_the_axis_and_the_player_on_one_screen(browser: Any, site: str) -> None:
    visit = Visit(browser, site, 1280, 800)
    visit.open("playground/")
    visit.tab.locator("#pg-load").wait_for()  # the last thing that moves the picture down
    player = visit.tab.frame_locator(".pg-frame").locator("#play")
    player.wait_for()
    box = player.bounding_box()
    assert box["y"] + box["height"] <= 800


def test_live_pictures_share_their_script() -> None:
    live = [path for path in built().rglob("*.html") if 'id="data"' in path.read_text(encoding="utf-8")]
    whole = [
        path.relative_to(SITE).as_posix()
        for path in live
        if not re.search(r"(tracer|alone).js", path.read_text(encoding="utf-8"))
    ]
    assert len(live) > 40
    assert whole == []


def test_every_handout_prints_on_one_page(browser: Any, site: str) -> None:
    visit = Visit(browser, site, 1280, 800)
    handouts = sorted((SITE / "teach").glob("handout_*/"))
    assert handouts
    for handout, paper in product(handouts, ("A4", "Letter")):
        visit.open(f"teach/{handout.name}/")
        assert len(re.findall(rb"/Type /Page\b", visit.tab.pdf(format=paper))) == 1, handout.name


@pytest.mark.filterwarnings("ignore:.* ranks share:UserWarning")  # on a machine with fewer GPUs than ranks
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("page", ["misconceptions.md", "how_to/from_a_script.md"])
def test_the_code_of_a_page_runs_and_its_numbers_hold(page: str) -> None:
    assert "pipelab" in ran(ROOT / "docs" / page)
