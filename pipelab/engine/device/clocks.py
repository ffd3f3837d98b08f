"""Clocks of CPU and CUDA devices: when an action began and ended."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

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
    """The host's clock, for every step alike: marks are readings of it.

    Attributes:
        error_ns: how far they may be from it, if another process measured them.
    """

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
