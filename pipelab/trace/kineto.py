"""What `torch.profiler` wrote of one rank: which actions of PyTorch's own pipelining ran, and when."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from pipelab.errors import FormatError
from pipelab.plan.actions import Action, Kind
from pipelab.plan.fault import shorten
from pipelab.trace.reading import time_of

_NAMES: dict[str, dict[str, re.Pattern[str]]] = {
    "user_annotation": {
        # PyTorch's runtime labels all that it does: PP:2F0, PP:(0F3;3B1)OVERLAP_F_B, PP:2RECV_F0.
        "label": re.compile(r"PP:.+"),
        # ScheduleGPipe labels forwards and backwards. Each holds the wait for its value too.
        "single": re.compile(r"(Forward|Backward) ([0-9]{1,9})"),
        # A receive of gloo's ends when the value is there.
        "received": re.compile(r"\w+:recv\b.*"),
    },
    # Schedule1F1B labels nothing, but the profiler can record which functions were called.
    "python_function": {
        "frame": re.compile(r".*torch/distributed/pipelining/stage\.py.*: (forward|backward)_one_chunk"),
        "step": re.compile(r".*torch/distributed/pipelining/schedules\.py.*: _step_microbatches"),
    },
    "cpu_op": {"send": re.compile("c10d::send"), "recv": re.compile("c10d::recv_")},
}
"""Which events count, by category: what each kind is called here, and its names."""
_COMPUTED = re.compile(r"PP:(?:\(([0-9]+F[0-9]+);([0-9]+[BI][0-9]+)\)OVERLAP_F_B|([0-9]+(?:[FBIW][0-9]+|REDUCE_GRAD)))")
MOVED = re.compile(r"PP:([0-9]{1,9})(SEND|RECV)_([FB])([0-9]{1,9})")
_COLLECTIVE = re.compile("nccl|rccl", re.IGNORECASE)


Span = tuple[float, float, str]
"""Start and end in microseconds, and a name."""


@dataclass(slots=True)
class Kernel:
    """Work on the device: when it was launched, when it ran, and on which stream."""

    launched: float
    start: float
    end: float
    stream: str
    name: str


@dataclass(slots=True)
class Ran:
    """What one label says: which actions ran, and when; when the values that they received were there.

    On a GPU, these are the device's times. `called` is the host's start.
    """

    actions: tuple[Action, ...]
    called: float
    start: float
    end: float
    arrived: tuple[float | None, ...]


@dataclass(slots=True)
class File:
    """What one rank's file holds, in order of time."""

    path: str
    rank: int | None
    host: str | None
    on_gpu: bool
    spans: dict[str, list[Span]]
    kernels: list[Kernel]
    stream: str
    """The one with the most work."""
    steps: list[list[Ran]] = field(default_factory=list)


def is_profile(data: object) -> bool:
    """Return whether the data of a JSON file are a profiler's."""
    return isinstance(data, dict) and "traceEvents" in data


# What a file holds


def base_of(path: str, data: Mapping[str, Any]) -> float:
    """Return from when a file's times count, in nanoseconds: a whole number, which is exact."""
    base: float = data.get("baseTimeNanoseconds", 0)
    time_of(base, f"{path}: 'baseTimeNanoseconds'")
    return base


def read_file(path: str, data: Mapping[str, Any], ahead: float) -> File:
    """Read one rank's events.

    Args:
        path: the file's name.
        data: what it holds.
        ahead: how much later its times begin to count than the first file's, in microseconds.

    Raises:
        FormatError: if an event that counts has no start or length.
    """
    events, about = data["traceEvents"], data.get("distributedInfo")
    if not isinstance(events, list):
        raise FormatError(f"{path}: 'traceEvents' is {shorten(events)}: expected a list")
    about = about if isinstance(about, dict) else {}
    spans: dict[str, list[Span]] = defaultdict(list)
    launches: dict[int, float] = {}
    kernels: list[tuple[int, Span, str]] = []
    for number, event in enumerate(events):
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        name, kind, args = (event.get(key) for key in ("name", "cat", "args"))
        if not isinstance(name, str) or not isinstance(kind, str):
            continue
        what = next((what for what, names in _NAMES.get(kind, {}).items() if names.fullmatch(name)), None)
        args = args if isinstance(args, dict) else {}
        called: Any = args.get("correlation")
        launch = kind.endswith(("_runtime", "_driver"))
        if what is None and not (isinstance(called, int) and (launch or kind == "kernel")):
            continue
        where = f"{path}: event {number}, {shorten(name)}: "
        start = ahead + time_of(event.get("ts"), f"{where}'ts'")
        span = start, start + max(0.0, time_of(event.get("dur"), f"{where}'dur'")), name
        if what is not None:
            spans[what].append(span)
        elif launch:
            launches[called] = start
        else:
            kernels.append((called, span, str(args.get("stream", event.get("tid")))))
    for rows in spans.values():
        rows.sort(key=lambda each: (each[0], -each[1]))
    found = [Kernel(launches[called], *span[:2], on, span[2]) for called, span, on in kernels if called in launches]
    found.sort(key=lambda each: each.launched)
    work: dict[str, float] = defaultdict(float)
    for each in found:
        work[each.stream] += 0 if _COLLECTIVE.search(each.name) else each.end - each.start
    rank, host = about.get("rank"), data.get("host_name")
    return File(
        path,
        rank if isinstance(rank, int) else None,
        host if isinstance(host, str) else None,
        bool(launches) or "nccl" in str(about.get("backend")),
        spans,
        found,
        max(work, key=work.__getitem__, default=""),
    )


def _ran(file: File) -> Iterator[Ran]:
    """Yield what one rank ran, in order; of a schedule that names no stages, all on stage 0."""
    spans = file.spans
    arrived: dict[tuple[str, int | None, int | None], float | None] = {}
    for start, end, name in spans["label"]:
        if moved := MOVED.fullmatch(name):
            if moved[2] == "RECV":
                arrived[moved[3], int(moved[4]), int(moved[1])] = _received(file, start, end)
        elif computed := _COMPUTED.fullmatch(name):
            actions = tuple(Action.parse(text) for text in computed.groups() if text)
            keys = [("F" if each.traits.forward else "B", each.microbatch, each.stage) for each in actions]
            yield _timed(file, actions, start, end, tuple(arrived.pop(key, None) for key in keys))
    if spans["label"]:
        return
    for start, end, name in spans["single"]:
        word, number = name.split()
        action = Action("F" if word == "Forward" else "B", int(number), 0)
        if file.kernels:
            yield _timed(file, (action,), start, end, (None,))
            continue
        sent = min((at for at, _, _ in _within(spans["send"], start, end)), default=end)  # its label ends after that
        yield _timed(file, (action,), start, sent, (_received(file, start, end),))
    if spans["single"]:
        return
    for since, until, _ in spans["step"]:
        seen: Counter[str] = Counter()
        for start, end, name in spans["frame"]:
            if since <= start < until:
                kind: Kind = "F" if name.endswith("forward_one_chunk") else "B"
                yield _timed(file, (Action(kind, seen[kind], 0),), start, end, (None,))
                seen[kind] += 1


def _timed(file: File, actions: tuple[Action, ...], start: float, end: float, arrived: tuple[float | None, ...]) -> Ran:
    """Return when actions ran: on a GPU, what was launched meanwhile; on a CPU, from when their value was there."""
    if file.kernels:
        work = [
            each
            for each in _launched(file, start, end)
            if each.stream == file.stream and not _COLLECTIVE.search(each.name)
        ]
        begun, ended = (
            min((each.start for each in work), default=start),
            max((each.end for each in work), default=start),
        )
    else:
        begun, ended = min(max(start, -inf if arrived[0] is None else arrived[0]), end), end
    return Ran(actions, start, begun, ended, arrived)


def _launched(file: File, start: float, end: float) -> list[Kernel]:
    """Return the kernels that the host launched in a span: a backward's are launched by another thread."""
    low, high = (
        find(file.kernels, at, key=lambda each: each.launched)
        for find, at in ((bisect_left, start), (bisect_right, end))
    )
    return file.kernels[low:high]


def _received(file: File, start: float, end: float) -> float | None:
    """Return when what was asked for in a span was there."""
    if file.kernels:
        return max((each.end for each in _launched(file, start, end) if _COLLECTIVE.search(each.name)), default=None)
    return max((each[1] for each in _within(file.spans["received"], start, end)), default=None)


def _within(rows: list[Span], start: float, end: float) -> list[Span]:
    """Return the spans that begin within another one."""
    low, high = (bisect_left(rows, at, key=lambda each: each[0]) for at in (start, end))
    return rows[low:high]


# Steps and ranks


def whole_steps(file: File) -> list[list[Ran]]:
    """Return the steps of one rank that the profiler saw from their first action to their last.

    Raises:
        FormatError: if there is none.
    """
    steps: list[list[Ran]] = [[]]
    begun: set[tuple[int | None, int | None]] = set()
    for ran in _ran(file):
        step = steps[-1]
        if any(action in each.actions for each in step for action in ran.actions):
            steps.append(step := [])
            begun.clear()
        begun |= {(each.stage, mb) for each in ran.actions if each.traits.forward for mb in (each.microbatch, None)}
        step.append(ran)
        if not begun.issuperset((each.stage, each.microbatch) for each in ran.actions):
            steps[-1] = []  # the profiler began after this action's forward
            begun.clear()
    whole = [step for step in steps if step and _is_whole(step)]
    if whole:
        return whole
    if any(steps):
        raise FormatError(
            f"{file.path} holds no whole step, each forward with its backward: profile from before a step to after it"
        )
    raise FormatError(
        f"{file.path} names no forward and no backward of a pipeline. PyTorch's runtime labels them PP:2F0, and "
        "ScheduleGPipe Forward 0; Schedule1F1B labels none\n  try: torch.profiler.profile(..., with_stack=True), which "
        "records what it calls"
    )


def _is_whole(step: Sequence[Ran]) -> bool:
    """Return whether every forward has its backward, or its weight gradient."""
    places: dict[str, list[tuple[int, int]]] = {kinds: [] for kinds in ("F", "BW")}
    for ran in step:
        for each in ran.actions:
            for kinds, found in places.items():
                if each.kind in kinds:
                    found.append((each.stage or 0, each.microbatch or 0))
    return sorted(places["F"]) == sorted(places["BW"])
