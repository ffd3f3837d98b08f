"""Which device each rank runs on, and one GPU cut into partitions that run side by side.

    cuda:0, 132 SMs   | 32 SMs, a stream | 32 SMs, a stream | 32 SMs, a stream | 32 SMs, a stream | 4 left over |

Kernels on two ordinary streams overlap only if the first leaves room. A *green context* is a share of a GPU's
streaming multiprocessors (SMs): a stream made in one runs its kernels on those SMs alone. All partitions come from one
split, so no SM is in two of them. The driver splits SMs in groups (on Hopper, of eight), so a few may be left over;
memory, its bandwidth and the L2 cache are shared.

The driver is called through `cuda.bindings`, a dependency of PyTorch's CUDA wheels. (`cuda.core` has green contexts
only since 1.0, and 1.0.0 cannot be imported beside the `cuda.bindings` of PyTorch 2.11.)
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

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
    """Return devices for `n` ranks: one GPU each, or an even share of fewer GPUs, or the CPU if there is none.

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
    for each in found:
        if each.device.type not in ("cpu", "cuda"):
            raise DeviceError(f"devices has {each.device}: pipelab runs on 'cpu' and 'cuda' devices")
    return found


def _device(name: torch.device | str) -> torch.device:
    device = torch.device(name)
    return torch.device("cuda", 0) if str(device) == "cuda" else device


# ── One GPU cut into partitions ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SMPartition:
    """A partition of a GPU: a stream whose kernels run on `multiprocessors` of the GPU's `of` SMs."""

    stream: torch.cuda.Stream
    multiprocessors: int
    of: int

    def __str__(self) -> str:
        return f"{self.multiprocessors} of {self.of} SMs"


class _Refused(Exception):  # noqa: N818 - it becomes a DeviceError
    """An error of the driver; its text is the driver's name for it, `CUDA_ERROR_...`."""


_made: dict[tuple[int, int], tuple[SMPartition, ...]] = {}
_making = threading.Lock()


def partitions_of(device: torch.device, count: int) -> tuple[SMPartition, ...]:
    """Return `count` equal, disjoint partitions of a CUDA device, as large as possible.

    A process makes them once for each device and count, so that many pipelines do not pile up contexts. Partitions for
    another count are cut from the whole device again: the two sets overlap.
    """
    with _making:
        if (device.index, count) not in _made:
            _made[device.index, count] = _make(device, count)
        return _made[device.index, count]


def _make(device: torch.device, count: int) -> tuple[SMPartition, ...]:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(f"it needs the package cuda.bindings ({error}): pip install cuda-bindings") from error
    try:
        # An error destroys the contexts made so far. No context becomes current: the caller's stays.
        with torch.cuda.device(device), ExitStack() as undo:
            torch.cuda.synchronize(device)  # creates PyTorch's context, to which green contexts belong
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
                parts.append(SMPartition(stream, size, whole.sm.smCount))
            undo.pop_all()
    except DeviceError:
        raise
    except Exception as error:  # cuda.bindings raises several kinds if the driver, or one of its functions, is missing
        text = (str(error).strip().splitlines() or [""])[0]
        raise DeviceError(text if isinstance(error, _Refused) else f"{type(error).__name__}: {text}") from error
    return tuple(parts)


def _asked(answer: tuple[Any, ...]) -> Any:
    """Return the driver's answer, one value or several; raise `_Refused` for an error."""
    code, *found = answer
    if int(code) != 0:
        raise _Refused(getattr(code, "name", str(code)))
    return found[0] if len(found) == 1 else found


def _step(device: torch.device) -> int:
    """Return the size of the driver's groups of SMs, which `cuda.bindings` and drivers before 13 do not report."""
    major, _ = torch.cuda.get_device_capability(device)
    return 8 if major >= 9 else 2


def _split(driver: Any, whole: Any, count: int, usual_step: int) -> list[Any]:
    """Return `count` equal groups of SMs, as large as the driver allows.

    If SMs lie in clusters of uneven size, fewer large groups fit than division suggests: smaller ones are tried next.
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
        f"{total} SMs are too few for {count} partitions: each has at least {least} SMs, in groups of {step}"
    )


def _try_out(stream: torch.cuda.Stream) -> None:
    """Do on a partition's stream what a rank does: wait for another stream, launch a kernel, time it."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record(torch.cuda.current_stream(stream.device))
    stream.wait_event(began)
    with torch.cuda.stream(stream):
        torch.zeros(1, device=stream.device)
    ended.record(stream)
    ended.synchronize()
    began.elapsed_time(ended)
