"""Start this process's part of a pipeline: compare with the other processes, and connect to them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipelab._version import __version__
from pipelab.engine.engine import Settings
from pipelab.engine.model.split import Stages
from pipelab.engine.stage.pytree import described
from pipelab.engine.stage.replicas import require_replicable
from pipelab.engine.stage.snapshot import overwrite
from pipelab.engine.stage.tied import ties_of
from pipelab.engine.torchrun.agreement import few_numbers
from pipelab.engine.torchrun.engine import TorchEngine
from pipelab.engine.torchrun.groups import (
    Connections,
    backend_of,
    broadcast,
    connect,
    device_of,
    holders_of,
    warn_of_one_queue,
)
from pipelab.engine.torchrun.stage import fsdp_modules
from pipelab.engine.torchrun.store import AnsweringStore, duration, open_store, prefix_store
from pipelab.engine.torchrun.supervisor import Failures, Status, Supervisor
from pipelab.errors import EngineError, RankError
from pipelab.plan.plan import Plan

_MARGIN_SECONDS = 30.0
"""How much longer PyTorch's own timeouts are: pipelab's come first, and say more."""
_SAME = ("pipelab", "torch", "plan", "model", "reduction", "replicated_buffers")

_made = 0
"""How many pipelines this process has made: each uses a part of the store."""


def start(plan: Plan, stages: Stages, settings: Settings) -> TorchEngine:
    """Start this process's part."""
    global _made  # noqa: PLW0603 - it counts for the process
    _made += 1
    # [1] checks that need no other process
    _require_actions(plan)
    _require_replicable(plan, stages, settings)
    _require_spreadable(plan, stages, settings)
    rank, size = identify(plan.ranks, settings.group)
    members = list(range(size)) if settings.group is None else dist.get_process_group_ranks(settings.group)
    place = members.index(rank)
    device = device_of(settings.devices, place, plan.ranks)
    info = process_info() | {
        "group": members,
        "runs_on": str(device),
        "gpu": str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "",
        "plan": describe_plan(plan),
        "model": describe_model(stages.modules),
        "weights": _digest_of_weights(stages.modules),
        "reduction": settings.reduction,
        "replicated_buffers": settings.replicated_buffers,
        "seed": torch.initial_seed(),
    }
    # [2] compare with the others
    # A wait for one key of a store blocks all other users of its connection, so the caller and the communication thread
    # each have one.
    callers, meeting = (prefix_store(each, str(_made)) for each in open_store(rank, size, settings.timeout))
    store = AnsweringStore(callers, settings.timeout)
    everyone = introduce(store, rank, size, info, settings.timeout)
    if rank == 0:
        warn_of_other_weights([each["weights"] for each in everyone])
    # [3] connect, supervised
    threads = settings.intra_op_threads or torch.get_num_threads()
    supervisor = Supervisor(rank, Failures(store, rank, everyone), settings.timeout, threads)
    held = [stage for stage, ranks in plan.replicas.items() if place in ranks]
    for stage in held:
        stages.make(stage, everyone[0]["seed"])
        stages.place_stage(stage, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # as scripts under torchrun do, so that "cuda" means this one
        torch.cuda.current_stream(device).synchronize()
    backend = backend_of(everyone)
    holders = [*plan.replicas.values(), *(holders_of(tied, plan) for tied in ties_of(stages.modules))]
    groups = sorted({tuple(each["group"]) for each in everyone})
    limit = duration(None if settings.timeout is None else settings.timeout + _MARGIN_SECONDS)

    def meet() -> Connections:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            connections = connect(meeting, rank, size, device, backend, holders, limit, groups)
            for stage in held:
                if len(ranks := plan.replicas[stage]) > 1:
                    _copy_first_replica(stages.modules[stage], connections.shared[ranks], connections.transport_device)
            dist.barrier(connections.everyone)  # who closes at once would cut off a process that still connects
            return connections

    several = len({each["host"] for each in everyone}) > 1
    hint = " (on several machines GLOO_SOCKET_IFNAME may be needed)" if several else ""
    connections = supervisor.run(meet, Status(lambda: f"waits for all processes to connect{hint}"))
    supervisor.abort = connections.abort
    # [4] the engine
    own = [everyone[member] for member in members]
    devices = [torch.device(each["runs_on"]) for each in own]
    engine = TorchEngine(plan, stages, place, devices, connections, supervisor, settings)
    eager = getattr(dist.group.WORLD, "bound_device_id", None) is not None
    engine.transport = "buffered" if backend == "gloo" else "rank" if eager else "pair"  # see docs/wire.md
    if rank == 0 and engine.transport == "rank":
        warn_of_one_queue(plan)
    engine.labels = [f"{each['runs_on']}, process {each['pid']} on {each['host']}" for each in own]
    return engine


def _require_actions(plan: Plan) -> None:
    for rank, row in enumerate(plan.bound.rows):
        if not row:
            raise EngineError(
                f"rank {rank} of {plan.ranks} has no action, and PyTorch's runtime needs one on every rank\n"
                "  try: fewer ranks; or engine='threads'"
            )


def _require_replicable(plan: Plan, stages: Stages, settings: Settings) -> None:
    """Refuse stages that cannot be on several ranks, and a loss that learns: its gradients would not be summed."""
    for stage, ranks in plan.replicas.items():
        if len(ranks) > 1:
            require_replicable(stage, stages.modules[stage], ranks, settings.replicated_buffers)
    last, loss = plan.replicas[plan.stages - 1], settings.loss_fn
    named = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    name = next((name for name, each in named if each.requires_grad), "")
    if name and len(last) > 1:
        raise EngineError(
            f"the loss has a parameter {name!r}, and the last stage is on ranks {', '.join(map(str, last))}, which "
            "would train different copies: only the gradients of stages are summed over replicas\n"
            "  try: make the parameter part of the last stage, freeze it, or use engine='threads'"
        )


def _require_spreadable(plan: Plan, stages: Stages, settings: Settings) -> None:
    """Refuse what would give wrong gradients if stages are themselves spread over processes."""
    ranks = next((ranks for ranks in plan.replicas.values() if len(ranks) > 1), ())
    if settings.group is not None and ranks:
        raise EngineError(
            f"{plan.name} has {len(ranks)} replicas, and group= names the processes of one pipeline\n"
            "  try: a schedule without replicate, and fully_shard(stage, mesh=...) over another dimension of the mesh"
        )
    split = next((action for row in plan.rows for action in row if getattr(action, "kind", "") == "I"), None)
    sharded = next((stage for stage, module in enumerate(stages.modules) if fsdp_modules(module)), None)
    if split is not None and sharded is not None:
        raise EngineError(
            f"{plan.name} splits backwards ({split}), and stage {sharded} is sharded by fully_shard, which needs whole "
            "backwards: with split ones its gradients would be wrong\n"
            "  try: a schedule with whole backwards, such as 1F1B or interleaved 1F1B"
        )


def identify(ranks: int, group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return this process's rank and the number of processes; refuse any number in `group` but one per rank."""
    script = Path(sys.argv[0]).name
    script = shlex.join([script, *sys.argv[1:]]) if script.endswith(".py") else "train.py"
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    else:
        raise EngineError(
            "engine='torch' runs one process per rank, and this process was started alone\n"
            f"  try: pipelab launch {script} --ranks {ranks}\n"
            f"  or: torchrun --standalone --nproc-per-node {ranks} {script}"
        )
    if group is not None:
        if dist.get_world_size(group) != ranks:
            raise EngineError(
                f"the plan has {ranks} rank{'s' if ranks != 1 else ''} and this process's group= has "
                f"{max(0, dist.get_world_size(group))} processes: there must be one process per rank\n"
                '  try: the dimension of the mesh that has as many, group=mesh["pp"].get_group()'
            )
    elif size != ranks:
        raise EngineError(
            f"the plan has {ranks} rank{'s' if ranks != 1 else ''} and torchrun started {size} "
            f"process{'es' if size != 1 else ''}: there must be one process per rank\n"
            f"  try: torchrun --standalone --nproc-per-node {ranks} {script}\n"
            f"  or on several machines: --nnodes times --nproc-per-node must be {ranks}\n"
            '  or, if stages are spread over processes too: group=mesh["pp"].get_group()'
        )
    return rank, size


# --- what processes know of each other


def process_info() -> dict[str, Any]:
    """Return the versions and the place of this process."""
    numbering = ""
    with contextlib.suppress(OSError):  # where its process number is valid: on a machine, or in a container
        numbering = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return {
        "pipelab": __version__,
        "torch": torch.__version__.partition("+")[0],
        "host": socket.gethostname(),
        "processes": numbering,
        "pid": os.getpid(),
    }


def describe_plan(plan: Plan) -> list[str]:
    """Return the sizes and actions of a plan, which must be the same on every process."""
    sizes = f"{plan.ranks} ranks, {plan.stages} stages, {plan.microbatches} micro-batches"
    sizes += ", all-reduces beside" * plan.bound.beside
    rows = enumerate(plan.rows)
    return [sizes, *(f"{each} at position {at} of row {rank}" for rank, row in rows for at, each in enumerate(row))]


def describe_model(modules: Sequence[nn.Module]) -> list[str]:
    """Return the parameters and buffers of all stages, which must be the same on every process."""
    return [
        f"{name} of stage {stage}: {described(tensor)}"
        for stage, module in enumerate(modules)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    ]


def introduce(store: AnsweringStore, rank: int, size: int, info: dict[str, Any], timeout: float | None) -> list[Any]:
    """Exchange every process's info; return all of them, by rank."""
    keys = [f"info/{each}" for each in range(size)]
    began = time.monotonic()
    try:
        own = json.dumps(info)
        first = store.compare_set(keys[rank], "", own).decode()
        if first != own:
            other = json.loads(first)
            raise RankError(
                f"process {other['pid']} on {other['host']} came as rank {rank} before this one: the address where all "
                "processes meet belongs to another job\n  try: another port for each job, or end the other one",
                rank,
            )
        while not store.check(keys):
            waited = time.monotonic() - began
            if timeout is not None and waited > timeout:
                missing = [each for each, key in enumerate(keys) if not store.check([key])]
                if missing:
                    raise RankError(
                        f"rank {', '.join(map(str, missing))} made no Pipeline within {waited:.3g} s, and the others "
                        "wait for it\n  it failed earlier, or its script makes none: look at its output",
                        missing[0],
                    )
            time.sleep(min(0.1, 0.005 + waited / 10))
        everyone: list[dict[str, Any]] = [json.loads(store.get(key)) for key in keys]
        for key in _SAME:
            others = [each for each in range(size) if everyone[each][key] != everyone[0][key]]
            if others:
                what, ours, theirs = key, everyone[0][key], everyone[others[0]][key]
                if isinstance(ours, list):
                    pairs = zip_longest(ours, theirs, fillvalue="nothing more")
                    ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
                    what = f"a {key} with"
                verb = "has" if len(others) == 1 else "have"
                message = f"rank {', '.join(map(str, others))} {verb} {what} {theirs}, rank 0 has {what} {ours}"
                Failures(store, rank, everyone).report(others[0], message, alive=True)
                raise RankError(message, others[0])
    except RuntimeError as error:
        raise RankError(f"lost this job's store, which rank 0 or torchrun holds: {error}", 0) from error
    return everyone


# --- weights


def _digest_of_weights(modules: Sequence[nn.Module]) -> str | None:
    """Return a digest of some numbers of every parameter; `None` if one is not a plain tensor of this process."""
    digest = hashlib.sha256()
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        plain = type(parameter) in (nn.Parameter, torch.Tensor) and parameter.layout is torch.strided
        if parameter.is_meta or not plain:  # another class may be spread over several processes
            return None
        digest.update(few_numbers(parameter))
    return digest.hexdigest()


def warn_of_other_weights(digests: Sequence[str | None]) -> None:
    """Warn if processes begin with other weights than rank 0: the stages would belong to different models."""
    others = [rank for rank, digest in enumerate(digests) if None not in (digests[0], digest) and digest != digests[0]]
    if others:
        warnings.warn(
            f"rank {', '.join(map(str, others))} {'has' if len(others) == 1 else 'have'} other weights than rank 0: "
            "each stage begins with the weights in its own process\n"
            "  try: the same torch.manual_seed in every process before the model is made; load a saved state in every "
            "process; after an earlier pipeline of this model, load its pipe.state_dict()",
            stacklevel=5,
        )


def _copy_first_replica(module: nn.Module, group: dist.ProcessGroup, transport_device: torch.device) -> None:
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            sent = tensor.detach().to(transport_device).contiguous()
            broadcast(sent, group, 0)
            overwrite(tensor, sent)
