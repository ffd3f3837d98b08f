"""The process groups that connect the processes of a plan."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.device.devices import RankDevice, rank_devices
from pipelab.engine.stage.tied import Tied
from pipelab.engine.torchrun.store import prefix_store
from pipelab.plan.plan import Plan
from pipelab.simulation.clock import simulate

_ABORT_TAG = 1 << 20
"""A tag of no message."""


@dataclass(frozen=True, slots=True)
class Connections:
    """The groups that a process belongs to.

    Attributes:
        everyone: all processes of this plan, connected by gloo: for small messages on the CPU.
        values: the same processes: for values between stages.
        shared: by their ranks, the processes that hold the same stage, or a parameter of several stages.
        transport_device: the device of the values that are sent.
        members: for each rank of the plan, its process's rank in PyTorch's default group.
    """

    everyone: dist.ProcessGroup
    values: dist.ProcessGroup
    shared: Mapping[tuple[int, ...], dist.ProcessGroup]
    transport_device: torch.device
    members: tuple[int, ...]

    def abort(self) -> None:
        """Close gloo's connections immediately: a thread of this process that waits in one of its groups gets an error.

        Gloo has no call for it, but a receive that times out closes all connections of its group on this process.
        """
        others = (self.values, *self._own_shared) if self.transport_device.type == "cpu" else ()
        for group in dict.fromkeys((self.everyone, *others)):
            for peer in set(range(group.size())) - {group.rank()}:
                with suppress(RuntimeError):
                    group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Destroy the groups, their threads and their connections; this process must not be using them."""
        for group in {id(group): group for group in (*self._own_shared, self.values, self.everyone)}.values():
            if group is not dist.group.WORLD and dist.is_initialized():
                dist.destroy_process_group(group)

    @property
    def _own_shared(self) -> list[dist.ProcessGroup]:
        """The groups in `shared` of which this process is a member."""
        return [group for group in self.shared.values() if isinstance(group, dist.ProcessGroup)]


def warn_of_one_queue(plan: Plan) -> None:
    """Warn if a plan takes longer where all sends and receives of a rank wait in one queue."""
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
    holders: Iterable[tuple[int, ...]],
    timeout: timedelta,
    groups: Sequence[tuple[int, ...]],
) -> Connections:
    """Connect this process to the others; all of them must call it."""
    if not dist.is_initialized():
        both = "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(both, store=prefix_store(store, "world"), rank=rank, world_size=size)
    members = next(group for group in groups if rank in group)

    def new_group(places: Iterable[int], backend: str) -> Any:
        made = {group: dist.new_group([group[place] for place in places], timeout, backend) for group in groups}
        return made[members]

    everyone = new_group(range(len(members)), "gloo")
    transport_device = device if backend == "nccl" else torch.device("cpu")
    shared = {ranks: new_group(ranks, backend) for ranks in dict.fromkeys(holders) if len(ranks) > 1}
    values = everyone if backend == "gloo" else new_group(range(len(members)), backend)
    return Connections(everyone, values, shared, transport_device, members)


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, source: int) -> None:
    """Broadcast a contiguous tensor, also of a type that the backend does not support."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # of a single number, the stride may be any
    dist.broadcast(flat.view(torch.uint8), group=group, group_src=source)
