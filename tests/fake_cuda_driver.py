"""A GPU's multiprocessors as `cuda.bindings.driver` hands them out, without a GPU: enough to see that we ask rightly.

What it imitates is in NVIDIA's documentation of `cuDevSmResourceSplitByCount`: it rounds up, may make fewer groups than
were asked for, and refuses what does not fit. Every function returns an error code, then what it found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType, SimpleNamespace


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_INVALID_RESOURCE_TYPE = 914
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 915


class CUdevResourceType(IntEnum):
    CU_DEV_RESOURCE_TYPE_INVALID = 0
    CU_DEV_RESOURCE_TYPE_SM = 1


class CUgreenCtxCreate_flags(IntEnum):  # noqa: N801 - the driver's name
    CU_GREEN_CTX_DEFAULT_STREAM = 1


class CUstream_flags(IntEnum):  # noqa: N801 - the driver's name
    CU_STREAM_DEFAULT = 0
    CU_STREAM_NON_BLOCKING = 1


@dataclass
class FakeGPU:
    """A GPU whose SMs sit in clusters; the driver gives them in groups of `step` from one cluster."""

    clusters: tuple[int, ...] = (18, 18, 16, 16, 16, 16, 16, 16)
    step: int = 8
    least: int = 8
    says_steps: bool = True  # as drivers, and cuda.bindings, do from 13 on
    refuses: bool = False  # what does not fit; else it makes fewer groups
    splits: list[tuple[int, int]] = field(default_factory=list)
    contexts: dict[int, frozenset[int]] = field(default_factory=dict)  # those that are there: the SMs of each
    streams: dict[int, int] = field(default_factory=dict)  # those that are there: the context of each
    made: int = 0

    @property
    def sm_count(self):
        return sum(self.clusters)

    def units(self):
        """Return the SMs in groups of `step`, each from one cluster."""
        first, found = 0, []
        for size in self.clusters:
            here = list(range(first, first + size))
            found += [here[at : at + self.step] for at in range(0, size // self.step * self.step, self.step)]
            first += size
        return found

    def resource(self, sms):
        sm = SimpleNamespace(smCount=len(sms))
        if self.says_steps:
            sm.minSmPartitionSize, sm.smCoscheduledAlignment = self.least, self.step
        return SimpleNamespace(sm=sm, sms=frozenset(sms), gpu=self)

    def number(self):
        self.made += 1
        return 1000 + self.made


def module(gpus):
    """Return the module `cuda.bindings` for these GPUs, by index."""
    driver = ModuleType("cuda.bindings.driver")
    for kind in (CUresult, CUdevResourceType, CUgreenCtxCreate_flags, CUstream_flags):
        setattr(driver, kind.__name__, kind)
    fine = CUresult.CUDA_SUCCESS

    def cuDeviceGet(ordinal):
        return (fine, ordinal) if ordinal in gpus else (CUresult.CUDA_ERROR_INVALID_DEVICE, None)

    def cuDeviceGetDevResource(device, kind):
        assert kind == CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        gpu = gpus[device]
        return fine, gpu.resource(range(gpu.sm_count))

    def cuDevSmResourceSplitByCount(groups, whole, flags, least):
        assert flags == 0
        gpu = whole.gpu
        assert whole.sms == frozenset(range(gpu.sm_count)), "parts must be cut from the whole device"
        gpu.splits.append((groups, least))
        units = gpu.units()
        need = max(gpu.least, -(-least // gpu.step) * gpu.step) // gpu.step
        made = min(groups, len(units) // need)
        if made == 0 or (gpu.refuses and made < groups):
            return CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, None, 0, None
        found = [[sm for unit in units[need * at : need * (at + 1)] for sm in unit] for at in range(made)]
        rest = whole.sms.difference(*found)
        room = [gpu.resource(each) for each in [*found, *[[]] * (groups - made)]]  # as long as was asked for
        return fine, room, made, gpu.resource(rest)

    def cuDevResourceGenerateDesc(resources, count):
        assert count == len(resources) == 1
        return fine, resources[0]

    def cuGreenCtxCreate(described, device, flags):
        assert flags == CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM, "the driver requires it"
        gpu = gpus[device]
        context = gpu.number()
        gpu.contexts[context] = described.sms
        return fine, context

    def owner(context):
        return next(gpu for gpu in gpus.values() if context in gpu.contexts)

    def cuGreenCtxStreamCreate(context, flags, priority):
        assert flags == CUstream_flags.CU_STREAM_NON_BLOCKING, "the driver requires it"
        gpu = owner(context)
        stream = gpu.number()
        gpu.streams[stream] = context
        return fine, stream

    def cuGreenCtxGetDevResource(context, kind):
        assert kind == CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        gpu = owner(context)
        return fine, gpu.resource(gpu.contexts[context])

    def cuGreenCtxDestroy(context):
        gpu = owner(context)
        assert context not in gpu.streams.values(), "its stream goes first"
        del gpu.contexts[context]
        return (fine,)

    def cuStreamDestroy(stream):
        del next(gpu for gpu in gpus.values() if stream in gpu.streams).streams[stream]
        return (fine,)

    for function in (
        cuDeviceGet,
        cuDeviceGetDevResource,
        cuDevSmResourceSplitByCount,
        cuDevResourceGenerateDesc,
        cuGreenCtxCreate,
        cuGreenCtxStreamCreate,
        cuGreenCtxGetDevResource,
        cuGreenCtxDestroy,
        cuStreamDestroy,
    ):
        setattr(driver, function.__name__, function)
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver
    return bindings
