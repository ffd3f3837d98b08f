"""Which device each rank runs on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipelab.errors import DeviceError, require_size

__all__ = ["Slot", "devices", "slots_for"]


@dataclass(frozen=True, slots=True)
class Slot:
    """What one rank runs on: a device, or a share of one.

    Attributes:
        device: the device.
        share: which share of it, such as `"2 of 4"`; empty where the rank has the device to itself.
        stream: the CUDA stream that the rank uses; `None` for one of its own.
    """

    device: torch.device
    share: str = ""
    stream: torch.cuda.Stream | None = None

    def __str__(self) -> str:
        """Return the device, and the share in brackets."""
        return f"{self.device} ({self.share})" if self.share else str(self.device)


def devices(n: int) -> list[Slot]:
    """Return what `n` ranks run on: `n` GPUs if there are as many, fewer shared evenly, the CPU if there is none.

    Ranks that share a GPU get a stream each, so that their kernels may overlap where the GPU has room; a warning says
    which ranks share.

    Example:
        >>> import pipelab
        >>> len(pipelab.devices(4))
        4

    Raises:
        SizeError: if `n` is not a positive whole number.
    """
    require_size("n", n)
    if not torch.cuda.is_available():
        return [Slot(torch.device("cpu")) for _ in range(n)]
    gpus = torch.cuda.device_count()
    if gpus >= n:
        return [Slot(torch.device("cuda", index)) for index in range(n)]
    slots = share_evenly([torch.device("cuda", index) for index in range(gpus)], n)
    warnings.warn(
        f"{n} ranks share {gpus} GPU{'s' if gpus > 1 else ''}, a stream each: "
        + ", ".join(f"rank {rank} on {slot}" for rank, slot in enumerate(slots)),
        stacklevel=2,
    )
    return slots


def share_evenly(pool: Sequence[torch.device], n: int) -> list[Slot]:
    """Return slots for `n` ranks on fewer devices, neighbours together, shares as even as can be."""
    each, more = divmod(n, len(pool))
    slots: list[Slot] = []
    for index, device in enumerate(pool):
        count = each + (index < more)
        slots.extend(Slot(device, f"{part + 1} of {count}" if count > 1 else "") for part in range(count))
    return slots


def slots_for(wanted: Sequence[Slot | torch.device | str] | None, ranks: int) -> list[Slot]:
    """Return one slot per rank: those that were asked for, or what this machine has.

    Raises:
        DeviceError: if there is not one device per rank, or one of them is not there.
    """
    if wanted is None:
        return devices(ranks)
    if isinstance(wanted, str):
        raise DeviceError(
            f"devices={wanted!r}: expected a list with one device per rank, such as [{wanted!r}] * {ranks}"
        )
    slots = [item if isinstance(item, Slot) else Slot(_device(item)) for item in wanted]
    if len(slots) != ranks:
        raise DeviceError(
            f"{len(slots)} device{'s' if len(slots) != 1 else ''} for {ranks} ranks: give one per rank "
            f"(a device may stand several times), or leave devices out"
        )
    for rank, slot in enumerate(slots):
        if slot.device.type == "cuda" and slot.device.index >= torch.cuda.device_count():
            raise DeviceError(f"rank {rank} wants {slot.device}, but this machine has {torch.cuda.device_count()} GPUs")
        if slot.device.type not in ("cpu", "cuda"):
            raise DeviceError(f"rank {rank} wants {slot.device}: pipelab runs on 'cpu' and 'cuda' devices")
    return slots


def _device(name: torch.device | str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"{name!r} is not a device: {str(error).splitlines()[0]}") from None
    if str(device) == "cuda":
        return torch.device("cuda", 0)
    return device
