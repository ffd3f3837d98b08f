"""Idle time in words: why a rank waits, followed back to its root."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from pipelab.draw import wording
from pipelab.draw.wording import number
from pipelab.errors import UsageError, counted
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
    found = _idle_at(trace, rank, at)
    if found is not None:
        told, root = [sentence(trace, found)], _giver(trace, found)
    else:
        begun = (event for event in trace.events_of(rank) if event.start <= at)
        event = max(begun, key=lambda event: (event.start, event.end))
        root = trace.plan.bound.codes.code(event.action)
        until = f"from {number(event.start)} to {number(event.end)}"
        told = [f"Rank {rank} is busy at {number(at)}: it runs {event.action} {until}."]
    if root is not None:
        steps = chain(trace, root)
        told += islice(steps, lines)
        if more := sum(1 for _ in steps):
            told.append(f"… and {counted(more, 'more step')}, back to a first action.")
    return "\n".join(told)


def _idle_at(trace: Trace, rank: int, at: float) -> Idle | None:
    """Return a rank's idle time at a time; at the trace's end, the one that ends there."""
    row = [idle for idle in trace.idle if idle.rank == rank]
    last = [idle for idle in row[-1:] if idle.end == at == trace.end]
    return next((idle for idle in row if idle.start <= at < idle.end), next(iter(last), None))


def _giver(trace: Trace, idle: Idle) -> int | None:
    """Return the code of what gave the value that came last."""
    bound = trace.plan.bound
    if idle.giver is None or idle.needer is None:
        return None
    needs = Waits(trace).needs(idle.rank, bound.index_of(idle.rank)[bound.codes.code(idle.needer)])
    given = [need for need in needs if bound.codes.action(need.giver) == idle.giver]
    return max(given, key=lambda need: need.there).giver


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
    ended = number(max((event.end for event in trace.events if event.action == idle.giver), default=idle.end))
    if idle.reason == "all-reduce":
        return f"{head}{idle.needer} begins when the last rank is there, which runs {idle.giver} until {ended}."
    told = f"which ends at {ended}"
    if idle.reason == "transfer":
        told = f"which ended at {ended} and is on its way"
    if idle.reason == "behind another transfer":
        wait = Waits(trace).of(
            idle.rank, trace.plan.bound.index_of(idle.rank)[trace.plan.bound.codes.code(idle.needer)]
        )
        behind = wording.stood_behind(trace, wait) if wait is not None else ""
        told = f"which ended at {ended}{f': {behind}' if behind else ', but whose transfer waits behind another'}"
    first = ", its first action," if idle.reason == "fill" else ""
    return f"{head}{idle.needer}{first} needs {idle.giver}, {told}."


def chain(trace: Trace, code: int) -> Iterator[str]:
    """Yield, step by step backwards, why an action, or a move, did not begin earlier."""
    found = Waits(trace)
    where = {code: (rank, index) for rank, row in enumerate(found.bound.computing) for index, code in enumerate(row)}
    before: int | None = code
    while before is not None:
        step, before = _step(found, before, where) if before in where else _step_of_move(found, before)
        yield step


def _step(found: Waits, code: int, where: Mapping[int, tuple[int, int]]) -> tuple[str, int | None]:
    """Return why an action did not begin earlier, and the code of what it waited for."""
    named, (rank, index) = found.bound.codes.action, where[code]
    head = f"{named(code)} begins on rank {rank} at {number(found.trace.starts[rank][index])}"
    wait, before = found.of(rank, index), before_slot(found.trace, rank, index)
    if wait is not None:
        giver = f"{named(wait.giver)} on rank {where.get(wait.giver, (rank,))[0]}"
        there = f", and its value is there at {number(wait.there)}" if wait.there > wait.ended else ""
        return f"{head}: {giver} ends at {number(wait.ended)}{there}.", wait.giver
    if before >= 0:
        other = found.bound.computing[rank][before]
        return f"{head}: until then it runs {named(other)}.", other
    return f"{head}: it is the rank's first action, and needs nothing.", None


def _step_of_move(found: Waits, code: int) -> tuple[str, int | None]:
    move, before = found.moved[code], found.before_move(code)
    head = f"{move.action} begins on rank {move.rank} at {number(move.start)}"
    if before is None:
        return f"{head}: nothing comes before it.", None
    return f"{head}: until then it waits for {found.bound.codes.action(before)}.", before
