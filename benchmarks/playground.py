"""How long the playground takes to its first picture, and from an edit to its picture, in Chromium."""

from __future__ import annotations

import functools
import http.server
import runpy
import shutil
import tempfile
import threading
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SIZES = {(4, 8): 50, (8, 64): 100}
"""Ranks and micro-batches, with the target for 95 % of the edits in milliseconds."""
COLD = 6
"""The target in seconds for the first picture."""
ROUNDS = 3
EDITS = 40
FIRST = """async () => {
  const button = document.getElementById("pg-load"), began = performance.now();
  performance.clearMarks("pipelab-shown");
  button.click();
  while (!performance.getEntriesByName("pipelab-shown").length) await new Promise((done) => setTimeout(done, 5));
  return performance.getEntriesByName("pipelab-shown")[0].startTime - began;
}"""
EDIT = """async ([ranks, microbatches, edits]) => {
  const code = document.getElementById("pg-code"), found = [];
  for (const [name, value] of [["ranks", ranks], ["microbatches", microbatches]]) {
    const slider = document.querySelector(`[name=${name}]`);
    slider.value = value;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
  }
  for (let edit = -5; edit < edits; edit += 1) {
    await new Promise((done) => setTimeout(done, 300));
    for (const name of ["pipelab-asked", "pipelab-shown"]) performance.clearMarks(name);
    code.focus();
    getSelection().selectAllChildren(code);
    getSelection().collapseToEnd();
    document.execCommand("insertText", false, `# ${edit} `);
    while (!performance.getEntriesByName("pipelab-shown").length) await new Promise(requestAnimationFrame);
    const at = (name) => performance.getEntriesByName(name)[0].startTime;
    if (edit >= 0) found.push(at("pipelab-shown") - at("pipelab-asked"));
  }
  return found;
}"""


def measure() -> dict[str, object]:
    """Return seconds to the first picture, and milliseconds of edits by size; nothing without Chromium and Pyodide."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        return {"missing": "Chromium is not installed"}
    from playwright.sync_api import sync_playwright

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        engine = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "pyodide.py"))["build"](Path(folder))
        if "reason" in engine:
            return {"missing": engine["reason"]}
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
            first, edits = [], []
            for _ in range(ROUNDS):
                browser = playwright.chromium.launch(executable_path=chromium, args=flags)  # each with an empty cache
                seconds, edits = _round(
                    browser, f"http://127.0.0.1:{server.server_port}/", last=len(first) == ROUNDS - 1
                )
                first.append(seconds)
                browser.close()
            server.shutdown()
    return {"bytes": engine["bytes"], "version": engine["version"], "first": first, "edits": edits}


def _round(browser: Browser, address: str, *, last: bool) -> tuple[float, list[dict[str, object]]]:
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(address)
    tab.wait_for_selector("#pg-load:enabled:not(:empty)")
    tab.wait_for_timeout(500)
    first = tab.evaluate(FIRST) / 1e3
    if not last:
        return first, []
    found = [(size, tab.evaluate(EDIT, [*size, EDITS])) for size in SIZES]
    return first, [{"ranks": size[0], "microbatches": size[1], "milliseconds": times} for size, times in found]


def report(found: dict[str, object]) -> str:
    """Return the figures as Markdown."""
    if "missing" in found:
        return f"Not measured: {found['missing']}."
    first: list[float] = found["first"]  # type: ignore[assignment]
    lines = [
        f"Pyodide {found['version']}, {found['bytes'] / 1e6:.1f} MB from a server on the same machine. "  # type: ignore[operator]
        f"From the button to the first picture, with an empty cache: {median(first):.1f} s "
        f"(of {len(first)}: {', '.join(f'{each:.1f}' for each in sorted(first))}; target {COLD}).",
        "",
        "From the end of the 150 ms after the last key to the picture:",
        "",
        "| ranks x micro-batches | median | 95 % of the edits | target |",
        "|---|---:|---:|---:|",
    ]
    for row in found["edits"]:  # type: ignore[attr-defined]
        size, times = (row["ranks"], row["microbatches"]), row["milliseconds"]
        slow = quantiles(times, n=20)[-1]
        lines.append(f"| {size[0]} x {size[1]} | {median(times):.0f} ms | {slow:.0f} ms | {SIZES[size]} ms |")
    return "\n".join(lines)
