"""What a pipeline asks of an engine, and the engines by name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from pipelab.engine.device.devices import RankDevice, rank_devices
from pipelab.engine.device.streams import lanes_for
from pipelab.engine.model.split import Stages
from pipelab.engine.stage.caller import PLAIN, CallerContext
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.replicas import Buffers, Runners
from pipelab.engine.step import Ran
from pipelab.engine.threads.engine import ThreadsEngine
from pipelab.plan.plan import Plan

__all__ = ["ENGINES", "Engine", "Home", "Job", "OneProcess", "Started"]


@dataclass(frozen=True, slots=True)
class Job:
    """What an engine is made for.

    Attributes:
        plan: the plan, legal.
        stages: the model, split.
        devices: the devices that were asked for, one per rank; `None` for what the machine has.
        reduction: how the loss averages, in a word, so that processes can compare theirs.
        timeout: seconds without any progress after which a step is stopped; `None` waits for ever.
        intra_op_threads: how many processor threads each operation on a CPU rank may use; `None` for a fair share.
        replicated_buffers: what becomes of the buffers that replicated stages write into.
        loss_fn: takes the model's output and the target of one micro-batch; a module's parameters learn with it.
    """

    plan: Plan
    stages: Stages
    devices: Sequence[RankDevice | torch.device | str] | None
    reduction: str
    timeout: float | None
    intra_op_threads: int | None
    replicated_buffers: Buffers = "refuse"
    loss_fn: object = None


class Engine(Protocol):
    """What runs a plan on its stages."""

    @property
    def labels(self) -> list[str]:
        """What each rank runs on and in, for drawings."""

    def run(
        self, inputs: list[Any], loss: Loss | None, *, watch_nan: bool = False, caller: CallerContext = PLAIN
    ) -> Ran:
        """Run all micro-batches; without a loss, only the forwards."""

    def close(self, error: BaseException | None = None) -> None:
        """Let go of threads and connections; `error` is why, if the caller's own code failed."""


class Home(Protocol):
    """Where the model is: which stages this process holds, and how the others come here.

    Attributes:
        held: the stages whose parameters learn in this process.
        devices: for each stage, the device on which this process runs it plainly, for comparison.
    """

    held: Sequence[int]
    devices: Sequence[torch.device]

    def whole(self) -> AbstractContextManager[None]:
        """Have all stages here for a while, as they are now, on their `devices`."""

    def gather_gradients(self) -> None:
        """Have the gradients of all stages here."""

    def gather_state(self) -> None:
        """Have the parameters and buffers of all stages here, as they are now."""

    def stepped(self) -> None:
        """Note that a training step has run."""

    def first_to_say(self, words: str) -> str:
        """Return what the lowest rank says that says anything, on all processes alike; "" if none does."""

    def clip_grad_norm_(self, parameters: list[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale the gradients of all stages, of which `parameters` are those held here; return their norm before."""


class OneProcess:
    """The home of a model that is all in this process."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """Take each stage's device."""
        self.devices = devices
        self.held: Sequence[int] = range(len(devices))

    def whole(self) -> AbstractContextManager[None]:
        """Do nothing: it is."""
        return nullcontext()

    def gather_gradients(self) -> None:
        """Do nothing: they are here."""

    def gather_state(self) -> None:
        """Do nothing: it is here."""

    def stepped(self) -> None:
        """Do nothing: all stages learn here."""

    def first_to_say(self, words: str) -> str:
        """Return it: nobody else could."""
        return words

    def clip_grad_norm_(self, parameters: list[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip as PyTorch does."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


@dataclass(frozen=True, slots=True)
class Started:
    """An engine, ready to run, and what belongs to it.

    Attributes:
        engine: the engine.
        home: where the model is.
        devices: what each rank runs on.
        runners: what runs each stage.
        intra_op_threads: how many processor threads each operation on a CPU rank uses.
    """

    engine: Engine
    home: Home
    devices: Sequence[RankDevice]
    runners: Runners
    intra_op_threads: int


def _threads(job: Job) -> Started:
    """Place the stages on their ranks' devices and start a worker thread for each rank."""
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        warnings.warn(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, and each of them runs all ranks of this pipeline "
            "in threads: with engine='torch' each runs one rank",
            stacklevel=3,
        )
    devices = rank_devices(job.devices, job.plan.ranks)
    on = [each.device for each in devices]
    runners = Runners(job.stages.modules, job.plan.replicas, on, job.replicated_buffers)
    homes = [on[ranks[0]] for _, ranks in sorted(job.plan.replicas.items())]
    job.stages.place(homes)
    threads = job.intra_op_threads or max(1, torch.get_num_threads() // job.plan.ranks)
    engine = ThreadsEngine(job.plan, runners.of, lanes_for(devices), job.timeout, threads)
    return Started(engine, OneProcess(homes), devices, runners, threads)


def _torch(job: Job) -> Started:
    """Meet the other processes, and place this one's stages."""
    from pipelab.engine.torchrun.start import start

    return start(job)


ENGINES: dict[str, Callable[[Job], Started]] = {"threads": _threads, "torch": _torch}
"""The engines: what starts each of them."""
