"""A GPU's multiprocessors as `cuda.core` hands them out, without a GPU: enough to see that pipelab asks rightly.

What it imitates is in NVIDIA's documentation of `cuDevSmResourceSplit` (driver 13.1 and newer: refuses what does not
fit) and `cuDevSmResourceSplitByCount` (before: rounds up, and may give fewer groups).
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace


class CUDAError(Exception):
    """What `cuda.core` raises where the driver refuses."""


@dataclass
class SMResourceOptions:
    count: object = None


@dataclass
class ContextOptions:
    resources: object


@dataclass
class FakeGPU:
    """A GPU whose SMs sit in clusters; the driver gives them in groups of `step` from one cluster."""

    clusters: tuple[int, ...] = (18, 18, 16, 16, 16, 16, 16, 16)
    step: int = 8
    least: int = 8
    structured: bool = True
    splits: list[object] = field(default_factory=list)
    contexts: list[weakref.ref] = field(default_factory=list)
    current_in: set[int] = field(default_factory=set)

    @property
    def sm_count(self):
        return sum(self.clusters)

    def units(self, free):
        """Return the free SMs in groups of `step`, each from one cluster."""
        first, found = 0, []
        for size in self.clusters:
            here = [sm for sm in range(first, first + size) if sm in free]
            found += [here[at : at + self.step] for at in range(0, len(here) // self.step * self.step, self.step)]
            first += size
        return found


class SMResource:
    def __init__(self, gpu, sms):
        self.gpu, self.sms = gpu, frozenset(sms)
        self.min_partition_size, self.coscheduled_alignment = gpu.least, gpu.step

    @property
    def sm_count(self):
        return len(self.sms)

    def split(self, options, *, dry_run=False):
        assert not dry_run
        gpu, counts = self.gpu, list(options.count)
        assert self.sms == frozenset(range(gpu.sm_count)), "parts must be cut from the whole device"
        gpu.splits.append(counts)
        units, groups = gpu.units(self.sms), []
        for count in counts:
            if gpu.structured and count % gpu.step:
                raise CUDAError("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION: not a multiple")
            need = max(gpu.least, -(-count // gpu.step) * gpu.step) // gpu.step
            if need > len(units):
                if gpu.structured:
                    raise CUDAError("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION: does not fit")
                break
            taken, units = units[:need], units[need:]
            groups.append(SMResource(gpu, [sm for unit in taken for sm in unit]))
        rest = self.sms.difference(*(group.sms for group in groups))
        return groups, SMResource(gpu, rest)


class Stream:
    def __init__(self, context):
        self.context = context  # as in `cuda.core`, a stream keeps its context
        self.handle = id(self)


class Context:
    is_green = True

    def __init__(self, gpu, resources):
        (group,) = resources
        self.gpu, self.resources = gpu, SimpleNamespace(sm=group)
        gpu.contexts.append(weakref.ref(self))

    def create_stream(self, options=None):
        assert threading.get_ident() in self.gpu.current_in, "the primary context must be current"
        return Stream(self)


class Device:
    gpus: dict[int, FakeGPU]

    def __init__(self, index):
        self.gpu = self.gpus[index]
        self.resources = SimpleNamespace(sm=SMResource(self.gpu, range(self.gpu.sm_count)))

    def set_current(self, context=None):
        assert context is None, "a green context must not become a thread's current one"
        self.gpu.current_in.add(threading.get_ident())

    def create_context(self, options):
        assert threading.get_ident() in self.gpu.current_in
        return Context(self.gpu, options.resources)


def module(gpus):
    """Return the module `cuda.core` for these GPUs, by index."""
    found = ModuleType("cuda.core")
    found.Device = type("Device", (Device,), {"gpus": gpus})
    found.SMResourceOptions, found.ContextOptions = SMResourceOptions, ContextOptions
    return found
