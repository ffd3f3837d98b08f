"""Whether all processes begin with the same weights.

Each process makes the whole model and trains its own stages of it. Where one was made from another seed, or a saved
state was loaded in one process only, everything would run, and train a model that nobody has made.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipelab.engine.device.devices import RankDevice, rank_devices
from pipelab.engine.device.streams import rank_streams
from pipelab.engine.engine import Settings
from pipelab.engine.model.split import Stages
from pipelab.engine.stage.replicas import Runners, require_replicable
from pipelab.engine.stage.snapshot import overwrite
from pipelab.engine.torchrun.engine import TorchEngine
from pipelab.engine.torchrun.failures import Notices
from pipelab.engine.torchrun.groups import Connections, backend_of, connect, device_of, gpu_of, parts_of
from pipelab.engine.torchrun.joining import (
    decline,
    describe_model,
    describe_plan,
    facts_of_this_process,
    identify,
    introduce,
    started_as,
)
from pipelab.engine.torchrun.model_state import ManyProcesses, is_stale, spread, warn_of_stale
from pipelab.engine.torchrun.store import AnsweringStore, corner, duration, open_store, store_is_at_hand
from pipelab.engine.torchrun.supervisor import Doing, Watch
from pipelab.errors import EngineError, PipelabError
from pipelab.plan.plan import Plan

__all__ = ["digests_of_weights", "start", "warn_of_other_weights"]

_SAMPLE = 16
"""How many numbers of each parameter are looked at: another seed changes them all."""


def digests_of_weights(stages: Stages) -> list[str | None]:
    """Return, for each stage, what stands for its weights; `None` where this process cannot know them."""
    return [None if is_stale(stages, stage) else _digest(module) for stage, module in enumerate(stages.modules)]


def warn_of_other_weights(holders: Mapping[int, Sequence[int]], digests: Sequence[Sequence[str | None]]) -> None:
    """Warn if a process has other weights for a stage than the process that will train it.

    Args:
        holders: by stage, the ranks that train it; the first one's weights are those that count.
        digests: by rank, what stands for the weights of each stage.
    """
    for stage, (first, *_) in sorted(holders.items()):
        counts = digests[first][stage]
        others = [
            rank for rank, each in enumerate(digests) if None not in (counts, each[stage]) and each[stage] != counts
        ]
        if others:
            who = f"rank {', '.join(map(str, others))} {'has' if len(others) == 1 else 'have'}"
            warnings.warn(
                f"{who} other weights for stage {stage} than rank {first}, which trains it: a stage begins with the "
                "weights that its own rank's process has\n"
                "  try: the same torch.manual_seed in every process before the model is made; a saved state is loaded "
                "in every process",
                stacklevel=5,
            )
            return


def _digest(module: nn.Module) -> str | None:
    found = hashlib.sha256()
    for parameter in module.parameters():
        plain = type(parameter) in (nn.Parameter, torch.Tensor) and parameter.layout is torch.strided
        if parameter.is_meta or not plain:  # of another class, it may lie in several processes
            return None
        flat: Any = parameter.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // _SAMPLE)][:_SAMPLE].contiguous()
        found.update(bytes(sample.view(torch.uint8).tolist()))
    return found.hexdigest()[:16]


_MARGIN_SECONDS = 30.0
"""How much longer PyTorch's own timeouts are: pipelab's come first, and say more."""

_DECLINING_SECONDS = 2.0
"""How long each attempt to reach the store may take for a process that makes no pipeline; PyTorch makes several."""

_made = 0
"""How many pipelines this process has made: each has its own corner of the store."""


def start(plan: Plan, stages: Stages, settings: Settings) -> TorchEngine:
    """Start this process's part.

    Raises:
        EngineError: if the plan cannot be lowered, or there is not one process per rank; before anything communicates.
        RankError: if a process does not come, or has something else than rank 0.
    """
    global _made  # noqa: PLW0603 - it counts for the process
    _made += 1
    job = _Job(plan, stages, settings)
    try:
        parts = parts_of(plan)
        _require_replicable(job)
        rank, size = identify(plan.ranks)
        if isinstance(job.settings.devices, str) or (
            job.settings.devices is not None and len(job.settings.devices) != size
        ):
            rank_devices(job.settings.devices, size)  # says so
        device = device_of(job.settings.devices, rank)
        facts = _facts(job, device)
    except PipelabError as error:
        _decline(job, error)
        raise
    held = [stage for stage, ranks in plan.replicas.items() if rank in ranks]
    base = open_store(rank, size, job.settings.timeout)
    store = corner(base, str(_made))
    everyone = introduce(AnsweringStore(store, job.settings.timeout), rank, size, facts, job.settings.timeout)
    warn_of_stale(job.stages, held)
    if rank == 0:
        warn_of_other_weights(plan.replicas, [each["weights"] for each in everyone])
    backend = backend_of(everyone)
    threads = job.settings.intra_op_threads or torch.get_num_threads()
    # A process that waits for one thing of a store waits with it for all others. So the watch has a connection of its
    # own, and so has the worker, who may be stuck with it.
    watched, meeting = (corner(base.clone(), str(_made)) if hasattr(base, "clone") else store for _ in range(2))
    watch = Watch(
        rank, Notices(AnsweringStore(watched, job.settings.timeout), rank, everyone), job.settings.timeout, threads
    )
    limit = duration(None if job.settings.timeout is None else job.settings.timeout + _MARGIN_SECONDS)
    _place(job, held, device)

    def meet() -> Connections:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            connections = connect(meeting, rank, size, device, backend, parts, limit)
            if connections.replicas is not None:
                for stage in held:
                    _begin_alike(job.stages.modules[stage], connections.replicas, connections.carrier)
            return connections

    connections = watch.attend(meet, Doing(lambda: "waits for all processes to connect"))
    on = [torch.device(each["runs_on"]) for each in everyone]
    firsts = {stage: ranks[:1] for stage, ranks in plan.replicas.items()}  # others are other processes'
    runners = Runners(job.stages.modules, firsts, on, job.settings.replicated_buffers)
    own = [runners.of[stage, first] for stage, (first,) in sorted(firsts.items())]
    labels = [f"{each['runs_on']}, process {each['pid']} on {each['host']}" for each in everyone]
    part = next(part for part in parts if rank in part.ranks)
    (stream,) = rank_streams([RankDevice(device)])
    engine = TorchEngine(plan, part, rank, own, stream, connections, watch, labels, job.settings.replicated_buffers)
    engine.devices = [RankDevice(each) for each in on]
    engine.runners, engine.intra_op_threads = runners, threads
    engine.local_stages, engine.stage_devices = held, [device] * plan.stages
    engine.model = ManyProcesses(plan, job.stages, engine, rank, device)
    return engine


@dataclass(frozen=True, slots=True)
class _Job:
    plan: Plan
    stages: Stages
    settings: Settings


def _decline(job: _Job, error: PipelabError) -> None:
    """Tell processes that were given something else, and wait for this one, if there is a store to tell it in."""
    found = started_as()
    if found is not None and store_is_at_hand():
        with suppress(RuntimeError, EngineError):  # this process has an error of its own
            limit = min(job.settings.timeout or _DECLINING_SECONDS, _DECLINING_SECONDS)
            decline(corner(open_store(*found, limit), str(_made)), found[0], error)


def _require_replicable(job: _Job) -> None:
    """Refuse what cannot be on several ranks.

    Raises:
        EngineError: naming the stage, or the loss.
    """
    for stage, ranks in job.plan.replicas.items():
        if len(ranks) > 1:
            require_replicable(stage, job.stages.modules[stage], ranks, job.settings.replicated_buffers)
    last = job.plan.replicas[job.plan.stages - 1]
    if len(last) > 1:
        _require_plain_loss(job.settings.loss_fn, last)


def _facts(job: _Job, device: torch.device) -> dict[str, Any]:
    """Return what the others should know: where this process runs, and what it was given."""
    return facts_of_this_process() | {
        "runs_on": str(device),
        "gpu": gpu_of(device),
        "plan": describe_plan(job.plan),
        "model": describe_model(job.stages.modules),
        "weights": digests_of_weights(job.stages),
        "reduction": job.settings.reduction,
        "replicated_buffers": job.settings.replicated_buffers,
    }


def _place(job: _Job, held: Sequence[int], device: torch.device) -> None:
    """Bring this process's stages to its device, their parameters the same objects as before."""
    for stage in held:
        job.stages.place_stage(stage, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # as scripts under torchrun do, so that "cuda" means this one
        torch.cuda.current_stream(device).synchronize()


def _require_plain_loss(loss_fn: object, ranks: Sequence[int]) -> None:
    """Refuse a loss that learns where several ranks compute it: only stages' gradients are summed over replicas.

    Raises:
        EngineError: naming its parameter.
    """
    if not isinstance(loss_fn, nn.Module):
        return
    for name, parameter in loss_fn.named_parameters():
        if parameter.requires_grad:
            raise EngineError(
                f"the loss has a parameter {name!r}, and the last stage is on ranks {', '.join(map(str, ranks))}: each "
                "would train one for itself, as only stages' gradients are summed over replicas\n"
                "  try: make the parameter part of the last stage, freeze it, or use engine='threads'"
            )


def _begin_alike(module: nn.Module, replicas: dist.ProcessGroup, carrier: torch.device) -> None:
    """Give a stage the parameters and buffers that it has in the first replica."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            parcel = tensor.detach().to(carrier).contiguous()
            spread(parcel, replicas, 0)
            overwrite(tensor, parcel)
