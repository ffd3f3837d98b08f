"""Cut one GPU into parts that run side by side: each has streaming multiprocessors (SMs) of its own.

    cuda:0, 132 SMs   | 32 SMs, a stream | 32 SMs, a stream | 32 SMs, a stream | 32 SMs, a stream | 4 left over |

Kernels on two ordinary streams overlap only where the first leaves room. A *green context* is a share of a GPU's SMs: a
stream made in one runs its kernels on those SMs alone. All parts come from one split, so no SM is in two of them. The
driver gives SMs in groups (on Hopper, in eights), so a few may be left over; memory, its bandwidth and the L2 cache are
shared.

The driver is asked directly, by `cuda.bindings`, which PyTorch's CUDA wheels bring along. (`cuda.core` has green
contexts only from 1.0 on, and 1.0.0 cannot be imported beside the `cuda.bindings` of PyTorch 2.11.)
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
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
        return f"{self.multiprocessors} of {self.of} SMs"


class _Refused(Exception):  # noqa: N818 - it becomes a DeviceError
    """What the driver refuses; its text is the driver's name for it, `CUDA_ERROR_...`."""


_made: dict[tuple[int, int], tuple[Part, ...]] = {}
_making = threading.Lock()


def parts_of(device: torch.device, count: int) -> tuple[Part, ...]:
    """Return `count` parts of a CUDA device, as large as can be, all equal, no SM in two of them.

    They are made once in a process for each device and count, and live as long as it does: whoever asks for the same
    gets the same, so that many pipelines do not pile up contexts. Parts for another count are cut from the whole device
    again: the two sets overlap.

    Raises:
        DeviceError: saying why the device cannot be cut: the package `cuda.bindings` is not there, the driver is too
            old, the device has too few SMs.
    """
    with _making:
        if (device.index, count) not in _made:
            _made[device.index, count] = _make(device, count)
        return _made[device.index, count]


def _make(device: torch.device, count: int) -> tuple[Part, ...]:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(f"it needs the package cuda.bindings ({error}): pip install cuda-bindings") from error
    try:
        # If what follows fails, what was made is undone. No context is made current: the caller's stays.
        with torch.cuda.device(device), ExitStack() as undo:
            torch.cuda.synchronize(device)  # green contexts belong to PyTorch's context: now there is one
            gpu = _asked(driver.cuDeviceGet(device.index))
            kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
            whole = _asked(driver.cuDeviceGetDevResource(gpu, kind))
            parts = []
            for group in _split(driver, whole, count, _step(device)):
                described = _asked(driver.cuDevResourceGenerateDesc([group], 1))
                needed = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
                context = _asked(driver.cuGreenCtxCreate(described, gpu, needed))
                undo.callback(driver.cuGreenCtxDestroy, context)
                apart = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
                owned = _asked(driver.cuGreenCtxStreamCreate(context, apart, 0))
                undo.callback(driver.cuStreamDestroy, owned)
                stream = torch.cuda.ExternalStream(int(owned), device=device)
                _try_out(stream)
                size = _asked(driver.cuGreenCtxGetDevResource(context, kind)).sm.smCount
                parts.append(Part(stream, size, whole.sm.smCount))
            undo.pop_all()
    except DeviceError:
        raise
    except Exception as error:  # whatever cuda.bindings raises where the driver, or one of its functions, is not there
        told = str(error).strip().splitlines() or [""]
        what = told[0] if isinstance(error, _Refused) else f"{type(error).__name__}: {told[0]}"
        raise DeviceError(what) from error
    return tuple(parts)


def _asked(answer: tuple[Any, ...]) -> Any:
    """Return what the driver answered: one thing, or several.

    Raises:
        _Refused: with the name of the driver's error.
    """
    code, *found = answer
    if int(code) != 0:
        raise _Refused(getattr(code, "name", str(code)))
    return found[0] if len(found) == 1 else found


def _step(device: torch.device) -> int:
    """Return how many SMs the driver gives at a time, for a `cuda.bindings` or a driver before 13 that does not say."""
    major, _ = torch.cuda.get_device_capability(device)
    return 8 if major >= 9 else 2


def _split(driver: Any, whole: Any, count: int, usual_step: int) -> list[Any]:
    """Return `count` equal groups of SMs, as large as the driver grants.

    Where SMs sit in clusters of uneven size, fewer large groups fit than division says: then smaller ones are tried.

    Raises:
        DeviceError: if not even groups of the smallest size fit.
    """
    total = whole.sm.smCount
    step = getattr(whole.sm, "smCoscheduledAlignment", 0) or usual_step
    least = -(-(getattr(whole.sm, "minSmPartitionSize", 0) or step) // step) * step
    for wanted in range(total // count // step * step, least - 1, -step):
        try:
            groups, made, _ = _asked(driver.cuDevSmResourceSplitByCount(count, whole, 0, wanted))
        except _Refused as refused:
            if "INVALID_RESOURCE_CONFIGURATION" not in str(refused):
                raise
            continue
        if made >= count:
            return list(groups[:count])
    raise DeviceError(
        f"its {total} SMs are too few for {count} parts: the driver gives at least {least} to each, in groups of {step}"
    )


def _try_out(stream: torch.cuda.Stream) -> None:
    """Do on a part's stream, once, what a rank does: wait for another stream, launch, and be timed."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record(torch.cuda.current_stream(stream.device))
    stream.wait_event(began)
    with torch.cuda.stream(stream):
        torch.zeros(1, device=stream.device)
    ended.record(stream)
    ended.synchronize()
    began.elapsed_time(ended)
