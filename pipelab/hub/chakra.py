"""Plans as Chakra execution traces, which simulators of clusters such as ASTRA-sim read: a file of nodes for each rank.

    row    rank 1 | 1F0 1B0
    nodes  recv 0F0 ── comp 1F0 ── comp 1B0 ── send 1B0         a node needs what is to its left

The messages are those of MLCommons' `schema/protobuf/et_def.proto`, commit 21585d8; each has its length before it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from pipelab.checking.checker import ScheduleLike
from pipelab.errors import UsageError
from pipelab.files import write
from pipelab.plan.plan import Plan
from pipelab.plan.transfers import Lowering, lowered
from pipelab.simulation.clock import simulate
from pipelab.simulation.cost import Cost, as_cost
from pipelab.trace.events import MICROSECONDS
from pipelab.trace.trace import Trace

_TYPES = {"run": 4, "SEND": 5, "RECV": 6}
"""COMP_NODE, COMM_SEND_NODE, COMM_RECV_NODE."""


def export(plan: Plan | ScheduleLike | Trace, folder: str | os.PathLike[str], cost: Cost | None = None) -> list[Path]:
    """Write a plan as Chakra execution traces, `rank.0.et`, `rank.1.et`, …; return their paths.

    A COMP_NODE is an action with its time in whole microseconds; a unit that is no time counts as a millisecond. It
    needs the action before it on its rank, and the COMM_RECV_NODE of a value from another rank, whose COMM_SEND_NODE,
    with the same size, tag and ranks, needs the action that gives the value.

    Args:
        plan: a plan or schedule, or a trace, whose times then count.
        folder: where the files go; it is made if need be.
        cost: the times, and with `activation_bytes` and `boundary_gradient_bytes` the sizes, at least a byte.

    Example:
        >>> import pipelab, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in export(pipelab.GPipe(2, 4), folder)]
        ['rank.0.et', 'rank.1.et']

    Raises:
        UsageError: if the plan has all-reduces or moves, whose bytes no cost says; if an action
            takes less than half a microsecond.
        ScheduleError: if the plan has faults.
    """
    trace = plan if isinstance(plan, Trace) else simulate(plan, cost)
    bound = trace.plan.bound
    strange = [each.action for each in trace.events if each.action.traits.collective]
    strange += [move.action for move in bound.moves]
    if strange:
        raise UsageError(
            f"{trace.plan.name} has {strange[0]}, and pipelab does not know how many bytes it moves\n"
            f"  try: a plan without {strange[0].kind}"
        )
    short = min((each for each in trace.events if each.duration), key=lambda each: each.duration, default=None)
    if short and not round(short.duration * MICROSECONDS.get(trace.unit, 1e3)):
        raise UsageError(
            f"{short.action} takes {short.duration:g} {trace.unit or 'ms'}, and the files have whole microseconds\n"
            "  try: --unit us, if the numbers are microseconds, or longer times"
        )
    low = lowered(bound, "at-use")
    weighed = replace(as_cost(cost), latency=0, links=None, bandwidth=1)
    sizes = bound.codes.by_value(*weighed.transfer_times(trace.plan))
    Path(folder).mkdir(parents=True, exist_ok=True)
    return [write(Path(folder) / f"rank.{rank}.et", _file(trace, low, sizes, rank)) for rank in range(trace.ranks)]


def _file(trace: Trace, low: Lowering, sizes: list[float], rank: int) -> bytes:
    """Return a rank's nodes, none of them before one that it needs."""
    bound = trace.plan.bound
    action, scale = bound.codes.action, MICROSECONDS.get(trace.unit, 1e3)
    times = dict(zip(bound.computing[rank], zip(trace.starts[rank], trace.ends[rank], strict=True), strict=True))
    messages = [_field(1, "0.0.4")]  # GlobalMetadata
    before: list[int] = []  # the node of the action before
    made: dict[int, list[int]] = {}  # by code, the node of the action
    received: dict[int, list[int]] = {}  # by code, the node of what it needs from another rank
    free = trace.start
    for at, (word, numbers, number) in enumerate((*step, number) for step in low.rows[rank] for number in step[1]):
        about = {"is_cpu_op": (27, 0)}  # by name, the field of its type and its value
        last = b""
        if word == "run":
            start, end = times[number]  # the halves of a pair in one slot share its time: the first one waits for both
            last, free = _field(7, round((max(end, free) - max(start, free)) * scale)), max(end, free)
            slot = [each for each in numbers if times[each] == times[number]]
            name, needs = str(action(number)), [*before, *(one for each in slot for one in received.pop(each, ()))]
            before = made[number] = [at]
        else:
            crossing = low.crossings[number]
            about |= {"comm_size": (9, max(1, round(sizes[number]))), "comm_tag": (7, number)}
            about |= {"comm_src": (7, crossing.source), "comm_dst": (7, crossing.target)}
            name = f"{word.lower()} {action(crossing.giver)}"
            needs = made[crossing.giver] if word == "SEND" else []
            received |= {} if word == "SEND" else {crossing.needer: [at]}
        node = [_field(1, at), _field(2, name), _field(3, _TYPES[word]), _field(5, b"".join(map(_varint, needs))), last]
        node += [_field(10, _field(1, key) + _field(field, value)) for key, (field, value) in about.items()]
        messages.append(b"".join(node))
    return b"".join(_varint(len(message)) + message for message in messages)


def _field(number: int, value: int | str | bytes) -> bytes:
    """Return a field of a protocol buffer: its number and wire type, then a number; or the length, and bytes."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Return a number in groups of seven bits, the lowest first; all but the last have the eighth bit."""
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])
