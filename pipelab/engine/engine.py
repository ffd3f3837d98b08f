"""What a pipeline asks of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from pipelab.engine.device.devices import RankDevice
from pipelab.engine.model.split import Stages
from pipelab.engine.stage.caller import CallerContext
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.replicas import Buffers, Runners
from pipelab.engine.step import StepState
from pipelab.plan.plan import Plan

__all__ = ["Engine", "Settings", "Start"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How an engine shall run, as `Pipeline` was told.

    Attributes:
        devices: the devices that were asked for, one per rank; `None` for what the machine has.
        reduction: how the loss averages, in a word, so that processes can compare theirs.
        timeout: seconds without any progress after which a step is stopped; `None` waits for ever.
        intra_op_threads: how many processor threads each operation on a CPU rank may use; `None` for a fair share.
        replicated_buffers: what becomes of the buffers that replicated stages write into.
        loss_fn: takes the model's output and the target of one micro-batch; a module's parameters learn with it.
    """

    devices: Sequence[RankDevice | torch.device | str] | None
    reduction: str
    timeout: float | None
    intra_op_threads: int | None
    replicated_buffers: Buffers
    loss_fn: object


class Engine(ABC):
    """What runs a plan on a model's stages. Its own methods are those of an engine that has all stages in one process.

    Attributes:
        devices: what each rank runs on.
        stage_devices: for each stage, the device on which this process runs it plainly, for comparison.
        local_stages: the stages whose parameters learn in this process.
        labels: what each rank runs on and in, for drawings.
        runners: what runs each stage.
        intra_op_threads: how many processor threads each operation on a CPU rank uses.
    """

    devices: Sequence[RankDevice]
    stage_devices: Sequence[torch.device]
    local_stages: Sequence[int]
    labels: Sequence[str]
    runners: Runners
    intra_op_threads: int

    @abstractmethod
    def run(self, inputs: list[Any], loss: Loss | None, caller: CallerContext, *, watch_nan: bool = False) -> StepState:
        """Run all micro-batches; without a loss, only the forwards."""

    @abstractmethod
    def close(self, error: BaseException | None = None) -> None:
        """Let go of threads and connections; `error` is why, if the caller's own code failed."""

    def gather_parameters(self) -> None:  # noqa: B027 - they are here
        """Have the parameters and buffers of all stages here, as they are now."""

    def gather_gradients(self) -> None:  # noqa: B027 - likewise
        """Have the gradients of all stages here."""

    def full_model(self) -> AbstractContextManager[None]:
        """Have all stages here for a while, as they are now, on their `stage_devices`."""
        return nullcontext()

    def first_to_say(self, words: str) -> str:
        """Return what the lowest rank says that says anything, on all processes alike; "" if none does."""
        return words

    def clip_grad_norm_(self, parameters: list[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale the gradients of all stages, of which `parameters` are those held here; return their norm before."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


class Start(Protocol):
    """What starts an engine."""

    def __call__(self, plan: Plan, stages: Stages, settings: Settings) -> Engine:
        """Place the stages, and get ready to run the plan."""
