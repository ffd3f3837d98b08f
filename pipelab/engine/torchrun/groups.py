"""The pipelines of a plan: one, or several replicas that share the batch."""

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

from pipelab.engine.device.devices import RankDevice, rank_devices
from pipelab.engine.torchrun.store import corner
from pipelab.errors import EngineError
from pipelab.plan.actions import Action
from pipelab.plan.plan import Plan

__all__ = ["Connections", "Part", "backend_of", "connect", "device_of", "gpu_of", "parts_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """One pipeline of a plan.

    Attributes:
        plan: the pipeline by itself, its ranks and micro-batches numbered from 0.
        ranks: which ranks of the whole plan they are.
        microbatches: which micro-batches of the whole plan they are.
    """

    plan: Plan
    ranks: tuple[int, ...]
    microbatches: tuple[int, ...]


def parts_of(plan: Plan) -> list[Part]:
    """Return the pipelines of a legal plan: each has ranks and micro-batches of its own.

        replicate(OneFOneB(2, 4), 2)          rank 0 | F0 F2    B0    B2 R  ┐ part 0: ranks 0, 1; micro-batches 0, 2
                                              rank 1 |    F0 B0 F2 B2 R     ┘
                                              rank 2 | F1 F3    B1    B3 R  ┐ part 1: ranks 2, 3; micro-batches 1, 3
                                              rank 3 |    F1 B1 F3 B3 R     ┘

    Example:
        >>> import pipelab
        >>> [(part.ranks, part.microbatches) for part in parts_of(pipelab.replicate(pipelab.GPipe(2, 2), 2).plan())]
        [((0, 1), (0, 2)), ((2, 3), (1, 3))]

    Raises:
        EngineError: if a rank runs one stage for some micro-batches and another rank for others, as in a bidirectional
            pipeline, or has nothing to do; or if the replicas are not alike.
    """
    bound = plan.bound
    for rank, row in enumerate(bound.rows):
        if not row:
            raise EngineError(
                f"rank {rank} of {plan.ranks} has nothing to do: PyTorch's runtime needs an action on every rank; "
                "use fewer ranks, or engine='threads'"
            )
    routes: dict[tuple[int, ...], list[int]] = {}
    for microbatch in range(plan.microbatches):
        route = tuple(bound.route(microbatch))
        routes.setdefault(route, []).append(microbatch)
    if len(routes) == 1:
        return [Part(plan, tuple(range(plan.ranks)), tuple(range(plan.microbatches)))]
    _require_apart(routes)
    groups = [tuple(sorted(set(route))) for route in routes]
    columns = {tuple(group.index(rank) for rank in route) for group, route in zip(groups, routes, strict=True)}
    if len(columns) > 1:
        raise EngineError(
            f"the {len(routes)} pipelines of {plan.name} place their stages differently, so they make no mesh of "
            "replicas: use pipelab.replicate, or engine='threads'"
        )
    return [
        Part(_alone(plan, group, turns), group, tuple(turns))
        for group, turns in zip(groups, routes.values(), strict=True)
    ]


def _require_apart(routes: dict[tuple[int, ...], list[int]]) -> None:
    """Refuse pipelines that share a rank.

    Raises:
        EngineError: naming it.
    """
    owner: dict[int, tuple[int, ...]] = {}
    for route in routes:
        for stage, rank in enumerate(route):
            other = owner.setdefault(rank, route)
            if other is not route:
                ranks = sorted({each[stage] for each in routes})
                raise EngineError(
                    f"stage {stage} is on ranks {', '.join(map(str, ranks))} of one pipeline: rank {rank} is on the "
                    f"way of micro-batch {routes[other][0]} and of micro-batch {routes[route][0]}, which take "
                    "different ways; PyTorch's runtime has every stage of a pipeline on one rank\n"
                    "  try: engine='threads', or a schedule that places it so"
                )


def _alone(plan: Plan, ranks: tuple[int, ...], microbatches: list[int]) -> Plan:
    """Return one pipeline of a plan, numbered by itself."""
    action = plan.bound.codes.action
    number = {microbatch: index for index, microbatch in enumerate(microbatches)}
    rows = [
        [
            each if each.microbatch is None else Action(each.kind, number[each.microbatch], each.stage)
            for each in map(action, plan.bound.rows[rank])
        ]
        for rank in ranks
    ]
    home = [ranks.index(rank) for rank in plan.bound.route(microbatches[0])]
    return Plan(rows, plan.stages, len(microbatches), lambda _, stage: home[stage], name=plan.name)


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
