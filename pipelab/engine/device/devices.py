"""Which device each rank runs on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from pipelab.engine.device.green_contexts import partitions_of
from pipelab.errors import DeviceError, require_size


@dataclass(frozen=True, slots=True)
class RankDevice:
    """The device of one rank, or its share of a device.

    Attributes:
        device: the device.
        share: the share, such as `"2 of 4"` or `"2 of 4: 32 of 132 SMs"`; empty if no other rank uses the device.
        stream: the CUDA stream that the rank uses; `None` for a new one.
    """

    device: torch.device
    share: str = ""
    stream: torch.cuda.Stream | None = None

    def __str__(self) -> str:
        return f"{self.device} ({self.share})" if self.share else str(self.device)


def devices(n: int) -> list[torch.device | RankDevice]:
    """Return devices for `n` ranks: `n` GPUs if there are as many, fewer shared evenly, the CPU if there is none.

    Ranks that share a GPU get disjoint partitions of its multiprocessors (SMs), so that they truly run side by side: on
    a GPU with 132 SMs, four ranks get `cuda:0 (1 of 4: 32 of 132 SMs)` and so on. Partitions need the package
    `cuda-bindings`, which comes with a PyTorch for CUDA or with `pip install cuda-bindings`, and a driver for CUDA 12.5
    or newer. Without them every rank gets an ordinary stream, and kernels overlap only if the GPU has room. A warning
    reports which ranks share a GPU, and how.

    A rank that shares a device gets a `RankDevice`; any other rank gets a `torch.device`.

    Example:
        >>> import pipelab
        >>> len(pipelab.devices(4))
        4

    Raises:
        UsageError: if `n` is not a positive whole number.
    """
    n = require_size("n", n)
    if not torch.cuda.is_available():
        return [torch.device("cpu")] * n
    gpus = torch.cuda.device_count()
    if gpus >= n:
        return [torch.device("cuda", index) for index in range(n)]
    found: list[torch.device | RankDevice] = []
    refusals: list[str] = []
    shared = share_evenly([torch.device("cuda", index) for index in range(gpus)], n)
    for device, ranks in groupby(shared, key=lambda each: each.device):
        try:
            found.extend(_partitioned(list(ranks)))
        except DeviceError as error:
            found.extend(each for each in shared if each.device == device)
            refusals.append(f"\n  {device} has no partitions of SMs: {error}")
    if refusals:
        refusals.append("\n  ranks that share it have a stream each: their kernels overlap only if there is room")
    warnings.warn(
        f"{n} ranks share {gpus} GPU{'s' if gpus > 1 else ''}: "
        + ", ".join(f"rank {rank} on {each}" for rank, each in enumerate(found))
        + "".join(refusals),
        stacklevel=2,
    )
    return found


def _partitioned(ranks: list[RankDevice]) -> list[RankDevice]:
    """Return the ranks of one GPU, each with a partition of it."""
    if len(ranks) == 1:
        return ranks
    pairs = zip(ranks, partitions_of(ranks[0].device, len(ranks)), strict=True)
    return [RankDevice(each.device, f"{each.share}: {part}", part.stream) for each, part in pairs]


def share_evenly(pool: Sequence[torch.device], n: int) -> list[RankDevice]:
    """Return devices for `n` ranks on fewer devices, neighbours together, shares as even as possible."""
    each, more = divmod(n, len(pool))
    found: list[RankDevice] = []
    for index, device in enumerate(pool):
        count = each + (index < more)
        found.extend(RankDevice(device, f"{part + 1} of {count}" if count > 1 else "") for part in range(count))
    return found


def rank_devices(wanted: Sequence[RankDevice | torch.device | str] | None, ranks: int) -> list[RankDevice]:
    """Return one device per rank: the wanted ones, or this machine's.

    Raises:
        DeviceError: if there is not one device per rank, or one of another kind than CPU and CUDA.
    """
    if wanted is None:
        wanted = devices(ranks)
    if isinstance(wanted, str):
        raise DeviceError(
            f"devices={wanted!r}: expected a list with one device per rank, such as [{wanted!r}] * {ranks}"
        )
    found = [item if isinstance(item, RankDevice) else RankDevice(_device(item)) for item in wanted]
    if len(found) != ranks:
        raise DeviceError(
            f"{len(found)} device{'s' if len(found) != 1 else ''} for {ranks} ranks: pass one per rank "
            "(several ranks may share a device), or no devices"
        )
    for each in found:
        if each.device.type not in ("cpu", "cuda"):
            raise DeviceError(f"devices has {each.device}: pipelab runs on 'cpu' and 'cuda' devices")
    return found


def _device(name: torch.device | str) -> torch.device:
    device = torch.device(name)
    return torch.device("cuda", 0) if str(device) == "cuda" else device
