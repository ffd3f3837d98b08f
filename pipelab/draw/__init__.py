"""Drawings of traces and plans: text, figures, pages and graphs.

Importing this package is quick: matplotlib, networkx and graphviz are loaded when something is drawn with them.

- `text`: timelines for terminals, logs and tests, with their ruler
- `figure`: timelines on matplotlib axes, with the labels that fit
- `page`: timelines as one HTML file
- `graph`: the dependency graph, by Graphviz
- `bars`: a trace as lanes of bars: what all of them draw
- `table`: tables as text, files and plots
- `tables`: idle times, memory, frontiers and comparisons as tables
- `wording`: headlines and tables in words
- `why`: idle time in words
- `differences`: two traces compared, in words
- `scatter`: bubbles against memory
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelab.checking.checker import check
from pipelab.display import WAYS
from pipelab.draw import differences, exports, figure, graph, order_figure, page, scatter, table, tables, text, why
from pipelab.draw.notebook import comparison_html, faults_html, faults_page, plan_html, plan_page, trace_html
from pipelab.draw.order import drawings, plan_drawing
from pipelab.errors import UsageError, clean, require_suffix
from pipelab.files import write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pipelab.checking.checker import Faults
    from pipelab.table import Table
    from pipelab.trace.trace import Trace

__all__ = ["FORMATS", "comparison_html", "faults_html", "plan_html", "save", "show", "trace_html"]

Writer = Callable[..., Path]
"""Writes a subject, its first argument, to a path, its second; for a figure also to a width."""
_FIGURES = (".svg", ".png", ".pdf")


def _page(make: Callable[[Any], str]) -> dict[str, Writer]:
    return {".html": lambda subject, path: write(path, make(subject))}


def _text(make: Callable[[Any], str]) -> dict[str, Writer]:
    return {".txt": lambda subject, path: write(path, make(subject) + "\n")}


def _figures(plot: Callable[..., Axes | Figure]) -> dict[str, Writer]:
    return dict.fromkeys(_FIGURES, lambda subject, path, **width: figure.write(plot(subject, **width), path))


def _tables(make: Callable[[Any], Table]) -> dict[str, Writer]:
    return dict.fromkeys((".csv", ".md"), lambda subject, path: make(subject).save(path))


def _json(make: Callable[[Trace], Any]) -> Writer:
    return lambda trace, path: write(path, json.dumps(make(trace)) + "\n")


def _caption(faults: Faults) -> str:
    return str(faults) if faults.plan is None else str(faults).splitlines()[0]


def _unless_faulty(writers: dict[str, Writer]) -> dict[str, Writer]:
    """Return writers of a plan that write its faults instead, if it has any."""

    def writer(write_plan: Writer) -> Writer:
        return lambda plan, path: save(FAULTS, faults, path) if (faults := check(plan)) else write_plan(plan, path)

    return {suffix: writer(each) for suffix, each in writers.items()}


TRACE, COMPARISON, DIFF, FAULTS, PLAN, LOWERED = (
    "a trace", "a comparison", "two compared traces", "a list of faults", "a plan", "a plan with its transfers"
)  # fmt: skip
FORMATS: dict[str, dict[str, Writer]] = {
    TRACE: {
        **_page(page.page),
        **_figures(figure.plot),
        **_text(lambda trace: text.timeline(trace, text.PLAIN_WIDTH, colour=False)),
        ".json": _json(lambda trace: trace.to_dict()),
        ".events.csv": lambda trace, path: exports.events(trace).save(path),
        ".perfetto.json": _json(exports.perfetto),
    },
    COMPARISON: {
        **_page(page.comparison_page),
        **_figures(figure.plot_comparison),
        **_text(lambda comparison: text.comparison(comparison, text.PLAIN_WIDTH, colour=False)),
        **_tables(tables.readable),
        ".csv": lambda comparison, path: tables.in_full(comparison).save(path),
    },
    DIFF: {
        **_page(page.diff_page),
        ".txt": lambda found, path: differences.table(found).save(path),
        **_tables(differences.table),
    },
    FAULTS: {
        **_page(faults_page),
        **_figures(lambda faults: order_figure.plot(drawings(faults), _caption(faults))),
        **_text(lambda faults: clean(str(faults), keep="\n")),
    },
    PLAN: _unless_faulty(
        {
            **_page(plan_page),
            **_figures(lambda plan: order_figure.plot([plan_drawing(plan)], "")),
            **_text(
                lambda plan: "\n".join(f"rank {rank} | {' '.join(map(str, row))}" for rank, row in enumerate(plan.rows))
            ),
        }
    )
    | {".csv": lambda plan, path: plan.to_csv(path)},
    LOWERED: {".csv": lambda low, path: low.to_csv(path), **_text(str)},
}
"""For each kind of thing that can be saved, its formats: by suffix, what writes it. Tables have their own."""


def save(what: str, subject: object, path: str | os.PathLike[str], width: float | str | None = None) -> Path:
    """Write something to a file, in the format of its suffix."""
    path, writers = Path(path), FORMATS[what]
    ends = [suffix for suffix in writers if path.name.lower().endswith(suffix)]
    suffix = max(ends, key=len) if ends else require_suffix(path, what, list(writers))
    if width is None:
        return writers[suffix](subject, path)
    if suffix not in _FIGURES:
        raise UsageError(f"width={width!r}: only figures have one: {' '.join(_FIGURES)}")
    return writers[suffix](subject, path, width=width)


def show_on_screen(trace: Trace) -> Path | None:
    """Show a trace as a figure in a notebook, and otherwise as a page in the web browser."""
    if _in_notebook():
        from IPython import display

        display.display(display.SVG(figure.svg(trace)))
        return None
    with tempfile.NamedTemporaryFile(prefix="pipelab-", suffix=".html", delete=False) as file:
        path = Path(file.name)
    save(TRACE, trace, path)
    if not webbrowser.open(path.as_uri()):
        sys.stdout.write(f"No web browser was found; the timeline is in {path}\n")
    return path


def _in_notebook() -> bool:
    """Tell whether the code runs in a notebook's kernel, which shows rich output."""
    # A notebook has loaded IPython; elsewhere it need not even be installed.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


WAYS |= {
    "Trace": {
        "text": partial(text.timeline, colour=False),
        "html": trace_html,
        "svg": figure.svg,
        "axes": figure.plot,
        "screen": show_on_screen,
        "why": why.why,
        "save": partial(save, TRACE),
    },
    "Comparison": {
        "text": partial(text.comparison, colour=False),
        "html": comparison_html,
        "svg": lambda shown: figure.svg_of(figure.plot_comparison(shown)),
        "figure": figure.plot_comparison,
        "save": partial(save, COMPARISON),
    },
    "Diff": {
        "text": differences.text,
        "html": lambda found: differences.table(found, differences.MOST)._repr_html_(),
        "sentence": differences.sentence,
        "table": differences.table,
        "save": partial(save, DIFF),
    },
    "Faults": {"html": faults_html, "save": partial(save, FAULTS)},
    "Plan": {"html": plan_html, "graph": graph.save, "save": partial(save, PLAN)},
    "LoweredPlan": {"save": partial(save, LOWERED)},
    "Table": {"text": table.text, "html": table.page, "figure": table.plot, "save": table.save},
    "Ledger": {"table": tables.ledger},
    "MemoryUse": {"table": tables.memory},
    "Frontier": {"table": tables.frontier, "svg": lambda found: scatter.scatter(found.schedules, found.points)},
}
