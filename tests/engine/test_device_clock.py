"""A GPU's events become moments of the host's clock: exactly ordered on one GPU, with a known error between devices."""

from __future__ import annotations

import pytest
import torch
from fake_cuda import FakeGPU

from pipelab.engine.device import HOST, GpuClock

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    return FakeGPU().install(monkeypatch)


def marks(gpu, count, apart=1e-4):
    """Return timed events on a stream, so many seconds apart."""
    stream, found = torch.cuda.Stream(), []
    for _ in range(count):
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        found.append(event)
        gpu.sleep(apart)
    return found


def test_the_hosts_readings_are_taken_as_they_are():
    assert HOST.begin().nanoseconds([1, 5, 7]) == [1, 5, 7]
    assert HOST.error_ns == 0


@pytest.mark.parametrize(
    ("fast", "apart", "many", "error_ns"),
    [(0, 1e-4, 20, 10_000), (5e-5, 0.2, 10, 300_000), (-5e-5, 0.2, 10, 300_000)],
    ids=["right", "fast, in a long step", "slow, in a long step"],
)
def test_readings_are_right_within_their_error(monkeypatch, fast, apart, many, error_ns):
    gpu = FakeGPU(fast=fast).install(monkeypatch)
    clock = GpuClock(DEVICE)
    gpu.sleep(0.5 if fast else 0)
    step = clock.begin()
    events = marks(gpu, many, apart)
    for event, reading in zip(events, step.nanoseconds(events), strict=True):
        assert abs(reading - event.true_ns) <= step.error_ns + 500
    assert 0 < step.error_ns < error_ns


def test_to_begin_a_step_the_host_does_not_wait_and_a_rank_that_did_nothing_has_no_readings(gpu):
    clock = GpuClock(DEVICE)
    waited = gpu.waits
    assert clock.begin().nanoseconds([]) == []
    assert gpu.waits == waited


def test_a_step_begins_after_what_the_caller_has_launched(gpu):
    clock = GpuClock(DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()):
        gpu.launch("the caller's")
        step = clock.begin()
    assert step._reference.over == {"the caller's"}


def test_ranks_on_one_gpu_see_its_own_order_exactly(gpu):
    step = GpuClock(DEVICE).begin()
    events = marks(gpu, 400, apart=1e-7)  # closer than the clock can tell
    first, second = step.nanoseconds(events[::2]), step.nanoseconds(events[1::2])
    assert sorted(first + second) == [time for both in zip(first, second, strict=True) for time in both]


@pytest.mark.parametrize("hours", [0, 1, 100])
def test_however_late_a_trace_is_read_times_within_a_step_are_exact(gpu, hours):
    clock = GpuClock(DEVICE)
    gpu.sleep(3600 * hours)
    step = clock.begin()
    events = marks(gpu, 10)
    gpu.sleep(3600 * hours)
    readings = step.nanoseconds(events)
    for event, reading in zip(events, readings, strict=True):
        assert abs((reading - readings[0]) - (event.true_ns - events[0].true_ns)) <= 1_000
        assert abs(reading - event.true_ns) <= step.error_ns + 500
    assert step.error_ns >= 3600e9 * hours / 2**24  # but where the step lies on the host's clock is coarser


def test_an_old_steps_trace_is_the_same_after_newer_ones_were_read(gpu):
    clock = GpuClock(DEVICE)
    old, events = clock.begin(), marks(gpu, 3)
    before = old.nanoseconds(events)
    gpu.sleep(10)
    clock.begin().nanoseconds(marks(gpu, 3))
    assert old.nanoseconds(events) == before


def test_the_nearest_anchor_counts(gpu):
    clock = GpuClock(DEVICE)
    step = clock.begin()  # at once after the clock was set
    events = marks(gpu, 3)
    gpu.sleep(3600)
    step.nanoseconds(events)
    assert step.error_ns < 10_000
