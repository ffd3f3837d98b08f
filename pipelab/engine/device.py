"""The devices of ranks, the streams in which they compute, send and receive, and their clocks, on CPU and CUDA.

The worker loop is the same for both. On a CPU a value is sent unchanged and the clock is the processor's. On CUDA the
host only launches: a value is sent with an event that the receiver's stream waits for, times are events on the rank's
stream, and nothing waits for the device inside a step. (A rank on a CPU must wait for values from a GPU.)

    caller's stream  ──┬─────────────────────────────────────────┬── reads loss, outputs, gradients
    rank 0's stream    └ F0 ── F1 ────────────── wait ── B0 ─────┤
    rank 1's stream         └ wait ── F0 ── B0 ────┘             │
    copies between two devices run on streams of their own ──────┘
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from pipelab.engine.stage.pytree import map_tensors, tensors_of
from pipelab.errors import DeviceError, counted, require_size

# ── Which device each rank runs on ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RankDevice:
    """The device of one rank, or its share of a device.

    Attributes:
        device: the device.
        share: the share, such as `"2 of 4"`; empty if no other rank uses the device.
    """

    device: torch.device
    share: str = ""

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
        f"{n} ranks share {counted(len(gpus), 'GPU')}: {where}\n"
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
            f"{counted(len(found), 'device')} for {counted(ranks, 'rank')}: pass one per rank "
            "(several ranks may share a device), or no devices"
        )
    strange = [str(item.device) for item in found if item.device.type not in ("cpu", "cuda")]
    if strange:
        raise DeviceError(f"devices has {strange[0]}: pipelab runs on 'cpu' and 'cuda' devices")
    return found


def _device(name: torch.device | str) -> torch.device:
    device = torch.device(name)
    return torch.device("cuda", 0) if str(device) == "cuda" else device


# ── Clocks: when an action began and ended ────────────────────────────────────────────────────────────────────────────

_OVERHEAD_NANOSECONDS = 1_000_000


class _Here(threading.local):
    """Per thread: the clock's reading at the start of its action; `None` outside of a pipeline, and on CUDA."""

    began: object = None


here = _Here()


def since() -> int:
    """Return when an emulated layer begins, in nanoseconds of `time.perf_counter_ns`.

    That is the start of the action, or the end of the previous emulated layer, if only overhead lies between; after
    real work of a millisecond or more, it is now.
    """
    now = time.perf_counter_ns()
    if isinstance(here.began, int) and now - here.began < _OVERHEAD_NANOSECONDS:
        return here.began
    return now


_TRIES = 8
"""How often an anchor is measured; the quickest counts."""

_RESOLUTION_NS = 500
"""The resolution of CUDA events, as documented."""

_FLOAT_ROUNDING = 2.0**-24
"""The relative error of a time between two events, a 32-bit float."""

_DRIFT = 1e-4
"""How much faster or slower than the host's clock a GPU's may run: a quartz is off by half of that at most."""


class HostClock:
    """The host's clock, for every step alike: marks are readings of it, within `error_ns` if another process's."""

    def __init__(self, error_ns: int = 0) -> None:
        self.error_ns = error_ns

    def begin(self) -> HostClock:
        """Return the clock of a step that begins now."""
        return self

    def nanoseconds(self, marks: list[Any]) -> list[int]:
        """Return a rank's marks as readings of the host's clock."""
        return marks


HOST = HostClock()


@dataclass(frozen=True, slots=True)
class _Anchor:
    event: torch.cuda.Event
    host_ns: int
    error_ns: int


class GpuClock:
    """The clock of a CUDA device, shared by all ranks on the device: marks are events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # a separate one, so that no work comes before an anchor
        self.anchor = self.measure()

    def measure(self) -> _Anchor:
        """Read both clocks at one moment; store it as the newest anchor and return it."""
        tries = []
        for _ in range(_TRIES):
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._stream)  # the first time makes the event, which takes long
            event.synchronize()
            before = time.perf_counter_ns()
            event.record(self._stream)
            event.synchronize()
            after = time.perf_counter_ns()
            tries.append(_Anchor(event, (before + after) // 2, (after - before + 1) // 2))
        self.anchor = min(tries, key=lambda anchor: anchor.error_ns)
        return self.anchor

    def begin(self) -> GpuStepClock:
        """Return the clock of a step that begins now, after the caller's kernels; do not wait for the device."""
        return GpuStepClock(self)


class GpuStepClock:
    """One step's clock on one GPU, shared by the ranks on it."""

    def __init__(self, clock: GpuClock) -> None:
        self._clock = clock
        self._before = clock.anchor
        self._reference = torch.cuda.Event(enable_timing=True)
        self._reference.record(torch.cuda.current_stream(clock.device))
        self._longest = 0.0  # from the reference to the last mark that was read

    @property
    def error_ns(self) -> int:
        """How far the readings may be from the host's clock, in nanoseconds."""
        _, error, gap = self._origin
        return error + _RESOLUTION_NS + round((_FLOAT_ROUNDING + _DRIFT) * gap + _DRIFT * self._longest)

    def nanoseconds(self, marks: list[Any]) -> list[int]:
        """Return a rank's marks, in order, as readings of the host's clock; wait for the device if necessary."""
        if not marks:
            return []
        marks[-1].synchronize()
        origin, _, _ = self._origin
        since = [1e6 * self._reference.elapsed_time(mark) for mark in marks]
        self._longest = max(self._longest, since[-1])
        return [origin + round(passed) for passed in since]

    @cached_property
    def _origin(self) -> tuple[int, int, float]:
        """The reference on the host's clock, by the nearer anchor before or after the step; its error and distance.

        CUDA's times are 32-bit floats, in milliseconds: the longer, the coarser.
        """
        self._reference.synchronize()
        after = self._clock.measure()
        since = 1e6 * self._before.event.elapsed_time(self._reference)
        until = 1e6 * self._reference.elapsed_time(after.event)
        if since < until:
            return self._before.host_ns + round(since), self._before.error_ns, since
        return after.host_ns - round(until), after.error_ns, until


Clock = HostClock | GpuClock
StepClock = HostClock | GpuStepClock


# ── Streams: how a rank computes, sends and receives ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Sent:
    """A value that a CUDA stream computes, the event after which it is ready, and the device of that stream."""

    value: Any
    ready: torch.cuda.Event
    device: torch.device


class RankStream:
    """A rank on the CPU.

    Attributes:
        runs_on: the device or its share.
        clock: the device's clock.
        mark: reads the clock: a number of nanoseconds, or an event that the step's clock converts into one.
        send: wraps a value for another rank; `None` if values need no wrapping.
        receive: unwraps a value from another rank, or from the caller, and moves it to this stream's device; `None` if
            it is always there.
    """

    def __init__(self, runs_on: RankDevice, gpus: Sequence[torch.device]) -> None:
        """Make the stream; `gpus` are the other CUDA devices that ranks of the pipeline run on."""
        self.runs_on = runs_on
        self.clock: Clock = HOST
        self.mark: Callable[[], Any] = time.perf_counter_ns
        self.send: Callable[[Any], Any] | None = _pinned if gpus else None
        self.receive: Callable[[Any], Any] | None = self._received if gpus else None
        # Copies from another device would run on its default stream, in line with the caller's work and each other.
        self._copying = [torch.cuda.Stream(gpu) for gpu in gpus]

    def enter(self, stack: ExitStack) -> None:
        """Make this stream's device and streams the current ones of the worker thread."""
        for stream in self._copying:
            stack.enter_context(torch.cuda.stream(stream))

    def begin(self) -> None:
        """Make the step wait for the caller's kernels; the caller's thread calls this before a step."""
        for stream in self._copying:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def finish(self, values: Sequence[torch.Tensor]) -> None:
        """Make the caller's later kernels wait for the step; on the CPU, its work and its copies are done."""

    def _received(self, given: Any) -> Any:
        """Copy a value to the CPU, waiting for nothing else on its device."""
        if isinstance(given, Sent):
            torch.cuda.current_stream(given.device).wait_event(given.ready)
            given = given.value
        sources = {tensor.device for tensor in tensors_of(given) if tensor.is_cuda}
        if sources:
            given = map_tensors(lambda tensor: tensor.to("cpu", non_blocking=True), given)
        for source in sources:
            torch.cuda.current_stream(source).record_event().synchronize()
        return given


class CudaStream(RankStream):
    """A rank on a CUDA device, or on a share of one, with its own stream."""

    def __init__(self, runs_on: RankDevice, gpus: Sequence[torch.device], clock: GpuClock) -> None:
        super().__init__(runs_on, gpus)
        self.clock = clock
        self.device = runs_on.device
        self.stream = torch.cuda.Stream(self.device)
        self.mark, self.send, self.receive = self._mark, self._sent, self._received

    def enter(self, stack: ExitStack) -> None:
        """Keep backwards on this thread too, and so on this stream."""
        super().enter(stack)
        stack.enter_context(torch.cuda.device(self.device))
        stack.enter_context(torch.cuda.stream(self.stream))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))

    def begin(self) -> None:
        """Let this stream wait too."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        super().begin()

    def finish(self, values: Sequence[torch.Tensor]) -> None:
        """Reserve the memory of `values` too, until the caller's kernels end."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        for tensor in values:
            if tensor.device == self.device:
                tensor.record_stream(current)
        for stream in self._copying:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def _sent(self, value: Any) -> Sent:
        ready = torch.cuda.Event()
        ready.record(self.stream)
        return Sent(map_tensors(lambda one: one.detach().requires_grad_(one.requires_grad), value), ready, self.device)

    def _received(self, given: Any) -> Any:
        value = given
        if isinstance(given, Sent):
            self.stream.wait_event(given.ready)
            value = given.value
        return map_tensors(self._copied, value)

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda:
            # Its memory must not be reused before this rank is done with it. Between two GPUs the copy runs on the
            # sender's current stream, after all that this rank's stream has waited for.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        elif not tensor.requires_grad and not tensor.is_pinned():
            tensor = tensor.pin_memory()  # from pageable memory, the driver would make the host wait
        return tensor.to(self.device, non_blocking=True)


def rank_streams(devices: Sequence[RankDevice]) -> list[RankStream]:
    """Return a stream for each rank of a pipeline; those on one GPU share its clock."""
    gpus = list(dict.fromkeys(rank.device for rank in devices if rank.device.type == "cuda"))
    clocks = {gpu: GpuClock(gpu) for gpu in gpus}
    return [
        CudaStream(rank, [gpu for gpu in gpus if gpu != rank.device], clocks[rank.device])
        if rank.device in clocks
        else RankStream(rank, gpus)
        for rank in devices
    ]


def begin(streams: Sequence[RankStream]) -> list[StepClock]:
    """Make a step wait for the caller's kernels; return the clock that reads each rank's marks."""
    clocks = {clock: clock.begin() for clock in {stream.clock for stream in streams}}
    for stream in streams:
        stream.begin()
    return [clocks[stream.clock] for stream in streams]


def finish(streams: Sequence[RankStream], values: Any = ()) -> None:
    """Make the caller's later kernels wait for the step; `values` are the results that it keeps."""
    tensors = [] if all(stream.clock is HOST for stream in streams) else tensors_of(values)
    for stream in streams:
        stream.finish(tensors)


def _pinned(value: Any) -> Any:
    """Return a value of the CPU without its history, in pinned memory, which a GPU copies asynchronously."""
    return map_tensors(lambda tensor: tensor.detach().pin_memory().requires_grad_(tensor.requires_grad), value)
