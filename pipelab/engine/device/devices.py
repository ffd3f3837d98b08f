"""Which device each rank runs on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipelab.errors import DeviceError, require_size


@dataclass(frozen=True, slots=True)
class RankDevice:
    """The device of one rank, or its share of a device.

    Attributes:
        device: the device.
        share: the share, such as `"2 of 4"`; empty if no other rank uses the device.
        stream: the CUDA stream that the rank uses; `None` for a new one.
    """

    device: torch.device
    share: str = ""
    stream: torch.cuda.Stream | None = None

    def __str__(self) -> str:
        return f"{self.device} ({self.share})" if self.share else str(self.device)


def devices(n: int) -> list[torch.device | RankDevice]:
    """Return devices for `n` ranks: one GPU each, or an even share of fewer GPUs, or the CPU if there is none.

    Ranks that share a GPU get a `RankDevice` each, such as `cuda:0 (1 of 4)`, and a CUDA stream: their kernels overlap
    only if the GPU has room. A warning reports which ranks share a GPU.

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
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if len(gpus) >= n:
        return list(gpus[:n])
    shared = share_evenly(gpus, n)
    where = ", ".join(f"rank {rank} on {device}" for rank, device in enumerate(shared))
    warnings.warn(
        f"{n} ranks share {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: {where}\n"
        "  ranks that share a GPU have a stream each: their kernels overlap only if there is room",
        stacklevel=2,
    )
    return list(shared)


def share_evenly(pool: Sequence[torch.device], n: int) -> list[RankDevice]:
    """Return devices for `n` ranks on fewer devices, neighbours together, shares as even as possible."""
    least, more = divmod(n, len(pool))
    found: list[RankDevice] = []
    for index, device in enumerate(pool):
        count = least + (index < more)
        found.extend(RankDevice(device, f"{part + 1} of {count}" if count > 1 else "") for part in range(count))
    return found


def rank_devices(wanted: Sequence[RankDevice | torch.device | str] | None, ranks: int) -> list[RankDevice]:
    """Return one device per rank: the wanted ones, or this machine's."""
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
    strange = [str(item.device) for item in found if item.device.type not in ("cpu", "cuda")]
    if strange:
        raise DeviceError(f"devices has {strange[0]}: pipelab runs on 'cpu' and 'cuda' devices")
    return found


def _device(name: torch.device | str) -> torch.device:
    device = torch.device(name)
    return torch.device("cuda", 0) if str(device) == "cuda" else device
