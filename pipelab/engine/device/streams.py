"""Rank streams: how a rank computes, reads the clock and hands values over, on a CPU and on a CUDA device.

The worker loop is the same for both. On a CPU a value is handed over as it is and the clock is the processor's. On CUDA
the host only launches: a value travels with an event that its needer's stream waits for, times are events on the rank's
stream, and nothing waits for the device inside a step. (A rank on a CPU must wait for what it needs from a GPU.)

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

__all__ = ["CpuStream", "CudaStream", "RankStream", "Sent", "begin", "finish", "rank_streams"]


@dataclass(frozen=True, slots=True)
class Sent:
    """A value given on a CUDA stream, the event after which it is there, and the device of that stream."""

    value: Any
    ready: torch.cuda.Event
    device: torch.device


class RankStream(Protocol):
    """What the worker loop asks of a rank's device.

    Attributes:
        runs_on: the device, and which share of it.
        clock: the device's clock.
        mark: reads the clock: a number of nanoseconds, or an event that the step's clock turns into one.
        send: wraps a value for another rank; `None` where it goes as it is.
        receive: unwraps a value from another rank, or from the caller, on this stream's device; `None` where it is
            there as it is.
    """

    runs_on: RankDevice
    clock: Clock
    mark: Callable[[], Any]
    send: Callable[[Any], Any] | None
    receive: Callable[[Any], Any] | None

    def enter(self, stack: ExitStack) -> None:
        """Make this stream's device and streams the current ones of the worker thread."""

    def begin(self) -> None:
        """Called by the caller's thread before a step: what it has launched must come before the step."""

    def finish(self, values: Sequence[torch.Tensor]) -> None:
        """Called by the caller's thread after a step: what it launches from now on must come after the step.

        Args:
            values: what the step made and the caller keeps.
        """


class CpuStream:
    """A rank on the CPU."""

    def __init__(self, runs_on: RankDevice, gpus: Sequence[torch.device]) -> None:
        """Make the stream; `gpus` are the devices that other ranks of the pipeline run on."""
        self.runs_on = runs_on
        self.clock: Clock = HOST
        self.mark: Callable[[], Any] = time.perf_counter_ns
        self.send: Callable[[Any], Any] | None = _pinned if gpus else None
        self.receive: Callable[[Any], Any] | None = self._take if gpus else None
        self._copying = _CopyStreams(gpus)

    def enter(self, stack: ExitStack) -> None:
        """Let values from GPUs come over on streams of their own; a CPU thread computes where it is."""
        self._copying.enter(stack)

    def begin(self) -> None:
        """Let copies wait for what the caller has launched; its work on the CPU is done."""
        self._copying.begin()

    def finish(self, values: Sequence[torch.Tensor]) -> None:
        """Do nothing: the step's work on the CPU is done, and so are the copies that it waited for."""

    def _take(self, given: Any) -> Any:
        """Bring a value over, waiting for its copy and for nothing else on its device."""
        if isinstance(given, Sent):
            torch.cuda.current_stream(given.device).wait_event(given.ready)
            given = given.value
        homes = {tensor.device for tensor in tensors_of(given) if tensor.is_cuda}
        if homes:
            given = map_tensors(lambda tensor: tensor.to("cpu", non_blocking=True), given)
        for home in homes:
            torch.cuda.current_stream(home).record_event().synchronize()
        return given


class CudaStream:
    """A rank on a CUDA device, or on a share of one, with a stream of its own."""

    def __init__(self, runs_on: RankDevice, clock: GpuClock, others: Sequence[torch.device]) -> None:
        """Make the stream; `others` are the other CUDA devices of the pipeline."""
        self.runs_on = runs_on
        self.clock: Clock = clock
        self.device = runs_on.device
        self.stream = runs_on.stream or torch.cuda.Stream(self.device)
        self.mark: Callable[[], Any] = self._mark
        self.send: Callable[[Any], Any] | None = self._give
        self.receive: Callable[[Any], Any] | None = self._take
        self._copying = _CopyStreams(others)

    def enter(self, stack: ExitStack) -> None:
        """Make device and streams current; keep backwards on this thread, and so on this stream."""
        self._copying.enter(stack)
        stack.enter_context(torch.cuda.device(self.device))
        stack.enter_context(torch.cuda.stream(self.stream))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))

    def begin(self) -> None:
        """Let the streams wait for what the caller has launched on their devices."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self._copying.begin()

    def finish(self, values: Sequence[torch.Tensor]) -> None:
        """Let the caller's streams wait for these, and keep memory that the caller now uses from being reused."""
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

    def _give(self, value: Any) -> Sent:
        ready = torch.cuda.Event()
        ready.record(self.stream)
        return Sent(_detached(value), ready, self.device)

    def _take(self, given: Any) -> Any:
        value = given
        if isinstance(given, Sent):
            self.stream.wait_event(given.ready)
            value = given.value
        return map_tensors(self._bring, value)

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda:
            # Whoever made it must not reuse its memory before this rank is done with it. Between two GPUs the copy runs
            # on the stream that is current on the giver's device, after what this rank's stream has waited for.
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
    gpus = list(dict.fromkeys(each.device for each in devices if each.device.type == "cuda"))
    clocks = {gpu: GpuClock(gpu) for gpu in gpus}
    return [
        CudaStream(each, clocks[each.device], [gpu for gpu in gpus if gpu != each.device])
        if each.device in clocks
        else CpuStream(each, gpus)
        for each in devices
    ]


def begin(streams: Sequence[RankStream]) -> list[StepClock]:
    """Put a step behind what the caller has launched; return the clock by which each rank's marks are read."""
    clocks = {clock: clock.begin() for clock in {stream.clock for stream in streams}}
    for stream in streams:
        stream.begin()
    return [clocks[stream.clock] for stream in streams]


def finish(streams: Sequence[RankStream], values: Any = ()) -> None:
    """Put what the caller launches from now on behind the step; `values` are what it keeps of it."""
    tensors = [] if all(stream.clock is HOST for stream in streams) else tensors_of(values)
    for stream in streams:
        stream.finish(tensors)


def _detached(value: Any) -> Any:
    """Return a value without its history, which is of the stage that made it; it still says whether it learns."""
    return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def _pinned(value: Any) -> Any:
    """Return a value of the CPU without its history, in memory that a GPU can copy from while the host goes on."""
    return map_tensors(lambda tensor: tensor.detach().pin_memory().requires_grad_(tensor.requires_grad), value)
