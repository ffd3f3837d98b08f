"""Timelines as one HTML file that needs nothing else: no network, no fonts, no libraries.

`page.html` holds the frame, `page.css` the looks. Three scripts follow: `model.js` reads the data that Python puts in,
`timeline.js` draws what is visible, `panel.js` answers: what is selected, why it waited, and everything else.
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
from pipelab.trace.ledger import MEANINGS, REASONS
from pipelab.trace.waits import critical_path, half, waits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pipelab.plan.bound import BoundPlan
    from pipelab.trace.trace import Trace
    from pipelab.trace.waits import Wait

__all__ = ["comparison_page", "document", "page"]


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


def document(title: str, body: str) -> str:
    """Return a page without scripts that has the looks of the others.

    Args:
        title: its name and heading, as text.
        body: what follows, as HTML.
    """
    name = html.escape(title)
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>{name}</title>\n'
        f"<style>\n{_palette()}{_read('page.css')}{_ORDER}</style>\n</head>\n"
        f"<body>\n<header><h1>{name}</h1></header>\n<main>{body}</main>\n</body>\n</html>\n"
    )


_ORDER = """
.picture { overflow-x: auto; } .picture svg text { fill: #000000; }
.order.faulty h2 { color: var(--need); } .order.after h2, .try { color: var(--give); }
.order ol { margin: .2rem 0; } details pre { overflow-x: auto; }
@media print { .picture svg { max-width: 100%; height: auto; } .order { break-inside: avoid; } }
"""


def _page(title: str, comparison: Comparison, plain: str) -> str:
    """Fill the frame."""
    alone = len(comparison.traces) == 1
    there = {kind for trace in comparison.traces for kind in trace.plan.bound.kinds}
    data = {
        "shared": comparison.shares_axis,
        "reasons": REASONS,
        "meanings": MEANINGS,
        "kinds": {kind: Action(kind).word for kind in KINDS if kind in there},
        "traces": [_trace(trace, name) for trace, name in zip(comparison.traces, comparison.names, strict=True)],
    }
    parts = {
        "title": html.escape(title),
        "subtitle": f'<p class="subtitle">{html.escape(_subtitle(comparison.traces[0]))}</p>' if alone else "",
        "style": _palette() + _read("page.css"),
        "table": _table(comparison),
        "note": "" if comparison.shares_axis else "<p>The units of time differ: every timeline has its own scale.</p>",
        "text": html.escape(plain),
        "data": _script_safe(json.dumps(data, separators=(",", ":"))),
        "script": "\n".join(map(_read, ("model.js", "timeline.js", "panel.js"))),
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
    lines += [f"--hue{at}:{colour};--hue{at}-ink:{colours.ink(colour)};" for at, colour in enumerate(colours.HUES)]
    return f":root{{{''.join(lines)}}}\n"


def _table(comparison: Comparison) -> str:
    """Return the figures of every trace as an HTML table."""
    heads, *rows = wording.table(comparison)
    first = 0 if len(rows) > 1 else 1  # the name of a single trace is the page's title
    lines = ["".join(f"<th>{html.escape(head)}</th>" for head in heads[first:])]
    for row in rows:
        cells = zip(heads[first:], row[first:], strict=True)
        lines.append("".join(f'<td data-head="{html.escape(head)}">{html.escape(cell)}</td>' for head, cell in cells))
    return "\n".join(f"<tr>{line}</tr>" for line in lines)


def _subtitle(trace: Trace) -> str:
    """Return a trace's size, and the times of its actions where each kind has one time on all stages."""
    plan = trace.plan
    spans: dict[str, set[float]] = {}
    for event in trace.events if trace.source == "simulated" else ():
        spans.setdefault(event.action.kind, set()).add(round(event.duration, 9))
    sizes = [(plan.ranks, "rank"), (plan.stages, "stage"), (plan.microbatches, "micro-batch")]
    words = [f"{count} {word}{'' if count == 1 else 'es' if word.endswith('ch') else 's'}" for count, word in sizes]
    costs = [f"{kind} = {wording.number(min(times))}" for kind, times in spans.items() if len(times) == 1]
    unit = f" ({clean(trace.unit)})" if trace.unit and costs else ""
    return ", ".join([*words, *costs]) + unit


def _trace(trace: Trace, name: str) -> dict[str, Any]:
    """Return what the page draws of a trace. Times are whole numbers of `tick`, and count from the trace's start.

    Each rank has its actions: their `kinds`, their `stage` (one number where all have the same), their `microbatches`
    (each as the difference from the one before of its kind), `gaps` (from the end of the action before), and `lasts`
    (their durations). `halves` numbers the actions that share a slot with the next. `lags` are the travel times of
    values from other ranks, in the order of the actions that need them. `idle` has three numbers for each idle time:
    its reason, how long after the end of the idle time before it starts, and its length. `behind` says in words behind
    which transfer the value stood that an action waited for.
    """
    lanes, bound = Lanes(trace), trace.plan.bound
    # Seven digits are more than a screen shows and keep the file small.
    tick = 10.0 ** -max(0, 6 - math.floor(math.log10(trace.makespan))) if trace.makespan else 1.0

    def ticks(times: Iterable[float]) -> list[int]:
        return [round((time - trace.start) / tick) for time in times]

    typical, waited = lanes.typical(range(trace.ranks)), waits(trace)
    arrived = {(each.giver, each.needer): each.end for each in trace.transfers}
    travelled = any(each.end > each.start for each in trace.transfers)
    ends = {
        code: end
        for row, times in zip(bound.rows, trace.ends, strict=True)
        for code, end in zip(row, times, strict=True)
    }
    action = bound.codes.action

    def lags(row: Sequence[int], rank: int) -> list[int]:
        found: list[int] = []
        for code in row:
            for _, giver in bound.inputs(code):
                if bound.rank_of[giver] != rank:
                    found.append(round((arrived[action(giver), action(code)] - ends[giver]) / tick))
        return found

    return {
        "name": clean(name),
        "unit": wording.unit(trace),
        "tick": tick,
        "span": round(trace.makespan / tick),
        "microbatches": trace.plan.microbatches,
        "namesStages": lanes.names_stages,
        "typical": min((time for kind, time in typical.items() if kind != "R"), default=0),
        "critical": _places(trace),
        "ranks": [
            _times(ticks(trace.starts[rank]), ticks(trace.ends[rank]))
            | _row(bound, row)
            | {
                "halves": [index for index in range(len(row)) if half(trace, rank, index) == "upper"],
                "lags": _once(lags(row, rank)) if travelled else 0,
                "idle": _idle(trace, rank, ticks),
                "behind": _behind(trace, waited[rank]),
                "busy": f"{100 * trace.busy[rank] / trace.makespan:.0f} %" if trace.makespan else "",
                "peak": trace.peak_activations[rank],
                "lane": trace.lanes[rank] if rank < len(trace.lanes) else "",
            }
            for rank, row in enumerate(bound.rows)
        ],
    }


def _times(starts: Sequence[int], ends: Sequence[int]) -> dict[str, list[int]]:
    gaps = [start - before for start, before in zip(starts, (0, *ends), strict=False)]
    return {"gaps": gaps, "lasts": [end - start for start, end in zip(starts, ends, strict=True)]}


def _row(bound: BoundPlan, row: Sequence[int]) -> dict[str, Any]:
    codes = bound.codes
    stages = [codes.stage[code] for code in row]
    before = dict.fromkeys(KINDS, 0)
    microbatches: list[int] = []
    for code in row:
        kind, microbatch = codes.kind[code], codes.action(code).microbatch or 0
        microbatches.append(microbatch - before[kind])
        before[kind] = microbatch
    return {
        "kinds": "".join(codes.kind[code] for code in row),
        "stage": _once(stages),
        "microbatches": microbatches,
    }


def _once(numbers: list[int]) -> list[int] | int:
    """Return one number for a list in which all are the same."""
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _idle(trace: Trace, rank: int, ticks: Callable[[Iterable[float]], list[int]]) -> list[int]:
    found: list[int] = []
    before = 0
    for idle in trace.idle:
        if idle.rank == rank:
            start, end = ticks([idle.start, idle.end])
            found += [REASONS.index(idle.reason), start - before, end - start]
            before = end
    return found


def _behind(trace: Trace, waited: Sequence[Wait | None]) -> dict[int, str]:
    """Return, by index of an action, behind which other transfer the value stood that it waited for."""
    return {at: words for at, wait in enumerate(waited) if wait and (words := wording.stood_behind(trace, wait))}


def _places(trace: Trace) -> list[tuple[int, int]]:
    """Return rank and index of every action on the critical path."""
    codes = trace.plan.bound.codes
    where = [{code: index for index, code in enumerate(row)} for row in trace.plan.bound.rows]
    return [(event.rank, where[event.rank][codes.code(event.action)]) for event in critical_path(trace)]
