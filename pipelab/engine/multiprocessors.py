"""Cut one GPU into parts that run side by side: each has streaming multiprocessors (SMs) of its own.

    cuda:0, 132 SMs   | 32 SMs, a stream | 32 SMs, a stream | 32 SMs, a stream | 32 SMs, a stream | 4 left over |

Kernels on two ordinary streams overlap only where the first leaves room. A *green context* is a share of a GPU's SMs: a
stream made in one runs its kernels on those SMs alone. All parts come from one split, so no SM is in two of them. The
driver gives SMs in groups (on Hopper, in eights), so a few may be left over; memory, its bandwidth and the L2 cache are
shared.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from pipelab.errors import DeviceError

__all__ = ["Part", "parts_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a GPU.

    Attributes:
        stream: what is launched here runs on this part's SMs.
        multiprocessors: how many SMs it has.
        of: how many the whole GPU has.
    """

    stream: torch.cuda.Stream
    multiprocessors: int
    of: int

    def __str__(self) -> str:
        """Return its share of the SMs."""
        return f"{self.multiprocessors} of {self.of} SMs"


@dataclass(frozen=True, slots=True)
class _Kept:
    """The parts of a GPU, and the green contexts and streams that must outlive every use of them."""

    parts: tuple[Part, ...]
    owners: tuple[Any, ...]


_made: dict[tuple[int, int], _Kept] = {}
_making = threading.Lock()


def parts_of(device: torch.device, count: int) -> tuple[Part, ...]:
    """Return `count` parts of a CUDA device, as large as can be, all equal, no SM in two of them.

    They are made once in a process for each device and count, and kept: whoever asks for the same gets the same, so
    that many pipelines do not pile up contexts. Parts for another count are cut from the whole device again: the two
    sets overlap.

    Raises:
        DeviceError: saying why the device cannot be cut: the package `cuda.core` is not there, the driver is too old,
            the device has too few SMs.
    """
    with _making:
        kept = _made.get((device.index, count))
        if kept is None:
            # A thread of its own, because CUDA's current context is the thread's: the caller's is not touched.
            with ThreadPoolExecutor(1) as elsewhere:
                kept = elsewhere.submit(_make, device, count).result()
            _made[device.index, count] = kept
    return kept.parts


def _make(device: torch.device, count: int) -> _Kept:
    try:
        from cuda.core import ContextOptions, Device, SMResourceOptions
    except ImportError as error:
        raise DeviceError(
            f'it needs the package cuda.core, 1.0 or newer ({error}): pip install "pipelab[gpu]"'
        ) from error
    try:
        with torch.cuda.device(device):  # PyTorch's context, the device's primary one: green contexts belong to it
            gpu = Device(device.index)
            gpu.set_current()
            whole = gpu.resources.sm
            groups = _split(whole, count, SMResourceOptions)
            contexts = [gpu.create_context(ContextOptions(resources=[group])) for group in groups]
            owned = [context.create_stream() for context in contexts]
            streams = [torch.cuda.ExternalStream(int(stream.handle), device=device) for stream in owned]
            for stream in streams:
                _try_out(stream)
            sizes = [context.resources.sm.sm_count for context in contexts]
    except DeviceError:
        raise
    except Exception as error:  # cuda.core raises its CUDAError, RuntimeError, ValueError and NotImplementedError
        told = str(error).strip().splitlines() or [""]
        raise DeviceError(f"{type(error).__name__}: {told[0]}") from error
    parts = [Part(stream, size, whole.sm_count) for stream, size in zip(streams, sizes, strict=True)]
    return _Kept(tuple(parts), (*owned, *contexts))


def _split(whole: Any, count: int, options: Any) -> list[Any]:
    """Return `count` equal groups of SMs, as large as the driver grants.

    Where SMs sit in clusters of uneven size, fewer large groups fit than division says: then smaller ones are tried.

    Raises:
        DeviceError: if not even groups of the smallest size fit.
    """
    step = max(1, whole.coscheduled_alignment)
    least = -(-max(1, whole.min_partition_size) // step) * step
    for wanted in range(whole.sm_count // count // step * step, least - 1, -step):
        try:
            groups, _ = whole.split(options(count=[wanted] * count))
        except Exception as error:
            if "INVALID_RESOURCE_CONFIGURATION" not in str(error):
                raise
            continue
        if len(groups) == count:
            return list(groups)
    raise DeviceError(
        f"its {whole.sm_count} SMs are too few for {count} parts: the driver gives at least {least} to each, "
        f"in groups of {step}"
    )


def _try_out(stream: torch.cuda.Stream) -> None:
    """Do on a part's stream, once, what a rank does: wait for another stream, launch, record an event to be timed."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        torch.zeros(1, device=stream.device)
    torch.cuda.Event(enable_timing=True).record(stream)
    stream.synchronize()
