"""On a CUDA device cut into parts: each part's kernels run on multiprocessors of its own, beside the others'."""

from __future__ import annotations

import warnings
from itertools import combinations

import plain
import pytest
import torch
from torch import nn
from traces import assert_obeys

import pipelab
from pipelab import OneFOneB, Pipeline
from pipelab.engine.device.devices import RankDevice, partitions_of
from pipelab.errors import DeviceError

mse = nn.functional.mse_loss

pytestmark = pytest.mark.gpu

SOURCE = r"""
extern "C" __global__ void where(int* seen, int cycles) {
    // Note on which multiprocessor this block runs, and stay there for a while, so that others go elsewhere.
    unsigned int multiprocessor;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    seen[multiprocessor] = 1;
    long long start = clock64();
    while (clock64() - start < cycles) {}
}

extern "C" __global__ void meet(volatile int* here, int* met, int own, int other, int cycles) {
    // Say that this side is here, and wait for the other side, but not for ever.
    here[own] = 1;
    __threadfence();
    long long start = clock64();
    while (!here[other] && clock64() - start < cycles) {}
    if (here[other] && threadIdx.x == 0) atomicAdd(met + own, 1);
}
"""


@pytest.fixture
def parts():
    """Four parts of the first GPU."""
    try:
        return partitions_of(torch.device("cuda", 0), 4)
    except DeviceError as error:
        pytest.skip(f"this GPU cannot be cut: {error}")


@pytest.fixture
def kernels():
    """The kernels above, compiled for this GPU; each is launched on a PyTorch stream."""
    torch.cuda.synchronize()  # there must be a context to load them into
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = {name: torch.cuda._compile_kernel(SOURCE, name) for name in ("where", "meet")}
    except Exception as error:  # noqa: BLE001 - NVIDIA's compiler is a library of its own, and the function is private
        pytest.skip(f"needs NVIDIA's run-time compiler: {error}")

    def launcher(kernel):
        return lambda stream, blocks, threads, *arguments: kernel(
            (blocks, 1, 1), (threads, 1, 1), list(arguments), stream=stream
        )

    return {name: launcher(kernel) for name, kernel in compiled.items()}


def devices_on(parts):
    return [
        RankDevice(torch.device("cuda", 0), f"part {index}: {part}", part.stream) for index, part in enumerate(parts)
    ]


def test_no_multiprocessor_is_in_two_parts(parts, kernels):
    total = parts[0].of
    seen = torch.zeros(len(parts), 4096, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    for index, part in enumerate(parts):
        kernels["where"](part.stream, 16 * total, 128, seen[index], 200_000)
    torch.cuda.synchronize()
    used = [set(row.nonzero().flatten().tolist()) for row in seen]
    assert [len(each) for each in used] == [part.multiprocessors for part in parts]
    assert all(first.isdisjoint(second) for first, second in combinations(used, 2))
    assert sum(map(len, used)) <= total


def test_kernels_that_fill_two_parts_run_at_the_same_time(parts, kernels):
    blocks = 4 * parts[0].of  # several times what a part can hold at once
    here, met, elsewhere = (torch.zeros(2, dtype=torch.int32, device="cuda") for _ in range(3))
    torch.cuda.synchronize()
    for part in parts[:2]:
        kernels["meet"](part.stream, 1, 1, elsewhere, elsewhere, 0, 1, 0)  # the first launch loads the kernel
    torch.cuda.synchronize()
    for own, part in enumerate(parts[:2]):
        kernels["meet"](part.stream, blocks, 1024, here, met, own, 1 - own, 1_000_000_000)
    torch.cuda.synchronize()
    assert met.tolist() == [blocks, blocks]


def test_the_callers_device_and_stream_stay_current(parts):
    with torch.cuda.stream(torch.cuda.Stream()):
        before = torch.cuda.current_stream()
        assert partitions_of(torch.device("cuda", 0), 4) is parts
        partitions_of(torch.device("cuda", 0), 2)
        assert torch.cuda.current_stream() == before
        assert torch.cuda.current_device() == 0
        torch.zeros(8, device="cuda").sum().item()


def test_a_pipeline_on_parts_gives_the_plain_gradients_without_waiting(parts):
    model = plain.mlp(8, 64)
    x, y = (tensor.cuda() for tensor in plain.batch(24, 64))
    with Pipeline(model, OneFOneB(4, 6), mse, devices=devices_on(parts)) as pipe:
        pipe.step(x, y)
        model.zero_grad()
        with plain.no_waiting_for_the_gpu():
            step = pipe.step(x, y)
        found = plain.taken(model)
        plain.one_after_another(model, mse, x, y, 6)
        assert plain.difference(found, plain.taken(model)) <= 1e-5  # other kernels may be chosen for other parts
        assert all("SMs" in lane for lane in step.trace.lanes)
        assert_obeys(step.trace, pipe.plan)
        pipe.verify(x, y)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            pipe.verify(x, y)


def test_many_pipelines_share_the_same_parts(parts):
    model = plain.mlp(8, 64)
    x, y = (tensor.cuda() for tensor in plain.batch(8, 64))
    losses = []
    for _ in range(20):
        with Pipeline(model, OneFOneB(4, 4), mse, devices=devices_on(parts)) as pipe:
            losses.append(pipe.step(x, y).loss)
    assert partitions_of(torch.device("cuda", 0), 4) is parts
    torch.testing.assert_close(torch.stack(losses), mse(model(x), y).detach().expand(20))


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs a machine with one GPU")
def test_devices_gives_every_rank_a_part_of_the_only_gpu(parts):
    with pytest.warns(UserWarning, match="4 ranks share 1 GPU: rank 0 on cuda:0 .1 of 4: .* SMs"):
        found = pipelab.devices(4)
    assert [each.stream for each in found] == [part.stream for part in parts]
