"""Streams, events and a device's clock as CUDA has them, without a device: who comes after whom, and at what time.

Tensors stay on the CPU. What matters is the order: every launch knows all launches that must be over before it begins.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import torch

RESOLUTION_NS = 500


class FakeGPU:
    """One CUDA device. Its clock is not the host's, and it stamps events some microseconds after they are launched.

    The clock runs too fast by the share `fast`.
    """

    def __init__(self, offset_ns=123_456_789_000, delay_ns=3_000, fast=0.0):
        self.offset_ns, self.delay_ns, self.fast = offset_ns, delay_ns, fast
        self.before = {}  # each launch, by name: those that are over when it begins
        self.waits = 0  # how often the host has waited for the device
        self._now_ns = 10**15
        self._here = threading.local()
        self._default = FakeStream(self)

    def now_ns(self):
        """Return the host's time, which passes only by being looked at, and by `sleep`."""
        self._now_ns += 200
        return self._now_ns

    def sleep(self, seconds):
        self._now_ns += round(1e9 * seconds)

    def current(self, device=None):
        return getattr(self._here, "stream", self._default)

    @contextmanager
    def using(self, stream):
        before, self._here.stream = self.current(), stream
        try:
            yield
        finally:
            self._here.stream = before

    def launch(self, name):
        stream = self.current()
        assert name not in self.before
        self.before[name] = frozenset(stream.over)
        stream.over.add(name)

    def install(self, monkeypatch):
        """Put this device in the place of PyTorch's CUDA."""
        monkeypatch.setattr(time, "perf_counter_ns", self.now_ns)
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "device_count", lambda: 1)
        monkeypatch.setattr(cuda, "Stream", lambda device=None: FakeStream(self))
        monkeypatch.setattr(cuda, "Event", lambda enable_timing=False: FakeEvent(self, enable_timing))
        monkeypatch.setattr(cuda, "current_stream", self.current)
        monkeypatch.setattr(cuda, "stream", self.using)
        monkeypatch.setattr(cuda, "device", lambda device: self.using(self.current()))
        monkeypatch.setattr(cuda, "synchronize", lambda: None)
        monkeypatch.setattr(cuda, "get_rng_state", lambda device: torch.zeros(16, dtype=torch.uint8))
        monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *args, **kwargs: tensor)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
        return self


class FakeStream:
    def __init__(self, gpu):
        self.gpu, self.device, self.over = gpu, torch.device("cuda", 0), set()

    def wait_stream(self, other):
        self.over |= other.over

    def wait_event(self, event):
        assert event.over is not None, "a stream waits for an event that nobody has recorded: it would not wait"
        self.over |= event.over

    def record_event(self):
        event = FakeEvent(self.gpu, timed=False)
        event.record(self)
        return event


class FakeEvent:
    def __init__(self, gpu, timed):
        self.gpu, self.timed, self.over, self.true_ns = gpu, timed, None, None

    def record(self, stream):
        self.over = frozenset(stream.over)
        self.true_ns = self.gpu.now_ns() + self.gpu.delay_ns

    def synchronize(self):
        self.gpu.waits += 1
        self.gpu._now_ns = max(self.gpu._now_ns, self.true_ns)

    def elapsed_time(self, later):
        """Return milliseconds, as CUDA does: in half microseconds, as a 32-bit float."""
        assert self.timed
        assert later.timed
        own = [round(event.true_ns * (1 + self.gpu.fast)) + self.gpu.offset_ns for event in (self, later)]
        stamps = [each // RESOLUTION_NS * RESOLUTION_NS for each in own]
        return torch.tensor((stamps[1] - stamps[0]) / 1e6, dtype=torch.float32).item()
