"""Drawings of traces and plans: text, figures, pages and graphs.

Importing this package is quick: matplotlib, networkx and graphviz are loaded when something is drawn with them.

- `text`: timelines for terminals, logs and tests
- `figure`: timelines on matplotlib axes
- `page`: timelines as one HTML file
- `graph`: the dependency graph, by Graphviz
- `ring`: a ring all-reduce, step by step
- `bars`: a trace as lanes of bars: what all of them draw
- `labels`: which labels fit into the bars of a figure
- `table`: tables of results, for a terminal, a report and a plot
- `ruler`: the ruler under a text timeline
- `wording`: headlines and tables in words
- `why`: idle time in words
- `differences`: two traces compared, in words
- `order`: what a picture of faults shows
- `order_figure`: pictures of faults on matplotlib axes
- `notebook`: what notebooks show
- `exports`: traces for other tools
- `colours`: the palette
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import webbrowser
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pipelab.checking.checker import check
from pipelab.draw import differences, exports, figure, order_figure, text, wording
from pipelab.draw.notebook import comparison_html, faults_html, faults_page, plan_html, plan_page, trace_html
from pipelab.draw.order import drawings, plan_drawing
from pipelab.draw.page import page
from pipelab.draw.table import Column, Table
from pipelab.errors import UsageError, clean, require_suffix
from pipelab.files import write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pipelab.checking.checker import Faults
    from pipelab.plan.plan import Plan
    from pipelab.simulation.comparison import Comparison
    from pipelab.trace.diff import Diff
    from pipelab.trace.trace import Trace

__all__ = [
    "COMPARISON_SUFFIXES",
    "DIFF_SUFFIXES",
    "FAULTS_SUFFIXES",
    "PLAN_SUFFIXES",
    "TRACE_SUFFIXES",
    "comparison_html",
    "faults_html",
    "plan_html",
    "save",
    "save_comparison",
    "save_diff",
    "save_faults",
    "save_plan",
    "show",
    "trace_html",
]

_FIGURES = (".svg", ".png", ".pdf")
_DRAWN = (".html", *_FIGURES, ".txt")
TRACE_SUFFIXES = (*_DRAWN, ".json", ".events.csv", ".perfetto.json")
"""The formats of `Trace.save`."""
COMPARISON_SUFFIXES = (*_DRAWN, ".csv", ".md", ".tex")
"""The formats of `Comparison.save`."""
DIFF_SUFFIXES = (".html", ".txt", ".csv", ".md", ".tex")
"""The formats of `Diff.save`."""
FAULTS_SUFFIXES = _DRAWN
"""The formats of what `check` returns."""
PLAN_SUFFIXES = (*_DRAWN, ".csv")
"""The formats of `Plan.save`."""


def save(trace: Trace, path: str | Path, width: float | str | None = None) -> Path:
    """Write a trace to a file; its suffix is one of `TRACE_SUFFIXES`.

    Example:
        >>> import pipelab
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save(pipelab.simulate(pipelab.OneFOneB(2, 2)), Path(folder) / "1f1b.txt")
        ...     print(path.read_text(encoding="utf-8").splitlines()[1])
        rank 0 │F0 F1 ······B0─── ···B1───

    Returns:
        The path.

    Raises:
        FormatError: if it has another suffix.
    """
    path = Path(path)
    if width is not None and path.suffix.lower() not in _FIGURES:
        raise UsageError(f"width={width!r}: only figures have one: {' '.join(_FIGURES)}")
    if path.name.lower().endswith(".events.csv"):
        return exports.events(trace).save(path)
    if path.suffix.lower() == ".json":
        data = exports.perfetto(trace) if path.name.lower().endswith(".perfetto.json") else trace.to_dict()
        return write(path, json.dumps(data) + "\n")
    return _write(
        path,
        "a trace",
        TRACE_SUFFIXES,
        html=lambda: page.page(trace),
        txt=lambda: text.timeline(trace, text.PLAIN_WIDTH, colour=False),
        picture=lambda: figure.plot(trace, width=width),
    )


def save_comparison(comparison: Comparison, path: str | Path) -> Path:
    """Draw a comparison to a file, or write its table; the suffix is one of `COMPARISON_SUFFIXES`.

    Returns:
        The path.

    Raises:
        FormatError: if it has another suffix.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".csv":
        rows = [{key: value for key, value in asdict(row).items() if value is not None} for row in comparison.rows]
        return Table(rows, []).save(path)
    if suffix in (".md", ".tex"):
        heads, *lines = wording.table(comparison)
        return Table([dict(zip(heads, line, strict=True)) for line in lines], list(map(Column, heads))).save(path)
    return _write(
        path,
        "a comparison",
        COMPARISON_SUFFIXES,
        html=lambda: page.comparison_page(comparison),
        txt=lambda: text.comparison(comparison, text.PLAIN_WIDTH, colour=False),
        picture=lambda: figure.plot_comparison(comparison),
    )


def save_diff(found: Diff, path: Path) -> Path:
    """Write two compared traces as a page, or as a table; the suffix is one of `DIFF_SUFFIXES`.

    Returns:
        The path.

    Raises:
        FormatError: if the suffix is another one.
    """
    suffix = require_suffix(path, "two compared traces", DIFF_SUFFIXES)
    if suffix == ".html":
        return write(path, page.diff_page(found))
    return differences.table(found).save(path)


def save_faults(faults: Faults, path: str | os.PathLike[str]) -> Path:
    """Draw faults to a file; its suffix is one of `FAULTS_SUFFIXES`.

    Returns:
        The path.

    Raises:
        FormatError: if it has another suffix.
    """
    return _write(
        path,
        "a list of faults",
        FAULTS_SUFFIXES,
        html=lambda: faults_page(faults),
        txt=lambda: clean(str(faults), keep="\n"),
        picture=lambda: order_figure.plot(drawings(faults), str(faults) if faults.plan is None else _first(faults)),
    )


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> Path:
    """Draw a plan's rows to a file, with its faults if it has any; its suffix is one of `PLAN_SUFFIXES`.

    Returns:
        The path.

    Raises:
        FormatError: if it has another suffix.
    """
    if require_suffix(Path(path), "a plan", PLAN_SUFFIXES) == ".csv":
        return plan.to_csv(path)
    if faults := check(plan):
        return save_faults(faults, path)
    return _write(
        path,
        "a plan",
        PLAN_SUFFIXES,
        html=lambda: plan_page(plan),
        txt=lambda: "\n".join(f"rank {rank} | {' '.join(map(str, row))}" for rank, row in enumerate(plan.rows)),
        picture=lambda: order_figure.plot([plan_drawing(plan)], ""),
    )


def _first(faults: Faults) -> str:
    return str(faults).splitlines()[0]


def show(trace: Trace) -> Path | None:
    """Show a trace as a figure in a notebook, and otherwise as a page in the web browser.

    Returns:
        The page that was written, or `None` in a notebook. Without a browser, its path is printed.
    """
    if _in_notebook():
        from IPython import display

        display.display(display.SVG(figure.svg(trace)))
        return None
    with tempfile.NamedTemporaryFile(prefix="pipelab-", suffix=".html", delete=False) as file:
        path = Path(file.name)
    save(trace, path)
    if not webbrowser.open(path.as_uri()):
        sys.stdout.write(f"No web browser was found; the timeline is in {path}\n")
    return path


def _in_notebook() -> bool:
    """Tell whether the code runs in a notebook's kernel, which shows rich output."""
    # A notebook has loaded IPython; elsewhere it need not even be installed.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def _write(
    path: str | os.PathLike[str],
    what: str,
    known: Sequence[str],
    *,
    html: Callable[[], str],
    txt: Callable[[], str],
    picture: Callable[[], Axes | Figure],
) -> Path:
    """Write the format of the suffix; nothing else is drawn.

    Raises:
        FormatError: if the suffix is not known.
    """
    path = Path(path)
    suffix = require_suffix(path, what, known)
    if suffix == ".html":
        return write(path, html())
    if suffix == ".txt":
        return write(path, txt() + "\n")
    return figure.write(picture(), path)
