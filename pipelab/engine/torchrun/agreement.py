"""Before every step: does every process mean the same call, on the same batch?

A process that calls something else, or that was given rows of another shape, would leave the others waiting or send
them what they have no room for. So all of them compare a few numbers first; it takes one small collective operation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.stage.pytree import take_apart, tensors_of
from pipelab.errors import BatchError

__all__ = ["agree", "describe_batch", "gathered", "sample_of"]

_SAMPLE = 16
"""How many numbers of a row are looked at."""


def agree(group: dist.ProcessGroup, call: str, about: str, sample: bytes = b"", aside: int = 0) -> list[int]:
    """Return every process's `aside`, once all have made the same call about the same thing.

    Args:
        group: all processes.
        call: what this process does, such as `"step(x, y)"`.
        about: what it does it with: shapes, modes; joined by "; ".
        sample: a few numbers of the batch.
        aside: a number that the others should know.

    Raises:
        BatchError: if the processes differ; all of them raise it.
    """
    mine = torch.tensor([_number(call.encode()), _number(about.encode()), _number(sample), aside])
    every = gathered(mine, group)
    if bool((every[:, :3] != every[0, :3]).any()):
        told: list[Any] = [None] * len(every)
        dist.all_gather_object(told, (call, about, _number(sample)), group=group)
        raise BatchError(_difference(told))
    return [int(number) for number in every[:, 3]]


def gathered(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return every process's tensor, `[processes, ...]`, all of one shape."""
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return torch.stack(every)


def describe_batch(microbatches: Sequence[Any]) -> str:
    """Return what a batch is made of: its parts, and the shape and type of each, micro-batch by micro-batch."""
    seen: dict[str, int] = {}
    for each in microbatches:
        parts, spec = take_apart(each)
        words = [_describe(part) if isinstance(part, torch.Tensor) else str(part) for part in parts]
        text = ", ".join(words) if isinstance(each, torch.Tensor) else f"{', '.join(words)} in {spec}"
        seen[text] = seen.get(text, 0) + 1
    return " and ".join(f"{count} x {text}" for text, count in seen.items())


def _describe(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def sample_of(microbatches: Sequence[Any]) -> bytes:
    """Return a few numbers of a batch's first and last row: other rows than the others' show."""
    taken: list[int] = []
    for each, row in ((microbatches[0], 0), (microbatches[-1], -1)):
        for tensor in tensors_of(each):
            numbers = tensor[row].detach().flatten()
            few = numbers[:: max(1, len(numbers) // _SAMPLE)][:_SAMPLE].contiguous().cpu()
            taken += few.view(torch.uint8).tolist()
    return bytes(taken)


def _number(data: bytes) -> int:
    """Return 63 bits that are the same for the same data on every process."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1


def _apart(one: str, other: str) -> tuple[str, str]:
    """Return what is only in the one and only in the other of two texts, of the parts that they are joined of."""
    theirs, ours = one.split("; "), other.split("; ")
    only_theirs = [part for part in theirs if part not in ours]
    only_ours = [part for part in ours if part not in theirs]
    return "; ".join(only_theirs) or "nothing more", "; ".join(only_ours) or "nothing more"


def _difference(told: Sequence[tuple[str, str, int]]) -> str:
    """Say who does what."""
    for index, what in enumerate(("calls", "has", "")):
        others = [rank for rank, each in enumerate(told) if each[index] != told[0][index]]
        if not others:
            continue
        ranks = f"rank {', '.join(map(str, others))}"
        if what:
            theirs, ours = _apart(str(told[others[0]][index]), str(told[0][index]))
            return (
                f"{ranks} {what} {theirs}, rank 0 {what} {ours}: every process runs the same script on the same "
                "batches, and makes every call of a pipeline"
            )
        return (
            f"{ranks} {'was' if len(others) == 1 else 'were'} given other rows than rank 0, of the same shape: every "
            "process must see the same batches, replicas too\n"
            "  try: no DistributedSampler, and the same seed for what shuffles the data: torch.manual_seed(0) or a "
            "DataLoader's generator"
        )
    return "the processes differ"
