"""What every action of a trace waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pipelab.trace.trace import Trace

__all__ = ["Half", "Wait", "half", "waits"]

Half = Literal["whole", "upper", "lower"]


@dataclass(frozen=True, slots=True)
class Wait:
    """What an action waited for, while its rank was free.

    Attributes:
        giver: the code of the action that gave the need that arrived last; for an `R`, of the last action on the rank
            of the group that came last.
        there: when that need was there.
    """

    giver: int
    there: float


def waits(trace: Trace) -> list[list[Wait | None]]:
    """Return, for each rank and each of its actions, what it waited for; `None` if its rank was the last to be ready.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.OneFOneB(ranks=2, microbatches=1))
        >>> action = trace.plan.program.numbering.action
        >>> [[wait and (action(wait.giver), wait.there) for wait in row] for row in waits(trace)]
        [[None, (1B0, 4.0)], [(0F0, 1.0), None]]
    """
    program = trace.plan.program
    arrivals = _arrivals(trace)
    slack = 1e-9 * trace.makespan
    found: list[list[Wait | None]] = []
    for rank, row in enumerate(program.rows):
        free = trace.start
        waited: list[Wait | None] = []
        for index, code in enumerate(row):
            part = half(trace, rank, index)
            needs = arrivals[code]
            if part != "whole":  # a slot starts when both of its halves have what they need
                needs = needs + arrivals[row[index + (1 if part == "upper" else -1)]]
            last = max(needs, key=lambda wait: wait.there, default=None)
            waited.append(last if last is not None and last.there > free + slack else None)
            if part != "upper":
                free = max(free, trace.ends[rank][index])
        found.append(waited)
    return found


def _arrivals(trace: Trace) -> dict[int, list[Wait]]:
    """Return, for every code, when each of its needs was there; for an `R`, when each rank of its group was free."""
    program = trace.plan.program
    numbering = program.numbering
    ended = {
        code: end
        for row, ends in zip(program.rows, trace.ends, strict=True)
        for code, end in zip(row, ends, strict=True)
    }
    travelled = {
        (numbering.code(transfer.giver), numbering.code(transfer.needer)): transfer.end for transfer in trace.transfers
    }
    arrivals: dict[int, list[Wait]] = {}
    for rank, row in enumerate(program.rows):
        for index, code in enumerate(row):
            found = arrivals.setdefault(code, [])
            for value in numbering.needs(code):
                giver = program.giver(value)
                found.append(Wait(giver, travelled.get((giver, code), ended[giver])))
            if code >= 4 * numbering.slots and index:
                found.append(Wait(row[index - 1], trace.ends[rank][index - 1]))
    return arrivals


def half(trace: Trace, rank: int, index: int) -> Half:
    """Return which part of its slot an action fills: half of it where it shares the slot with its pair's other half."""
    pairs = trace.plan.program.pairs
    if pairs:
        row = trace.plan.program.rows[rank]
        starts, ends = trace.starts[rank], trace.ends[rank]
        span = (starts[index], ends[index])
        if row[index] in pairs and span == (starts[index + 1], ends[index + 1]):
            return "upper"
        if index and row[index - 1] in pairs and span == (starts[index - 1], ends[index - 1]):
            return "lower"
    return "whole"
