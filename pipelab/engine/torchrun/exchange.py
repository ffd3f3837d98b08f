"""What all processes exchange: their calls and batches before a step, times and losses after it, and their clocks.

A process that makes another call, or has rows of another shape, would make the others wait for ever, or send messages
that do not fit their buffers. A process that was given no inputs or no targets learns their shapes here: in a second
operation, when they are new.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from ctypes import string_at
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, groupby
from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.device import HOST, HostClock
from pipelab.engine.engine import Measured, StepState
from pipelab.engine.stage.batch import Part
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import described, rebuild, take_apart, tensors_of
from pipelab.engine.torchrun.messages import from_bytes, to_bytes
from pipelab.engine.torchrun.stage import ProcessStep
from pipelab.errors import BatchError
from pipelab.plan.plan import Plan
from pipelab.trace.waits import travelled

_TAG = 2  # 0 is of values, and 1 of which gradients are present

_SAMPLE = 16
"""How many numbers of a row, or of a parameter, are looked at: another seed changes them all."""


def gathered(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return every process's tensor, `[processes, ...]`, all of one shape.

    Each sends its own to all others: of a small tensor, that takes half as long as gloo's `all_gather`.
    """
    rank, found = group.rank(), mine.new_empty(group.size(), *mine.shape)
    found[rank] = mine
    others = [other for other in range(len(found)) if other != rank]
    works = [group.recv([found[other]], other, _TAG) for other in others]
    for work in works + [group.send([found[rank]], other, _TAG) for other in others]:
        work.wait()
    return found


# ── Do all processes mean the same step? ──────────────────────────────────────────────────────────────────────────────


def agree(
    group: dist.ProcessGroup, call: str, about: str, parts: Sequence[Part] = (), aside: tuple[int, int] = (0, 0)
) -> list[int]:
    """Return the first process's `aside`, once all have made the same call with the same batch.

    The first process compares and answers: if two send to each other at the same moment, gloo's threads wait for long.
    """
    known = {part.name: part for part in parts}
    two = [known.get(name, Part("", here=False)) for name in ("x", "y", "keywords")]
    error = next(filter(None, (part.error for part in parts)), None)
    texts = f"{call} {error or ''}", about, *(part.words for part in two)
    samples = [_number(sample_of(part.pieces)) | 1 if part.here and part.pieces else 0 for part in two[:2]]
    answer = torch.tensor([*map(_number_of_text, texts), *samples, *aside, 0])
    if group.rank():
        group.send([answer], 0, _TAG).wait()
        group.recv([answer], 0, _TAG).wait()
    else:
        rows = answer.repeat(group.size(), 1)
        for work in [group.recv([rows[other]], other, _TAG) for other in range(1, group.size())]:
            work.wait()
        columns: list[list[int]] = rows.T.tolist()
        answer[-1] = any(len(set(column)) > 1 for column in columns[:5]) or any(map(_differ, columns[5:7]))
        for work in [group.send([answer], other, _TAG) for other in range(1, group.size())]:
            work.wait()
    *_, reset, seed, unlike = answer.tolist()
    if unlike:
        _compare(group, [call, *about.split("; ")], two, samples)
    if error is not None:
        raise error
    return [reset, seed]


def _differ(samples: Sequence[int]) -> bool:
    """Return whether processes have different rows; a sample is zero where a process was given none."""
    return len(set(samples) - {0}) > 1


def _compare(group: dist.ProcessGroup, head: list[str], parts: Sequence[Part], own: Sequence[int]) -> None:
    """Raise what is wrong, or how the processes differ; if they do not, complete the parts that are not here."""
    given = [replace(part, pieces=_on("meta", part.pieces), error=None) if part.here else None for part in parts]
    wrong = [(type(part.error), str(part.error)) for part in parts if part.error is not None]
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, (head, given, own, wrong), group=group)
    for rank, (*_, errors) in enumerate(rows):
        for kind, message in errors:
            raise kind(f"rank {rank}: {message}")
    _merge_keywords(parts[2], [theirs[2].named for _, theirs, *_ in rows if theirs[2] is not None])
    agreed = [next(filter(None, column), None) for column in zip(*(theirs[:2] for _, theirs, *_ in rows), strict=True)]
    calls = []
    for theirs, parcels, *_ in rows:
        known = [parcel or usual for parcel, usual in zip(parcels[:2], agreed, strict=True)]
        calls.append([*theirs, *(parcel.words for parcel in known if parcel)])
    for column in zip(*(samples for *_, samples, _ in rows), strict=True):
        if _differ(column) or any(call != calls[0] for call in calls):
            raise BatchError(_difference(calls, column))
    for part, found in zip(parts[:2], agreed, strict=True):
        if not part.here and found is not None:
            part.take(replace(found, pieces=_on("cpu", found.pieces)))


def _merge_keywords(part: Part, named: Sequence[Mapping[str, list[str]]]) -> None:
    """Complete the descriptions of keywords by other processes'; refuse one that two of them give unlike values."""
    part.named = {}
    for rank, own in enumerate(named):
        for name, texts in own.items():
            if part.named.setdefault(name, texts) != texts:
                theirs, ours = texts[0], part.named[name][0]
                raise BatchError(f"rank {rank} gives the keyword {name!r} as {theirs}, and a rank before it as {ours}")
    part.named = dict(sorted(part.named.items()))
    part.words = f"keywords {part.named}" if part.named else ""


def _on(device: str, pieces: list[Any]) -> list[Any]:
    """Return micro-batches of the same shapes, with any numbers, or none on the device "meta"."""

    def like(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.empty_like(leaf, device=device, requires_grad=leaf.requires_grad)
        return leaf if isinstance(leaf, (str, int, float)) else None  # what cannot be sent is not needed elsewhere

    apart = map(take_apart, pieces)
    return [rebuild([*map(like, leaves)], spec) for leaves, spec in apart]


def describe_batch(microbatches: Sequence[Any]) -> str:
    """Return the structure of a batch, and the shapes and types of its parts, micro-batch by micro-batch."""
    runs = groupby(map(_describe_piece, microbatches))
    return " and ".join(f"{len([*run])} x {text}" for text, run in runs)


def _describe_piece(piece: Any) -> str:
    if isinstance(piece, torch.Tensor):
        return described(piece)
    parts, spec = take_apart(piece)
    words = ", ".join(described(part) if isinstance(part, torch.Tensor) else str(part) for part in parts)
    return f"{words} in {spec}"


def sample_of(microbatches: Sequence[Any]) -> bytes:
    """Return a few numbers of a batch's first and last row, by which different rows are noticed."""
    first, last = tensors_of(microbatches[0]), tensors_of(microbatches[-1])
    return b"".join(map(few_numbers, [*(tensor[:1] if tensor.dim() else tensor for tensor in first), *last]))


def few_numbers(tensor: torch.Tensor) -> bytes:
    """Return a few numbers of a tensor, from its beginning to its end."""
    step = max(1, tensor.numel() // _SAMPLE)
    if tensor.device.type == "cpu" and tensor.is_contiguous():  # as below, without operations, for which a step waits
        begin, size = tensor.data_ptr(), tensor.element_size()
        places = range(begin, begin + min(step * _SAMPLE, tensor.numel()) * size, step * size)
        return b"".join(string_at(place, size) for place in places)
    few = tensor.detach().reshape(-1)[: step * _SAMPLE : step].contiguous().cpu()
    return string_at(few.data_ptr(), few.nbytes)


def _number(data: bytes) -> int:
    """Return 63 bits that are the same for the same data on every process."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1


@lru_cache(64)  # most steps have the last one's
def _number_of_text(text: str) -> int:
    return _number(text.encode())


def _difference(calls: Sequence[Sequence[str]], samples: Sequence[int]) -> str:
    """Return how the first ranks that differ from rank 0 do so: in their calls, or else in the numbers of the batch."""
    others = [rank for rank, call in enumerate(calls) if call != calls[0]]
    if others:
        theirs, ours = calls[others[0]], calls[0]
        only_theirs = "; ".join(part for part in theirs if part not in ours) or "nothing more"
        only_ours = "; ".join(part for part in ours if part not in theirs) or "nothing more"
        return (
            f"rank {', '.join(map(str, others))}: {only_theirs}; rank 0: {only_ours}\n"
            "  every process must run the same script on the same batches, and make every call of a pipeline"
        )
    first = next(rank for rank, sample in enumerate(samples) if sample)
    others = [rank for rank, sample in enumerate(samples) if sample not in (0, samples[first])]
    return (
        f"rank {', '.join(map(str, others))} has other rows than rank {first}, of the same shape: every process, "
        "replicas too, must have the same batches\n  try: no DistributedSampler, and the same seed for what shuffles "
        "the data: torch.manual_seed(0), or a DataLoader's generator"
    )


# ── Clocks of several machines ────────────────────────────────────────────────────────────────────────────────────────

_ROUNDS = 32


@dataclass(frozen=True, slots=True)
class SharedClock:
    """How far this process's clock is ahead of rank 0's: on several machines, clocks count from different moments."""

    ahead_ns: int = 0
    error_ns: int = 0  # the largest error of `ahead_ns` on any process
    set_at: int = 0  # on this process's clock


def set_clocks(group: dist.ProcessGroup) -> SharedClock:
    """Compare every process's clock with rank 0's; all processes must call it.

    Rank 0 asks each other process for its time, some times, and uses the shortest round: the clock was read between
    question and answer, so in the middle of the round, with an error of half its length. A smaller difference counts as
    none: processes on one machine share a clock.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    found = torch.zeros(size, 2, dtype=torch.int64)
    for other in range(1, size):
        rounds = [_round(other, group) for _ in range(_ROUNDS) if rank in (0, other)]
        if rank == 0:
            length, ahead = min(rounds)
            found[other] = torch.tensor([ahead if abs(ahead) > length // 2 else 0, length // 2])
    dist.broadcast(found, group=group, group_src=0)
    return SharedClock(int(found[rank, 0]), int(found[:, 1].max()), time.perf_counter_ns())


def _round(other: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """Let rank 0 ask another process for its time; return how long that took, and how far its clock was ahead."""
    word = torch.zeros(1, dtype=torch.int64)
    asked = time.perf_counter_ns()
    if dist.get_rank(group) == other:
        dist.recv(word, group=group, group_src=0)
        word[0] = time.perf_counter_ns()
        dist.send(word, group=group, group_dst=0)
    else:
        dist.send(word, group=group, group_dst=other)
        dist.recv(word, group=group, group_src=other)
    answered = time.perf_counter_ns()
    return answered - asked, int(word) - (asked + answered) // 2


# ── What each process needs of the others' step ───────────────────────────────────────────────────────────────────────

_ARRIVED_NS = 20_000
"""If a wait is shorter than this, the value had arrived before it."""

_LOSS_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def share(group: dist.ProcessGroup, step: ProcessStep, clock: SharedClock) -> tuple[StepState, bool]:
    """Exchange times and losses; if no loss is asked for, the outputs. All processes must call it.

    The exchange is one collective operation of `3 * longest row + micro-batches + 2` whole numbers from each. Gathers
    and frees count as actions at the end of their row. The second result is whether a process drew random numbers.
    """
    plan = step.plan
    holders = plan.bound.rank_of_slot[plan.stages - 1 :: plan.stages]  # per micro-batch, the rank of its output
    state = StepState(plan, [None] * plan.microbatches, step.loss, step.watch_nan, step.caller)
    if step.loss is None:
        state.outputs = _outputs(group, holders, step)
        return state, bool(gathered(torch.tensor(bool(step.streams.drew)), group).any())
    moves = Counter(move.rank for move in plan.bound.moves)
    lengths = [(len(row), len(row) + moves[rank]) for rank, row in enumerate(plan.bound.computing)]
    longest = max(last for _, last in lengths)
    own = list[int]()
    for numbers in (*_times(step, clock), step.waited):
        own += [*numbers, *[0] * (longest - len(numbers))]
    own += [*_losses(step.loss), bool(step.streams.drew)]
    found = gathered(torch.tensor(own), group)
    _set_losses(step.loss, found[:, 3 * longest : -1], holders, step.mine.stream.runs_on.device)
    state.measured = partial(_measured, plan, lengths, found[:, : 3 * longest].unflatten(1, (3, longest)))
    state.outputs, state.outputs_on = step.outputs, sorted(set(holders))
    state.clocks = [HOST, *(HostClock(clock.error_ns) for _ in range(1, plan.ranks))]
    many = "es" if plan.ranks > 1 else ""
    state.note = f"{plan.ranks} process{many}, clocks within {clock.error_ns / 1e6:.2g} ms of rank 0's"
    return state, bool(found[:, -1].any())


def _times(step: ProcessStep, clock: SharedClock) -> list[list[int]]:
    """Return when this process's actions, then its moves, began and ended, on rank 0's clock."""
    moved = zip(*step.mine.moves, strict=True)
    marks = ([*own, *next(moved, ())] for own in (step.mine.begun, step.mine.ended))
    return [[reading - clock.ahead_ns for reading in step.clocks[0].nanoseconds(both)] for both in marks]


def _measured(plan: Plan, lengths: Sequence[tuple[int, int]], table: torch.Tensor) -> Measured:
    """Return the times in a table `[ranks, 3, actions]` of starts, ends and waits; a wait ends a value's travel."""
    marks, arrived = list[tuple[list[Any], list[Any], list[Any]]](), list[list[Any]]()
    for (length, last), (starts, ends, waits) in zip(lengths, table.tolist(), strict=True):
        beside = chain(*zip(starts[length:last], ends[length:last], strict=True))
        marks.append((starts[:length], ends[:length], [*beside]))
        pairs = zip(starts, waits[:length], strict=False)
        arrived.append([start if wait > _ARRIVED_NS else None for start, wait in pairs])
    begun, ended, _ = zip(*marks, strict=True)
    return marks, {value: time / 1e6 for value, time in travelled(plan.bound, begun, ended, arrived).items()}


def _outputs(group: dist.ProcessGroup, holders: Sequence[int], step: ProcessStep) -> list[Any]:
    outputs: list[Any] = [None] * len(holders)
    for holder in sorted(set(holders)):
        turns = [microbatch for microbatch, rank in enumerate(holders) if rank == holder]
        box: list[Any] = [to_bytes([step.outputs[microbatch] for microbatch in turns])]
        dist.broadcast_object_list(box, group=group, group_src=holder)
        for microbatch, output in zip(turns, from_bytes(box[0]), strict=True):
            outputs[microbatch] = output
    return outputs


def _losses(loss: Loss) -> list[int]:
    """Return the type of this process's losses, then the bits of each as a 64-bit number; 0 for unknown ones."""
    here = [value.detach().reshape(()) for value in loss.values if value is not None]
    if not here:
        return [0] * (len(loss.values) + 1)
    kind = here[0].dtype if here[0].is_floating_point() else torch.int64
    bits = iter(torch.stack(here).cpu().double().view(torch.int64).tolist())
    return [_LOSS_TYPES.index(kind), *(0 if value is None else next(bits) for value in loss.values)]


def _set_losses(loss: Loss, numbers: torch.Tensor, holders: Sequence[int], device: torch.device) -> None:
    kind = _LOSS_TYPES[int(numbers[holders[0], 0])]
    bits = numbers[holders, range(1, len(holders) + 1)]
    loss.values[:] = bits.view(torch.float64).to(device, kind).unbind()
