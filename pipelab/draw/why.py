"""Idle time in words: why a rank waits, followed back to its root."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from pipelab.draw import wording
from pipelab.draw.wording import number
from pipelab.errors import UsageError
from pipelab.trace.waits import Waits, before_slot

if TYPE_CHECKING:
    from pipelab.trace.ledger import Idle
    from pipelab.trace.trace import Trace


def why(trace: Trace, rank: int, at: float, lines: int = 5) -> str:
    """Return why a rank is idle at a time, or runs what it runs; see `Trace.why`."""
    if not 0 <= rank < trace.ranks:
        raise UsageError(f"rank {rank}: the trace has ranks 0 to {trace.ranks - 1}")
    if not trace.start <= at <= trace.end:
        raise UsageError(f"time {number(at)}: the trace goes from {number(trace.start)} to {number(trace.end)}")
    row = [idle for idle in trace.idle if idle.rank == rank]
    found = next((idle for idle in row if idle.start <= at < idle.end), None)
    if found is None and row and row[-1].end == at == trace.end:
        found = row[-1]
    waits, codes = Waits(trace), trace.plan.bound.codes
    root: int | None = None
    if found is not None:
        told = [sentence(trace, found)]
        if found.giver is not None and found.needer is not None:
            needs = waits.needs(rank, trace.plan.bound.index_of(rank)[codes.code(found.needer)])
            given = [need for need in needs if codes.action(need.giver) == found.giver]
            root = max(given, key=lambda need: need.there).giver
    else:
        code = max(
            (each for each in trace.events_of(rank) if each.start <= at), key=lambda each: (each.start, each.end)
        )
        root = codes.code(code.action)
        until = f"from {number(code.start)} to {number(code.end)}"
        told = [f"Rank {rank} is busy at {number(at)}: it runs {code.action} {until}."]
    if root is not None:
        steps = chain(trace, root)
        told += islice(steps, lines)
        if more := sum(1 for _ in steps):
            told.append(f"… and {more} more steps, back to a first action.")
    return "\n".join(told)


def sentence(trace: Trace, idle: Idle) -> str:
    """Return what an idle time is, in one sentence."""
    length = f"{number(idle.duration)} {wording.unit(trace)}"
    head = f"Rank {idle.rank} is idle from {number(idle.start)} to {number(idle.end)} ({length}, {idle.reason}): "
    if idle.reason == "drain":
        last = trace.events_of(idle.rank)[-1].action
        return f"{head}it has done all of its actions, {last} was the last; others end at {number(trace.end)}."
    if idle.needer is None:
        return f"{head}it has nothing to do."
    if idle.reason == "order":
        return f"{head}all that {idle.needer} needs is there, and the rank has not started it."
    if idle.giver is None and idle.reason == "all-reduce":
        return f"{head}it has done all of its actions, and {idle.needer} runs beside computing."
    if idle.giver is None:
        return f"{head}{idle.needer}, its first action, needs nothing, and has not been started."
    ended = max((event.end for event in trace.events if event.action == idle.giver), default=idle.end)
    if idle.reason == "all-reduce":
        return f"{head}{idle.needer} begins when the last rank is there, which runs {idle.giver} until {number(ended)}."
    told = {
        "behind another transfer": f"which ended at {number(ended)}, but whose transfer stands behind another",
        "transfer": f"which ended at {number(ended)} and is on its way",
    }.get(idle.reason, f"which ends at {number(ended)}")
    first = ", its first action," if idle.reason == "fill" else ""
    if idle.reason == "behind another transfer":
        found = Waits(trace)
        codes = trace.plan.bound.rows[idle.rank]
        wait = found.of(idle.rank, codes.index(trace.plan.bound.codes.code(idle.needer)))
        behind = wording.stood_behind(trace, wait) if wait is not None else ""
        told = f"which ended at {number(ended)}: {behind}" if behind else told
    return f"{head}{idle.needer}{first} needs {idle.giver}, {told}."


def chain(trace: Trace, code: int) -> Iterator[str]:
    """Yield, step by step backwards, why an action, or a move, did not begin earlier."""
    bound, found = trace.plan.bound, Waits(trace)
    where = {code: (rank, index) for rank, row in enumerate(bound.rows) for index, code in enumerate(row)}
    named = bound.codes.action
    while True:
        if code not in where:
            move, before_it = found.moved[code], found.before_move(code)
            yield f"{move.action} begins on rank {move.rank} at {number(move.start)}: " + (
                "nothing comes before it." if before_it is None else f"until then it waits for {named(before_it)}."
            )
            if before_it is None:
                return
            code = before_it
            continue
        rank, index = where[code]
        began, wait = number(trace.starts[rank][index]), found.of(rank, index)
        before = before_slot(trace, rank, index)
        if wait is not None:
            giver = f"{named(wait.giver)} on rank {where.get(wait.giver, (rank,))[0]}"
            there = f", and its value is there at {number(wait.there)}" if wait.there > wait.ended else ""
            yield f"{named(code)} begins on rank {rank} at {began}: {giver} ends at {number(wait.ended)}{there}."
            code = wait.giver
        elif before >= 0:
            other = bound.rows[rank][before]
            yield f"{named(code)} begins on rank {rank} at {began}: until then it runs {named(other)}."
            code = other
        else:
            yield f"{named(code)} begins on rank {rank} at {began}: it is the rank's first action, and needs nothing."
            return
