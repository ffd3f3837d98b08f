"""Profiles of all ranks of another job, as `torch.profiler` wrote them, as one trace: steps, ranks, stages, clocks."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from typing import Any, NamedTuple

from pipelab.errors import FormatError, UsageError
from pipelab.plan.actions import Action, Item, Kind, Pair
from pipelab.plan.bound import BoundPlan
from pipelab.plan.fault import ranges, shorten
from pipelab.trace.reading import plan_of, time_of
from pipelab.trace.waits import travelled

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
    """Read one rank's events."""
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
    places: dict[str, list[tuple[int, int]]] = {kinds: [] for kinds in ("F", "BW")}
    for ran in step:
        for each in ran.actions:
            for kinds, found in places.items():
                if each.kind in kinds:
                    found.append((each.stage or 0, each.microbatch or 0))
    return sorted(places["F"]) == sorted(places["BW"])


_NOISE = (0.0, 10.0, 100.0)
"""By how many microseconds a value may seem to come before it was sent: each process reads the clock by itself."""


class _Times(NamedTuple):
    """When an action ran, and when the value that it received was there, in microseconds of its rank's clock."""

    start: float
    end: float
    arrived: float | None


def read_profiles(files: Iterable[tuple[str, Any]], step: int | None, name: str) -> dict[str, Any]:
    """Return the arguments of `Trace` from the files of all ranks; see `Trace.load`."""
    read: list[File] = []
    origin: float | None = None
    for path, data in files:
        if not is_profile(data):
            raise FormatError(f"{path} is not a profile, which has 'traceEvents': of saved traces, only one is read")
        base = base_of(path, data)
        origin = base if origin is None else origin
        read.append(read_file(path, data, (base - origin) / 1e3))
        read[-1].steps = whole_steps(read[-1])
    read = _in_order(read)
    counts = [len(each.steps) for each in read]
    if len(set(counts)) > 1:
        most, least = (read[counts.index(many)].path for many in (max(counts), min(counts)))
        raise FormatError(
            f"{most} holds {max(counts)} whole steps, {least} only {min(counts)}: profile the same steps on every rank"
        )
    number = _median(read) if step is None else step
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < counts[0]:
        raise UsageError(f"step={shorten(step)}: the files hold {counts[0]} whole steps, from 0 to {counts[0] - 1}")
    chosen = [each.steps[number] for each in read]
    stages, microbatches = _sizes(read, chosen)
    try:
        plan = plan_of([[_item(ran.actions) for ran in row] for row in chosen], stages, microbatches, name)
    except FormatError as error:
        raise FormatError(f"{name}: what ran in step {number} is not a whole step of a pipeline: {error}") from error
    times = [_without_overlaps(row) for row in chosen]
    offsets, aligned = _offsets(plan.bound, [each.host for each in read], times)
    first = min(row[0][0] + offset for row, offset in zip(times, offsets, strict=True))
    times = [
        [
            _Times(
                (start + offset - first) / 1e3,
                (end + offset - first) / 1e3,
                None if arrived is None else (arrived + offset - first) / 1e3,
            )
            for start, end, arrived in row
        ]
        for row, offset in zip(times, offsets, strict=True)
    ]
    starts, ends = [[each.start for each in row] for row in times], [[each.end for each in row] for row in times]
    arrived = [[each.arrived for each in row] for row in times]
    blind = [rank for rank, each in enumerate(read) if each.on_gpu and not each.kernels]
    of_which = "" if len(blind) == len(read) else f" on rank{'s' * (len(blind) > 1)} {ranges(blind)}"
    which = f"step {number} of 0 to {counts[0] - 1}" if counts[0] > 1 else ""
    return {
        "plan": plan,
        "starts": starts,
        "ends": ends,
        "unit": "ms",
        "source": "measured",
        "delay": travelled(plan.bound, starts, ends, arrived).__getitem__,
        "lanes": [f"{'gpu' if each.kernels else 'cpu'}, {each.path}" for each in read],
        "note": ", ".join(filter(None, (which, aligned, f"without device times{of_which}" * bool(blind)))),
    }


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


def _without_overlaps(row: Sequence[Ran]) -> list[_Times]:
    """Return start, end and arrival of each action; what began on a rank before another one ended begins then."""
    times = []
    free = -inf
    for ran in row:
        start = max(ran.start, free)
        free = max(ran.end, start)
        times += [_Times(start, free, arrived) for arrived in ran.arrived]
    return times


def _offsets(
    bound: BoundPlan, hosts: Sequence[str | None], times: Sequence[Sequence[_Times]]
) -> tuple[list[float], str]:
    """Return what to add to the clock of each rank so that no value is used before it was made; and a remark.

    Ranks on one machine share a clock. Each value that goes from one machine to another says how far the other's clock
    must be ahead at least, and each that comes back, at most. In between, the middle is taken.
    """
    ended = {
        code: end
        for row, each in zip(bound.rows, times, strict=True)
        for code, (_, end, _) in zip(row, each, strict=True)
    }
    early: dict[tuple[int, int], float] = {}
    for rank, row in enumerate(bound.rows):
        for code, (start, _, _) in zip(row, times[rank], strict=True):
            for _, giver in bound.inputs(code):
                between = bound.rank_of[giver], rank
                early[between] = max(early.get(between, -inf), ended[giver] - start)
    clocks = [hosts.index(host) for host in hosts]
    if any(clocks[one] == clocks[other] and time > _NOISE[-1] for (one, other), time in early.items()):
        clocks = [*range(len(hosts))]  # the machines have the same name, or none
    if len(set(clocks)) == 1:
        return [0.0] * len(hosts), ""
    edges: dict[tuple[int, int], float] = {}
    for (one, other), time in early.items():
        between = clocks[one], clocks[other]
        if between[0] != between[1]:
            edges[between] = max(edges.get(between, -inf), time)
    for noise in _NOISE:
        slackened = {between: time - noise for between, time in edges.items()}
        least = _longest(slackened, len(hosts))
        most = _longest({(other, one): time for (one, other), time in slackened.items()}, len(hosts))
        if least is not None and most is not None:
            sides = [(least[clock], -most[clock]) for clock in clocks if least[clock] > -inf]
            if len(sides) < len(clocks):
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
