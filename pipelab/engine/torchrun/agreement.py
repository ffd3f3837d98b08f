"""Before every step, all processes compare their calls and batches, in one small collective operation.

A process that makes another call, or has rows of another shape, would make the others wait for ever, or send messages
that do not fit their buffers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.stage.pytree import described, take_apart, tensors_of
from pipelab.errors import BatchError

_SAMPLE = 16
"""How many numbers of a row, or of a parameter, are looked at: another seed changes them all."""


def agree(group: dist.ProcessGroup, call: str, about: str, sample: bytes = b"", aside: int = 0) -> list[int]:
    """Return every process's `aside`, once all have made the same call with the same arguments.

    Args:
        group: all processes.
        call: the call of this process, such as `"step(x, y)"`.
        about: shapes, modes and the like, joined by "; ".
        sample: a few numbers of the batch.
        aside: a number for the other processes.

    Raises:
        BatchError: if the processes differ; all of them raise it.
    """
    mine = torch.tensor([_number(call.encode()), _number(about.encode()), _number(sample), aside])
    every = gathered(mine, group)
    if bool((every[:, :3] != every[0, :3]).any()):
        calls: list[Any] = [None] * len(every)
        dist.all_gather_object(calls, [call, *about.split("; ")], group=group)
        raise BatchError(_difference(calls, every[:, 2].tolist()))
    return [int(number) for number in every[:, 3]]


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
    others = [rank for rank, sample in enumerate(samples) if sample != samples[0]]
    return (
        f"rank {', '.join(map(str, others))} has other rows than rank 0, of the same shape: every process, replicas "
        "too, must have the same batches\n  try: no DistributedSampler, and the same seed for what shuffles the data: "
        "torch.manual_seed(0), or a DataLoader's generator"
    )
