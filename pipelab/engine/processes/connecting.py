"""Connect processes: a group for all of them, one for each pipeline, and one for each stage's replicas."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipelab.engine.hardware import RankDevice, rank_devices
from pipelab.engine.processes.joining import corner
from pipelab.engine.processes.parts import Part

__all__ = ["Connections", "Device", "connect", "device_of"]


@dataclass(frozen=True, slots=True)
class Connections:
    """The groups that a process belongs to.

    Attributes:
        everyone: all processes, by gloo: for what is small and on the processor.
        pipeline: those of the same pipeline, for what travels between stages.
        replicas: those that hold the same stages in the other pipelines; `None` where there is one pipeline.
        carrier: the device on which values travel.
    """

    everyone: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    carrier: torch.device


@dataclass(frozen=True, slots=True)
class Device:
    """What a process runs on, and the backend that connects such processes."""

    device: torch.device
    backend: str


def device_of(wanted: Sequence[RankDevice | torch.device | str] | None, rank: int, size: int) -> Device:
    """Return what a process runs on: the device that was asked for, a GPU of its own, or the CPU.

    Raises:
        DeviceError: if the devices that were asked for are not one per rank, or this one's is not there.
    """
    if wanted is not None:
        devices = rank_devices(wanted, size)
        apart = len({each.device for each in devices}) == size and all(each.device.type == "cuda" for each in devices)
        return Device(devices[rank].device, "nccl" if apart else "gloo")
    if not torch.cuda.is_available():
        return Device(torch.device("cpu"), "gloo")
    here = int(os.environ.get("LOCAL_RANK", rank))
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    gpus = torch.cuda.device_count()
    if beside <= gpus:
        return Device(torch.device("cuda", here), "nccl")
    warnings.warn(
        f"{beside} processes share {gpus} GPU{'s' if gpus > 1 else ''}: NCCL connects one process per GPU, so values "
        "travel through the processor's memory",
        stacklevel=2,
    )
    return Device(torch.device("cuda", here % gpus), "gloo")


def connect(
    store: Any, rank: int, size: int, runs_on: Device, parts: Sequence[Part], timeout: timedelta
) -> Connections:
    """Connect this process to the others; all of them must call it.

    Args:
        store: what all processes share.
        rank: this process.
        size: how many there are.
        runs_on: this process's device, and the backend.
        parts: the pipelines of the plan. Several make a mesh of replicas x pipeline.
        timeout: after which PyTorch gives up by itself.
    """
    backend = runs_on.backend
    if not dist.is_initialized():
        both = "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(both, store=corner(store, "world"), rank=rank, world_size=size)
    everyone = dist.new_group(backend="gloo", timeout=timeout)
    carrier = runs_on.device if backend == "nccl" else torch.device("cpu")
    if len(parts) > 1:
        ranks = [list(part.ranks) for part in parts]
        mesh = DeviceMesh(carrier.type, ranks, mesh_dim_names=("replica", "pipeline"))
        return Connections(everyone, mesh.get_group("pipeline"), mesh.get_group("replica"), carrier)
    pipeline = everyone if backend == "gloo" else dist.new_group(backend=backend, timeout=timeout)
    return Connections(everyone, pipeline, None, carrier)
