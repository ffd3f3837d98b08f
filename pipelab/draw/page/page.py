"""Timelines as one HTML file that needs nothing else: no network, no fonts, no libraries.

`page.html` holds the frame, `page.css` the looks. Three scripts follow: `decode.js` reads the data that Python puts in,
`timeline.js` draws what is visible, `explain.js` says everything about one action.
"""

from __future__ import annotations

import html
import json
import math
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from pipelab.draw import colours, text, wording
from pipelab.draw.bars import Lanes
from pipelab.errors import clean
from pipelab.plan.actions import KINDS, Action
from pipelab.simulation.comparison import Comparison, compare
from pipelab.trace.waits import half, waits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelab.trace.trace import Trace

__all__ = ["comparison_page", "page"]


def page(trace: Trace) -> str:
    """Return a page with one trace: its figures, and a timeline that explains every action under the pointer.

    Example:
        >>> import pipelab
        >>> page(pipelab.simulate(pipelab.OneFOneB(ranks=2, microbatches=2))).startswith("<!DOCTYPE html>")
        True
    """
    name = wording.headline(trace)
    return _page(name, compare(trace, names=[name]), text.timeline(trace, text.PLAIN_WIDTH, colour=False))


def comparison_page(comparison: Comparison) -> str:
    """Return a page with several traces: a table, and timelines on one axis where their units agree.

    Example:
        >>> import pipelab
        >>> both = pipelab.compare(*(pipelab.simulate(kind(2, 2)) for kind in (pipelab.GPipe, pipelab.OneFOneB)))
        >>> "GPipe(ranks=2, microbatches=2), simulated" in comparison_page(both)
        True
    """
    plain = text.comparison(comparison, text.PLAIN_WIDTH, colour=False)
    return _page(f"Comparison of {len(comparison.traces)} traces", comparison, plain)


def _page(title: str, comparison: Comparison, plain: str) -> str:
    """Fill the frame."""
    there = {kind for trace in comparison.traces for kind in trace.plan.bound.kinds}
    data = {
        "shared": comparison.shares_axis,
        "kinds": {kind: Action(kind).word for kind in KINDS if kind in there},
        "traces": [_trace(trace, name) for trace, name in zip(comparison.traces, comparison.names, strict=True)],
    }
    parts = {
        "title": html.escape(title),
        "style": _palette() + _read("page.css"),
        "table": _table(comparison),
        "note": "" if comparison.shares_axis else "<p>The units of time differ: every timeline has its own scale.</p>",
        "text": html.escape(plain),
        "data": _script_safe(json.dumps(data, separators=(",", ":"))),
        "script": "\n".join(map(_read, ("decode.js", "timeline.js", "explain.js"))),
    }
    # In one pass, so that what looks like a place in a name stays a name.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _read("page.html"))


def _read(name: str) -> str:
    return (files("pipelab.draw.page") / name).read_text(encoding="utf-8")


def _script_safe(data: str) -> str:
    """Return JSON that cannot end the script element it stands in, whatever a name holds."""
    return data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _palette() -> str:
    """Return the colours as CSS variables: `--F0` and `--F1` for even and odd micro-batches, `--F-ink` on them."""
    lines = [f"--{kind}{at}:{colour};" for kind, pair in colours.PALETTE.items() for at, colour in enumerate(pair)]
    lines += [f"--{kind}-ink:{colours.ink(pair[0])};" for kind, pair in colours.PALETTE.items()]
    return f":root{{{''.join(lines)}}}\n"


def _table(comparison: Comparison) -> str:
    """Return the figures of every trace as an HTML table."""
    heads, *rows = wording.table(comparison)
    first = 0 if len(rows) > 1 else 1  # the name of a single trace is the page's title
    lines = [_table_row(heads[first:], "th")] + [_table_row(row[first:], "td") for row in rows]
    return "\n".join(lines)


def _table_row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(each)}</{tag}>' for each in cells)}</tr>"


def _trace(trace: Trace, name: str) -> dict[str, Any]:
    """Return what the page draws of a trace. Times count from its start.

    For each rank, as many `actions`, such as `0F3`, as `starts` and `ends`, and as `waits`, what an action waited for
    (`-`: nothing), with `there`, when that was there, and `behind`, the transfer that it stood behind, by the number of
    the action. `halves` numbers the actions that share a slot with the next.
    """
    lanes, bound = Lanes(trace), trace.plan.bound
    names = {code: str(bound.codes.action(code)) for row in bound.rows for code in row}
    # Seven digits are more than a screen shows and keep the file small.
    decimals = max(0, 6 - math.floor(math.log10(trace.makespan))) if trace.makespan else 0

    def short(time: float) -> float:
        rounded = round(time - trace.start, decimals)
        return int(rounded) if rounded == int(rounded) else rounded

    typical = lanes.typical(range(trace.ranks))
    ranks = [
        {
            "actions": " ".join(names[code] for code in row),
            "starts": [short(time) for time in trace.starts[rank]],
            "ends": [short(time) for time in trace.ends[rank]],
            "waits": " ".join("-" if wait is None else names[wait.giver] for wait in waited),
            "there": [0 if wait is None else short(wait.there) for wait in waited],
            "behind": {
                at: words for at, wait in enumerate(waited) if wait and (words := wording.stood_behind(trace, wait))
            },
            "halves": [index for index in range(len(row)) if half(trace, rank, index) == "upper"],
            "busy": f"{100 * trace.busy[rank] / trace.makespan:.0f} %" if trace.makespan else "",
            "peak": trace.peak_activations[rank],
            "lane": trace.lanes[rank] if rank < len(trace.lanes) else "",
        }
        for rank, (row, waited) in enumerate(zip(bound.rows, waits(trace), strict=True))
    ]
    return {
        "name": clean(name),
        "unit": wording.unit(trace),
        "span": short(trace.end),
        "namesStages": lanes.names_stages,
        "typical": min((time for kind, time in typical.items() if kind != "R"), default=0),
        "ranks": ranks,
    }
