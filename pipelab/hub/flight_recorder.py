"""Which action holds up all ranks: PyTorch's Flight Recorder, with the plan that ran.

The recorder keeps the last sends and receives of each process, and writes them into a file per rank when NCCL's
watchdog gives up (`TORCH_FR_BUFFER_SIZE`, `TORCH_NCCL_DUMP_ON_TIMEOUT`, `TORCH_FR_DUMP_TEMP_FILE`). It knows ranks,
sizes and times, but no micro-batches. The plan does: PyTorch's runtime posts the sends and receives of a rank in the
order of its lowered row, so the k-th one is the k-th of the row.

    row     1RECV_F0  1F0  1SEND_F0  1RECV_F1  1F1  1SEND_F1  …
    file    recv 1<-0      send 1->2  recv 1<-0                     rank 1 has not posted its second send:
            completed      completed  completed                     it is in 1F1, or has not begun it
"""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from pipelab.checking.checker import ScheduleLike, as_plan, require_legal
from pipelab.errors import FormatError, UsageError
from pipelab.files import read_data
from pipelab.plan.fault import shorten
from pipelab.plan.plan import Plan
from pipelab.plan.transfers import Lowering, Step, lowered

_P2P = re.compile(r"\w+:(send|recv) (\d+)(?:->|<-)(\d+)")
_PIPELINE = re.compile(r"pp|pipe", re.IGNORECASE)  # how PyTorch's meshes, torchtitan and Megatron name its group
_SIZES_OF_OBJECTS = (["Long"], ["Byte"])  # dtypes of what PyTorch sends before the first step: shapes, pickled
_OPCODES = b"\x80\x95(.N\x88\x89JKM\x8aGX\x8c]ae}suqr\x94hjc\x93"  # of lists, dictionaries, numbers, texts, and names


@dataclass(frozen=True)
class Stall:
    """Which rank holds up the others, and where it is.

    Attributes:
        rank: the rank that waits for no other one; `None` if ranks wait for each other in a circle, or none waits.
        actions: what it is running or about to run, in the plan's notation; empty if it is between two transfers.
        step: the training step that it is in, from 0; two validation steps before it count as one.
        waits: by rank, for which rank it waits, and with which send or receive.
        missing: whether the rank left no file.
        pipeline: if the files are of several pipelines, which one this is, in words.

    Example:
        >>> print(Stall(1, ("1F1",), 0, {0: (1, "0RECV_B0"), 2: (1, "2RECV_F1")}))
        rank 1 holds up the others: step 0, in or before 1F1
          rank 0 waits for rank 1: 0RECV_B0
          rank 2 waits for rank 1: 2RECV_F1
    """

    rank: int | None
    actions: tuple[str, ...]
    step: int
    waits: dict[int, tuple[int, str]]
    missing: bool = False
    pipeline: str = ""

    def __str__(self) -> str:
        """Return what holds up the ranks, then a line for each rank that waits."""
        if self.rank is None and not self.waits:
            head = "no rank waits for a transfer: all of them compute, or are done"
        elif self.rank is None:
            head = f"no rank can go on, in step {self.step}: they wait for each other in a circle"
        elif self.missing:
            head = f"rank {self.rank} left no file: its process has ended, or cannot write"
        else:
            where = f"in or before {' or '.join(self.actions)}" if self.actions else "between two transfers"
            head = f"rank {self.rank} holds up the others: step {self.step}, {where}"
        lines = [f"  rank {at} waits for rank {of}: {word}" for at, (of, word) in self.waits.items()]
        return "\n".join([head, *lines, *[f"  {self.pipeline}"] * bool(self.pipeline)])


def culprit(plan: Plan | ScheduleLike, files: Iterable[str | Path], *, tensors: int = 1) -> Stall:
    """Return which action of which rank holds up all others.

    Args:
        plan: the plan or schedule that ran. PyTorch's runtime has run it, in PyTorch's own order of transfers.
        files: the files of all ranks, pickled or JSON: of one pipeline, or of several if they say which group of
            processes each transfer is of. Transfers of other groups are left out.
        tensors: how many tensors a stage returns: the recorder counts each as one transfer.

    Raises:
        FormatError: if a file is not the Flight Recorder's, or its transfers do not fit the plan.
        UsageError: if two files are of the same rank, or none has a send or receive.
        ScheduleError: if the plan has faults.
    """
    plan = as_plan(plan)
    require_legal(plan)
    low = lowered(plan.bound, "pytorch")
    found = [(path, _by_group(path)) for path in map(Path, files)]
    if not found:
        raise UsageError(
            "no file of the Flight Recorder was found\n  try: the name that the job wrote, with * for the rank"
        )
    many = Counter[str]()
    for _, groups in found:
        sizes = {name: (len(ranks), len(records)) for name, (ranks, _, records) in groups.items()}
        many.update({name: records for name, (ranks, records) in sizes.items() if ranks in (0, len(low.rows))})
    refused: list[FormatError] = []
    for name in sorted(+many, key=lambda name: (not _PIPELINE.search(name), -many[name])):
        try:
            return _of_group(low, [(path, groups[name]) for path, groups in found if name in groups], name, tensors)
        except FormatError as error:
            refused.append(error)
    if refused:
        raise refused[0]
    raise UsageError("no file has a send or receive\n  try: TORCH_FR_BUFFER_SIZE=20000 for all processes")


def _of_group(low: Lowering, files: Sequence[tuple[Path, _Group]], name: str, tensors: int) -> Stall:
    """Return what holds up the pipeline that a group of processes is; of several, one that waits, and is behind."""
    pipelines: dict[tuple[int, ...], dict[int, _Progress]] = {}
    for path, (ranks, rank, records) in files:
        progress = pipelines.setdefault(ranks, {})
        if rank < 0:
            raise FormatError(f"{path}: no rank or several ranks in it, and none in its name")
        if rank in progress:
            raise UsageError(f"{path}: another file is of rank {rank} too\n  try: give the files of one pipeline")
        if not 0 <= rank < len(low.rows):
            raise UsageError(f"{path} is of rank {rank}, and the plan has {len(low.rows)} ranks")
        progress[rank] = _Progress.of(low, rank, records, tensors, path)
    stalls = [(_stall(low, progress), ranks) for ranks, progress in pipelines.items()]
    stall, ranks = min(stalls, key=lambda each: (not each[0].waits, each[0].step))
    which = f"of {len(pipelines)} pipelines, the one of the job's ranks {' '.join(map(str, ranks))} (group {name})"
    return stall if len(pipelines) == 1 else replace(stall, pipeline=which)


@dataclass(frozen=True, slots=True)
class _Record:
    """A send or receive, with the rank at its other end."""

    way: str
    peer: int
    state: str
    number: int


_Group = tuple[tuple[int, ...], int, Sequence[_Record]]
"""A group of processes in one file: the job's ranks in it, which of them wrote the file, and its transfers."""


def _by_group(path: Path) -> dict[str, _Group]:
    """Return, by the name of a group, its sends and receives in a file, from the oldest to the newest."""
    what = "a file of PyTorch's Flight Recorder"
    try:
        data: Any = path.read_bytes()
        data = _Plain(io.BytesIO(data)).load() if data[:1] == pickle.PROTO else read_data(path, what)
        config = data.get("pg_config") or {"": {"desc": ""}}
        entries: dict[tuple[str, str], list[Any]] = {
            (number, "" + about.get("desc", "")): [] for number, about in config.items()
        }
        for entry in data["entries"]:
            number, name = entry.get("process_group") or ("", "")
            entries.setdefault((number, "" + name), []).append(entry)
        moved = {group: _transfers(own) for group, own in entries.items()}
        members = {number: [*map(int, re.findall(r"\d+", about.get("ranks", "")))] for number, about in config.items()}
    except FormatError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a file's data lead to
        raise FormatError(f"{path} is not {what}: {type(error).__name__}: {error}") from None
    digits, found = re.findall(r"\d+", path.stem), dict[str, _Group]()
    for (number, name), transfers in sorted(moved.items(), key=lambda each: len(each[1])):
        ranks = tuple(members.get(number, ()))
        own = {rank for rank, _ in transfers}
        rank = next(iter(own)) if len(own) == 1 else -1
        if digits and not own:
            rank = ranks.index(int(digits[-1])) if int(digits[-1]) in ranks else int(digits[-1])
        found[name] = ranks, rank, [record for _, record in transfers]
    return found


def _transfers(entries: Sequence[Any]) -> Collection[tuple[int, _Record]]:
    """Return a group's sends and receives, each with its rank; those that were coalesced have one state."""
    done = {entry["p2p_seq_id"]: entry["state"] for entry in entries if entry["profiling_name"].endswith("coalesced")}
    found: dict[Any, tuple[int, _Record]] = {}
    for entry in entries:
        match = _P2P.fullmatch(entry["profiling_name"])
        if match and entry.get("input_dtypes") not in _SIZES_OF_OBJECTS:
            sequence = entry["p2p_seq_id"]
            if sequence >> 60:
                raise ValueError(f"p2p_seq_id is {shorten(sequence)}")
            key = sequence if sequence in done else ("alone", entry["record_id"])
            record = _Record(match[1].upper(), int(match[3]), done.get(sequence, entry["state"]), sequence)
            found.setdefault(key, (int(match[2]), record))
    return found.values()


class _Plain(pickle._Unpickler):  # noqa: SLF001 - Python's own, whose memo and opcodes are dictionaries
    """A pickle of lists, dictionaries, numbers, texts and pairs: others could run code, or fill the memory.

    Pairs become lists, so that none is hashed: that of a pair of pairs of pairs may take years.
    """

    def load_pair(self: Any) -> None:
        self.stack[-2:] = [self.stack[-2:]]

    dispatch: ClassVar[Any] = {code: pickle._Unpickler.dispatch[code] for code in _OPCODES}  # noqa: SLF001
    dispatch[pickle.TUPLE2[0]] = load_pair

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


@dataclass(frozen=True, slots=True)
class _Progress:
    """How far a rank is: the `states` of its transfers by number; all before the first of them are over.

    The transfers are at the places `at` of its lowered row. Their numbers go on from one step to the next, twice as far
    as there are transfers: a validation step has the forward's half of them, and counts as half a step.
    """

    row: Sequence[Step]
    at: Sequence[int]
    states: Mapping[int, str]
    upcoming: int = 0

    @classmethod
    def of(cls, low: Lowering, rank: int, records: Sequence[_Record], tensors: int, path: Path) -> _Progress:
        """Find which transfers of the plan the records are: of training steps, or also of validation steps."""
        row, forward = low.rows[rank], low.bound.codes.forward
        at = [index for index, (word, _) in enumerate(row) if word in ("SEND", "RECV")]
        if not at or not records:
            return cls(row, at, {})
        ends = [_end(low, row[index]) for index in at]
        validation = [k for k, index in enumerate(at) if forward[low.crossings[row[index][1][0]].giver]]
        groups = [records[each : each + tensors] for each in range(0, len(records), tensors)]
        seen = [{(each.way, each.peer) for each in group} for group in groups]
        steps = [range(len(at)), validation]
        found = _aligned(steps[:1], ends, seen) or _aligned(steps, ends, seen)
        if not found:
            raise FormatError(
                f"{path}: the transfers of rank {rank} are not the plan's: the first is {records[0].way} with "
                f"rank {records[0].peer}, the plan's first is {ends[0][0]} with rank {ends[0][1]}\n"
                "  try: the plan that ran, and with tensors= how many tensors a stage returns"
            )
        begun = (records[0].number - 1) / tensors - found[0][1]
        half = max(0, int(2 * begun / len(at) + 0.5))  # when the step begins
        states: dict[int, str] = {}
        for before, (kind, k), group in zip([None, *found], found, groups, strict=False):
            half += 2 - before[0] if before and k == 0 else 0
            states[half * len(at) + steps[kind][k]] = next((e.state for e in group if e.state != "completed"), "")
        kind, k = found[-1]
        ended = k + 1 == len(steps[kind])
        return cls(
            row, at, states, (half + 2 - kind if ended else half) * len(at) + (0 if ended else steps[kind][k + 1])
        )

    def state(self, number: int) -> str | None:
        """Return `""` of a transfer that is over, PyTorch's word of one that is not, and `None` before it is posted."""
        return self.states.get(number, "" if number < next(iter(self.states), self.upcoming) else None)

    def place(self, number: int) -> tuple[int, int]:
        """Return at which half of a step the step of a transfer began, and its place in the row."""
        half, within = divmod(number, len(self.at))
        return half, self.at[within]

    def before(self, number: int) -> list[Step]:
        """Return what the rank runs between the transfer before this one, and this one."""
        index = self.place(number)[1]
        begin = max((each for each in self.at if each < index), default=-1)
        tail = self.row[self.at[-1] + 1 :] if begin < 0 and number else []
        return [*tail, *self.row[begin + 1 : index]]


def _aligned(
    steps: Sequence[Sequence[int]], ends: Sequence[tuple[str, int]], seen: Sequence[set[tuple[str, int]]]
) -> list[tuple[int, int]]:
    """Return, for each transfer that was seen, of which kind of step it is and which of its transfers; or nothing.

    `steps` has, for each kind of step, the transfers of a whole row that it has. Each may follow each.
    """
    at = [(kind, k) for kind, step in enumerate(steps) for k in range(len(step)) if {ends[step[k]]} == seen[0]]
    ways: list[dict[tuple[int, int], tuple[int, int]]] = [dict(zip(at, at, strict=True))]  # by place, the one before
    for end in seen[1:]:
        ways.append({})
        for kind, k in ways[-2]:
            ahead = [(kind, k + 1)] if k + 1 < len(steps[kind]) else [(each, 0) for each in range(len(steps))]
            for other, number in ahead:
                if {ends[steps[other][number]]} == end:
                    ways[-1].setdefault((other, number), (kind, k))
    found = list(ways[-1])[:1]
    for before in ways[:0:-1]:
        found += [before[place] for place in found[-1:]]
    return found[::-1]


def _end(low: Lowering, step: Step) -> tuple[str, int]:
    """Return a transfer's word, and the rank at its other end."""
    word, (value,) = step
    return word, low.crossings[value].target if word == "SEND" else low.crossings[value].source


def _at(low: Lowering, progress: Mapping[int, _Progress], rank: int, timed: bool) -> tuple[int, bool]:
    """Return the transfer that a rank has not got past, and whether it waits for the other end.

    A send that is posted holds up nothing until the step's end. What a GPU's queue has not reached is not started,
    because the rank computes; without these times, the state at the other end says it.
    """
    own = progress[rank]
    held: int | None = None
    for number, state in own.states.items():
        word, peer = _end(low, own.row[own.place(number)[1]])
        if state == "scheduled" and timed:
            return number, False
        if state:
            there = _other_end(low, progress, rank, number)
            if word == "RECV":
                return number, state == "started" or there != ""
            if state == "scheduled" and there is not None and peer in progress:
                return number, False
            held = number if held is None else held
    at_end = own.upcoming % len(own.at) == 0
    return (held, True) if at_end and held is not None else (own.upcoming, False)


def _other_end(low: Lowering, progress: Mapping[int, _Progress], rank: int, number: int) -> str | None:
    """Return the state of the same transfer at its other end."""
    step, index = progress[rank].place(number)
    word, values = progress[rank].row[index]
    other = progress.get(_end(low, (word, values))[1])
    if other is None:
        return None
    sought = ("RECV" if word == "SEND" else "SEND", values)
    return other.state(step * len(other.at) + [other.row[index] for index in other.at].index(sought))


def _stall(low: Lowering, progress: Mapping[int, _Progress]) -> Stall:
    """Follow each rank to the one that it waits for."""
    timed = any("started" in each.states.values() for each in progress.values())
    waits: dict[int, tuple[int, str]] = {}
    working: dict[int, int] = {}  # by rank that waits for no other, the transfer that it has not come to
    for rank, own in sorted(progress.items()):
        if own.at:
            number, waiting = _at(low, progress, rank, timed)
            step = own.row[own.place(number)[1]]
            if waiting:
                waits[rank] = (_end(low, step)[1], low.word(step))
            else:
                working[rank] = number
    if missing := {peer for peer, _ in waits.values()} - progress.keys():
        return Stall(min(missing), (), 0, waits, missing=True)
    if not working or not waits:
        return Stall(None, (), 0, waits)
    # Of several that compute, the one for which most others wait, directly or not; then the one that is behind.
    ends = [_awaited(rank, waits) for rank in waits]
    halves = {rank: progress[rank].place(number)[0] for rank, number in working.items()}
    rank = max(working, key=lambda each: (-halves[each], ends.count(each), -each))
    runs = [low.word(each) for each in progress[rank].before(working[rank]) if each[0] == "run"]
    return Stall(rank, tuple(runs), halves[rank] // 2, waits)


def _awaited(rank: int, waits: Mapping[int, tuple[int, str]]) -> int:
    """Return for which rank another one waits at last."""
    seen = set[int]()
    while rank in waits and rank not in seen:
        seen.add(rank)
        rank = waits[rank][0]
    return rank
