"""Read a trace from plain data: everything is looked at before anything is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipelab.checking.checker import require_legal
from pipelab.errors import FormatError, counted
from pipelab.plan.actions import FINITE, Action, finite
from pipelab.plan.fault import ScheduleError, shorten
from pipelab.plan.plan import Plan
from pipelab.trace.events import Event, Transfer

FORMAT = "pipelab-trace"
VERSION = 1

_WORDS = {"source": ("simulated", "measured"), "all_reduce_runs": ("in-row", "beside"), "passes": ("all", "forwards")}
_USUAL = {"name": "", "unit": "", "note": "", "lanes": [], "costs": {}} | {key: each[0] for key, each in _WORDS.items()}
"""What a file need not say; nor `stages` and `microbatches`, which follow from the rows, `transfers` and `moves`."""
_KINDS = {str: "a text", int: "a whole number", list: "a list", dict: "lists by name"}
_PARTS = ("source", "target", "giver", "needer", "start", "end")
_BEHIND = ("queued", "giver", "needer")
"""What follows for a transfer that waited behind another one: how long, and which."""


def read_saved(path: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Trace` from the data of a file that `Trace.save` wrote."""
    try:
        return read(data)
    except FormatError as error:
        tries = "pipelab simulate 1f1b --save example.json, which writes one"
        if "traceEvents" in data:
            tries = "pipelab.hub.profiles.load, which reads PyTorch's profiles"
        raise FormatError(f"{path} is not a trace saved by pipelab: {error}\n  try: {tries}") from error


def read(data: object) -> dict[str, Any]:
    """Return the arguments of `Trace` from the data that `Trace.to_dict` made."""
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise FormatError(f"expected format {FORMAT!r}, version {VERSION}")
    data = {**_USUAL, **data}
    name, unit, note, source, runs, _ = (_field(data, key, str) for key in ("name", "unit", "note", *_WORDS))
    for key, words in _WORDS.items():
        if data[key] not in words:
            raise FormatError(f"{key!r} is {shorten(data[key])}: expected {' or '.join(words)}")
    plan = _plan(data, name).reducing(beside=runs == "beside")
    starts, ends = (_times_of(data, key, plan) for key in ("starts", "ends"))
    for rank, both in enumerate(zip(starts, ends, strict=True)):
        for position, (start, end) in enumerate(zip(*both, strict=True)):
            if end < start:
                raise FormatError(f"rank {rank}, position {position} ends at {end}, before its start at {start}")
    costs = {kind: _times(times, f"'costs', {kind}") for kind, times in _field(data, "costs", dict).items()}
    return {
        "plan": plan,
        "starts": starts,
        "ends": ends,
        "unit": unit,
        "source": source,
        "transfers": _transfers(data, plan) if "transfers" in data else None,
        "moves": _moves(data, plan),
        "lanes": _texts(data, "lanes"),
        "note": note,
        "costs": partial(dict, costs),  # and no lambda, so that a trace can be pickled
    }


def _plan(data: dict[str, Any], name: str) -> Plan:
    """Return the plan, which has no faults."""
    read = Plan.parse(_texts(data, "rows"))
    data = {"stages": read.stages, "microbatches": read.microbatches, **data}
    stages, microbatches = (_field(data, key, int) for key in ("stages", "microbatches"))
    slices = data.get("after")
    after = None if slices is None else partial(_entry, slices)
    only = data["passes"] == "forwards"
    return plan_of(read.written, stages, microbatches, name, after=after, forwards_only=only)


def _entry(table: Sequence[Sequence[Any]], row: int, column: int) -> Any:
    return table[row][column]


def plan_of(written: Sequence[Sequence[object]], stages: int, microbatches: int, name: str, **more: Any) -> Plan:
    """Return a plan that has no faults; `more` is for `Plan`."""
    actions = sum(map(len, written))
    # Before tables of that size are made. A pair is one item and two actions.
    if stages < 1 or microbatches < 1 or stages * microbatches > actions:
        raise FormatError(
            f"stages={shorten(stages)} and microbatches={shorten(microbatches)} do not fit {counted(actions, 'action')}"
        )
    plan = Plan(written, stages, microbatches, name=name, **more)
    try:
        require_legal(plan)
    except ScheduleError as error:
        raise FormatError(f"its plan has faults: {error.faults[0].message}") from error
    return plan


def _times_of(data: dict[str, Any], key: str, plan: Plan) -> list[list[float]]:
    """Return every rank's starts or ends, one for each action."""
    listed = [_times(times, f"{key!r}, rank {rank}") for rank, times in enumerate(_field(data, key, list))]
    counts, rows = [*map(len, listed)], [*map(len, plan.bound.computing)]
    if counts != rows:
        raise FormatError(f"{key!r} have {shorten(counts)} times, rank by rank, for {shorten(rows)} actions")
    return listed


def _transfers(data: dict[str, Any], plan: Plan) -> list[Transfer]:
    """Return the transfers, each between two ranks that list its actions."""
    codes = plan.bound.codes
    listed = [{codes.action(code) for code in row} for row in plan.bound.computing]
    anywhere = set().union(*listed)
    transfers: list[Transfer] = []
    for number, parts in enumerate(_field(data, "transfers", list)):
        where = f"'transfers', number {number}"
        if len(_is(parts, list, where)) not in (len(_PARTS), len(_PARTS + _BEHIND)):
            words = f"{', '.join(_PARTS)}, and maybe {', '.join(_BEHIND)} of the one before it"
            raise FormatError(f"{where} is {shorten(parts)}: expected {words}")
        ranks, ends = parts[:2], [Action.parse(_is(text, str, where)) for text in parts[2:4]]
        for rank, action in zip(ranks, ends, strict=True):
            if not 0 <= _is(rank, int, where) < plan.ranks or action not in listed[rank]:
                raise FormatError(f"{where} names {shorten(action)} on rank {shorten(rank)}, which does not list it")
        times = [time_of(time, where) for time in parts[4:6]]
        transfers.append(Transfer(*ranks, *ends, *times, *_behind(parts[6:], anywhere, where)))
    return transfers


def _moves(data: dict[str, Any], plan: Plan) -> list[Event]:
    """Return the plan's moves, each with its times; none if none were measured."""
    listed, moves = _field({"moves": [], **data}, "moves", list), plan.bound.moves
    if len(listed) not in (0, len(moves)):
        raise FormatError(f"'moves': {len(listed)} of the plan's {counted(len(moves), 'move')}")
    times = [_times(move, f"'moves', number {number}") for number, move in enumerate(listed)]
    if any(len(both) != 2 for both in times):
        raise FormatError("'moves': expected start and end of each")
    return [Event(move.rank, move.action, *both) for move, both in zip(moves, times, strict=False)]


def _behind(parts: Sequence[Any], anywhere: set[Action], where: str) -> tuple[float, tuple[Action, Action]] | tuple[()]:
    """Return how long a transfer waited behind which other one; nothing if it did not."""
    if not parts:
        return ()
    giver, needer = (Action.parse(_is(text, str, where)) for text in parts[1:])
    if not {giver, needer} <= anywhere:
        raise FormatError(f"{where} waited behind {shorten(giver)} and {shorten(needer)}, which no rank lists")
    return time_of(parts[0], where), (giver, needer)


def _field(data: dict[str, Any], key: str, kind: type) -> Any:
    if key not in data:
        raise FormatError(f"{key!r} is missing")
    return _is(data[key], kind, repr(key))


def _texts(data: dict[str, Any], key: str) -> list[str]:
    return [_is(text, str, f"{key!r}, rank {rank}") for rank, text in enumerate(_field(data, key, list))]


def _times(times: Any, where: str) -> list[float]:
    return [time_of(time, f"{where}, position {position}") for position, time in enumerate(_is(times, list, where))]


def _is(value: Any, kind: type, where: str) -> Any:
    """Return a value of this type: `True` is not a whole number, and a tuple is a list."""
    if kind is list and isinstance(value, tuple):
        return value
    if not isinstance(value, kind) or isinstance(value, bool):
        raise FormatError(f"{where} is {shorten(value)}: expected {_KINDS[kind]}")
    return value


def time_of(value: Any, where: str) -> float:
    """Return a number that can be a time."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or finite(abs(value)) is None:  # nor is NaN
        raise FormatError(f"{where} is {shorten(value)}: expected a time, {FINITE}")
    return float(value)
