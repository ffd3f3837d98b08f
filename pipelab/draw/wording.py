"""Numbers, names and tables in words, the same in text, figures and pages."""

from __future__ import annotations

import math
import re
from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING

from pipelab.errors import clean, counted
from pipelab.plan.actions import EVERY_KIND, TRAITS
from pipelab.schedule import DOCSTRINGS
from pipelab.trace.ledger import WAITS
from pipelab.trace.replay import order_of
from pipelab.trace.waits import values_between

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipelab.plan.actions import Kind
    from pipelab.simulation.comparison import Comparison
    from pipelab.trace.trace import Trace
    from pipelab.trace.waits import Wait


def columns(rows: Sequence[Sequence[str]], width: int, least: int = 15, left: Sequence[int] = (0,)) -> list[str]:
    r"""Return rows in columns, the first one flush left, and the others flush right.

    If the lines would be wider than `width`, long heads are wrapped; then the first column is cut.
    """
    if sum(_widths(rows)) + 2 * (len(rows[0]) - 1) > width:
        rows = [*_wrapped(rows[0], _widths(rows[1:])), *rows[1:]]
    first, *others = _widths(rows)
    first = min(first, max(width - sum(others) - 2 * len(others), least))
    lines: list[str] = []
    for name, *figures in rows:
        sized = enumerate(zip(figures, others, strict=True), start=1)
        cells = [f"{each:<{size}}" if place in left else f"{each:>{size}}" for place, (each, size) in sized]
        lines.append("  ".join([f"{cut(name, first):<{first}}", *cells]))
    return lines


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _wrapped(heads: Sequence[str], widths: Sequence[int]) -> list[tuple[str, ...]]:
    """Return heads on two lines, each as narrow as its cells and words allow."""
    parts: list[list[str]] = []
    for head, size in zip(heads, widths, strict=True):
        narrow = range(max(size, *map(len, head.split())), len(head) + 1)
        parts.append(next((lines for width in narrow if len(lines := wrap(head, width)) <= 2), [head]))
    return list(zip_longest(*parts, fillvalue=""))


def cut(text: str, width: int) -> str:
    """Cut a text in its middle: names of one schedule differ at their ends."""
    tail = min(12, width // 3)
    return text if len(text) <= width else f"{text[: width - 1 - tail]}…{text[-tail:]}"


_MOST = 8
"""How many ranks are listed one by one."""


def number(value: float) -> str:
    """Return a number for readers: with at most two decimals in full, others with three digits."""
    if not math.isfinite(value):
        return str(value)
    exact = abs(100 * value - round(100 * value)) <= 1e-9 * max(1.0, abs(100 * value))
    decimals = 2 if exact else max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value * (1 + 1e-12):,.{decimals}f}"  # halves are rounded up, as in the page
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float) -> str:
    """Return a share in per cent."""
    return f"{100 * share:.1f} %"


def percents(shares: Sequence[float]) -> str:
    """Return the shares of many ranks in per cent, with a decimal if all are small."""
    if max(shares, default=0.0) < 0.1:
        return f"{elided(f'{100 * share:.1f}' for share in shares)} %"
    return f"{elided(math.floor(100 * share + 0.5) for share in shares)} %"


def elided(values: Iterable[object]) -> str:
    """Return one value per rank; with many ranks, the middle is left out."""
    words = [str(value) for value in values]
    if len(words) > _MOST:
        words = [*words[:3], "…", *words[-2:]]
    return " ".join(words)


def unit(trace: Trace) -> str:
    """Return the unit of time, `units` if it has no name."""
    return clean(trace.unit) or "units"


def span(trace: Trace, length: float | None = None) -> str:
    """Return the makespan, or another time of a trace, with its unit."""
    text, name = number(trace.makespan if length is None else length), unit(trace)
    return f"{text} {'unit' if (text, name) == ('1', 'units') else name}"


_QUICK = 10_000
"""Of how many actions a caption says which rank limits the step: a picture waits for it."""


def caption(trace: Trace) -> str:
    """Return what every picture of a trace says: its time, its bubble, which rank limits it, and its memory.

    What follows: the ranks' own spans if all are shorter than the makespan; how long they were behind other transfers.
    """
    peaks = trace.peak_activations
    most = max(peaks)
    idle = f"The ranks idle {percent(trace.bubble)} of it (the bubble)"
    if any(TRAITS[kind].again for kind in trace.plan.bound.kinds):
        again = sum(event.duration for event in trace.events if event.action.traits.again)
        idle += f" and recompute {percent(again / (trace.ranks * trace.makespan or 1))}"
    if trace.ranks > 1 and sum(map(len, trace.ends)) <= _QUICK:
        # A rank limits the step if it works most of the time on what may not end later, and longer than any other.
        works = order_of(trace).work_without_slack()
        *_, second, first = sorted(works)
        alone = first > 0.6 * trace.makespan and second < 0.95 * first
        idle += f"; rank {works.index(first)} limits it" if alone else "; no rank alone limits it"
    who, each = (
        (f"Rank {peaks.index(most)}", f" (by rank: {elided(peaks)})") if min(peaks) < most else ("Every rank", "")
    )
    of = f" of slices, each {share}" if (share := _share(trace)) else ""
    told = [f"A step takes {span(trace)}", idle]
    told += [f"{who} holds up to {counted(most, 'activation')}{of}{each}"] if most else []
    if max(trace.spans, default=0.0) < 0.99 * trace.makespan:  # of ZB-H2, whose lanes are a parallelogram
        told.append(f"From first start to last end, ranks take {elided(map(number, trace.spans))}")
    told += [f"Idle behind other transfers: {elided(map(number, trace.queued))}"] if any(trace.queued) else []
    return f"{'. '.join(told)}."


_WORDS: dict[Kind, str] = {"I": "backward: input", "W": "backward: weight", "UNSHARD": "gather of the stage in it"}


def idea(trace: Trace) -> str:
    """Return the first sentence of the docstring of the schedule that a plan's name names; none of another order."""
    found = re.match(r"(?:replicate\()*(\w+)\(ranks(?!.*, (?:forwards|other rows))", trace.plan.name)
    text = DOCSTRINGS.get(found[1], "").replace("`", "").strip() if found else ""
    text = re.split(r"(?<=[.!?])(?<!\.\w\.)(?<!\bvs\.)\s+(?=[A-Z\d])|\n\s*\n", text)[0]
    return clean(re.sub(r"(?<=[^.!?])[:,;]*$", ".", " ".join(text.split()), count=1))


def told(trace: Trace) -> str:
    """Return the idea of a trace's schedule, and its caption."""
    return f"{idea(trace)} {caption(trace)}".strip()


def ways(trace: Trace) -> dict[int, tuple[int, ...]]:
    """Return each way through the ranks by its first micro-batch, if one goes up: at its begin, or where it turns."""
    ranks, stages, found = trace.plan.bound.rank_of_slot, trace.plan.stages, dict[tuple[int, ...], int]()
    for m in range(trace.plan.microbatches):
        found.setdefault(tuple(ranks[m * stages : (m + 1) * stages]), m)
    steps = (step for way in found for step in zip((math.inf, *way), way, way[1:], strict=False))
    up = any(after < here <= before for before, here, after in steps)
    return {m: way for way, m in found.items()} if up and len(found) < 5 else {}


def _sequences(trace: Trace) -> dict[int, list[int]]:
    """Return the micro-batches that are slices of one sequence, by the first of them."""
    after, heads, found = trace.plan.after, list[int](), dict[int, list[int]]()
    for m in range(trace.plan.microbatches):
        heads.append(min((heads[each] for each in (after(m, 0) if after else ())), default=m))
        found.setdefault(heads[m], []).append(m)
    return found


def _share(trace: Trace) -> str:
    """Return how much of a sequence a micro-batch is; empty if a whole one."""
    sizes = {len(each) for each in _sequences(trace).values()} or {1}
    return "part of a sequence" if len(sizes) > 1 else f"1/{max(sizes)} of a sequence" * (sizes != {1})


def brackets(trace: Trace) -> list[int]:
    """Return how many actions each rank begins with that are one sequence's slices, in order; none if no rank does."""
    plan, whole, found = trace.plan, _sequences(trace), list[int]()
    for row in plan.bound.computing:
        slices = whole.get(plan.bound.codes.microbatch[row[0]], []) if row else []
        wanted = [row[0] + (m - slices[0]) * plan.stages for m in slices]
        found.append(len(slices) if len(slices) > 1 and row[: len(slices)] == wanted else 0)
    return found if any(found) else []


def marks(traces: Sequence[Trace]) -> list[str]:
    """Return what a legend says of the marks that show a schedule's idea."""
    said = [f"┌┐ {size} slices: a sequence" for trace in traces for size in brackets(trace) if size]
    said += [f"→ way of {', '.join(f'F{m}' for m in ways(trace))}" for trace in traces if ways(trace)]
    return list(dict.fromkeys(said))


def legend(traces: Sequence[Trace]) -> dict[Kind, str]:
    """Return what a legend says of each kind of action that takes time in the traces."""
    there = {kind for trace in traces for kind in trace.plan.bound.kinds}
    there |= {event.action.kind for trace in traces for event in trace.moves if event.action.traits.cost}
    return {kind: f"{kind} {_WORDS.get(kind, TRAITS[kind].word)}" for kind in EVERY_KIND if kind in there}


def example(traces: Sequence[Trace]) -> tuple[str, str]:
    """Return what a forward's box means, in each way that traces need; if boxes name stages, also which are paler."""
    plans, most, words = [trace.plan for trace in traces], 1, dict[str, None]()
    m, s = min(3, *(plan.microbatches - 1 for plan in plans)), min(2, *(plan.stages - 1 for plan in plans))
    for trace, plan in zip(traces, plans, strict=True):
        count = max(len(set(map(plan.bound.codes.stage.__getitem__, row))) for row in plan.bound.computing)
        what = f"slice {m}, {share}" if (share := _share(trace)) else f"micro-batch {m}"
        words[f"{s}F{m} = stage {s}, forward, {what}" if count > 1 else f"F{m} = forward of {what}"] = None
        most = max(most, count)
    return " or ".join(words), f"paler: {'every ' * (most > 2)}2nd stage" * (most > 1)


def idle(traces: Sequence[Trace]) -> dict[str, str]:
    """Return what a legend says of idle times that are there; of waits, with the narrowest words as its example."""
    reasons = {idle.reason for trace in traces for idle in trace.idle}
    rest = [words for reason, words in (("fill", "not begun"), ("drain", "done")) if reason in reasons]
    found = {"wait": "wait"} if reasons - {"fill", "drain"} else {}
    waits = ((trace, idle.giver) for trace in traces for idle in trace.idle if idle.reason in WAITS)
    for where, giver in waits:
        if giver is not None:
            rank = where.plan.bound.rank_of[where.plan.bound.codes.code(giver)]
            found |= {"wait": f"wait (r{rank}: rank {rank})", "arrow": "arrow: longest"}
            break
    found |= {"transfer": "transfer"} if "transfer" in reasons else {}
    return found | ({"idle": ", ".join(rest)} if rest else {})


def stood_behind(trace: Trace, wait: Wait) -> str:
    """Return behind which other transfer the value waited that an action waited for; empty if behind none."""
    transfer, code = wait.transfer, trace.plan.bound.codes.code
    if transfer is None or transfer.behind is None or not transfer.queued:
        return ""
    giver, needer = transfer.behind
    rank_of = trace.plan.bound.rank_of
    source, target = rank_of[code(giver)], rank_of[code(needer)]
    if transfer.target in (source, target):
        end, other = "receive", f"the one of {needer}" if target == transfer.target else f"the send of {giver}"
    else:
        end, other = "send", f"the one of {giver}" if source == transfer.source else f"the receive of {needer}"
    ready = number(transfer.start - transfer.queued)
    return f"{transfer.giver} had made it by {ready}, but its {end} waited behind {other}"


def table(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a comparison's figures as rows of cells, heads first.

    If the comparison has bounds, there is a column for how far each makespan is above its bound, or one for each bound.
    """
    rows = comparison.rows
    lines = [["name", "step time", "bubble", "peak activations"]]
    for row, trace in zip(rows, comparison.traces, strict=True):
        lines.append([called(row.name), span(trace), percent(row.bubble), elided(row.peak_activations)])
    before = ["-"] * len(rows)
    for at, name, head in ((2, "bound", "of these actions"), (3, "bare_bound", "without C")):
        above = [percent(max(0.0, row.makespan / least - 1)) if (least := getattr(row, name)) else "-" for row in rows]
        if above != before:
            cells = [f"above bound {head}", *above]
            lines = [[*line[:at], cell, *line[at:]] for line, cell in zip(lines, cells, strict=True)]
        before = above
    return list(map(tuple, lines))


NAMES = {
    "OneFOneB": "1F1B",
    "Eager1F1B": "Eager 1F1B",
    "DelayedBackward": "Delayed backward",
    "Interleaved1F1B": "Interleaved 1F1B",
    "Overlapped1F1B": "Overlapped 1F1B",
    "LoopedBFS": "Looped BFS",
    "ZBH1": "ZB-H1",
    "ZBH2": "ZB-H2",
    "InterleavedZeroBubble": "Interleaved zero bubble",
    "ZBV": "ZB-V",
    "V1F1B": "V-1F1B",
    "VHalf": "V-Half",
    "VMin": "V-Min",
    "TwoBW": "PipeDream-2BW",
}
"""What papers call a schedule, by its class; one that is not listed is called like its class."""


def called(name: str) -> str:
    """Return a name as readers know it: what papers call the schedule, and its sizes."""
    found = re.match(r"(\w+)\(ranks=(\d+), microbatches=(\d+)(, .*)?\)(?=,|$)", name := clean(name))
    if not found:
        return name
    kind, ranks, microbatches, more = found.groups(default="")
    sizes = f"{counted(int(ranks), 'rank')}, {counted(int(microbatches), 'micro-batch')}"
    more = re.sub(r"stages_per_rank=(\d+)", r"\1 stages per rank", more)
    return f"{NAMES.get(kind, kind)} · {sizes}{more}{name[found.end() :]}"


def headline(trace: Trace) -> str:
    """Return a trace's title: its own name or its plan's, the source of its times, and its note."""
    return called(", ".join(filter(None, (trace.name, trace.source, trace.note))))


def costs(trace: Trace) -> str:
    """Return what each kind of action takes in a simulated trace, where that is one time on all stages."""
    spans: dict[str, set[float]] = {}
    bound = trace.plan.bound
    for rank in range(trace.ranks if trace.source == "simulated" else 0):
        for code, start, end in trace.computed(rank):
            spans.setdefault(bound.codes.kind[code], set()).add(round(end - start, 9))
    same = {kind: min(times) for kind, times in spans.items() if len(times) == 1 and any(times)}
    words = ", ".join(f"{kind} = {number(time)}" for kind, time in same.items())
    travels = {round(trace.delay(value), 9) for value in values_between(bound).values()} if words else set()
    if len(travels) == 1 and any(travels):
        words += f", transfer {number(max(travels))}"
    return f"{words} ({clean(trace.unit)})" if trace.unit and words else words
