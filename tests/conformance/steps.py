"""One step of PyTorch's own pipelining; pipelab's gradients and loss are compared with its."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import networkx
import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as native

from pipelab.plan.actions import Action
from pipelab.plan.plan import Plan

from .recording import RUNTIME, held_by, held_in, lower, one_or_all, watch

torch.set_num_threads(1)  # the last bits of a number may depend on the number of cores: both sides use one


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of one step: every parameter's gradient, stage by stage, and the loss of the whole batch."""

    gradients: list[torch.Tensor]
    loss: torch.Tensor

    def same_gradients(self, other: Outcome) -> bool:
        """Return whether all gradients are equal bit for bit."""
        return len(self.gradients) == len(other.gradients) and all(map(torch.equal, self.gradients, other.gradients))

    def difference(self, other: Outcome) -> float:
        """Return the largest relative difference of a parameter's gradient, in the 2-norm."""
        return max(
            float((ours - theirs).norm() / theirs.norm())
            for ours, theirs in zip(self.gradients, other.gradients, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Task:
    """The batch, its targets and the loss of a step; all micro-batches have the same number of rows."""

    x: torch.Tensor
    y: torch.Tensor
    loss_fn: Callable[[Any, Any], torch.Tensor]
    microbatches: int

    def weighed(self, output: Any, target: Any) -> torch.Tensor:
        """Return a micro-batch's share of the batch's loss."""
        return self.loss_fn(output, target) * (1 / self.microbatches)


WIDTH, ROWS = 16, 2


def fixed_model(stages: int) -> nn.Sequential:
    """Return a small model with one layer per stage and the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)]
        return nn.Sequential(*layers)


def fixed_task(microbatches: int) -> Task:
    """Return a batch with a few rows in every micro-batch, the same every time."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, ROWS * microbatches, WIDTH, generator=generator)
    return Task(x, y, nn.functional.mse_loss, microbatches)


@contextmanager
def group_of_one() -> Iterator[None]:
    """Make this process a process group of one, so that it runs PyTorch's pipelining without other processes."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def step_of_class(kind: str, modules: Sequence[nn.Module], task: Task, *, one_at_a_time: bool = False) -> Outcome:
    """Run one step of PyTorch's class `kind`, whose only rank, this process, holds all stages. Needs `group_of_one`.

    With `one_at_a_time`, the schedule gets one micro-batch after the other. Gradients are added to the modules'.
    """
    stages = _stages(modules, range(len(modules)))
    schedule = _schedule(kind, stages, 1 if one_at_a_time else task.microbatches, task)
    return _outcome(modules, _take_step(schedule, stages, task, one_at_a_time))


def step_of_plan(plan: Plan, modules: Sequence[nn.Module], task: Task) -> Outcome:
    """Let PyTorch's runtime run a plan on one rank, this process: each stage's actions in the plan's order.

    All rows become one, in an order that the dependencies allow. Needs `group_of_one`. Gradients are added to the
    modules'.
    """
    stages = _stages(modules, range(len(modules)))
    schedule = _schedule(RUNTIME, stages, task.microbatches, task)
    lower(schedule, [networkx.topological_sort(plan.graph())])
    return _outcome(modules, _take_step(schedule, stages, task))


def _stages(modules: Sequence[nn.Module], held: Sequence[int]) -> list[PipelineStage]:
    return [PipelineStage(modules[index], index, len(modules), torch.device("cpu")) for index in held]


def _schedule(kind: str, stages: Sequence[PipelineStage], microbatches: int, task: Task) -> Any:
    """Return a native schedule on this rank's stages; it scales gradients as pipelab does."""
    cls = getattr(native, kind)
    return cls(one_or_all(cls, stages), microbatches, loss_fn=task.weighed, scale_grads=False)


def _take_step(
    schedule: Any, stages: Sequence[PipelineStage], task: Task, one_at_a_time: bool = False
) -> torch.Tensor | None:
    """Run one step on this rank's stages; return the batch's loss if the last stage is among them."""
    portions = task.microbatches if one_at_a_time else 1
    losses: list[torch.Tensor] = []
    for x, y in zip(task.x.chunk(portions), task.y.chunk(portions), strict=True):
        arguments = (x,) if any(stage.is_first for stage in stages) else ()
        found: list[torch.Tensor] = []
        named = {"target": y, "losses": found} if any(stage.is_last for stage in stages) else {}
        schedule.step(*arguments, **named)
        losses += found
    return torch.stack([loss.detach() for loss in losses]).sum() if losses else None


def _outcome(modules: Sequence[nn.Module], loss: torch.Tensor | None) -> Outcome:
    return Outcome([parameter.grad for module in modules for parameter in module.parameters()], loss)


# ── In several processes, one for each rank, connected by gloo ────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Job:
    """One step of PyTorch's class `kind` with a plan's sizes; the runtime, which has no order, runs the plan."""

    kind: str
    plan: Plan
    one_at_a_time: bool = False

    @property
    def held(self) -> Sequence[Sequence[int]]:
        """Each rank's stages."""
        if self.kind == RUNTIME:
            return held_in(self.plan)
        return held_by(self.kind, self.plan.ranks, self.plan.stages // self.plan.ranks)


def run_in_processes(jobs: Sequence[Job], ranks: int) -> list[tuple[Plan, Outcome]]:
    """Run jobs in `ranks` processes; return the plan that each executed on real stages, and its numbers."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_serve, (folder, jobs, ranks), nprocs=ranks)
        answers = [torch.load(Path(folder, str(rank))) for rank in range(ranks)]
    return [_merged(parts) for parts in zip(*answers, strict=True)]


def _merged(parts: Sequence[dict[str, Any]]) -> tuple[Plan, Outcome]:
    gradients = {stage: found for part in parts for stage, found in part["gradients"].items()}
    (loss,) = (part["loss"] for part in parts if part["loss"] is not None)
    in_order = [gradient for _, found in sorted(gradients.items()) for gradient in found]
    return Plan.parse(part["record"] for part in parts), Outcome(in_order, loss)


def _serve(rank: int, folder: str, jobs: Sequence[Job], ranks: int) -> None:
    meeting = Path(folder, "meeting").as_uri()
    distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    torch.save([_run(job, rank) for job in jobs], Path(folder, str(rank)))
    distributed.barrier()
    distributed.destroy_process_group()


def _run(job: Job, rank: int) -> dict[str, Any]:
    """Run one job's part of this rank."""
    modules, task = list(fixed_model(job.plan.stages)), fixed_task(job.plan.microbatches)
    held = job.held[rank]
    stages = _stages(modules, held)
    record: list[Action] = []
    for stage in stages:
        watch(stage, record)
    schedule = _schedule(job.kind, stages, 1 if job.one_at_a_time else task.microbatches, task)
    if job.kind == RUNTIME:
        lower(schedule, job.plan.rows)
    loss = _take_step(schedule, stages, task, job.one_at_a_time)
    return {
        "gradients": {index: [parameter.grad for parameter in modules[index].parameters()] for index in held},
        "loss": loss,
        "record": " ".join(map(str, _numbered(record) if job.one_at_a_time else record)),
    }


def _numbered(record: Sequence[Action]) -> list[Action]:
    """Return the actions with their micro-batches counted: given one at a time, each of them has number 0."""
    seen: Counter[tuple[str, int | None]] = Counter()
    numbered = []
    for action in record:
        numbered.append(replace(action, microbatch=seen[action.kind, action.stage]))
        seen[action.kind, action.stage] += 1
    return numbered
