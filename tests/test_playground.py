"""The playground: Python in the browser says what Python says here, and a loop ends."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from browsing import served, wait_until
from commands import RIGHT

import pipelab

DOCS = Path(__file__).resolve().parents[1] / "docs"
PYODIDE = runpy.run_path(str(DOCS / "pyodide.py"))
EDITING = runpy.run_path(str(DOCS / "editing.py"))
DRAW = runpy.run_path(str(DOCS / "playground" / "playground.py"))["draw"]
SETTINGS = {"ranks": 4, "microbatches": 8, "cost": {"forward": 1, "backward": 2}}
MINE = RIGHT.partition("\n\nclass Chatty")[0]
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
DEADLOCK = """
import pipelab
from pipelab import B, F

class Reversed(pipelab.Schedule):
    def actions(self, rank):
        warmup = rank + 1
        for m in range(warmup):
            yield F(m)
        for m in range(self.microbatches - warmup):
            yield B(m)
            yield F(warmup + m)
        for m in range(self.microbatches - warmup, self.microbatches):
            yield B(m)
"""


def reversed_schedule():
    namespace = {}
    exec(DEADLOCK, namespace)  # noqa: S102 - the code above
    return namespace["Reversed"]


def test_the_last_schedule_class_is_drawn_with_the_settings():
    trace = pipelab.simulate(pipelab.GPipe(3, 5), pipelab.Cost(forward=2, latency=1))
    found = DRAW(RIGHT, {"ranks": 3, "microbatches": 5, "cost": {"forward": 2, "latency": 1}})
    assert found["sets"] == "nothing"
    assert f"A step takes {trace.makespan:g} units" in found["content"]["subtitle"]


@pytest.mark.parametrize(
    ("code", "sets", "words"),
    [
        ("import pipelab\npipelab.ZBH1", "nothing", "ZB-H1 · 4 ranks, 8 micro-batches"),
        ("import pipelab\npipelab.GPipe(2, 3)", "sizes", "GPipe · 2 ranks, 3 micro-batches"),
        (
            "import pipelab\nt = pipelab.simulate(pipelab.GPipe(2, 3))\nprint(1)",
            "all",
            "GPipe · 2 ranks, 3 micro-batches",
        ),
        ("import pipelab as p\np.compare(*(p.simulate(k(2, 2)) for k in (p.GPipe, p.Naive)))", "all", "2 traces"),
    ],
)
def test_the_code_says_what_is_drawn_and_which_settings_it_leaves_open(code, sets, words):
    found = DRAW(code, SETTINGS)
    assert (found["sets"], words in found["content"]["title"]) == (sets, True)


def test_every_schedule_of_the_menu_draws_itself():
    for name, shown in PYODIDE["_schedules"]().items():
        assert DRAW(shown["code"], SETTINGS)["content"] == shown["content"], name


def test_a_fault_has_the_words_of_check_and_a_picture():
    faults = pipelab.check(reversed_schedule()(4, 8))
    found = DRAW(DEADLOCK, SETTINGS)
    assert (found["fault"], "more" in found) == (str(faults[0]), False)
    before, after = found["pictures"]
    assert len(before["arrows"]) == len(faults[0].cycle)
    assert {cell["state"] for row in after["rows"] for cell in row["cells"] if cell} == {"ran"}
    assert "memory-cap" in DRAW(RIGHT, {**SETTINGS, "cap": 3})["fault"]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("yield F(m)", "yield B(m)"),
        ("yield B(m)", "yield B(n)"),
        ("yield B(m)", "yield F(m)"),
        ("F(warmup + m)", "F(warmup - m)"),
        ("F(m)", "F"),
        ("- rank", "* rank"),
    ],
)
def test_one_wrong_letter_makes_one_fault_in_front_without_names_of_the_library(right, wrong):
    code = (DOCS / "playground" / "first.py").read_text(encoding="utf-8")
    found = DRAW(code.replace(right, wrong, 1), SETTINGS)
    every = f"{found['fault']} {found.get('more', {}).get('fault', '')}"
    assert found["fault"].count("  try: ") == 1
    assert len(found["pictures"]) <= 2
    assert "error." not in every
    assert "pipelab." not in every
    assert "try: fix that line" in found["fault"] or found["more"]["title"].startswith("and ")


def test_the_other_faults_are_there_for_who_asks():
    found = DRAW("import pipelab\npipelab.check(pipelab.Plan.parse('0F0 0F0 0B0; 1B0 1B0'))", SETTINGS)
    faults = pipelab.check(pipelab.Plan.parse("0F0 0F0 0B0; 1B0 1B0"))
    assert found["fault"] == str(faults[0])
    assert found["more"]["title"] == f"and {len(faults) - 1} more"
    assert all(fault.message.splitlines()[0] in found["more"]["fault"] for fault in faults[1:])


@pytest.mark.parametrize(
    ("code", "line", "words"),
    [
        ("x = 1\nclass Nothing(", 2, "was never closed"),
        ("def f():\n    return 1 / 0\n\nf()", 2, "ZeroDivisionError"),
        (RIGHT.replace("yield F(m)", "yield F(m) / 0"), None, "TypeError"),
        ("raise SystemExit(5)", 1, "SystemExit"),
        ("x = 1", None, "nothing to draw"),
    ],
)
def test_an_error_names_its_line_and_no_line_of_the_playground(code, line, words):
    found = DRAW(code, SETTINGS)
    assert words in found["fault"]
    assert "playground" not in found["fault"]
    assert found["line"] == (line or found["line"])


def test_what_the_code_prints_is_kept_and_a_flood_is_cut():
    assert DRAW("print('hello')\nimport pipelab\npipelab.GPipe", SETTINGS)["printed"] == "hello\n"
    assert "80,001 more" in DRAW("print('x' * 100_000)", SETTINGS)["printed"]


def test_the_archive_is_the_same_whenever_it_is_made_and_imports_without_pytorch(tmp_path):
    archive = PYODIDE["_archive"]
    (tmp_path / "pipelab.zip").write_bytes(archive())
    assert archive() == (tmp_path / "pipelab.zip").read_bytes()
    blocked = "import sys; sys.path[:0] = ['pipelab.zip']; sys.modules.update(dict.fromkeys(['torch', 'matplotlib']))"
    run = subprocess.run(
        [sys.executable, "-Ic", f"{blocked}; import playground, pipelab; print(pipelab.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pipelab.zip" in run.stdout


def test_a_cell_to_edit_brings_what_it_needs_and_no_more():
    above = ["import os\nfrom pipelab import F, B\na, b = 1, 2", "print(a)\nassert a == 1", "c = 3"]
    code = "from pipelab import F, B\na, b = 1, 2\nd = b\nF(d)\n"
    assert EDITING["self_contained"](above, "d = b\nF(d)") == code


def test_only_cells_that_the_browser_can_draw_have_a_link():
    setup, tensors = "import pipelab\nimport torch", "torch.ones(1)\npipelab.check(pipelab.GPipe(2, 2))"
    cells = [setup, "print(1)", "pipelab.simulate(pipelab.GPipe(2, 2))", tensors]
    *none, linked, with_torch = EDITING["links"](cells, "../")
    assert (none, with_torch, "../#code=" in linked) == (["", ""], "", True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Serve the playground alone on this machine; return its address."""
    folder = tmp_path_factory.mktemp("site")
    engine = PYODIDE["build"](folder)
    if "reason" in engine:
        pytest.skip(f"needs Pyodide: {engine['reason']}")
    (folder / "bare.html").write_text('<!DOCTYPE html><link rel="icon" href="data:,"><script src="engine.js"></script>')
    with served(folder) as address:
        yield address


@pytest.fixture
def opened(browser, site):
    """Return a function that opens a page which may ask this machine alone, and may not complain."""
    complaints = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(100_000)  # ms: a slow machine takes long to fill in two thousand lines
    tab = context.new_page()
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("console", lambda message: complaints.append(message.text))

    def refuse(route):
        complaints.append(route.request.url)
        route.abort()

    context.route(lambda url: not url.startswith((site, "data:", "blob:")), refuse)

    def opener(path):
        tab.goto(site + path)
        return tab

    yield opener
    context.close()
    assert complaints == []


@pytest.mark.npm
def test_the_worker_answers_ends_a_loop_and_goes_on(opened):
    tab = opened("bare.html")
    call = "([code, settings]) => pipelabEngine.call('draw', [code, settings])"
    found = tab.evaluate(call, [DEADLOCK, SETTINGS])
    assert found["fault"] == str(pipelab.check(reversed_schedule()(4, 8))[0])
    assert tab.evaluate(
        "async () => { try { await pipelabEngine.call('draw', ['while True: pass', {}]); }"
        " catch (error) { return error instanceof pipelabEngine.Stopped; } }"
    )
    again = tab.evaluate(call, ["import pipelab\npipelab.OneFOneB", SETTINGS])
    assert again == json.loads(json.dumps(DRAW("import pipelab\npipelab.OneFOneB", SETTINGS)))
    unknown = "pipelabEngine.call('nonsense', []).catch((error) => error.message)"
    assert "nonsense" in tab.evaluate(unknown)


def python_runs(tab):
    """Press the button that loads Python, and wait until its first answer is shown."""
    tab.locator("#pg-load").click()
    done = "document.querySelector('.pg-start').hidden && document.getElementById('pg-state').value === ''"
    wait_until(tab, done, seconds=120)


CODE = "[...document.querySelectorAll('#pg-code .cm-line')].map((each) => each.textContent).join('\\n')"
FRAME = "document.querySelector('.pg-frame').contentDocument"


def shows(tab, title):
    """Wait until the frame shows something with this title; Python may have to start anew before."""
    wait_until(tab, f"{FRAME}.querySelector('h1')?.textContent === {title!r}", seconds=90)


def test_without_npm_the_rest_is_there_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    fresh = runpy.run_path(str(DOCS / "pyodide.py"))
    fresh["vendored"].__wrapped__.__globals__["_VENDORED"] = tmp_path
    made = fresh["files"]()
    assert made["editor.js"] == b""
    assert "npm" in json.loads(made["engine.json"])["reason"]
    assert {"frame.html", "schedules.json"} <= made.keys()
    assert not [name for name in made if name.startswith("pyodide/")]


@pytest.mark.npm
def test_the_page_draws_explains_ends_a_loop_and_goes_on(opened):
    tab = opened("index.html")
    shows(tab, "MySchedule · 4 ranks, 8 micro-batches, simulated")  # before Python is there
    tab.locator("#pg-code").fill("x = 1")
    wait_until(tab, "document.getElementById('pg-state').value.includes('until this code runs')")
    tab.locator("#pg-reset").click()
    wait_until(tab, "document.getElementById('pg-state').value === ''")
    python_runs(tab)
    tab.locator("[name=ranks]").fill("3")
    shows(tab, "MySchedule · 3 ranks, 8 micro-batches, simulated")
    tab.locator("[name=ranks]").fill("4")
    tab.locator("#pg-code").fill(DEADLOCK)
    wait_until(tab, "!document.querySelector('.pg-fault').hidden")
    assert tab.locator(".pg-fault > pre").text_content() == str(pipelab.check(reversed_schedule()(4, 8))[0])
    assert tab.evaluate("!document.querySelector('.pg-frame').hidden && document.querySelector('.pg-frame').inert")
    assert tab.locator(".pg-order").count() == 2
    first = str(pipelab.check(reversed_schedule()(4, 8))[0]).splitlines()[0]
    assert tab.evaluate("document.querySelector('.pg-fault').innerText.split(" + repr(first) + ").length") == 2  # once
    assert tab.locator("[data-arrow]").count() == len(pipelab.check(reversed_schedule()(4, 8))[0].cycle)
    tab.locator("#pg-code").fill(f"x = 1\nraise ValueError({HOSTILE!r})")
    wait_until(tab, "document.querySelector('.pg-wrong')?.textContent.startsWith('raise')")
    assert tab.locator(".pg-fault > pre").get_attribute("tabindex") == "0"  # its long lines scroll by keys
    assert HOSTILE in tab.locator(".pg-fault > pre").text_content()
    tab.locator("#pg-code").fill("while True: pass")
    wait_until(tab, "document.querySelector('.pg-fault').textContent.includes('was stopped after 2 s')")
    tab.locator("#pg-code").fill("import pipelab\npipelab.ZBH1")
    shows(tab, "ZB-H1 · 4 ranks, 8 micro-batches, simulated")
    assert tab.locator("[name=weight_grad]").is_visible()
    assert tab.title() == "playground"


@pytest.mark.npm
def test_the_editor_shows_the_first_code_whole_and_has_tab_undo_and_colours(opened):
    tab = opened("index.html")
    shows(tab, "MySchedule · 4 ranks, 8 micro-batches, simulated")
    first = (DOCS / "playground" / "first.py").read_text(encoding="utf-8")
    assert tab.evaluate(CODE) == first
    box = "document.querySelector('.cm-scroller')"
    assert tab.evaluate(f"{box}.scrollWidth === {box}.clientWidth")
    assert tab.locator(".tok-keyword", has_text="yield").count() == 3
    assert tab.locator(".cm-lineNumbers .cm-gutterElement").nth(3).text_content() == "3"
    tab.locator("#pg-code").click()
    for key in ("Control+End", "i", "f", "Space", "x", ":", "Enter", "y", "Tab"):
        tab.keyboard.press(key)
    assert tab.evaluate(CODE) == f"{first}if x:\n        y"
    while tab.evaluate(CODE) != first:
        tab.keyboard.press("Control+z")
    tab.keyboard.press("Escape")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") != "pg-code"


@pytest.mark.npm
def test_without_codemirror_the_code_is_in_a_plain_box(opened):
    tab = opened("bare.html")
    tab.route("**/editor.js", lambda route: route.fulfill(body=""))
    opened("index.html")
    shows(tab, "MySchedule · 4 ranks, 8 micro-batches, simulated")
    tab.locator("textarea#pg-code").fill("x = 1")
    wait_until(tab, "document.getElementById('pg-state').value.includes('until this code runs')")
    tab.locator("#pg-schedule").select_option("gpipe")
    assert "class GPipe" in tab.locator("textarea#pg-code").input_value()


@pytest.mark.npm
def test_a_shared_link_brings_code_sliders_and_selection_to_a_phone(opened):
    tab = opened("index.html")
    python_runs(tab)
    tab.locator("#pg-code").fill(MINE)
    tab.locator("[name=microbatches]").fill("5")
    shows(tab, "MySchedule · 4 ranks, 5 micro-batches, simulated")
    tab.evaluate("document.querySelector('.pg-frame').contentWindow.restore('#v=1&s=0:1B3.1')")
    tab.locator("#pg-share").click()
    wait_until(tab, "document.getElementById('pg-state').value.includes('link')")
    link = tab.evaluate("location.hash")
    assert "1B3" in link
    tab.locator("#pg-code").fill("\n".join(f"x{at} = {at**9}" for at in range(2000)))
    wait_until(tab, "document.querySelector('.pg-fault').textContent.includes('nothing to draw')")  # the run has ended
    tab.locator("#pg-share").click()
    wait_until(tab, "document.getElementById('pg-state').value.includes('8 kB')")
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.goto("about:blank")
    opened(f"index.html{link}")
    wait_until(tab, f"{CODE} === {json.dumps(MINE)}")
    wide = "document.documentElement.scrollWidth"
    assert tab.evaluate(wide) == 390
    python_runs(tab)
    shows(tab, "MySchedule · 4 ranks, 5 micro-batches, simulated")
    wait_until(tab, f"{FRAME}.querySelector('#panel h3')?.textContent === '1B3'")
    assert tab.evaluate(wide) == 390
    tab.locator("#pg-code").fill(DEADLOCK)
    wait_until(tab, "!document.querySelector('.pg-fault').hidden")
    assert tab.evaluate(wide) == 390


@pytest.mark.npm
def test_a_link_of_the_tutorial_or_a_bad_one_is_text(opened):
    tab = opened(f"index.html#code={EDITING['packed'](HOSTILE)}")
    wait_until(tab, f"{CODE} === {json.dumps(HOSTILE)}")
    assert tab.locator("img").count() == 0
    for bad in ("code=%3Cimg%3E", "code=AAAA", f"schedule={HOSTILE}", "ranks=-1&cap=x&v=1&s=<img>&code"):
        tab.goto("about:blank")
        opened(f"index.html#{bad}")
        shows(tab, "MySchedule · 4 ranks, 8 micro-batches, simulated")
        assert tab.locator("img").count() == 0
    tab.goto("about:blank")
    opened("index.html#schedule=zb-h1&ranks=4")
    shows(tab, "ZB-H1 · 4 ranks, 8 micro-batches, simulated")
    assert tab.locator("#pg-schedule").input_value() == "zb-h1"


@pytest.mark.npm
def test_a_site_without_python_says_why_beside_the_picture(opened):
    tab = opened("bare.html")
    tab.route("**/engine.json", lambda route: route.fulfill(json={"reason": "npm is not installed"}))
    opened("index.html#schedule=gpipe")
    shows(tab, "GPipe · 4 ranks, 8 micro-batches, simulated")
    wait_until(tab, "document.getElementById('pg-state').value === 'npm is not installed'")
    assert tab.locator("#pg-load").is_disabled()


@pytest.mark.npm
def test_a_level_is_solved_by_hand_without_python_and_refused_in_the_words_of_check(opened):
    tab = opened("challenges.html")
    asked = []
    tab.on("request", lambda request: asked.append(request.url))
    wait_until(tab, "document.querySelectorAll('.ch-levels button').length === 16")
    placed = "document.querySelectorAll('.ch-bar').length"
    assert tab.evaluate(placed) >= 1  # 0F0 leaves no choice
    worth, clicks = tab.locator(".ch-worth"), 0
    while not worth.is_visible():
        tab.locator(".ch-next button").first.click()
        clicks += 1
    assert clicks < 18  # the forced ones placed themselves
    assert "units" in worth.text_content()
    tab.locator("#ch-reset").click()
    choices = [f"{s}F{m}" for m in range(3) for s in range(3)] + [f"{s}B{m}" for m in range(3) for s in (2, 1, 0)]
    for word in choices:
        button = tab.get_by_role("button", name=f": {word} on rank {word[0]}, begins at")
        if not tab.locator(f".ch-bar[title^='{word},']").count():
            button.click()
    assert "15 units. Par!" in worth.text_content()
    assert "gpipe" in worth.text_content()
    assert "fill and drain" in worth.text_content()  # the lesson
    assert "★★★" in tab.locator(".ch-levels [aria-current]").text_content()
    assert not [each for each in asked if "pyodide" in each]  # not a byte of Python
    assert tab.locator(".ch-named").text_content() == "par 15"  # the dashed line's name
    assert tab.locator(".ch-score dd").all_text_contents() == ["15 units", "18", "15", "15 ★★★", "0 of 3"]
    assert tab.locator(".ch-score tbody tr").nth(1).locator("td").all_text_contents() == ["1", "6", "6"]
    assert tab.locator(".ch-critical").count() >= 6
    tab.locator("#ch-undo").click()
    wait_until(tab, f"document.querySelector('.ch-worth').hidden && {placed} < 18")
    solved, bars = tab.evaluate("location.hash"), tab.evaluate(placed)
    tab.keyboard.press("r")
    wait_until(tab, f"!document.querySelector('.ch-worth').hidden && {placed} === 18")
    tab.keyboard.press("u")
    wait_until(tab, f"{placed} === {bars}")
    tab.keyboard.press("h")
    assert tab.locator(".ch-hints li").count() == 1
    tab.locator(".ch-levels button").nth(1).click()
    assert tab.locator(".ch-held").first.text_content() == "■□□□"  # of four activations
    tab.locator("summary").click()
    tab.locator("#ch-try").click()
    wait_until(tab, "!document.querySelector('.ch-worth').hidden", seconds=120)
    first = str(pipelab.check(pipelab.GPipe(4, 8), memory_cap=4)[0])
    assert first in tab.locator(".ch-worth pre").text_content()
    tab.locator("#ch-code").fill("import pipelab\npipelab.OneFOneB(4, 8)")
    tab.locator("#ch-try").click()
    wait_until(tab, "document.querySelector('.ch-worth').textContent.includes('33 units. Par!')")
    assert "Looked up" in worth.text_content()
    assert tab.evaluate(placed) == 64
    assert tab.locator(".ch-memory .ch-full").count() == 5  # rank 0 holds four after F3 to F7
    assert tab.evaluate("localStorage.getItem('pipelab-challenges')") == '{"fill":15,"four":"looked up"}'
    tab.locator(".ch-worth button").click()
    assert tab.locator(".ch-title").text_content() == "In a circle"
    assert tab.locator(".ch-circle [data-arrow]").count() == 4
    assert tab.locator(".ch-note").nth(2).text_content() == "listed next: F2 F3 B0 B1 B2 B3"  # the rest ran as listed
    for word in ("0F2", "2B0", "2B1", "2B2"):
        if not tab.locator(f".ch-bar[title^='{word},']").count():
            tab.get_by_role("button", name=f": {word} on rank {word[0]}, begins at").click()
    assert "2 moves. Par!" in worth.text_content()
    assert not tab.locator(".ch-circle").is_visible()
    tab.evaluate(f"location.hash = {solved!r}")
    wait_until(tab, f"{placed} === {bars}")
    tab.evaluate("location.hash = '#fill:9F9.<img>'")
    wait_until(tab, f"{placed} === 3")
