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
from pipelab.engine.processes.parts import Part
from pipelab.engine.processes.store import corner

__all__ = ["Connections", "backend_of", "connect", "device_of", "gpu_of"]


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

    def close(self) -> None:
        """Let go of the groups, their threads and their connections; nothing may be under way on this process."""
        for group in {id(group): group for group in (self.replicas, self.pipeline, self.everyone)}.values():
            if group is not None and group is not dist.group.WORLD and dist.is_initialized():
                dist.destroy_process_group(group)


def device_of(wanted: Sequence[RankDevice | torch.device | str] | None, rank: int) -> torch.device:
    """Return what a process runs on: the device that was asked for, else a GPU, shared if need be, else the CPU.

    Raises:
        DeviceError: if what was asked for is not there.
    """
    if wanted is not None:
        return rank_devices(wanted[rank : rank + 1], 1, first=rank)[0].device
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())


def gpu_of(device: torch.device) -> str:
    """Return which GPU a device is, whatever number it has in this process; nothing for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def backend_of(everyone: Sequence[dict[str, Any]]) -> str:
    """Return what connects processes: `"nccl"` if each has a GPU of its own, else `"gloo"`, with a warning for GPUs.

    Args:
        everyone: what every process told of itself.

    Example:
        >>> backend_of([{"gpu": "GPU-1"}, {"gpu": "GPU-2"}]), backend_of([{"gpu": ""}, {"gpu": ""}])
        ('nccl', 'gloo')
    """
    gpus = [each["gpu"] for each in everyone]
    if all(gpus) and len(set(gpus)) == len(gpus):
        return "nccl"
    if any(gpus):
        how = "share GPUs" if all(gpus) else "run on GPUs and on processors"
        warnings.warn(
            f"the processes {how}, and NCCL connects processes that have a GPU each: values travel through the "
            "processors' memory, by gloo",
            stacklevel=2,
        )
    return "gloo"


def connect(
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    backend: str,
    parts: Sequence[Part],
    timeout: timedelta,
) -> Connections:
    """Connect this process to the others; all of them must call it.

    Args:
        store: what all processes share: this pipeline's corner of it, as an earlier one's tells where nobody is now.
        rank: this process.
        size: how many there are.
        device: what this process runs on.
        backend: what connects the pipeline, as `backend_of` says.
        parts: the pipelines of the plan. Several make a mesh of replicas x pipeline.
        timeout: after which PyTorch gives up by itself.
    """
    if not dist.is_initialized():
        both = "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(both, store=corner(store, "world"), rank=rank, world_size=size)
    everyone = dist.new_group(backend="gloo", timeout=timeout)
    carrier = device if backend == "nccl" else torch.device("cpu")
    if len(parts) > 1:
        ranks = [list(part.ranks) for part in parts]
        mesh = DeviceMesh(carrier.type, ranks, mesh_dim_names=("replica", "pipeline"))
        return Connections(everyone, mesh.get_group("pipeline"), mesh.get_group("replica"), carrier)
    pipeline = everyone if backend == "gloo" else dist.new_group(backend=backend, timeout=timeout)
    return Connections(everyone, pipeline, None, carrier)
