"""Profiles of all ranks of another job, as `torch.profiler` wrote them, as one trace: steps, ranks, stages, clocks."""

from __future__ import annotations

import errno
import glob
import os
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from pipelab.errors import FormatError, UsageError
from pipelab.hub.clocks import Times, offsets_of
from pipelab.plan.actions import Action, Item, Kind, Pair
from pipelab.plan.fault import ranges, shorten
from pipelab.trace.reading import plan_of, read_json, read_saved, time_of
from pipelab.trace.trace import Trace
from pipelab.trace.waits import travelled


def load(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], step: int | None = None) -> Trace:
    """Read PyTorch's profiles of a job that does not use pipelab, or a trace that `Trace.save` wrote.

    A profile is what `torch.profiler` writes with `export_chrome_trace`, one file for each rank. It shows a step of
    `torch.distributed.pipelining`: see [Read a trace of another job](../profiles.md).

    Args:
        path: the files of all ranks, packed with gzip or not: a list, or a pattern such as `"traces/rank*.json.gz"`.
        step: which step, from 0; by default the one of median length, which the trace's `note` names.

    Raises:
        FormatError: if the files do not hold a trace; the message says what is wrong and where.
        UsageError: if the profiles hold no such step.
    """
    paths = _files(path)
    data = read_json(paths[0])
    if len(paths) == 1 and not _is_profile(data):
        if step is not None:
            raise UsageError(f"step={step}: {paths[0]} is no profile, and holds one step")
        return Trace(**read_saved(paths[0], data))
    name = Path(path).name if isinstance(path, (str, os.PathLike)) else f"{len(paths)} profiles"
    later = ((str(each), read_json(each)) for each in paths[1:])  # one by one: they may be large
    ranks = _in_order(list(_read(chain([(str(paths[0]), data)], later))))
    return _trace(ranks, _number(ranks, step), name)


def _files(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the files that a path, a pattern or a list of paths names; of a pattern, `rank10` after `rank9`."""
    if not isinstance(path, (str, os.PathLike)):
        if not (paths := [Path(each) for each in path]):
            raise UsageError("an empty list of files: give the file of each rank")
        return paths
    if Path(path).exists() or not glob.has_magic(str(path)):
        return [Path(path)]
    found = sorted(map(Path, glob.glob(str(path))), key=lambda each: (len(str(each)), str(each)))
    if not found:
        raise FileNotFoundError(errno.ENOENT, "no file has such a name", str(path))
    return found


# ── One rank's profile ────────────────────────────────────────────────────────────────────────────────────────────────

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


def _is_profile(data: object) -> bool:
    """Return whether the data of a JSON file are a profiler's."""
    return isinstance(data, dict) and "traceEvents" in data


# What a file holds


def base_of(path: str, data: Mapping[str, Any]) -> float:
    """Return from when a file's times count, in nanoseconds: a whole number, which is exact."""
    base: float = data.get("baseTimeNanoseconds", 0)
    time_of(base, f"{path}: 'baseTimeNanoseconds'")
    return base


def read_file(path: str, data: Mapping[str, Any], ahead: float) -> File:
    """Read one rank's events."""
    spans: dict[str, list[Span]] = defaultdict(list)
    launches: dict[int, float] = {}
    ran: list[_Event] = []
    for event in _events(path, data["traceEvents"], ahead):
        if event.what:
            spans[event.what].append(event.span)
        elif event.launches:
            launches[event.called] = event.span[0]
        else:
            ran.append(event)
    for rows in spans.values():
        rows.sort(key=lambda each: (each[0], -each[1]))
    known = (event for event in ran if event.called in launches)
    kernels = [Kernel(launches[event.called], *event.span[:2], event.stream, event.span[2]) for event in known]
    kernels.sort(key=lambda each: each.launched)
    work: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        work[kernel.stream] += 0 if _COLLECTIVE.search(kernel.name) else kernel.end - kernel.start
    about, host = data.get("distributedInfo"), data.get("host_name")
    about = about if isinstance(about, dict) else {}
    rank = about.get("rank")
    return File(
        path,
        rank if isinstance(rank, int) else None,
        host if isinstance(host, str) else None,
        bool(launches) or "nccl" in str(about.get("backend")),
        spans,
        kernels,
        max(work, key=work.__getitem__, default=""),
    )


class _Event(NamedTuple):
    """An event that counts: what it shows, by `_NAMES`; or a launch, or the kernel that it called."""

    what: str
    span: Span
    launches: bool
    called: int
    stream: str


def _events(path: str, events: Any, ahead: float) -> Iterator[_Event]:
    """Yield what counts of a file's events."""
    if not isinstance(events, list):
        raise FormatError(f"{path}: 'traceEvents' is {shorten(events)}: expected a list")
    for number, event in enumerate(events):
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        name, kind, args = (event.get(key) for key in ("name", "cat", "args"))
        if not isinstance(name, str) or not isinstance(kind, str):
            continue
        what = next((what for what, names in _NAMES.get(kind, {}).items() if names.fullmatch(name)), "")
        args = args if isinstance(args, dict) else {}
        called: Any = args.get("correlation")
        launches = kind.endswith(("_runtime", "_driver"))
        if what or (isinstance(called, int) and (launches or kind == "kernel")):
            where = f"{path}: event {number}, {shorten(name)}: "
            start = ahead + time_of(event.get("ts"), f"{where}'ts'")
            span = start, start + max(0.0, time_of(event.get("dur"), f"{where}'dur'")), name
            yield _Event(what, span, launches, called, str(args.get("stream", event.get("tid"))))


def _ran(file: File) -> Iterator[Ran]:
    """Return what one rank ran, in order; of a schedule that names no stages, all on stage 0."""
    shows = _labelled if file.spans["label"] else _numbered if file.spans["single"] else _counted
    return shows(file)


def _labelled(file: File) -> Iterator[Ran]:
    """Yield what PyTorch's runtime labelled."""
    arrived: dict[tuple[str, int | None, int | None], float | None] = {}
    for start, end, name in file.spans["label"]:
        if moved := MOVED.fullmatch(name):
            if moved[2] == "RECV":
                arrived[moved[3], int(moved[4]), int(moved[1])] = _received(file, start, end)
        elif computed := _COMPUTED.fullmatch(name):
            actions = tuple(Action.parse(text) for text in computed.groups() if text)
            keys = [("F" if each.traits.forward else "B", each.microbatch, each.stage) for each in actions]
            yield _timed(file, actions, start, end, tuple(arrived.pop(key, None) for key in keys))


def _numbered(file: File) -> Iterator[Ran]:
    """Yield what ScheduleGPipe labelled."""
    for start, end, name in file.spans["single"]:
        word, number = name.split()
        action = Action("F" if word == "Forward" else "B", int(number), 0)
        if file.kernels:
            yield _timed(file, (action,), start, end, (None,))
            continue
        sent = min((at for at, _, _ in _within(file.spans["send"], start, end)), default=end)  # its label ends later
        yield _timed(file, (action,), start, sent, (_received(file, start, end),))


def _counted(file: File) -> Iterator[Ran]:
    """Yield what Schedule1F1B called, counted step by step."""
    for since, until, _ in file.spans["step"]:
        seen: Counter[str] = Counter()
        for start, end, name in _within(file.spans["frame"], since, until):
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
    low = bisect_left(file.kernels, start, key=lambda each: each.launched)
    return file.kernels[low : bisect_right(file.kernels, end, key=lambda each: each.launched)]


def _received(file: File, start: float, end: float) -> float | None:
    """Return when what was asked for in a span was there."""
    if file.kernels:
        return max((each.end for each in _launched(file, start, end) if _COLLECTIVE.search(each.name)), default=None)
    return max((each[1] for each in _within(file.spans["received"], start, end)), default=None)


def _within(rows: list[Span], start: float, end: float) -> list[Span]:
    low, high = (bisect_left(rows, at, key=lambda each: each[0]) for at in (start, end))
    return rows[low:high]


# Steps and ranks


def whole_steps(file: File) -> list[list[Ran]]:
    """Return the steps of one rank that the profiler saw from their first action to their last."""
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
    actions = [action for ran in step for action in ran.actions]
    forwards, backwards = ([each for each in actions if each.kind in kinds] for kinds in ("F", "BW"))
    return sorted(map(_place, forwards)) == sorted(map(_place, backwards))


def _place(action: Action) -> tuple[int, int]:
    return action.stage or 0, action.microbatch or 0


def _read(files: Iterable[tuple[str, Any]]) -> Iterator[File]:
    """Yield the files, with their whole steps; all times count from the first file's."""
    origin: float | None = None
    for path, data in files:
        if not _is_profile(data):
            raise FormatError(f"{path} is not a profile, which has 'traceEvents': of saved traces, only one is read")
        base = base_of(path, data)
        origin = base if origin is None else origin
        file = read_file(path, data, (base - origin) / 1e3)
        file.steps = whole_steps(file)
        yield file


def _number(files: Sequence[File], step: int | None) -> int:
    """Return which step to read: the one that was asked for, or that of median length."""
    counts = [len(each.steps) for each in files]
    if len(set(counts)) > 1:
        most, least = (files[counts.index(many)].path for many in (max(counts), min(counts)))
        raise FormatError(
            f"{most} holds {max(counts)} whole steps, {least} only {min(counts)}: profile the same steps on every rank"
        )
    number = _median(files) if step is None else step
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < counts[0]:
        raise UsageError(f"step={shorten(step)}: the files hold {counts[0]} whole steps, from 0 to {counts[0] - 1}")
    return number


def _trace(files: Sequence[File], number: int, name: str) -> Trace:
    """Return one step of all ranks."""
    chosen = [each.steps[number] for each in files]
    stages, microbatches = _sizes(files, chosen)
    try:
        plan = plan_of([[_item(ran.actions) for ran in row] for row in chosen], stages, microbatches, name)
    except FormatError as error:
        raise FormatError(f"{name}: what ran in step {number} is not a whole step of a pipeline: {error}") from error
    times = [_without_overlaps(row) for row in chosen]
    offsets, aligned = offsets_of(plan.bound, [each.host for each in files], times)
    first = min(row[0].start + offset for row, offset in zip(times, offsets, strict=True))
    shifted = [[time.moved(offset - first) for time in row] for row, offset in zip(times, offsets, strict=True)]
    starts, ends = [[each.start for each in row] for row in shifted], [[each.end for each in row] for row in shifted]
    return Trace(
        plan,
        starts,
        ends,
        "ms",
        "measured",
        delay=travelled(plan.bound, starts, ends, [[each.arrived for each in row] for row in shifted]).__getitem__,
        lanes=[f"{'gpu' if each.kernels else 'cpu'}, {each.path}" for each in files],
        note=_note(files, number, aligned),
    )


def _note(files: Sequence[File], number: int, aligned: str) -> str:
    last = len(files[0].steps) - 1
    which = f"step {number} of 0 to {last}" if last else ""
    blind = [rank for rank, each in enumerate(files) if each.on_gpu and not each.kernels]
    on = "" if len(blind) == len(files) else f" on rank{'s' * (len(blind) > 1)} {ranges(blind)}"
    return ", ".join(filter(None, (which, aligned, f"without device times{on}" * bool(blind))))


def _in_order(files: list[File]) -> list[File]:
    """Return the files in the order of the ranks, each with actions on its own stages."""
    if all(each.spans["label"] for each in files):
        files = sorted(
            files, key=lambda each: min(action.stage or 0 for ran in each.steps[0] for action in ran.actions)
        )
    else:
        numbers = [each.rank for each in files]
        if None not in numbers and len(set(numbers)) == len(files):
            files = sorted(files, key=lambda each: each.rank or 0)
        _require_ends(files)
        for stage, each in enumerate(files):
            for ran in (ran for step in each.steps for ran in step):
                ran.actions = tuple(replace(action, stage=stage) for action in ran.actions)
    owner: dict[Action, str] = {}
    for each in files:
        for action in {action for ran in each.steps[0] for action in ran.actions}:
            if owner.setdefault(action, each.path) != each.path:
                raise FormatError(
                    f"{owner[action]} and {each.path} both hold {action}: give the files of one pipeline, without its "
                    "replicas"
                )
    return files


def _require_ends(files: Sequence[File]) -> None:
    """Refuse files whose first rank receives inputs, or whose last rank sends outputs: another file is missing."""
    ends = (files[0], "recv", "receives its input", "before"), (files[-1], "send", "sends its output", "after")
    for each, what, does, side in ends:
        step = each.steps[0]
        forwards = [ran.called for ran in step if ran.actions[0].traits.forward]
        backward = next(ran.called for ran in step if not ran.actions[0].traits.forward)
        until = backward if what == "send" else forwards[min(1, len(forwards) - 1)]
        if any(forwards[0] <= start < until for start, _, _ in each.spans[what]):
            raise FormatError(
                f"{each.path} {does}, so the file of the rank {side} it is missing: give the files of all ranks"
            )


def _sizes(files: Sequence[File], chosen: Sequence[Sequence[Ran]]) -> tuple[int, int]:
    """Return how many stages and micro-batches there are."""
    ran = {action for row in chosen for each in row for action in each.actions}
    known = {action.stage or 0 for action in ran}
    for each in files:
        for moved in (MOVED.fullmatch(name) for _, _, name in each.spans["label"]):
            if moved:  # where a value goes to or comes from
                onward = 1 if moved[2] + moved[3] in ("SENDF", "RECVB") else -1
                known.add(int(moved[1]) + onward)
    stages = {action.stage or 0 for action in ran}
    missing = next(stage for stage in count() if stage not in stages)
    if missing <= max(known):
        raise FormatError(
            f"stage {missing} is in none of the {len(files)} files, and stage {max(known)} is named: give the files of "
            "all ranks of the pipeline"
        )
    return missing, 1 + max(action.microbatch or 0 for action in ran)


def _median(files: Sequence[File]) -> int:
    lengths = [
        max(row[-1].end - row[0].start for row in rows) for rows in zip(*(each.steps for each in files), strict=True)
    ]
    return sorted(range(len(lengths)), key=lengths.__getitem__)[(len(lengths) - 1) // 2]


def _item(actions: tuple[Action, ...]) -> Item:
    return Pair(*actions) if len(actions) > 1 else actions[0]


# Times


def _without_overlaps(row: Sequence[Ran]) -> list[Times]:
    """Return start, end and arrival of each action; what began on a rank before another one ended begins then."""
    times = []
    free = -inf
    for ran in row:
        start = max(ran.start, free)
        free = max(ran.end, start)
        times += [Times(start, free, arrived) for arrived in ran.arrived]
    return times
