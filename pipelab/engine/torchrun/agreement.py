"""Before every step, all processes compare their calls and batches, in one small collective operation.

A process that makes another call, or has rows of another shape, would make the others wait for ever, or send messages
that do not fit their buffers. A process that was given no inputs or no targets learns their shapes here: in a second
operation, when they are new.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.stage.batch import Part
from pipelab.engine.stage.pytree import described, map_tensors, take_apart, tensors_of
from pipelab.errors import BatchError

_SAMPLE = 16
"""How many numbers of a row, or of a parameter, are looked at: another seed changes them all."""


def agree(group: dist.ProcessGroup, call: str, about: str, parts: Sequence[Part] = (), aside: int = 0) -> list[int]:
    """Return every process's `aside`, once all have made the same call with the same batch."""
    two = [*parts, *[Part("", here=False)] * (2 - len(parts))]
    error = next(filter(None, (part.error for part in parts)), None)
    texts = (f"{call} {error or ''}", about, *(part.words for part in two))
    samples = [_number(sample_of(part.pieces)) | 1 if part.here and part.pieces else 0 for part in two]
    every = gathered(torch.tensor([*(_number(text.encode()) for text in texts), *samples, aside]), group)
    columns: list[list[int]] = every.T.tolist()
    if any(len(set(each)) > 1 for each in columns[:4]) or any(len(set(each) - {0}) > 1 for each in columns[4:6]):
        _compare(group, [call, *about.split("; ")], two, columns[4:6])
    if error is not None:
        raise error
    return columns[6]


def _compare(group: dist.ProcessGroup, head: list[str], parts: Sequence[Part], samples: list[list[int]]) -> None:
    """Raise what is wrong, or how the processes differ; if they do not, complete the parts that are not here."""
    given = [(part.words, _on("meta", part.pieces), part.weights) if part.here else None for part in parts]
    wrong = [(type(part.error), str(part.error)) for part in parts if part.error is not None]
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, (head, given, wrong), group=group)
    for rank, (*_, errors) in enumerate(rows):
        for kind, message in errors:
            raise kind(f"rank {rank}: {message}")
    agreed = [next(filter(None, column), None) for column in zip(*(its for _, its, _ in rows), strict=True)]
    words = [[one or other for one, other in zip(its, agreed, strict=True)] for _, its, _ in rows]
    calls = [[*theirs, *(part[0] for part in its if part)] for (theirs, *_), its in zip(rows, words, strict=True)]
    for each in samples:
        if any(call != calls[0] for call in calls) or len(set(each) - {0}) > 1:
            raise BatchError(_difference(calls, each))
    for part, found in zip(parts, agreed, strict=True):
        if not part.here and found is not None:
            part.words, part.pieces, part.weights = found[0], _on("cpu", found[1]), found[2]


def _on(device: str, pieces: list[Any]) -> list[Any]:
    """Return micro-batches of the same shapes, with any numbers, or none on the device "meta"."""
    like = partial(torch.empty_like, device=device)
    return [map_tensors(lambda each: like(each, requires_grad=each.requires_grad), piece) for piece in pieces]


def gathered(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return every process's tensor, `[processes, ...]`, all of one shape."""
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return torch.stack(every)


def describe_batch(microbatches: Sequence[Any]) -> str:
    """Return the structure of a batch, and the shapes and types of its parts, micro-batch by micro-batch."""
    seen: dict[str, int] = {}
    for each in microbatches:
        parts, spec = take_apart(each)
        words = [described(part) if isinstance(part, torch.Tensor) else str(part) for part in parts]
        text = ", ".join(words) if isinstance(each, torch.Tensor) else f"{', '.join(words)} in {spec}"
        seen[text] = seen.get(text, 0) + 1
    return " and ".join(f"{count} x {text}" for text, count in seen.items())


def sample_of(microbatches: Sequence[Any]) -> bytes:
    """Return a few numbers of a batch's first and last row, by which different rows are noticed."""
    first, last = tensors_of(microbatches[0]), tensors_of(microbatches[-1])
    return b"".join(few_numbers(row) for row in [*(each[0] for each in first), *(each[-1] for each in last)])


def few_numbers(tensor: torch.Tensor) -> bytes:
    """Return a few numbers of a tensor, from its beginning to its end."""
    flat = tensor.detach().reshape(-1)
    few = flat[:: max(1, len(flat) // _SAMPLE)][:_SAMPLE].contiguous().cpu()
    return bytes(few.view(torch.uint8).tolist())


def _number(data: bytes) -> int:
    """Return 63 bits that are the same for the same data on every process."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1


def _difference(calls: Sequence[Sequence[str]], samples: Sequence[int]) -> str:
    """Return how the first ranks that differ from rank 0 do so: in their calls, or else in the numbers of the batch.

    A sample is zero where a process was given none.
    """
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
