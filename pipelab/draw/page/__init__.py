"""Timelines as one HTML file that needs nothing else: no network, no fonts, no libraries.

`page.html` holds the frame, `page.css` the looks. The scripts follow in the order of `_SCRIPTS`: `model.js` reads the
data that Python puts in, `paint.js` paints bars as elements or as pixels, `timeline.js` draws what is visible,
`gestures.js` follows mouse and fingers, `ledger.js` sums up spans of time, `compare.js` shows how traces differ from
the first (`alone.js` if there is one trace), `panel.js` answers: what is selected, why it waited, and everything else;
`save.js` draws for paper and files, `address.js` keeps what is shown in the page's address. Notebooks have neither.
"""

from __future__ import annotations

import html
import json
import math
import re
from importlib.resources import files
from itertools import groupby, zip_longest
from operator import sub
from typing import TYPE_CHECKING, Any

from pipelab.draw import colours, differences, text, wording
from pipelab.draw.bars import Lanes, strip
from pipelab.errors import counted
from pipelab.plan.actions import KINDS, PER_MICROBATCH, TRAITS, Action, Kind
from pipelab.simulation.comparison import Comparison, compare
from pipelab.trace.ledger import MEANINGS, REASONS, WAITS
from pipelab.trace.waits import Waits, half

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from pipelab.trace.diff import Diff
    from pipelab.trace.events import Event
    from pipelab.trace.ledger import Reason
    from pipelab.trace.trace import Trace

_SCRIPTS = ("model", "paint", "timeline", "gestures", "ledger", "compare", "panel", "save", "address")
_SPACED = {
    "css": r"\"[^\"]*\"|\s*([{};,])\s*|(:) ",
    "js": r"(?m)^.*(?:/\S|`).*$|\"[^\"\n]*\"| *(=>|[=*?:,;{|&(<>+-]+)\s*| *([)}\]]) *",
}
"""Signs, in groups, with spaces around them. Texts, and lines with a template or a regular expression, are no signs."""


def page(trace: Trace, *, cap: int | None = None, notebook: bool = False) -> str:
    """Return a page with one trace: its figures, and a timeline that explains every action under the pointer."""
    return _page(content(trace, cap), text.timeline(trace, text.PLAIN_WIDTH, colour=False), notebook=notebook)


def comparison_page(comparison: Comparison, *, notebook: bool = False) -> str:
    """Return a page with several traces: a table, and timelines on one axis where their units agree."""
    plain = text.comparison(comparison, text.PLAIN_WIDTH, colour=False)
    return _page(content(comparison), plain, notebook=notebook)


def diff_page(found: Diff) -> str:
    """Return a page with two traces of the same actions, one over the other, coloured by what changed."""
    comparison = compare(found.before, found.after, names=found.names)
    plain = f"{differences.text(found)}\n\n{text.comparison(comparison, text.PLAIN_WIDTH, colour=False)}"
    shown = content(comparison)
    before, after = map(wording.called, found.names)
    shown["title"] = f"{after} compared with {before}"
    shown["data"]["view"] = "diff"
    return _page(shown, plain)


def frame() -> str:
    """Return a page that shows nothing until the page around it posts a message: `pipelabContent`, with `content`.

    A message later replaces what is shown, and keeps zoom, selection and layers. That is quicker than another page.
    """
    empty: dict[str, Any] = {"title": "pipelab", "subtitle": "", "table": [], "data": None}
    return _page(empty, "", subtitle='<p class="subtitle"></p>').replace("<body>", '<body class="framed">')


def content(shown: Trace | Comparison, cap: int | None = None) -> dict[str, Any]:
    """Return what a page shows: its title and sub-title, its table of figures, and the data of its script."""
    if isinstance(shown, Comparison):
        sources = dict.fromkeys(trace.source for trace in shown.traces if trace.source)
        comparison, title = shown, ", ".join([f"Comparison of {counted(len(shown.traces), 'trace')}", *sources])
        subtitle = "" if shown.shares_axis else "The units of time differ: every timeline has its own scale."
    else:
        title = wording.headline(shown)
        comparison, subtitle = compare(shown, names=[title]), f"{wording.told(shown)} {wording.costs(shown)}".strip()
    (first, name), *others = zip(comparison.traces, comparison.names, strict=True)
    there = {kind for trace in comparison.traces for kind in trace.plan.bound.kinds}
    moves = {move.action.kind for trace in comparison.traces for move in trace.moves}
    moved = {kind: each for kind, each in TRAITS.items() if kind in moves and each.channel and each.cost}
    found = {idle.reason for trace in comparison.traces for idle in trace.idle}
    waits_for = [reason for reason in REASONS if reason in found]
    said, legend = wording.idle(comparison.traces), wording.legend(comparison.traces)
    if arrow := said.pop("arrow", ""):
        said["wait"] += f"; {arrow}"
    data = {
        "shared": comparison.shares_axis,
        "cap": cap,
        "reasons": REASONS,
        "meanings": {reason: MEANINGS[reason] for reason in waits_for},
        "gaps": {reason: _gap(reason) for reason in waits_for},
        "kinds": {kind: Action(kind).word for kind in KINDS if kind in there}
        | {kind: each.word * (each.word != kind.lower()) for kind, each in moved.items()},
        "legend": legend | {"F": "; ".join(filter(None, wording.example(comparison.traces)))},
        "idle": said,
        "marks": wording.marks(comparison.traces),
        "letters": "".join(kind for kind in KINDS if kind in there),
        "view": "stack",
        "diffs": [differences.data(first, trace, (name, other)) for trace, other in others],
        "traces": [_trace(trace, name) for trace, name in zip(comparison.traces, comparison.names, strict=True)],
    }
    return {"title": title, "subtitle": subtitle, "table": wording.table(comparison) if others else [], "data": data}


def document(title: str, body: str) -> str:
    """Return a page without scripts that has the looks of the others."""
    name = html.escape(title)
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>{name}</title>\n'
        f"<style>\n{_palette()}{lean(_file('page.css') + _ORDER, 'css')}</style>\n</head>\n"
        f"<body>\n<header><h1>{name}</h1></header>\n<main>{body}</main>\n</body>\n</html>\n"
    )


_ORDER = """
.picture { overflow-x: auto; } .picture svg text { fill: #000000; }
.order.faulty h2 { color: var(--need); } .order.after h2, .try { color: var(--give); }
.order ol { margin: .2rem 0; } details pre { overflow-x: auto; }
@media print { .picture svg { max-width: 100%; height: auto; } .order { break-inside: avoid; } }
"""


def _page(shown: dict[str, Any], plain: str, subtitle: str = "", *, notebook: bool = False) -> str:
    """Fill the frame with `content`; `plain` is what a reader without scripts gets, for whom a notebook has its own."""
    scripts = list(_SCRIPTS[:-2] if notebook else _SCRIPTS)
    if shown["data"] and not shown["table"]:
        scripts[scripts.index("compare")] = "alone"
    sheets = [*(f"{name}.css" for name in scripts if name in ("compare", "save")), "page.css"]
    if shown["subtitle"]:
        subtitle = f'<p class="subtitle">{html.escape(shown["subtitle"])}</p>'
    kinds: Container[str] = colours.PALETTE
    if notebook:  # nothing else will be shown in it
        moves = any(trace["moves"] for trace in shown["data"]["traces"])
        kinds = {kind for kind, each in TRAITS.items() if kind in shown["data"]["kinds"] or (each.channel and moves)}
    parts = {
        "title": html.escape(shown["title"]),
        "subtitle": subtitle,
        "style": _palette(kinds, "alone" not in scripts) + lean("".join(map(_file, sheets)), "css"),
        "table": _table(shown["table"]),
        "text": "" if notebook else html.escape(plain),
        "data": _script_safe(json.dumps(shown["data"], separators=(",", ":"))),
        "script": "\n".join(lean(_file(f"{name}.js"), "js") for name in scripts),
    }
    # In one pass, so that what looks like a place in a name stays a name.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _file("page.html"))


def _script_safe(data: str) -> str:
    """Return JSON that cannot end the script element it is in, whatever a name holds."""
    return data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _gap(reason: Reason) -> dict[str, Any]:
    """Return how the page shows the idle times of a reason."""
    ground = "wait" if colours.ground(reason) is colours.WAIT else "idle"
    return {"hatch": colours.HATCHES[reason], "ground": ground, "waits": reason in WAITS}


def _file(name: str) -> str:
    return (files("pipelab.draw.page") / name).read_text(encoding="utf-8")


def lean(source: str, kind: str) -> str:
    """Return a style sheet or script, `"css"` or `"js"`, without comments and most spaces: a sixth of a page."""
    source = re.sub(r"(?m)^ *(//.*\n)?|(?<=[;{,})]) // .*$", "", source)
    source = re.sub(_SPACED[kind], lambda found: found[1] or found[2] or found[0], source)
    return re.sub(r"(?<=[;{,(}\[?:=+&|>)])\n|\n(?=[\]})?:.&|+*])", "", source) if kind == "js" else source


def _palette(kinds: Container[str] = colours.PALETTE, compared: bool = False) -> str:
    """Return the colours as CSS variables: `--F0` and `--F1` for a rank's stages in turns, and inks on them."""
    pairs = [each for each in colours.PALETTE.items() if each[0] in kinds]
    lines = [f"--{kind}{at}:{colour};" for kind, pair in pairs for at, colour in enumerate(pair)]
    lines += [f"--{kind}{at}-ink:{colours.ink(pair[at])};" for kind, pair in pairs for at in (0, 1)]
    for name, ground in (("idle", colours.REST), ("wait", colours.WAIT)):
        names = zip(("", "-lines", "-edge", "-ink"), ground, strict=True)
        lines += [f"--{name}{part}:{colour};" for part, colour in names]
    for name, palette in (("hue", colours.HUES), ("diff", colours.DIVERGING))[: 1 + compared]:
        lines += [f"--{name}{at}:{colour};--{name}{at}-ink:{colours.ink(colour)};" for at, colour in enumerate(palette)]
    return f":root{{{''.join(lines)}}}\n"


def _table(table: Sequence[Sequence[str]]) -> str:
    """Return the figures of every trace as an HTML table."""
    if not table:
        return ""
    heads, *rows = table
    lines = ["".join(f"<th>{html.escape(head)}</th>" for head in heads)]
    for row in rows:
        cells = zip(heads, row, strict=True)
        lines.append("".join(f'<td data-head="{html.escape(head)}">{html.escape(cell)}</td>' for head, cell in cells))
    return "\n".join(f"<tr>{line}</tr>" for line in lines)


def _trace(trace: Trace, name: str) -> dict[str, Any]:
    """Return what the page draws of a trace. Times are whole numbers of `tick`, and count from the trace's start.

    An action's number is its code; `apart` is the way to the next micro-batch's. `directions` has, for each
    micro-batch, the rank of its first stage; `ways`, the first micro-batch of each way; `brackets`: see `wording`;
    `moves`: see `_move`; `critical`: rank and number of each action on the critical path. Each rank has its actions,
    see `_row`; `halves` are those that share a slot with the next. `idle` has the reason of each idle time, which ends
    when the next action starts; if another idle time follows first, it has `-1 - reason` and the length. In long lists,
    `[value, count]` is a run of a value.
    """
    lanes, bound, moves = Lanes(trace), trace.plan.bound, set(trace.moves)
    code = bound.codes.code
    # Seven digits are more than a screen shows and keep the file small.
    tick = 10.0 ** -max(0, 6 - math.floor(math.log10(trace.makespan))) if trace.makespan else 1.0

    def ticks(times: Iterable[float]) -> list[int]:
        return [round((time - trace.start) / tick) for time in times]

    found = Waits(trace, for_moves=False)  # the page shows no waits for moves
    lags = {code: round(lag / tick) for code, lag in found.lags().items()}
    typical, idle = lanes.typical(range(trace.ranks)), _idle(trace, ticks)
    return {
        "name": wording.called(name),
        "idea": wording.idea(trace),
        "caption": wording.caption(trace),
        "unit": wording.unit(trace),
        "tick": tick,
        "span": round(trace.makespan / tick),
        "apart": trace.plan.stages,
        "directions": _runs(bound.rank_of_slot[:: trace.plan.stages]),
        "namesStages": lanes.names_stages,
        "typical": min((time for kind, time in typical.items() if kind in PER_MICROBATCH), default=0),
        "strips": len(lanes.strips),
        "ways": [*wording.ways(trace)],
        "brackets": wording.brackets(trace),
        "moves": [_move(each, ticks([each.start, each.end]), lanes.strips) for each in trace.moves],
        "critical": [(event.rank, code(event.action)) for event in trace.critical_path if event not in moves],
        "ranks": [
            _row(found, rank, ticks(trace.starts[rank]), ticks(trace.ends[rank]), lags)
            | {
                "halves": [at for at in range(len(row) if bound.pairs else 0) if half(trace, rank, at) == "upper"],
                "idle": _runs(idle[rank]),
                "busy": f"{100 * trace.busy[rank] / trace.makespan:.0f} %" if trace.makespan else "",
                "peak": trace.peak_activations[rank],
                "lane": trace.lanes[rank] if rank < len(trace.lanes) else "",
            }
            for rank, row in enumerate(bound.computing)
        ],
    }


def _move(event: Event, times: Sequence[int], strips: Sequence[str]) -> list[int | str]:
    """Return a move's rank, start, end, name, kind, how many activations more its rank holds, and its strip, from 1."""
    action = event.action
    held = 0 if action.microbatch is None else action.traits.in_flight
    return [event.rank, *times, str(action), action.kind, held, 1 + strips.index(strip(action))]


def _row(
    found: Waits, rank: int, starts: Sequence[int], ends: Sequence[int], lags: Mapping[int, int]
) -> dict[str, Any]:
    """Return the actions of a rank: the sorts of action that it has, and by action its sort and what else differs.

    A sort has a letter, the number of its action of micro-batch 0 in `first`, how many activations more the rank `held`
    after it, and what it `needs`: the way from its own number to that of the first giver, from there to the second, and
    so on. Of each action there are its `microbatches`, its `gaps` from the end of the action before, its `lasts` (how
    long it took), its `lags` (how long the value from another rank travelled), and the way to the action that it
    `waited` for, 0 if to none. `behind` says in words behind which transfer the value stood.
    """
    codes, row, giver_of = found.bound.codes, found.bound.computing[rank], found.bound.giver_of
    sorts: dict[tuple[Kind, int, int, tuple[int, ...]], str] = {}
    order = []
    for code in row:
        givers = list(map(giver_of.__getitem__, codes.all_needs(code)))
        held = codes.holds[code] - codes.releases[code]
        sort = codes.kind[code], codes.stage[code], held, tuple(map(sub, givers, [code, *givers]))
        order.append(sorts.setdefault(sort, chr(ord("A") + len(sorts))))
    gaps = [start - free for start, free in zip(starts, [0, *ends], strict=False)]
    waited = [found.of(rank, at) if gap else None for at, gap in enumerate(gaps)]
    columns = {
        "microbatches": [codes.microbatch[code] for code in row],
        "gaps": gaps,
        "lasts": list(map(sub, ends, starts)),
        "lags": [lags.get(code, 0) for code in row],
        "waited": [wait.giver - code if wait else 0 for wait, code in zip(waited, row, strict=True)],
    }
    behind = {at: wording.stood_behind(found.trace, wait) for at, wait in enumerate(waited) if wait and wait.transfer}
    return {
        "sorts": {
            letter: {
                "kind": kind,
                "stage": stage,
                "first": codes.of_kind[kind][stage],
                "held": held,
                "needs": _runs(needs),
            }
            for (kind, stage, held, needs), letter in sorts.items()
        },
        "order": "".join(order),
        **{name: _column(order, numbers) for name, numbers in columns.items()},
        "behind": {at: words for at, words in behind.items() if words},
    }


def _column(order: Sequence[str], numbers: Sequence[int]) -> list[int | list[int]]:
    """Return each action's number as the difference from that of the action before of its sort: mostly the same."""
    before = dict.fromkeys(order, 0)
    differences = []
    for sort, number in zip(order, numbers, strict=True):
        differences.append(number - before[sort])
        before[sort] = number
    return _runs(differences)


def _runs(numbers: Iterable[int]) -> list[int | list[int]]:
    """Return a list in which runs of the same number are short."""
    found: list[int | list[int]] = []
    for value, run in groupby(numbers):
        count = len(list(run))
        found += [[value, count]] if count > 3 else [value] * count
    return found


def _idle(trace: Trace, ticks: Callable[[Iterable[float]], list[int]]) -> list[list[int]]:
    spans: list[list[tuple[int, int, int]]] = [[] for _ in range(trace.ranks)]
    starts, ends = ticks(idle.start for idle in trace.idle), ticks(idle.end for idle in trace.idle)
    for idle, start, end in zip(trace.idle, starts, ends, strict=True):
        if end > start:
            spans[idle.rank].append((REASONS.index(idle.reason), start, end))
    found: list[list[int]] = [[] for _ in spans]
    for row, listed in zip(spans, found, strict=True):
        for (reason, start, end), following in zip_longest(row, row[1:]):
            another = following is not None and following[1] == end
            listed.extend([-1 - reason, end - start] if another else [reason])
    return found
