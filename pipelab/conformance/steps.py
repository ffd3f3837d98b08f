"""One step of PyTorch's own pipelining; pipelab's gradients and loss are compared with its."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import networkx
import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage

from pipelab.conformance import native
from pipelab.engine.torchrun import runtime
from pipelab.errors import EngineError
from pipelab.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of one step.

    Attributes:
        gradients: every parameter's gradient, stage by stage.
        loss: the loss of the whole batch.
    """

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
    """The batch and the loss of a step; all micro-batches have the same number of rows.

    Attributes:
        x: the batch, `[rows, ...]`.
        y: its targets, `[rows, ...]`.
        loss_fn: the mean loss of a micro-batch.
        microbatches: how many there are.
    """

    x: torch.Tensor
    y: torch.Tensor
    loss_fn: Callable[[Any, Any], torch.Tensor]
    microbatches: int

    def weighed(self, output: Any, target: Any) -> torch.Tensor:
        """Return a micro-batch's share of the batch's loss."""
        return self.loss_fn(output, target) * (1 / self.microbatches)


@contextmanager
def group_of_one() -> Iterator[None]:
    """Make this process a process group of one, so that it runs PyTorch's pipelining without other processes.

    Raises:
        EngineError: if the process is already in a group.
    """
    if distributed.is_initialized():
        raise EngineError(
            "this process is in a process group already, and the comparison with PyTorch needs its own group: "
            "run it without torchrun"
        )
    store = distributed.HashStore()  # type: ignore[attr-defined]  # public, and listed nowhere
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def step_of_class(kind: str, modules: Sequence[nn.Module], task: Task, *, one_at_a_time: bool = False) -> Outcome:
    """Run one step of PyTorch's class `kind`, whose only rank, this process, holds all stages. Needs `group_of_one`.

    With `one_at_a_time`, the schedule gets one micro-batch after the other. Gradients are added to the modules'.
    """
    stages = [PipelineStage(module, index, len(modules), torch.device("cpu")) for index, module in enumerate(modules)]
    schedule = make_schedule(kind, stages, task, one_at_a_time=one_at_a_time)
    return _outcome(modules, take_step(schedule, stages, task, one_at_a_time=one_at_a_time))


def step_of_plan(plan: Plan, modules: Sequence[nn.Module], task: Task) -> Outcome:
    """Let PyTorch's runtime run a plan on one rank, this process: each stage's actions in the plan's order.

    All rows become one, in an order that the dependencies allow. Needs `group_of_one`. Gradients are added to the
    modules'.
    """
    stages = [PipelineStage(module, index, len(modules), torch.device("cpu")) for index, module in enumerate(modules)]
    schedule = make_schedule("_PipelineScheduleRuntime", stages, task)
    native.lower(schedule, [networkx.topological_sort(plan.graph())])
    return _outcome(modules, take_step(schedule, stages, task))


def make_schedule(kind: str, stages: Sequence[Any], task: Task, *, one_at_a_time: bool = False) -> Any:
    """Return a native schedule on this rank's stages; it scales gradients as pipelab does."""
    cls = native.schedule_class(kind)
    single = issubclass(cls, runtime.load().schedules.PipelineScheduleSingle)
    microbatches = 1 if one_at_a_time else task.microbatches
    return cls(stages[0] if single else list(stages), microbatches, loss_fn=task.weighed, scale_grads=False)


def take_step(schedule: Any, stages: Sequence[Any], task: Task, *, one_at_a_time: bool = False) -> torch.Tensor | None:
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
    assert loss is not None
    gradients = [parameter.grad for module in modules for parameter in module.parameters()]
    return Outcome([gradient for gradient in gradients if gradient is not None], loss)
