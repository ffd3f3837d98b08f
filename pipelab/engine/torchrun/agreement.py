"""Before every step, all processes compare their calls and batches, in one small collective operation.

A process that makes another call, or has rows of another shape, would make the others wait for ever, or send messages
that do not fit their buffers. A process that was given no inputs or no targets learns their shapes here: in a second
operation, when they are new.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.stage.batch import Part
from pipelab.engine.stage.pytree import described, map_tensors, take_apart, tensors_of
from pipelab.errors import BatchError, LossError

_SAMPLE = 16
"""How many numbers of a row, or of a parameter, are looked at: another seed changes them all."""


Wrong = BatchError | LossError


def agree(
    group: dist.ProcessGroup,
    call: str,
    about: str,
    parts: Sequence[Part] = (),
    aside: int = 0,
    error: Wrong | None = None,
) -> list[int]:
    """Return every process's `aside`, once all have made the same call with the same batch.

    Args:
        group: all processes.
        call: the call of this process, such as `"step(x, y)"`.
        about: modes and the like, joined by "; ".
        parts: the inputs, and the targets of a step. One that is not here may be another step's, whose shapes it is
            likely to have; it gets those that it has in the processes that were given it.
        aside: a number for the other processes.
        error: what is wrong with the batch of this process.

    Raises:
        BatchError: if the processes differ; all of them raise it.
        LossError: the lowest rank's `error`, or `BatchError` alike: all raise it.
    """
    padded = [*parts, *[Part("", here=False)] * (2 - len(parts))]
    texts = (f"{call} {error or ''}", about, *(part.words for part in padded))
    samples = [_number(sample_of(part.pieces)) | 1 if part.here and part.pieces else 0 for part in padded]
    every = gathered(torch.tensor([*(_number(text.encode()) for text in texts), *samples, aside]), group)
    several = any(len(set(column) - {0}) > 1 for column in every[:, 4:6].T.tolist())
    if several or bool((every[:, :4] != every[0, :4]).any()):
        _compare(group, [call, *about.split("; ")], padded, error, every)
    if error is not None:
        raise error
    return [int(number) for number in every[:, 6]]


def _compare(
    group: dist.ProcessGroup, head: list[str], parts: Sequence[Part], error: Wrong | None, every: torch.Tensor
) -> None:
    """Raise what is wrong, or how the processes differ; if they do not, complete the parts that are not here."""
    given = [(part.words, list(map(_shapes, part.pieces)), part.weights) if part.here else None for part in parts]
    rows: list[Any] = [None] * len(every)
    dist.all_gather_object(rows, (head, given, error and (isinstance(error, LossError), str(error))), group=group)
    for rank, (*_, wrong) in enumerate(rows):
        if wrong is not None:
            raise (LossError if wrong[0] else BatchError)(f"rank {rank}: {wrong[1]}")
    agreed = [next(filter(None, column), None) for column in zip(*(its for _, its, _ in rows), strict=True)]
    calls = [
        [*theirs, *(part[0] for part in (one or other for one, other in zip(its, agreed, strict=True)) if part)]
        for theirs, its, _ in rows
    ]
    for samples in every[:, 4:6].T.tolist():
        if any(call != calls[0] for call in calls) or len(set(samples) - {0}) > 1:
            raise BatchError(_difference(calls, samples))
    for part, found in zip(parts, agreed, strict=True):
        if not part.here and found is not None:
            part.words, part.pieces, part.weights = found[0], list(map(_empty, found[1])), found[2]


def _shapes(piece: Any) -> Any:
    """Return a micro-batch without its numbers."""
    return map_tensors(lambda each: torch.empty_like(each, device="meta", requires_grad=each.requires_grad), piece)


def _empty(piece: Any) -> Any:
    return map_tensors(lambda each: torch.empty_like(each, device="cpu", requires_grad=each.requires_grad), piece)


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
