"""Profiles of all ranks of another job, as `torch.profiler` wrote them, as one trace: steps, ranks, stages, clocks."""

from __future__ import annotations

import errno
import glob
import os
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from math import inf
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple, TypeVar

from pipelab.errors import FormatError, UsageError, counted
from pipelab.files import read_data
from pipelab.plan.actions import Action, Kind, Pair
from pipelab.plan.bound import BoundPlan
from pipelab.plan.fault import ranges, shorten
from pipelab.trace.reading import plan_of, read_saved, time_of
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
    data = read_data(paths[0], "a trace")
    if len(paths) == 1 and "traceEvents" not in data:
        if step is not None:
            raise UsageError(f"step={step}: {paths[0]} is not a profile, and holds one step")
        return Trace(**read_saved(paths[0], data))
    name = Path(path).name if isinstance(path, (str, os.PathLike)) else counted(len(paths), "profile")
    later = ((str(each), read_data(each, "a trace")) for each in paths[1:])  # one by one: they may be large
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
_NOISE = (0.0, 10.0, 100.0)
"""By how many microseconds a value may seem to come before it was sent: each process reads the clock by itself."""


Span = tuple[float, float, str]
"""Start and end in microseconds, and a name."""
_Timed = TypeVar("_Timed", Span, tuple[float, float, float])


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
    kernels: list[tuple[float, float, float]]
    """Work of the stream with most of it: when it was launched, began and ended."""
    steps: list[list[Ran]] = field(default_factory=list)


class Times(NamedTuple):
    """When an action ran, and when the value that it received was there, in microseconds of its rank's clock."""

    start: float
    end: float
    arrived: float | None

    def moved(self, by: float) -> Times:
        """Return the same on another clock, in milliseconds."""
        arrived = None if self.arrived is None else (self.arrived + by) / 1e3
        return Times((self.start + by) / 1e3, (self.end + by) / 1e3, arrived)


# What a file holds


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
    known = [(launches[event.called], event) for event in ran if event.called in launches]
    work: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for at, event in known:
        if not event.collective:
            work[event.stream].append((at, *event.span[:2]))
    if known:
        spans["received"] = sorted((at, *event.span[1:]) for at, event in known if event.collective)
    about, host = data.get("distributedInfo"), data.get("host_name")
    about = about if isinstance(about, dict) else {}
    rank = about.get("rank")
    return File(
        path,
        rank if isinstance(rank, int) else None,
        host if isinstance(host, str) else None,
        bool(launches) or "nccl" in str(about.get("backend")),
        spans,
        sorted(max(work.values(), key=lambda ran: sum(end - start for _, start, end in ran), default=[])),
    )


class _Event(NamedTuple):
    """An event that counts: what it shows, by `_NAMES`; or a launch, or the kernel that it called."""

    what: str
    span: Span
    launches: bool
    called: int
    stream: str

    @property
    def collective(self) -> bool:
        """Whether it is a kernel that moves values between ranks."""
        return _COLLECTIVE.search(self.span[2]) is not None


def _events(path: str, events: Any, ahead: float) -> Iterator[_Event]:
    """Yield what counts of a file's events."""
    if not isinstance(events, list):
        raise FormatError(f"{path}: 'traceEvents' is {shorten(events)}: expected a list")
    for number, event in enumerate(events):
        about = event if isinstance(event, dict) else {}
        phase, name, kind, args = (about.get(key) for key in ("ph", "name", "cat", "args"))
        if phase != "X" or not isinstance(name, str) or not isinstance(kind, str):
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
        work = _within(file.kernels, start, end)
        begun = min((start for _, start, _ in work), default=start)
        return Ran(actions, start, begun, max((end for *_, end in work), default=start), arrived)
    there = start if arrived[0] is None else max(start, arrived[0])
    return Ran(actions, start, min(there, end), end, arrived)


def _received(file: File, start: float, end: float) -> float | None:
    """Return when what was asked for in a span was there."""
    return max((each[1] for each in _within(file.spans["received"], start, end)), default=None)


def _within(rows: list[_Timed], start: float, end: float) -> list[_Timed]:
    """Return what began in a span, or was launched: a backward's kernels are launched by another thread."""
    low, high = (bisect_left(rows, at, key=lambda each: each[0]) for at in (start, end))
    return rows[low:high]


# Steps and ranks


def _actions(step: Iterable[Ran]) -> list[Action]:
    return [action for ran in step for action in ran.actions]


def whole_steps(file: File) -> list[list[Ran]]:
    """Return the steps of one rank that the profiler saw from their first action to their last."""
    shows = _labelled if file.spans["label"] else _numbered if file.spans["single"] else _counted
    steps: list[list[Ran]] = [[]]
    begun: set[tuple[int | None, int | None]] = set()
    for ran in shows(file):
        step = steps[-1]
        if not set(_actions(step)).isdisjoint(ran.actions):
            steps.append(step := [])
            begun.clear()
        begun |= {(each.stage, mb) for each in ran.actions if each.traits.forward for mb in (each.microbatch, None)}
        step.append(ran)
        if not begun.issuperset((each.stage, each.microbatch) for each in ran.actions):
            steps[-1] = []  # the profiler began after this action's forward
            begun.clear()
    # Every forward has its backward, or its weight gradient.
    if whole := [step for step in steps if step and _places(step, "F") == _places(step, "BW")]:
        return whole
    if any(steps):
        raise FormatError(
            f"{file.path} holds no whole step, each forward with its backward: profile from before a step to after it"
        )
    moves = any(file.spans[what] for what in ("send", "recv", "received"))
    stack = "for Schedule1F1B, torch.profiler.profile(..., with_stack=True), which records its calls; in another job, "
    raise FormatError(
        f"{file.path} names no forward and no backward of a pipeline{'' if moves else ', no send and no receive'}. "
        "PyTorch's runtime labels them PP:2F0, and ScheduleGPipe Forward 0; Schedule1F1B labels none\n  try: "
        f"{stack * moves}each forward and backward under torch.profiler.record_function('PP:2F0')"
    )


def _places(step: Iterable[Ran], kinds: str) -> list[tuple[int, int]]:
    """Return the stages and micro-batches of some kinds of actions."""
    return sorted((each.stage or 0, each.microbatch or 0) for each in _actions(step) if each.kind in kinds)


def _read(files: Iterable[tuple[str, Any]]) -> Iterator[File]:
    """Yield the files, with their whole steps; all times count from the first file's."""
    origin: float | None = None
    for path, data in files:
        if "traceEvents" not in data:
            raise FormatError(f"{path} is not a profile, which has 'traceEvents': of saved traces, only one is read")
        base: float = data.get("baseTimeNanoseconds", 0)  # a whole number, which is exact
        time_of(base, f"{path}: 'baseTimeNanoseconds'")
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
    lengths = [
        max(row[-1].end - row[0].start for row in rows) for rows in zip(*(file.steps for file in files), strict=True)
    ]
    number = lengths.index(median_low(lengths)) if step is None else step
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < counts[0]:
        raise UsageError(f"step={shorten(step)}: the files hold steps 0 to {counts[0] - 1}")
    return number


def _trace(files: Sequence[File], number: int, name: str) -> Trace:
    """Return one step of all ranks."""
    chosen = [each.steps[number] for each in files]
    stages, microbatches = _sizes(files, chosen)
    try:
        items = [[Pair(*ran.actions) if len(ran.actions) > 1 else ran.actions[0] for ran in row] for row in chosen]
        plan = plan_of(items, stages, microbatches, name)
    except FormatError as error:
        raise FormatError(f"{name}: what ran in step {number} is not a whole step of a pipeline: {error}") from error
    times = [_without_overlaps(row) for row in chosen]
    offsets, aligned = offsets_of(plan.bound, [each.host for each in files], times)
    first = min(row[0].start + offset for row, offset in zip(times, offsets, strict=True))
    shifted = [[time.moved(offset - first) for time in row] for row, offset in zip(times, offsets, strict=True)]
    starts, ends, arrived = zip(*(zip(*row, strict=True) for row in shifted), strict=True)
    delay = travelled(plan.bound, starts, ends, arrived).__getitem__
    lanes = [f"{'gpu' if file.kernels else 'cpu'}, {file.path}" for file in files]
    return Trace(plan, starts, ends, "ms", "measured", delay, lanes=lanes, note=_note(files, number, aligned))


def _note(files: Sequence[File], number: int, aligned: str) -> str:
    last = len(files[0].steps) - 1
    which = f"step {number} of 0 to {last}" if last else ""
    blind = [rank for rank, each in enumerate(files) if each.on_gpu and not each.kernels]
    on = "" if len(blind) == len(files) else f" on rank{'s' * (len(blind) > 1)} {ranges(blind)}"
    return ", ".join(filter(None, (which, aligned, f"without device times{on}" * bool(blind))))


def _in_order(files: list[File]) -> list[File]:
    """Return the files in the order of the ranks, each with actions on its own stages."""
    if all(file.spans["label"] for file in files):
        files = sorted(files, key=lambda file: min(action.stage or 0 for action in _actions(file.steps[0])))
    else:
        files = _numbered_by_rank(files)
    owner: dict[Action, str] = {}
    for file in files:
        for action in set(_actions(file.steps[0])):
            if owner.setdefault(action, file.path) != file.path:
                raise FormatError(
                    f"{owner[action]} and {file.path} both hold {action}: give the files of one pipeline, without its "
                    "replicas"
                )
    return files


def _numbered_by_rank(files: list[File]) -> list[File]:
    """Return files that name no stages by rank, or as they came; each one is a stage."""
    numbers = [file.rank for file in files]
    if None not in numbers and len(set(numbers)) == len(files):
        files = sorted(files, key=lambda file: file.rank or 0)
    _require_ends(files)
    for stage, file in enumerate(files):
        for ran in chain.from_iterable(file.steps):
            ran.actions = tuple(replace(action, stage=stage) for action in ran.actions)
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
    places = _places(chain.from_iterable(chosen), "FBIWR")
    stages = {stage for stage, _ in places}
    labels = chain.from_iterable(file.spans["label"] for file in files)
    moved = filter(None, (MOVED.fullmatch(name) for _, _, name in labels))  # where a value goes to or comes from
    ends = (int(move[1]) + (1 if move[2] + move[3] in ("SENDF", "RECVB") else -1) for move in moved)
    last, missing = max(chain(stages, ends)), next(stage for stage in count() if stage not in stages)
    if missing <= last:
        raise FormatError(
            f"stage {missing} is in none of the {len(files)} files, and stage {last} is named: give the files of "
            "all ranks of the pipeline"
        )
    return missing, 1 + max(microbatch for _, microbatch in places)


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


# ── The clocks of several machines, aligned by the values that went from one to another ───────────────────────────────


def offsets_of(
    bound: BoundPlan, hosts: Sequence[str | None], times: Sequence[Sequence[Times]]
) -> tuple[list[float], str]:
    """Return what to add to the clock of each rank so that no value is used before it was made; and a remark.

    Ranks on one machine share a clock. Each value that goes from one machine to another says how far the other's clock
    must be ahead at least, and each that comes back, at most. In between, the middle is taken.
    """
    early, clocks = _early(bound, times), [hosts.index(host) for host in hosts]
    if any(clocks[one] == clocks[other] and time > _NOISE[-1] for (one, other), time in early.items()):
        clocks = [*range(len(hosts))]  # machines of the same name, or of none
    if len(set(clocks)) == 1:
        return [0.0] * len(hosts), ""
    edges = defaultdict[tuple[int, int], float](lambda: -inf)
    for (one, other), time in early.items():
        if clocks[one] != clocks[other]:
            edges[clocks[one], clocks[other]] = max(edges[clocks[one], clocks[other]], time)
    for noise in _NOISE:
        slackened = {between: time - noise for between, time in edges.items()}
        least = _longest(slackened, len(hosts))
        most = _longest({(other, one): time for (one, other), time in slackened.items()}, len(hosts))
        if least is not None and most is not None:
            sides = [(least[clock], -most[clock]) for clock in clocks]  # the least and the most that may be added
            if any(low == -inf for low, _ in sides):
                raise FormatError("no value goes from some ranks to others: are all files of one pipeline?")
            error = max((high - low) / 2 for low, high in sides) + noise
            found = [(low + high) / 2 for low, high in sides]
            far = max(map(abs, found)) / 1e3
            return found, f"clocks moved by up to {far:.3g} ms, aligned within {error / 1e3:.2g} ms"
    one, other = max(edges, key=lambda between: edges[between] + edges.get(between[::-1], -inf))
    raise FormatError(
        f"no clocks fit: between ranks {one} and {other}, values would be used "
        f"{(edges[one, other] + edges.get((other, one), 0)) / 1e3:.3g} ms before they were made: are the files of one "
        "run, and of the same steps?"
    )


def _early(bound: BoundPlan, times: Sequence[Sequence[Times]]) -> dict[tuple[int, int], float]:
    """Return, by a value's sender and receiver, by how much it was used before it was made, at most."""
    rows = [list(zip(row, ran, strict=True)) for row, ran in zip(bound.computing, times, strict=True)]
    ended = {code: time.end for row in rows for code, time in row}
    early = defaultdict[tuple[int, int], float](lambda: -inf)
    for rank, row in enumerate(rows):
        for code, time in row:
            for _, giver in bound.inputs(code):
                between = bound.rank_of[giver], rank
                early[between] = max(early[between], ended[giver] - time.start)
    return early


def _longest(edges: Mapping[tuple[int, int], float], nodes: int) -> list[float] | None:
    """Return the length of the longest way from node 0 to each other one; `None` if there is a way without end."""
    found = [0.0] + [-inf] * (nodes - 1)
    for _ in range(nodes):
        longer = {(one, other): found[one] + length for (one, other), length in edges.items()}
        better = [(other, far) for (_, other), far in longer.items() if far > found[other] + 1e-3]
        if not better:
            return found
        for other, far in better:
            found[other] = max(found[other], far)
    return None
