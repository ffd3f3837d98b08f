"""Which device each rank runs on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from pipelab.engine.device.green_contexts import parts_of
from pipelab.errors import DeviceError, require_size

__all__ = ["RankDevice", "devices", "rank_devices"]


@dataclass(frozen=True, slots=True)
class RankDevice:
    """What one rank runs on: a device, or a share of one.

    Attributes:
        device: the device.
        share: which share of it, such as `"2 of 4"` or `"2 of 4: 32 of 132 SMs"`; empty where the rank has the device
            to itself.
        stream: the CUDA stream that the rank uses; `None` for one of its own.
    """

    device: torch.device
    share: str = ""
    stream: torch.cuda.Stream | None = None

    def __str__(self) -> str:
        return f"{self.device} ({self.share})" if self.share else str(self.device)


def devices(n: int) -> list[torch.device | RankDevice]:
    """Return what `n` ranks run on: `n` GPUs if there are as many, fewer shared evenly, the CPU if there is none.

    Ranks that share a GPU get a part of it each, with multiprocessors (SMs) of its own, so that they truly run side by
    side: on four parts of a GPU with 132 SMs, `cuda:0 (1 of 4: 32 of 132 SMs)` and so on. That takes the package
    `cuda-bindings`, which a PyTorch for CUDA or `pip install cuda-bindings` brings, and a driver for CUDA 12.5 or
    newer. Without them every rank gets an ordinary stream, and kernels overlap only where the GPU has room. A warning
    says which ranks share, and how. The parts are made once in a process and shared by all that ask for the same
    number.

    A rank that has a device to itself gets a plain `torch.device`; one that shares it, a `RankDevice`, whose `device`
    it is.

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
            found.extend(_apart(list(ranks)))
        except DeviceError as error:
            found.extend(each for each in shared if each.device == device)
            refusals.append(f"\n  {device} is not cut into parts with SMs of their own: {error}")
    if refusals:
        refusals.append("\n  ranks that share it have a stream each: their kernels overlap only where there is room")
    warnings.warn(
        f"{n} ranks share {gpus} GPU{'s' if gpus > 1 else ''}: "
        + ", ".join(f"rank {rank} on {each}" for rank, each in enumerate(found))
        + "".join(refusals),
        stacklevel=2,
    )
    return found


def _apart(ranks: Sequence[RankDevice]) -> list[RankDevice]:
    """Return the ranks of one GPU, each with a part of it.

    Raises:
        DeviceError: saying why the GPU cannot be cut.
    """
    if len(ranks) == 1:
        return list(ranks)
    parts = parts_of(ranks[0].device, len(ranks))
    return [
        RankDevice(each.device, f"{each.share}: {part}", part.stream) for each, part in zip(ranks, parts, strict=True)
    ]


def share_evenly(pool: Sequence[torch.device], n: int) -> list[RankDevice]:
    """Return devices for `n` ranks on fewer devices, neighbours together, shares as even as can be."""
    each, more = divmod(n, len(pool))
    found: list[RankDevice] = []
    for index, device in enumerate(pool):
        count = each + (index < more)
        found.extend(RankDevice(device, f"{part + 1} of {count}" if count > 1 else "") for part in range(count))
    return found


def rank_devices(
    wanted: Sequence[RankDevice | torch.device | str] | None, ranks: int, *, first: int = 0
) -> list[RankDevice]:
    """Return one device per rank, from rank `first` on: those that were asked for, or what this machine has.

    Raises:
        DeviceError: if there is not one device per rank, or one of them is not there.
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
            f"{len(found)} device{'s' if len(found) != 1 else ''} for {ranks} ranks: give one per rank "
            f"(a device may stand several times), or leave devices out"
        )
    for rank, each in enumerate(found, first):
        if each.device.type == "cuda" and each.device.index >= torch.cuda.device_count():
            raise DeviceError(f"rank {rank} wants {each.device}, but this machine has {torch.cuda.device_count()} GPUs")
        if each.device.type not in ("cpu", "cuda"):
            raise DeviceError(f"rank {rank} wants {each.device}: pipelab runs on 'cpu' and 'cuda' devices")
    return found


def _device(name: torch.device | str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise DeviceError(f"{name!r} is not a device: expected 'cpu', or 'cuda:0', 'cuda:1' … for a GPU") from None
    if str(device) == "cuda":
        return torch.device("cuda", 0)
    return device
