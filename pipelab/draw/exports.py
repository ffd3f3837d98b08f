"""Traces for other tools: Perfetto and Chrome's tracing, and a table of events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelab.draw.bars import strip
from pipelab.table import Table
from pipelab.trace.events import MICROSECONDS
from pipelab.trace.waits import Waits, waits

if TYPE_CHECKING:
    from pipelab.plan.actions import Action
    from pipelab.trace.ledger import Idle
    from pipelab.trace.trace import Trace


def perfetto(trace: Trace) -> dict[str, Any]:
    """Return a trace in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open.

    Each rank is a thread, and each of its channels beside computing; each action a slice with what it waited for, each
    transfer an arrow, and the activations that a rank holds a counter. Times are microseconds; a unit that is no time
    counts as a millisecond.

    Source:
        "Trace Event Format", Google, 2016.
    """
    scale = MICROSECONDS.get(trace.unit, 1e3)
    action, rows = trace.plan.bound.codes.action, trace.plan.bound.computing
    where: dict[tuple[int, str], tuple[float, float]] = {}
    found: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": trace.name}}]
    for rank, (row, waited) in enumerate(zip(rows, waits(trace), strict=True)):
        thread: dict[str, Any] = {"pid": 0, "tid": rank}
        found.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": f"rank {rank}"}})
        found.append({"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": rank}})
        held = trace.plan.bound.in_flight(rank)
        for code, wait, start, end, count in zip(row, waited, trace.starts[rank], trace.ends[rank], held, strict=True):
            each = action(code)
            begin, last = scale * (start - trace.start), scale * (end - start)
            where[rank, str(each)] = begin, begin + last
            args = {} if wait is None else {"waited for": str(action(wait.giver))}
            found.append(_slice(each, rank, begin, last, **args))
            if each.traits.in_flight:
                at = begin if each.traits.in_flight > 0 else begin + last
                counter = f"activations of rank {rank}"
                found.append({"ph": "C", "name": counter, "pid": 0, "ts": at, "args": {"held": count}})
    threads: dict[str, int] = {}
    for event in trace.moves:
        name = f"rank {event.rank}, {strip(event.action)}"
        if name not in threads:
            threads[name] = trace.ranks + len(threads)
            found.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": threads[name], "args": {"name": name}})
        found.append(_slice(event.action, threads[name], scale * (event.start - trace.start), scale * event.duration))
    for number, transfer in enumerate(trace.transfers):
        flow = {"name": "transfer", "cat": "transfer", "id": number, "pid": 0}
        _, left = where[transfer.source, str(transfer.giver)]
        begun, _ = where[transfer.target, str(transfer.needer)]
        found.append({"ph": "s", **flow, "tid": transfer.source, "ts": left})
        found.append({"ph": "f", "bp": "e", **flow, "tid": transfer.target, "ts": begun})
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def _slice(action: Action, thread: int, begin: float, last: float, **more: str) -> dict[str, Any]:
    """Return an action as a slice of a thread."""
    args = {"stage": action.stage} | ({} if action.microbatch is None else {"micro-batch": action.microbatch})
    about = {"ph": "X", "name": str(action), "cat": action.word, "pid": 0, "tid": thread}
    return {**about, "ts": begin, "dur": last, "args": {**args, **more}}


def events(trace: Trace) -> Table:
    """Return every action as a row: when it ran, what it waited for, and how long its rank was idle before, and why.

    The moves of a rank, which run beside computing, follow its other actions. What a rank waits at its end for an
    all-reduce beside computing is in the row of that.
    """
    bound, found = trace.plan.bound, Waits(trace)
    before: dict[tuple[int, str], list[Idle]] = {}
    for each in trace.idle:
        before.setdefault((each.rank, str(each.needer)), []).append(each)
    rows: list[dict[str, Any]] = []
    for rank, waited in enumerate(waits(trace)):
        givers = [None if wait is None else wait.giver for wait in waited]
        moves = zip(bound.moves, trace.moves, strict=False)
        moved = ((event, found.before_move(move.code)) for move, event in moves if move.rank == rank)
        for event, giver in [*zip(trace.events_of(rank), givers, strict=True), *moved]:
            idle = before.get((rank, str(event.action)), [])
            rows.append(
                {
                    "rank": rank,
                    "kind": event.action.kind,
                    "stage": event.action.stage,
                    "microbatch": event.action.microbatch,
                    "start": event.start,
                    "end": event.end,
                    "waited_for": None if giver is None else str(bound.codes.action(giver)),
                    "idle_before": sum(each.duration for each in idle),
                    "reason": max(idle, key=lambda each: each.duration).reason if idle else None,
                }
            )
    return Table(rows, [])
