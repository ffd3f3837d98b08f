"""Rank streams: how a rank computes, reads the clock, sends and receives values, on a CPU and on a CUDA device.

The worker loop is the same for both. On a CPU a value is sent unchanged and the clock is the processor's. On CUDA the
host only launches: a value is sent with an event that the receiver's stream waits for, times are events on the rank's
stream, and nothing waits for the device inside a step. (A rank on a CPU must wait for values from a GPU.)

    caller's stream  ──┬─────────────────────────────────────────┬── reads loss, outputs, gradients
    rank 0's stream    └ F0 ── F1 ────────────── wait ── B0 ─────┤
    rank 1's stream         └ wait ── F0 ── B0 ────┘             │
    copies between two devices run on streams of their own ──────┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipelab.engine.device.clocks import HOST, Clock, GpuClock, StepClock
from pipelab.engine.device.devices import RankDevice
from pipelab.engine.stage.pytree import map_tensors, tensors_of


@dataclass(frozen=True, slots=True)
class Sent:
    """A value that a CUDA stream computes, the event after which it is ready, and the device of that stream."""

    value: Any
    ready: torch.cuda.Event
    device: torch.device


class RankStream(Protocol):
    """The interface between the worker loop and a rank's device.

    Attributes:
        runs_on: the device or its share.
        clock: the device's clock.
        mark: reads the clock: a number of nanoseconds, or an event that the step's clock converts into one.
        send: wraps a value for another rank; `None` if values need no wrapping.
        receive: unwraps a value from another rank, or from the caller, and moves it to this stream's device; `None` if
            it is always there.
    """

    runs_on: RankDevice
    clock: Clock
    mark: Callable[[], Any]
    send: Callable[[Any], Any] | None
    receive: Callable[[Any], Any] | None

    def enter(self, stack: ExitStack) -> None:
        """Make this stream's device and streams the current ones of the worker thread."""

    def begin(self) -> None:
        """Make the step wait for the caller's kernels; the caller's thread calls this before a step."""

    def finish(self, values: Sequence[torch.Tensor]) -> None:
        """Make the caller's later kernels wait for the step; the caller's thread calls this after a step."""


class CpuStream:
    """A rank on the CPU."""

    def __init__(self, runs_on: RankDevice, gpus: Sequence[torch.device]) -> None:
        """Make the stream; `gpus` are the devices that other ranks of the pipeline run on."""
        self.runs_on = runs_on
        self.clock: Clock = HOST
        self.mark: Callable[[], Any] = time.perf_counter_ns
        self.send: Callable[[Any], Any] | None = _pinned if gpus else None
        self.receive: Callable[[Any], Any] | None = self._received if gpus else None
        self._copying = _CopyStreams(gpus)

    def enter(self, stack: ExitStack) -> None:
        """Copy values from GPUs on separate streams."""
        self._copying.enter(stack)

    def begin(self) -> None:
        """Let copies wait for the caller's kernels; its work on the CPU is done."""
        self._copying.begin()

    def finish(self, values: Sequence[torch.Tensor]) -> None:
        """Do nothing: the step's work on the CPU and its copies are done."""

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


class CudaStream:
    """A rank on a CUDA device, or on a share of one, with its own stream."""

    def __init__(self, runs_on: RankDevice, clock: GpuClock, others: Sequence[torch.device]) -> None:
        """Make the stream; `others` are the other CUDA devices of the pipeline."""
        self.runs_on = runs_on
        self.clock: Clock = clock
        self.device = runs_on.device
        self.stream = runs_on.stream or torch.cuda.Stream(self.device)
        self.mark: Callable[[], Any] = self._mark
        self.send: Callable[[Any], Any] | None = self._sent
        self.receive: Callable[[Any], Any] | None = self._received
        self._copying = _CopyStreams(others)

    def enter(self, stack: ExitStack) -> None:
        """Make device and streams current; keep backwards on this thread, and so on this stream."""
        self._copying.enter(stack)
        stack.enter_context(torch.cuda.device(self.device))
        stack.enter_context(torch.cuda.stream(self.stream))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))

    def begin(self) -> None:
        """Let the streams wait for the caller's kernels on their devices."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self._copying.begin()

    def finish(self, values: Sequence[torch.Tensor]) -> None:
        """Let the caller's streams wait for these; reserve the memory of `values` until the caller's kernels end."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        for tensor in values:
            if tensor.device == self.device:
                tensor.record_stream(current)
        self._copying.finish()

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def _sent(self, value: Any) -> Sent:
        ready = torch.cuda.Event()
        ready.record(self.stream)
        return Sent(_detached(value), ready, self.device)

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


class _CopyStreams:
    """A stream on each of some CUDA devices, for copies from there to a rank on another device.

    Without them, copies would run on the default streams, in line with the caller's work and with each other.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._streams = [torch.cuda.Stream(device) for device in devices]

    def enter(self, stack: ExitStack) -> None:
        for stream in self._streams:
            stack.enter_context(torch.cuda.stream(stream))

    def begin(self) -> None:
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def finish(self) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)


def rank_streams(devices: Sequence[RankDevice]) -> list[RankStream]:
    """Return a stream for each rank of a pipeline; those on one GPU share its clock."""
    gpus = list(dict.fromkeys(rank.device for rank in devices if rank.device.type == "cuda"))
    clocks = {gpu: GpuClock(gpu) for gpu in gpus}
    return [
        CudaStream(rank, clocks[rank.device], [gpu for gpu in gpus if gpu != rank.device])
        if rank.device in clocks
        else CpuStream(rank, gpus)
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


def _detached(value: Any) -> Any:
    """Return a value without its history, which stays with its stage; `requires_grad` stays the same."""
    return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def _pinned(value: Any) -> Any:
    """Return a value of the CPU without its history, in pinned memory, which a GPU copies asynchronously."""
    return map_tensors(lambda tensor: tensor.detach().pin_memory().requires_grad_(tensor.requires_grad), value)
