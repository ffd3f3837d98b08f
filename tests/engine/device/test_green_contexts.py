"""One GPU is cut into parts, none of whose multiprocessors is in two of them."""

from __future__ import annotations

import gc
import sys
import threading
from contextlib import nullcontext
from itertools import combinations
from types import ModuleType

import fake_cuda_driver
import pytest
import torch
from fake_cuda_driver import CUresult, FakeGPU

import pipelab
from pipelab.engine.device import devices
from pipelab.engine.device.devices import partitions_of
from pipelab.errors import DeviceError

DEVICE = torch.device("cuda", 0)
HOPPER = (18, 18, 16, 16, 16, 16, 16, 16)


class ExternalStream:
    def __init__(self, pointer, device):
        self.pointer, self.device = pointer, device


@pytest.fixture
def machine(monkeypatch):
    """Pretend that this machine has these GPUs, and `cuda.bindings`."""
    monkeypatch.setattr(devices, "_made", {})
    monkeypatch.setattr(devices, "_try_out", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", ExternalStream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def pretend(*gpus):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if gpus[0].step > 2 else (8, 0))
        bindings = fake_cuda_driver.module(dict(enumerate(gpus)))
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        return bindings.driver

    return pretend


@pytest.mark.parametrize("refuses", [True, False], ids=["refuses", "makes fewer"])
@pytest.mark.parametrize("says", [True, False], ids=["driver 13", "driver 12"])
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
def test_parts_are_equal_disjoint_and_as_large_as_can_be(machine, refuses, says, clusters, step, count, size):
    gpu = FakeGPU(clusters, step=step, least=step, says_steps=says, refuses=refuses)
    machine(gpu)
    parts = partitions_of(DEVICE, count)
    assert [part.multiprocessors for part in parts] == [size] * count
    assert {part.of for part in parts} == {sum(clusters)}
    assert [len(each) for each in gpu.contexts.values()] == [size] * count
    assert all(first.isdisjoint(second) for first, second in combinations(gpu.contexts.values(), 2))
    assert [part.stream.pointer for part in parts] == list(gpu.streams)


def test_a_part_is_as_large_as_the_driver_made_it(machine):
    gpu = FakeGPU((16,) * 6 + (12,), step=2, least=4, says_steps=False)  # gives four where two are asked for
    machine(gpu)
    assert [part.multiprocessors for part in partitions_of(DEVICE, 27)] == [4] * 27


def test_a_part_says_how_many_multiprocessors_it_has(machine):
    machine(FakeGPU())
    assert str(partitions_of(DEVICE, 4)[0]) == "32 of 132 SMs"


def test_parts_are_made_once_for_each_device_and_number(machine):
    gpus = FakeGPU(), FakeGPU()
    machine(*gpus)
    first = partitions_of(DEVICE, 4)
    assert partitions_of(DEVICE, 4) is first
    assert partitions_of(DEVICE, 2) is not first
    assert partitions_of(torch.device("cuda", 1), 4) is not first
    assert [len(gpu.contexts) for gpu in gpus] == [6, 4]


def test_threads_that_ask_at_once_get_the_same_parts(machine):
    gpu = FakeGPU()
    machine(gpu)
    found = []
    threads = [threading.Thread(target=lambda: found.append(partitions_of(DEVICE, 4))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(parts) for parts in found}) == 1
    assert len(gpu.contexts) == 4


def test_green_contexts_live_as_long_as_the_process(machine):
    gpu = FakeGPU()
    machine(gpu)
    partitions_of(DEVICE, 4)
    gc.collect()
    assert len(gpu.contexts) == len(gpu.streams) == 4


def test_more_parts_than_the_driver_can_cut_are_refused_with_the_numbers(machine):
    gpu = FakeGPU()
    machine(gpu)
    with pytest.raises(DeviceError, match="132 SMs are too few for 17 partitions: .* at least 8 SMs, in groups of 8"):
        partitions_of(DEVICE, 17)
    assert not gpu.contexts
    assert len(partitions_of(DEVICE, 2)) == 2  # and nothing is spoiled


FUNCTIONS = [
    "cuDeviceGet",
    "cuDeviceGetDevResource",
    "cuDevSmResourceSplitByCount",
    "cuDevResourceGenerateDesc",
    "cuGreenCtxCreate",
    "cuGreenCtxStreamCreate",
    "cuGreenCtxGetDevResource",
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_whatever_the_driver_refuses_becomes_the_reason(machine, monkeypatch, function):
    gpu = FakeGPU()
    driver = machine(gpu)
    monkeypatch.setattr(driver, function, lambda *_: (CUresult.CUDA_ERROR_NOT_SUPPORTED, None))
    with pytest.raises(DeviceError, match="^CUDA_ERROR_NOT_SUPPORTED$"):
        partitions_of(DEVICE, 2)
    assert not gpu.contexts
    assert not gpu.streams


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError('Function "cuDeviceGetDevResource" not found\nmore'),  # an old driver
        AttributeError("module 'cuda.bindings.driver' has no attribute 'cuDeviceGetDevResource'"),  # old bindings
    ],
    ids=["driver", "bindings"],
)
def test_a_function_that_is_not_there_becomes_the_reason(machine, monkeypatch, error):
    driver = machine(FakeGPU())

    def refuse(*_):
        raise error

    monkeypatch.setattr(driver, "cuDeviceGetDevResource", refuse)
    with pytest.raises(DeviceError) as caught:
        partitions_of(DEVICE, 2)
    assert str(caught.value) == f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert caught.value.__cause__ is error


def test_a_stream_that_pytorch_cannot_use_is_a_reason_too(machine, monkeypatch):
    gpu = FakeGPU()
    machine(gpu)

    def fail(stream):
        raise RuntimeError("CUDA error: invalid resource handle")

    monkeypatch.setattr(devices, "_try_out", fail)
    with pytest.raises(DeviceError, match="RuntimeError: CUDA error: invalid resource handle"):
        partitions_of(DEVICE, 2)
    assert not gpu.contexts  # nothing is kept of it
    assert not gpu.streams


def test_without_cuda_bindings_the_way_to_them_is_told(machine, monkeypatch):
    machine(FakeGPU())
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match=r"needs the package cuda.bindings.*pip install cuda-bindings"):
        partitions_of(DEVICE, 2)


# --- what `pipelab.devices` makes of it


def test_ranks_that_share_a_gpu_get_partitions_of_it(machine):
    machine(FakeGPU())
    with pytest.warns(UserWarning, match=r"^4 ranks share 1 GPU: rank 0 on cuda:0 \(1 of 4: 32 of 132 SMs\), .*\)$"):
        found = pipelab.devices(4)
    assert [str(each) for each in found] == [f"cuda:0 ({part} of 4: 32 of 132 SMs)" for part in (1, 2, 3, 4)]
    assert [each.stream for each in found] == [part.stream for part in partitions_of(DEVICE, 4)]


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
    _, refusal, rest = str(warning.message).splitlines()
    assert refusal.startswith("  cuda:0 has no partitions of SMs: 6 SMs are too few for 2 partitions")
    assert "a stream each" in rest


# --- the real package, where it is installed


def test_the_fake_has_the_real_packages_names():
    reason = "needs cuda-bindings: .venv/bin/pip install -e '.[gpu]'"
    real = pytest.importorskip("cuda.bindings.driver", reason=reason, exc_type=ImportError)
    for name, value in vars(fake_cuda_driver.module({}).driver).items():
        if name.startswith("cu"):
            assert hasattr(real, name)
        elif name.startswith("CU"):
            assert all(int(getattr(getattr(real, name), each.name)) == each for each in value)
    assert real.CUresult(915).name == CUresult(915).name
    assert real.CUdevResource().sm.smCount == 0
    assert int(real.CUstream(4096)) == 4096
