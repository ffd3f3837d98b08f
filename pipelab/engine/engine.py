"""The protocol between a pipeline and its engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipelab.engine.device.devices import RankDevice
from pipelab.engine.model.split import Stages
from pipelab.engine.stage.batch import Cut, Part, Reduction
from pipelab.engine.stage.caller import CallerContext
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.replicas import Buffers, Runners
from pipelab.engine.stage.updates import MakeOptimizer, UpdatingStage
from pipelab.engine.step import StepState
from pipelab.plan.plan import Plan
from pipelab.plan.transfers import Transport


@dataclass(frozen=True, slots=True)
class Settings:
    """Arguments of `Pipeline` that an engine needs; of a `reduction` that is a function, only that it is one."""

    devices: Sequence[RankDevice | torch.device | str] | None
    reduction: str
    timeout: float | None
    intra_op_threads: int | None
    replicated_buffers: Buffers
    loss_fn: object
    group: dist.ProcessGroup | None = None
    optimizer: MakeOptimizer | None = None


class Engine(ABC):
    """Runs a plan on a model's stages. The methods defined here fit an engine that has all stages in one process."""

    devices: Sequence[RankDevice]  # the device of each rank
    stage_devices: Sequence[torch.device]  # for each stage, the device on which this process runs it in plain training
    local_stages: Sequence[int]  # the stages whose parameters learn in this process
    labels: Sequence[str]  # the device and the thread or process of each rank, for drawings
    runners: Runners  # what runs each stage
    intra_op_threads: int  # how many processor threads each operation on a CPU rank uses
    transport: Transport = "buffered"  # what waits for what among the values between ranks: see `simulate`

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Return a context in which a plan's updates leave the weights as they are."""
        updating = [each for each in self.runners.of.values() if isinstance(each, UpdatingStage)]
        for each in updating:
            each.frozen = True
        try:
            yield
        finally:
            for each in updating:
                each.frozen = False

    def agree(self, call: str, parts: Sequence[Part], caller: CallerContext) -> None:  # noqa: ARG002 - one process
        """Compare a call with the other processes', and complete the parts of its batch; all raise what is wrong."""
        for error in filter(None, (part.error for part in parts)):
            raise error

    def share_batch(self, x: Any, y: Any) -> Sequence[Any]:
        """Return inputs and targets, from other processes where this one was given none."""
        return x, y

    @abstractmethod
    def run(self, inputs: list[Any], loss: Loss | None, caller: CallerContext, *, watch_nan: bool = False) -> StepState:
        """Run all micro-batches; without a loss, only the forwards."""

    @abstractmethod
    def close(self, error: BaseException | None = None) -> None:
        """Release threads and connections; `error` is the exception with which the caller's own code ended, if any."""

    def full_state(self) -> AbstractContextManager[None]:
        """Return a context in which this process has the present parameters and buffers of all stages."""
        return nullcontext()

    def gather_gradients(self) -> None:  # noqa: B027 - one process has them already
        """Gather the gradients of all stages in this process."""

    def full_model(self) -> AbstractContextManager[None]:
        """Return a context in which this process has the present state of all stages, on their `stage_devices`."""
        return nullcontext()

    def first_message(self, message: str) -> str:
        """Return, on all processes, the message of the lowest rank that has one; "" if none has."""
        return message

    def clip_grad_norm_(self, parameters: list[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale the gradients of all stages, of which `parameters` are those held here; return their norm before."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def share_overflow(self, parameters: list[nn.Parameter], scale: float) -> None:  # noqa: B027 - one process has all
        """Let every process's `GradScaler` skip a step in which one process has a gradient that is not finite."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """What a pipeline hands to `verify` and to `memory`."""

    plan: Plan
    stages: Stages
    engine: Engine
    cut: Cut
    loss_fn: Callable[[Any, Any], torch.Tensor]
    reduction: Reduction  # how micro-batches' losses are weighed
    run: Callable[..., tuple[StepState, Loss]]  # runs one step on a batch; with `only`, no other sequence's loss counts
    caller: Callable[[], CallerContext]  # returns the caller's settings

    @property
    def modules(self) -> list[nn.Module]:
        """The stages' modules, and the loss's."""
        loss = [self.loss_fn] if isinstance(self.loss_fn, nn.Module) else []
        return [*self.stages.modules, *loss]


Start = Callable[[Plan, Stages, Settings], Engine]
"""Starts an engine: places the stages on their devices and prepares the plan."""
