"""The replicas of a pipeline, and the process groups that connect their processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipelab.engine.device.devices import RankDevice, rank_devices
from pipelab.engine.stage.tied import Tied
from pipelab.engine.torchrun.store import prefix_store
from pipelab.errors import EngineError
from pipelab.plan.actions import Action
from pipelab.plan.plan import Plan
from pipelab.simulation.clock import simulate

_ABORT_TAG = 1 << 20
"""A tag of no message."""


@dataclass(frozen=True, slots=True)
class PipelineReplica:
    """One pipeline of a plan: the only one, or one of several that share the batch.

    Attributes:
        plan: the pipeline alone, its ranks and micro-batches numbered from 0.
        ranks: the numbers of its ranks in the whole plan.
        microbatches: the numbers of its micro-batches in the whole plan.
    """

    plan: Plan
    ranks: tuple[int, ...]
    microbatches: tuple[int, ...]


def pipeline_replicas(plan: Plan) -> list[PipelineReplica]:
    """Return the pipelines of a legal plan, which share neither ranks nor micro-batches.

        replicate(OneFOneB(2, 4), 2)          rank 0 | F0 F2    B0    B2 R  ┐ replica 0: ranks 0, 1; micro-batches 0, 2
                                              rank 1 |    F0 B0 F2 B2 R     ┘
                                              rank 2 | F1 F3    B1    B3 R  ┐ replica 1: ranks 2, 3; micro-batches 1, 3
                                              rank 3 |    F1 B1 F3 B3 R     ┘

    Example:
        >>> import pipelab
        >>> replicas = pipeline_replicas(pipelab.replicate(pipelab.GPipe(2, 2), 2).plan())
        >>> [(replica.ranks, replica.microbatches) for replica in replicas]
        [((0, 1), (0, 2)), ((2, 3), (1, 3))]

    Raises:
        EngineError: if a rank has no action, pipelines share a rank, as in a bidirectional schedule, or the pipelines
            place their stages differently.
    """
    bound = plan.bound
    for rank, row in enumerate(bound.rows):
        if not row:
            raise EngineError(
                f"rank {rank} of {plan.ranks} has no action, and PyTorch's runtime needs one on every rank\n"
                "  try: fewer ranks; or engine='threads'"
            )
    routes: dict[tuple[int, ...], list[int]] = {}
    for microbatch in range(plan.microbatches):
        route = tuple(bound.route(microbatch))
        routes.setdefault(route, []).append(microbatch)
    if len(routes) == 1:
        return [PipelineReplica(plan, tuple(range(plan.ranks)), tuple(range(plan.microbatches)))]
    groups = [tuple(sorted(set(route))) for route in routes]
    columns = {tuple(group.index(rank) for rank in route) for group, route in zip(groups, routes, strict=True)}
    if len(columns) > 1 or len(set(chain.from_iterable(groups))) < sum(map(len, groups)):
        ways = (f"micro-batch {turns[0]} runs on ranks {list(route)}" for route, turns in routes.items())
        raise EngineError(
            f"{', '.join(islice(ways, 2))} of {plan.name}: PyTorch's runtime needs replicas that share no rank and "
            "place their stages alike\n  try: pipelab.replicate; or engine='threads'"
        )
    return [
        PipelineReplica(_alone(plan, group, turns), group, tuple(turns))
        for group, turns in zip(groups, routes.values(), strict=True)
    ]


def _alone(plan: Plan, ranks: tuple[int, ...], microbatches: list[int]) -> Plan:
    """Return one pipeline of a plan, with ranks and micro-batches numbered from 0."""
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
        everyone: all processes of this plan, connected by gloo: for small messages on the CPU.
        pipeline: the processes of the same pipeline: for values between stages.
        replicas: the processes that hold the same stages in all pipelines; `None` if there is one pipeline.
        transport_device: the device of the values that are sent.
        tied: by their ranks, the processes that hold a parameter of several stages.
        members: for each rank of the plan, its process's rank in PyTorch's default group.
    """

    everyone: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    transport_device: torch.device
    tied: Mapping[tuple[int, ...], dist.ProcessGroup]
    members: tuple[int, ...]

    def abort(self) -> None:
        """Close gloo's connections immediately: a thread of this process that waits in one of its groups gets an error.

        Gloo has no call for it, but a receive that times out closes all connections of its group on this process.
        """
        others = (self.pipeline, self.replicas, *self._own_tied) if self.transport_device.type == "cpu" else ()
        for group in filter(None, dict.fromkeys((self.everyone, *others))):
            for peer in set(range(group.size())) - {group.rank()}:
                with suppress(RuntimeError):
                    group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Destroy the groups, their threads and their connections; this process must not be using them."""
        for group in {
            id(group): group for group in (*self._own_tied, self.replicas, self.pipeline, self.everyone)
        }.values():
            if group is not None and group is not dist.group.WORLD and dist.is_initialized():
                dist.destroy_process_group(group)

    @property
    def _own_tied(self) -> list[dist.ProcessGroup]:
        """The groups in `tied` of which this process is a member."""
        return [group for group in self.tied.values() if isinstance(group, dist.ProcessGroup)]


def warn_of_one_queue(plan: Plan) -> None:
    """Warn if the plan of one pipeline takes longer where all sends and receives of a rank wait in one queue."""
    rows = [
        map(plan.bound.codes.action, row) for row in plan.bound.rows
    ]  # a pair runs as its forward, then its backward
    apart = plan.with_rows(rows)
    one = simulate(apart, transport="rank").makespan
    several = simulate(apart, transport="pair").makespan
    if one > 1.01 * several:
        warnings.warn(
            "init_process_group(device_id=...) puts all of a rank's sends and receives in one queue of NCCL, where "
            f"{plan.name} takes about {one:g} units (forward 1, backward 2); with a queue for each pair of ranks, "
            f"about {several:g}\n  try: init_process_group without device_id, or none: pipelab initialises",
            stacklevel=5,
        )


def holders_of(tied: Tied, plan: Plan) -> tuple[int, ...]:
    """Return the ranks that hold a parameter of several stages, in order."""
    return tuple(sorted({rank for stage in tied.stages for rank in plan.replicas[stage]}))


def device_of(wanted: Sequence[RankDevice | torch.device | str] | None, rank: int, ranks: int) -> torch.device:
    """Return the device of a process: the wanted one, else a GPU, shared if necessary, else the CPU."""
    if wanted is not None:
        return rank_devices(wanted, ranks)[rank].device
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())


def backend_of(everyone: Sequence[dict[str, Any]]) -> str:
    """Return `"nccl"` if every process has a GPU to itself, else `"gloo"`, with a warning for GPUs.

    Example:
        >>> backend_of([{"gpu": "GPU-1"}, {"gpu": "GPU-2"}]), backend_of([{"gpu": ""}, {"gpu": ""}])
        ('nccl', 'gloo')
    """
    gpus = [each["gpu"] for each in everyone]
    if all(gpus) and len(set(gpus)) == len(gpus):
        return "nccl"
    if any(gpus):
        how = "share GPUs" if all(gpus) else "run on GPUs and on CPUs"
        warnings.warn(
            f"the processes {how}, but NCCL needs a GPU for each: values travel through the CPUs' memory, by gloo",
            stacklevel=2,
        )
    return "gloo"


def connect(
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    backend: str,
    replicas: Sequence[PipelineReplica],
    holders: Iterable[tuple[int, ...]],
    timeout: timedelta,
    groups: Sequence[tuple[int, ...]],
) -> Connections:
    """Connect this process to the others; all of them must call it.

    Args:
        store: this pipeline's part of the store that all processes share.
        rank: this process.
        size: the number of processes.
        device: the device of this process.
        backend: the result of `backend_of`.
        replicas: the pipelines of the plan. Several form a mesh of replicas x pipeline.
        holders: the groups of ranks that hold a parameter of several stages.
        timeout: PyTorch's own timeout of every operation.
        groups: the processes of each pipeline that is made now. Every process must make the groups of all.
    """
    if not dist.is_initialized():
        both = "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(both, store=prefix_store(store, "world"), rank=rank, world_size=size)
    members = next(group for group in groups if rank in group)

    def new_group(places: Iterable[int], backend: str) -> Any:
        made = {group: dist.new_group([group[place] for place in places], timeout, backend) for group in groups}
        return made[members]

    everyone = new_group(range(len(members)), "gloo")
    transport_device = device if backend == "nccl" else torch.device("cpu")
    tied = {ranks: new_group(ranks, backend) for ranks in dict.fromkeys(holders) if len(ranks) > 1}
    if len(replicas) > 1:
        ranks = [list(replica.ranks) for replica in replicas]
        mesh = DeviceMesh(transport_device.type, ranks, mesh_dim_names=("replica", "pipeline"))
        return Connections(
            everyone, mesh.get_group("pipeline"), mesh.get_group("replica"), transport_device, tied, members
        )
    pipeline = everyone if backend == "gloo" else new_group(range(len(members)), backend)
    return Connections(everyone, pipeline, None, transport_device, tied, members)


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, source: int) -> None:
    """Broadcast a contiguous tensor, also of a type that the backend does not support."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # of a single number, the stride may be any
    dist.broadcast(flat.view(torch.uint8), group=group, group_src=source)
