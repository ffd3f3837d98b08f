"""One GPU is cut into parts, none of whose multiprocessors is in two of them."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from contextlib import nullcontext
from itertools import combinations
from types import ModuleType

import fake_cuda_core
import pytest
import torch
from fake_cuda_core import FakeGPU

import pipelab
from pipelab.engine import multiprocessors
from pipelab.engine.multiprocessors import parts_of
from pipelab.errors import DeviceError

DEVICE = torch.device("cuda", 0)
HOPPER = (18, 18, 16, 16, 16, 16, 16, 16)


class ExternalStream:
    def __init__(self, pointer, device):
        self.pointer, self.device = pointer, device


@pytest.fixture
def machine(monkeypatch):
    """Pretend that this machine has these GPUs, and `cuda.core`."""
    monkeypatch.setattr(multiprocessors, "_made", {})
    monkeypatch.setattr(multiprocessors, "_try_out", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", ExternalStream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def pretend(*gpus):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.core", fake_cuda_core.module(dict(enumerate(gpus))))

    return pretend


def sms(gpu):
    """Return the SMs of every green context that is alive."""
    return [context().resources.sm.sms for context in gpu.contexts if context() is not None]


@pytest.mark.parametrize("structured", [True, False], ids=["driver 13.1", "driver 12.4"])
@pytest.mark.parametrize(
    ("clusters", "step", "count", "size"),
    [
        (HOPPER, 8, 4, 32),  # 132 SMs: 4 are left over
        (HOPPER, 8, 2, 64),
        (HOPPER, 8, 3, 40),
        (HOPPER, 8, 16, 8),
        ((12, 12, 12), 8, 2, 8),  # 36 / 2 is 16 in eights, but every cluster has only one eight
        ((16,) * 6 + (12,), 2, 4, 26),  # an older chip: in twos
    ],
)
def test_parts_are_equal_disjoint_and_as_large_as_can_be(machine, structured, clusters, step, count, size):
    gpu = FakeGPU(clusters, step=step, least=step, structured=structured)
    machine(gpu)
    parts = parts_of(DEVICE, count)
    assert [part.multiprocessors for part in parts] == [size] * count
    assert {part.of for part in parts} == {sum(clusters)}
    assert [len(each) for each in sms(gpu)] == [size] * count
    assert all(first.isdisjoint(second) for first, second in combinations(sms(gpu), 2))
    assert len({part.stream.pointer for part in parts}) == count


def test_a_part_says_how_many_multiprocessors_it_has(machine):
    machine(FakeGPU())
    assert str(parts_of(DEVICE, 4)[0]) == "32 of 132 SMs"


def test_parts_are_made_once_for_each_device_and_number(machine):
    gpus = FakeGPU(), FakeGPU()
    machine(*gpus)
    first = parts_of(DEVICE, 4)
    assert parts_of(DEVICE, 4) is first
    assert parts_of(DEVICE, 2) is not first
    assert parts_of(torch.device("cuda", 1), 4) is not first
    assert [len(gpu.contexts) for gpu in gpus] == [6, 4]


def test_threads_that_ask_at_once_get_the_same_parts(machine):
    gpu = FakeGPU()
    machine(gpu)
    found = []
    threads = [threading.Thread(target=lambda: found.append(parts_of(DEVICE, 4))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(parts) for parts in found}) == 1
    assert len(gpu.contexts) == 4


def test_green_contexts_live_as_long_as_the_process(machine):
    gpu = FakeGPU()
    machine(gpu)
    parts = parts_of(DEVICE, 4)
    part = weakref.ref(parts[0].stream)
    del parts
    gc.collect()
    assert part() is not None
    assert len(sms(gpu)) == 4


def test_the_callers_current_context_is_not_touched(machine):
    gpu = FakeGPU()
    machine(gpu)
    parts_of(DEVICE, 4)
    assert gpu.current_in
    assert threading.get_ident() not in gpu.current_in


def test_more_parts_than_the_driver_can_cut_are_refused_with_the_numbers(machine):
    gpu = FakeGPU()
    machine(gpu)
    with pytest.raises(DeviceError, match="132 SMs are too few for 17 parts: .* at least 8 to each, in groups of 8"):
        parts_of(DEVICE, 17)
    assert not sms(gpu)
    assert len(parts_of(DEVICE, 2)) == 2  # and nothing is spoiled


@pytest.mark.parametrize(
    "error",
    [
        fake_cuda_core.CUDAError("CUDA_ERROR_NOT_SUPPORTED: no green contexts\nmore"),
        NotImplementedError("Green context support requires CUDA driver 12.4 or newer. Using driver version 12.2.0"),
        RuntimeError("the driver library is not there"),
    ],
)
def test_whatever_cuda_core_says_becomes_the_reason(machine, monkeypatch, error):
    machine(FakeGPU())

    def refuse(self, options, *, dry_run=False):
        raise error

    monkeypatch.setattr(fake_cuda_core.SMResource, "split", refuse)
    with pytest.raises(DeviceError) as caught:
        parts_of(DEVICE, 2)
    assert str(caught.value) == f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert caught.value.__cause__ is error


def test_a_stream_that_pytorch_cannot_use_is_a_reason_too(machine, monkeypatch):
    gpu = FakeGPU()
    machine(gpu)

    def fail(stream):
        raise RuntimeError("CUDA error: invalid resource handle")

    monkeypatch.setattr(multiprocessors, "_try_out", fail)
    with pytest.raises(DeviceError, match="RuntimeError: CUDA error: invalid resource handle"):
        parts_of(DEVICE, 2)
    gc.collect()
    assert not sms(gpu)  # nothing is kept of it


def test_without_cuda_core_the_way_to_it_is_told(machine, monkeypatch):
    machine(FakeGPU())
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(DeviceError, match=r'needs the package cuda.core.*pip install "pipelab\[gpu\]"'):
        parts_of(DEVICE, 2)


def test_an_old_cuda_core_is_told_like_a_missing_one(machine, monkeypatch):
    machine(FakeGPU())
    monkeypatch.setitem(sys.modules, "cuda.core", ModuleType("cuda.core"))
    with pytest.raises(DeviceError, match=r"cuda.core, 1.0 or newer \(cannot import name"):
        parts_of(DEVICE, 2)


# --- what `pipelab.devices` makes of it


def test_ranks_that_share_a_gpu_get_parts_of_it(machine):
    machine(FakeGPU())
    with pytest.warns(UserWarning, match=r"^4 ranks share 1 GPU: rank 0 on cuda:0 \(1 of 4: 32 of 132 SMs\), .*\)$"):
        found = pipelab.devices(4)
    assert [str(each) for each in found] == [f"cuda:0 ({part} of 4: 32 of 132 SMs)" for part in (1, 2, 3, 4)]
    assert [each.stream for each in found] == [part.stream for part in parts_of(DEVICE, 4)]


def test_a_rank_with_a_gpu_to_itself_has_all_of_it(machine):
    gpus = FakeGPU(), FakeGPU()
    machine(*gpus)
    with pytest.warns(UserWarning, match="3 ranks share 2 GPUs"):
        found = pipelab.devices(3)
    assert [str(each) for each in found] == [
        "cuda:0 (1 of 2: 64 of 132 SMs)",
        "cuda:0 (2 of 2: 64 of 132 SMs)",
        "cuda:1",
    ]
    assert not gpus[1].contexts


def test_one_gpu_that_cannot_be_cut_does_not_hinder_the_other(machine):
    machine(FakeGPU((6,)), FakeGPU())
    with pytest.warns(UserWarning, match="4 ranks share 2 GPUs") as told:
        found = pipelab.devices(4)
    assert [str(each) for each in found] == [
        "cuda:0 (1 of 2)",
        "cuda:0 (2 of 2)",
        "cuda:1 (1 of 2: 64 of 132 SMs)",
        "cuda:1 (2 of 2: 64 of 132 SMs)",
    ]
    (warning,) = told
    assert str(warning.message).splitlines()[1:] == [
        "  cuda:0 is not cut into parts with SMs of their own: its 6 SMs are too few for 2 parts: the driver gives at "
        "least 8 to each, in groups of 8",
        "  ranks that share it have a stream each: their kernels overlap only where there is room",
    ]


# --- the real package, where it is installed


def test_the_fake_has_the_real_packages_names():
    real = pytest.importorskip("cuda.core", reason="needs cuda.core, of the extra gpu", exc_type=ImportError)
    for cls, names in {
        real.Device: ("resources", "set_current", "create_context"),
        real.DeviceResources: ("sm",),
        real.SMResource: ("sm_count", "min_partition_size", "coscheduled_alignment", "split"),
        real.Context: ("create_stream", "resources", "is_green"),
        real.Stream: ("handle",),
    }.items():
        assert all(hasattr(cls, name) for name in names)
    assert real.SMResourceOptions(count=[8, 8]).count == [8, 8]
    assert real.ContextOptions(resources=[]).resources == []
