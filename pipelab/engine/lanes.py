"""Lanes: how a rank computes, reads the clock and hands values over, on a CPU and on a CUDA device.

The worker loop is the same for both. On a CPU a value is handed over as it is and the clock is the processor's. On CUDA
the host only launches: a value travels with an event that its needer's stream waits for, times are events on the rank's
stream, and nothing waits for the device inside a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipelab.engine.hardware import RankDevice
from pipelab.engine.trees import map_tensors, tensors_of

__all__ = ["CpuLane", "CudaLane", "Lane", "Parcel", "lane_for"]


@dataclass(frozen=True, slots=True)
class Parcel:
    """A value given on a CUDA stream, and the event after which it is there."""

    value: Any
    ready: torch.cuda.Event
    stream: torch.cuda.Stream


class Lane(Protocol):
    """What the worker loop asks of a rank's device.

    Attributes:
        runs_on: the device, and which share of it.
        mark: reads the clock: a number of nanoseconds, or an event that `nanoseconds` turns into one.
        gives: wraps a value for another rank; `None` where it goes as it is.
        takes: unwraps a value from another rank, on this lane's device; `None` where it is there as it is.
    """

    runs_on: RankDevice
    mark: Callable[[], Any]
    gives: Callable[[Any], Any] | None
    takes: Callable[[Any], Any] | None

    def enter(self, stack: ExitStack) -> None:
        """Make this lane's device and stream the current ones of the worker thread."""

    def begin(self) -> None:
        """Called by the caller's thread before a step: what it has launched must come before the step."""

    def finish(self, values: Sequence[Any]) -> None:
        """Called by the caller's thread after a step: what it launches from now on must come after the step.

        Args:
            values: what the step made on this lane and the caller keeps.
        """

    def nanoseconds(self, marks: list[Any]) -> list[int]:
        """Return a step's marks as readings of the host's clock, all at once, waiting for the device if need be."""


class CpuLane:
    """A rank on the CPU."""

    def __init__(self, runs_on: RankDevice, *, alone: bool) -> None:
        """Make the lane; `alone` means that no rank of the pipeline is on another kind of device."""
        self.runs_on = runs_on
        self.mark: Callable[[], Any] = time.perf_counter_ns
        self.gives: Callable[[Any], Any] | None = None
        self.takes: Callable[[Any], Any] | None = None if alone else self._take

    def enter(self, stack: ExitStack) -> None:
        """Do nothing: a CPU thread computes where it is."""

    def begin(self) -> None:
        """Do nothing: the caller's work on the CPU is done."""

    def finish(self, values: Sequence[Any]) -> None:
        """Do nothing: the step's work on the CPU is done."""

    def nanoseconds(self, marks: list[Any]) -> list[int]:
        """Return the readings as they are."""
        return marks

    def _take(self, given: Any) -> Any:
        if isinstance(given, Parcel):
            given.ready.synchronize()
            given = given.value
        return map_tensors(lambda tensor: tensor.to("cpu"), given)


class CudaLane:
    """A rank on a CUDA device, or on a share of one, with a stream of its own."""

    def __init__(self, runs_on: RankDevice) -> None:
        """Make the stream and set the device's clock against the host's."""
        self.runs_on = runs_on
        self.device = runs_on.device
        self.stream = runs_on.stream or torch.cuda.Stream(self.device)
        self.mark: Callable[[], Any] = self._mark
        self.gives: Callable[[Any], Any] | None = self._give
        self.takes: Callable[[Any], Any] | None = self._take
        self.set_clock()

    def set_clock(self) -> None:
        """Read both clocks at one moment; `clock_error_ns` says how exactly."""
        self.stream.synchronize()
        self._reference = torch.cuda.Event(enable_timing=True)
        before = time.perf_counter_ns()
        self._reference.record(self.stream)
        self._reference.synchronize()
        after = time.perf_counter_ns()
        self._reference_ns = (before + after) // 2
        self.clock_error_ns = (after - before) // 2

    def enter(self, stack: ExitStack) -> None:
        """Make device and stream current; keep backwards on this thread, and so on this stream."""
        stack.enter_context(torch.cuda.device(self.device))
        stack.enter_context(torch.cuda.stream(self.stream))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))

    def begin(self) -> None:
        """Let the stream wait for what the caller has launched on this device."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def finish(self, values: Sequence[Any]) -> None:
        """Let the caller's stream wait for this one, and keep memory that the caller now uses from being reused."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        for tensor in tensors_of(list(values)):
            if tensor.device == self.device:
                tensor.record_stream(current)

    def nanoseconds(self, marks: list[Any]) -> list[int]:
        """Return events as readings of the host's clock, waiting for the last of them."""
        if marks:
            marks[-1].synchronize()
        readings = [self._reference_ns + round(self._reference.elapsed_time(mark) * 1e6) for mark in marks]
        self.set_clock()  # elapsed times are 32-bit floats: a near reference keeps the next step's exact
        return readings

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def _give(self, value: Any) -> Parcel:
        ready = torch.cuda.Event()
        ready.record(self.stream)
        return Parcel(value, ready, self.stream)

    def _take(self, given: Any) -> Any:
        value = given
        if isinstance(given, Parcel):
            self.stream.wait_event(given.ready)
            value = given.value
        return map_tensors(self._bring, value)

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda:
            # Between two GPUs the copy runs on the giver's device, on the stream that is current there.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor.to(self.device, non_blocking=True)


def lane_for(runs_on: RankDevice, every: Sequence[RankDevice]) -> Lane:
    """Return the lane for one rank of a pipeline that runs on these devices."""
    if runs_on.device.type == "cuda":
        return CudaLane(runs_on)
    return CpuLane(runs_on, alone=all(other.device.type == "cpu" for other in every))
