"""The playground: Python in the browser says what Python says here, and a loop ends."""

from __future__ import annotations

import functools
import http.server
import json
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from commands import RIGHT

import pipelab

DOCS = Path(__file__).resolve().parents[1] / "docs"
PYODIDE = runpy.run_path(str(DOCS / "pyodide.py"))
DRAW = runpy.run_path(str(DOCS / "playground" / "playground.py"))["draw"]
SETTINGS = {"ranks": 4, "microbatches": 8, "cost": {"forward": 1, "backward": 2}}
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
    assert found["content"]["table"][1][0] == f"{trace.makespan:g} units"


@pytest.mark.parametrize(
    ("code", "sets", "words"),
    [
        ("import pipelab\npipelab.ZBH1", "nothing", "ZBH1(ranks=4, microbatches=8)"),
        ("import pipelab\npipelab.GPipe(2, 3)", "sizes", "GPipe(ranks=2, microbatches=3)"),
        (
            "import pipelab\nt = pipelab.simulate(pipelab.GPipe(2, 3))\nprint(1)",
            "all",
            "GPipe(ranks=2, microbatches=3)",
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
    assert found["fault"] == str(faults)
    before, after = found["pictures"]
    assert len(before["arrows"]) == len(faults[0].cycle)
    assert {cell["state"] for row in after["rows"] for cell in row["cells"] if cell} == {"ran"}
    assert "memory-cap" in DRAW(RIGHT, {**SETTINGS, "cap": 3})["fault"]


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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Serve the playground alone on this machine; return its address."""
    folder = tmp_path_factory.mktemp("site")
    engine = PYODIDE["build"](folder)
    if "reason" in engine:
        pytest.skip(f"Pyodide is not there: {engine['reason']}")
    (folder / "bare.html").write_text('<!DOCTYPE html><link rel="icon" href="data:,"><script src="engine.js"></script>')

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def opened(browser, site):
    """Return a function that opens a page which may ask this machine alone, and may not complain."""
    complaints = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
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


@pytest.mark.browser
@pytest.mark.timeout(120)
def test_the_worker_answers_ends_a_loop_and_goes_on(opened):
    tab = opened("bare.html")
    call = "([code, settings]) => pipelabEngine.call('draw', [code, settings])"
    found = tab.evaluate(call, [DEADLOCK, SETTINGS])
    assert found["fault"] == str(pipelab.check(reversed_schedule()(4, 8)))
    assert tab.evaluate(
        "async () => { try { await pipelabEngine.call('draw', ['while True: pass', {}]); }"
        " catch (error) { return error instanceof pipelabEngine.Stopped; } }"
    )
    again = tab.evaluate(call, ["import pipelab\npipelab.OneFOneB", SETTINGS])
    assert again == json.loads(json.dumps(DRAW("import pipelab\npipelab.OneFOneB", SETTINGS)))
    unknown = "pipelabEngine.call('nonsense', []).catch((error) => error.message)"
    assert "nonsense" in tab.evaluate(unknown)
