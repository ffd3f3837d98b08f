"""How long drawing 1F1B takes, how large the files are, and how smoothly a page zooms and pans in Chromium."""

from __future__ import annotations

import shutil
import tempfile
import time
from bisect import bisect_left
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import pipelab

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SIZES = ((8, 64), (16, 256), (32, 1024))
PAGES = {(32, 1024): "1.0 MB, 0.6 s, 60, 30", (64, 4096): "4 MB, 3 s, 20, -"}
"""The sizes of pages opened in Chromium, with the targets: file, first drawing, frames, frames in the worst second."""
BEFORE = {(32, 1024): "zoom 4 to 7, pan 7 to 23"}
"""Frames per second of the page that drew an element for each bar, measured on a machine of two busy cores."""
ROUNDS = 3
MOVES = """async (kind) => {
  const [line] = timelines, frame = () => new Promise((done) => requestAnimationFrame(done)), gaps = [];
  line.setZoom(kind === "pan" ? 20 : 1, 0);
  for (let still = 0; still < 30; still += 1) await frame();
  let before = await frame();
  for (let step = 0; step < 150; step += 1) {
    if (kind === "pan") line.scroller.scrollLeft += line.width / 30;
    else line.setZoom(line.zoom * 1.05, line.width / 2);
    const now = await frame();
    gaps.push(now - before);
    before = now;
  }
  return gaps;
}"""


def measure() -> dict[str, object]:
    """Return seconds and bytes by size and format, and frames per second by size and movement."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks, microbatches in SIZES:
            for suffix in ("txt", "svg", "html"):
                path = Path(folder) / f"trace.{suffix}"
                times = []
                for _ in range(4):
                    trace = pipelab.simulate(pipelab.OneFOneB(ranks, microbatches))
                    began = time.perf_counter()
                    trace.save(path)
                    times.append(time.perf_counter() - began)
                rows.append(
                    {
                        "ranks": ranks,
                        "microbatches": microbatches,
                        "format": suffix,
                        "seconds": median(times[1:]),
                        "bytes": path.stat().st_size,
                    }
                )
        return {"rows": rows, "pages": _pages(Path(folder))}


def _pages(folder: Path) -> list[dict[str, object]]:
    """Return what Chromium makes of large pages; nothing where it or playwright is not installed."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        return []
    with sync_playwright() as playwright:
        # Chromium compresses nothing here and asks nobody: a page is one file.
        flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        return [_page(browser, ranks, microbatches, folder / "page.html") for ranks, microbatches in PAGES]


def _page(browser: Browser, ranks: int, microbatches: int, path: Path) -> dict[str, object]:
    trace = pipelab.simulate(pipelab.OneFOneB(ranks, microbatches))
    began = time.perf_counter()
    trace.save(path)
    written = time.perf_counter() - began
    first: list[float] = []
    gaps: dict[str, list[list[float]]] = {"zoom": [], "pan": []}
    for _ in range(ROUNDS):
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        tab.goto(path.as_uri())
        first.append(tab.evaluate("performance.getEntriesByName('drawn')[0].startTime") / 1e3)
        for kind, found in gaps.items():
            found.append(tab.evaluate(MOVES, kind))
        tab.close()
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "bytes": path.stat().st_size,
        "written": written,
        "first": median(first),
        **{f"{kind}_median": median(1e3 / median(each) for each in found) for kind, found in gaps.items()},
        **{f"{kind}_worst": median(map(_worst_second, found)) for kind, found in gaps.items()},
    }


def _worst_second(gaps: list[float]) -> float:
    """Return the frames per second of the slowest second; `gaps` are milliseconds."""
    times = list(accumulate(gaps, initial=0.0))
    seconds = ((first, bisect_left(times, start + 1e3)) for first, start in enumerate(times))
    rates = [1e3 * (last - first) / (times[last] - times[first]) for first, last in seconds if last < len(times)]
    return min(rates, default=1e3 * len(gaps) / times[-1])


def report(found: dict[str, object]) -> str:
    """Return the figures as Markdown."""
    lines = ["| 1F1B, ranks x micro-batches | text | SVG | HTML page |", "|---|---:|---:|---:|"]
    for ranks, microbatches in SIZES:
        cells = [
            f"{row['seconds']:.2f} s, {row['bytes'] / 1e3:,.0f} kB"
            for row in found["rows"]  # type: ignore[attr-defined]
            if (row["ranks"], row["microbatches"]) == (ranks, microbatches)
        ]
        lines.append(f"| {ranks} x {microbatches} | {' | '.join(cells)} |")
    if not found.get("pages"):
        return "\n".join(lines)
    lines += [
        "",
        "Pages in headless Chromium without a GPU: frames per second, the median and that of the slowest second, of "
        f"{ROUNDS} rounds the median. A screen shows 60. Other programs on the machine make them fewer.",
        "",
        "| 1F1B | written in | file | first drawing | zoom | pan | targets: file, first, median, slowest | before |",
        "|---|---:|---:|---:|---:|---:|---|---|",
    ]
    for row in found["pages"]:  # type: ignore[attr-defined]
        size = row["ranks"], row["microbatches"]
        zoom, pan = (f"{row[f'{kind}_median']:.0f}, slowest {row[f'{kind}_worst']:.0f}" for kind in ("zoom", "pan"))
        lines.append(
            f"| {size[0]} x {size[1]} | {row['written']:.1f} s | {row['bytes'] / 1e6:.2f} MB | {row['first']:.2f} s "
            f"| {zoom} | {pan} | {PAGES[size]} | {BEFORE.get(size, '-')} |"
        )
    return "\n".join(lines)
