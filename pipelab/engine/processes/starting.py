"""Start the torch engine in this process: meet the others, compare, connect, and place this process's stages."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.engines import Job, Started
from pipelab.engine.hardware import RankDevice, rank_devices
from pipelab.engine.lanes import CpuLane, lane_for
from pipelab.engine.processes.engine import TorchEngine
from pipelab.engine.processes.joining import (
    corner,
    describe_model,
    describe_plan,
    duration,
    facts_of_this_process,
    identify,
    introduce,
    open_store,
)
from pipelab.engine.processes.lowering import require_lowerable
from pipelab.engine.processes.notices import Notices
from pipelab.engine.processes.watch import Doing, Watch
from pipelab.engine.processes.whole import ManyProcesses
from pipelab.engine.stage import Stage

__all__ = ["start"]

_MARGIN_SECONDS = 30.0
"""How much longer PyTorch's own timeouts are: pipelab's come first, and say more."""

_made = 0
"""How many pipelines this process has made: each has its own corner of the store."""


def start(job: Job) -> Started:
    """Start this process's part.

    Raises:
        EngineError: if the plan cannot be lowered, or there is not one process per rank; before anything communicates.
        RankError: if a process does not come, or has something else than rank 0.
    """
    global _made  # noqa: PLW0603 - it counts for the process
    plan = job.plan
    require_lowerable(plan)
    rank, size = identify(plan.ranks)
    device, backend = _device(job.devices, rank, size)
    facts = facts_of_this_process(str(device)) | {
        "plan": describe_plan(plan),
        "model": describe_model(job.stages.modules),
        "reduction": job.reduction,
    }
    base = open_store(job.timeout)
    _made += 1
    store = corner(base, f"{_made}")
    everyone = introduce(store, rank, size, facts, job.timeout)
    threads = job.intra_op_threads or torch.get_num_threads()
    own = corner(base.clone(), f"{_made}") if hasattr(base, "clone") else store
    watch = Watch(rank, Notices(own, rank, everyone), job.timeout, threads)
    limit = duration(None if job.timeout is None else job.timeout + _MARGIN_SECONDS)
    group, pipeline = watch.attend(
        lambda: _connect(base, rank, size, backend, limit), Doing(lambda: "waits for all processes to connect")
    )
    runners = [Stage(index, module, plan.stages) for index, module in enumerate(job.stages.modules)]
    held = [stage for stage, ranks in plan.replicas.items() if rank in ranks]
    for stage in held:
        runners[stage].module.to(device)  # parameters stay the same objects
    runs_on = RankDevice(device)
    carrier = device if backend == "nccl" else torch.device("cpu")
    labels = [f"{each['runs_on']}, process {each['pid']} on {each['host']}" for each in everyone]
    lane = lane_for(runs_on, [runs_on])
    engine = TorchEngine(plan, runners, rank, lane, group, pipeline, carrier, watch, labels)
    home = ManyProcesses(plan, job.stages, engine, held, device)
    devices = [RankDevice(torch.device(each["runs_on"])) for each in everyone]
    lanes = [CpuLane(each, alone=True) for each in devices]  # what comes back from a step are readings already
    return Started(engine, home, devices, lanes, runners, threads)


def _device(wanted: Sequence[RankDevice | torch.device | str] | None, rank: int, size: int) -> tuple[torch.device, str]:
    """Return what this process runs on, and the backend that connects such processes.

    Raises:
        DeviceError: if the devices that were asked for are not one per rank, or this one's is not there.
    """
    if wanted is not None:
        devices = rank_devices(wanted, size)
        shared = len({each.device for each in devices}) < size
        on_gpus = all(each.device.type == "cuda" for each in devices)
        return devices[rank].device, "nccl" if on_gpus and not shared else "gloo"
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    here = int(os.environ.get("LOCAL_RANK", rank))
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    gpus = torch.cuda.device_count()
    if beside <= gpus:
        return torch.device("cuda", here), "nccl"
    warnings.warn(
        f"{beside} processes share {gpus} GPU{'s' if gpus > 1 else ''}: NCCL connects one process per GPU, so values "
        "travel through the processor's memory",
        stacklevel=2,
    )
    return torch.device("cuda", here % gpus), "gloo"


def _connect(
    store: Any, rank: int, size: int, backend: str, timeout: timedelta
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Connect all processes; return a group for what is small and on the processor, and one for the pipeline."""
    if not dist.is_initialized():
        both = "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(both, store=corner(store, "world"), rank=rank, world_size=size)
    group = dist.new_group(backend="gloo", timeout=timeout)
    return group, group if backend == "gloo" else dist.new_group(backend=backend, timeout=timeout)
