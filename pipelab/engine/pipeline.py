"""Pipelines: a model and a schedule, run on tensors."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipelab.checking.checker import ScheduleLike, as_plan, require_legal
from pipelab.engine.device.devices import RankDevice
from pipelab.engine.engine import Settings, Start
from pipelab.engine.model.split import Stages, split
from pipelab.engine.stage.batch import Reduction, join, row_counts, rows_of, split_batch, weights_of
from pipelab.engine.stage.caller import CallerContext
from pipelab.engine.stage.loss import Loss, require_even_targets, require_loss
from pipelab.engine.stage.replicas import Buffers
from pipelab.engine.step import Step, StepState
from pipelab.engine.threads.engine import ThreadsEngine
from pipelab.engine.torchrun.start import start
from pipelab.engine.verify.verify import Verification, verify
from pipelab.errors import BatchError, DeviceError, EngineError, UsageError, require_size
from pipelab.plan.fault import shorten
from pipelab.plan.plan import Plan

__all__ = ["Pipeline", "Step"]

ENGINES: dict[str, Start] = {"threads": ThreadsEngine, "torch": start}
"""The engines: what starts each of them."""


class Pipeline:
    """A model, split into stages, that runs a schedule on real tensors.

    `step` runs all micro-batches forward and backward and **adds** to the parameters' `.grad`, as `backward()` does; it
    never zeroes them. Parameters stay the model's own: your optimizer, your scheduler and `model.state_dict()` work as
    they are.

    Args:
        model: an `nn.Sequential`, a list of stage modules, or what `pipelab.split` returned.
        schedule: a schedule or a plan.
        loss_fn: takes the model's output and the target of one micro-batch, and returns one number.
        devices: one device per rank; by default, what `pipelab.devices` finds. A device may stand several times.
        engine: `"threads"`: one worker thread per rank, in this process; `"torch"`: one process per rank, under
            torchrun, of which this is one.
        reduction: how the loss averages over rows. `"mean"`: each micro-batch weighs its share of the rows, so that
            uneven micro-batches are exact too; `"sum"`: each weighs 1; or a function from a micro-batch's target to its
            weight (the number of rows that are not ignored, say: a cross entropy that needs it is told so).
        timeout: seconds without any progress after which a step is stopped with an explanation; `None` waits for ever
            (but between processes, for the store that they share, at most 300 seconds).
        watch_nan: whether to stop at the first NaN or infinity, naming who made it.
        intra_op_threads: how many processor threads each operation on a CPU rank may use; by default, the processor's
            threads shared evenly among the ranks, and in several processes, what each of them has.
        replicated_buffers: what becomes of buffers that a stage on several ranks writes into, such as a BatchNorm's
            running statistics. `"refuse"` them; or keep the `"lowest"` rank's, which sees a part of the micro-batches.

    Example:
        >>> import pipelab, torch
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> x, y = torch.randn(6, 4), torch.randn(6, 1)
        >>> with pipelab.Pipeline(model, pipelab.OneFOneB(ranks=2, microbatches=3), torch.nn.MSELoss()) as pipe:
        ...     step = pipe.step(x, y)
        ...     proof = pipe.verify(x, y)
        >>> proof.exact, proof.parameters
        (True, 4)
        >>> bool(torch.isclose(step.loss, torch.nn.functional.mse_loss(model(x), y)))
        True

    Raises:
        ScheduleError: if the plan has faults.
        SplitError: if the model cannot be cut into the plan's stages.
        DeviceError: if the devices do not fit.
        LossError: if `loss_fn` is no function, or reduces otherwise than `reduction` says.
        EngineError: if a stage cannot be on several ranks, or the engine cannot run the plan.
        RankError: if another process does not come, or has another plan, model or torch.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Stages,
        schedule: Plan | ScheduleLike,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        devices: Sequence[RankDevice | torch.device | str] | None = None,
        engine: str = "threads",
        reduction: Reduction = "mean",
        *,
        timeout: float | None = 300.0,
        watch_nan: bool = False,
        intra_op_threads: int | None = None,
        replicated_buffers: Buffers = "refuse",
    ) -> None:
        """Check the plan, split the model, move the stages to their devices, and start the workers."""
        if engine not in ENGINES:
            raise EngineError(f"engine={engine!r}: expected {' or '.join(map(repr, ENGINES))}")
        if not callable(reduction) and reduction not in ("mean", "sum"):
            raise EngineError(f"reduction={reduction!r}: expected 'mean', 'sum', or a function from target to weight")
        if timeout is not None and not timeout > 0:
            raise EngineError(f"timeout={timeout!r}: expected seconds, more than 0, or None to wait for ever")
        if replicated_buffers not in ("refuse", "lowest"):
            raise EngineError(f"replicated_buffers={replicated_buffers!r}: expected 'refuse' or 'lowest'")
        if intra_op_threads is not None:
            intra_op_threads = require_size("intra_op_threads", intra_op_threads)
        if isinstance(model, (Plan, ScheduleLike)) and not isinstance(model, nn.Module):
            raise TypeError(
                f"Pipeline(model, schedule, loss_fn): the model comes first, and {shorten(model)} stands first"
            )
        self.plan = as_plan(schedule)
        require_legal(self.plan)
        require_loss(loss_fn, reduction)
        self.loss_fn = loss_fn
        self.reduction = reduction
        self.watch_nan = watch_nan
        self.stages = split(model, into=self.plan.stages)
        self._guard = OptimizerGuard(list(self.stages.model.parameters()))
        named = reduction if isinstance(reduction, str) else "a function"
        settings = Settings(devices, named, timeout, intra_op_threads, replicated_buffers, loss_fn)
        self.engine = ENGINES[engine](self.plan, self.stages, settings)
        self._guard.watch_if_moved()
        self._one_at_a_time = threading.Lock()

    def step(self, x: Any, y: Any) -> Step:
        """Run all micro-batches forward and backward, adding to the parameters' `.grad`.

        Args:
            x: the batch, `[rows, ...]`: a tensor, or a tuple or dict of tensors, as the first stage takes it.
            y: the targets, `[rows, ...]`, as `loss_fn` takes them.

        Returns:
            The loss of the whole batch, its outputs, and the trace.

        Raises:
            BatchError: if the batch cannot be cut into the plan's micro-batches.
            LossError: if a cross entropy leaves targets out, or weighs classes, and `reduction` does not say so.
            StageError: if a stage or the loss raised, with rank, stage and action; in threads the pipeline can be used
                again, in several processes it is over.
            StepTimeoutError: if nothing moved for `timeout` seconds.
            RankError: if another process failed, or is gone.
            UsageError: if the pipeline was closed, or inside `torch.no_grad()`, where nobody means to make gradients.
        """
        if not torch.is_grad_enabled():
            raise UsageError(
                "step(x, y) makes gradients, and this is inside torch.no_grad() or torch.inference_mode()\n"
                "  try: loss_fn(pipe.forward(x), y) for the loss alone"
            )
        state, loss = self.run(x, y)
        return Step(loss.total(), state, self.plan, tuple(self.engine.labels))

    def run(self, x: Any, y: Any, only: int | None = None) -> tuple[StepState, Loss]:
        """Run one step and return its raw state; `step` and `verify` stand on it.

        Args:
            x: the batch.
            y: the targets.
            only: a micro-batch whose loss alone should count; by default, all do.
        """
        rows = rows_of(x, "x")
        if rows_of(y, "y") != rows:
            raise BatchError(f"x has {rows} rows and y has {rows_of(y, 'y')}: every row needs its target")
        counts = row_counts(rows, self.plan.microbatches)
        self.stages.require_rows(counts)
        self.stages.require_no_lost_hooks()
        targets = split_batch(y, counts)
        weights = weights_of(self.reduction, counts, targets)
        if only is not None:
            weights = [weight if m == only else 0.0 for m, weight in enumerate(weights)]
        even = partial(require_even_targets, self.loss_fn, self.reduction, targets, counts)
        loss = Loss(self.loss_fn, targets, weights, even)
        with self._one_at_a_time, self.engine.runners.running(self.stages.modules, learning=True):
            state = self.engine.run(split_batch(x, counts), loss, self.caller(), watch_nan=self.watch_nan)
        return state, loss

    def forward(self, x: Any) -> Any:
        """Run all micro-batches forward, without gradients; return the outputs, rows in the batch's order.

        The modules' training mode is yours: call `pipe.eval()` before and `pipe.train()` after.

        Args:
            x: the batch, `[rows, ...]`.

        Raises:
            BatchError: if the batch cannot be cut into the plan's micro-batches.
            StageError: if a stage raised.
        """
        counts = row_counts(rows_of(x, "x"), self.plan.microbatches)
        self.stages.require_no_lost_hooks()
        inputs = split_batch(x, counts)
        modules = self.stages.for_evaluation(inputs, counts)
        with self._one_at_a_time, self.engine.runners.running(modules, learning=False):
            state = self.engine.run(inputs, None, self.caller())
        return join(state.outputs)

    def verify(self, x: Any, y: Any) -> Verification:
        """Check that the pipeline's gradients are those of the plain model; return the proof.

        Gradients, buffers, random state and the batch are as before afterwards.

        Raises:
            VerificationError: naming the parameter and the micro-batch that differ first.
        """
        return verify(self, x, y)

    @property
    def devices(self) -> Sequence[RankDevice]:
        """What each rank runs on."""
        return self.engine.devices

    def train(self, mode: bool = True) -> Self:
        """Set the model's training mode, as `model.train()` does; return the pipeline."""
        self.stages.model.train(mode)
        return self

    def eval(self) -> Self:
        """Set the model's evaluation mode, as `model.eval()` does; return the pipeline."""
        return self.train(mode=False)

    @property
    def writes_into_input(self) -> bool:
        """Whether the first stage may write into what it is given, and so gets a copy of the batch."""
        return any(runner.clones_input for (stage, _), runner in self.engine.runners.of.items() if stage == 0)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the stages that this process holds, stage by stage, each once.

        With `engine="threads"` it holds all of them, with `engine="torch"` those of its rank.
        """
        return chain.from_iterable(self.stages.modules[stage].parameters() for stage in self.engine.local_stages)

    def move_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring an optimizer's state to where its parameters are now.

        Needed only for an optimizer that has already stepped before the pipeline moved the stages to other devices.
        """
        self._guard.move(optimizer)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients of all stages so that their common norm is at most `max_norm`; return the norm before."""
        return self.engine.clip_grad_norm_(list(self.parameters()), max_norm, norm_type)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of the whole model, under the model's own names.

        With `engine="torch"` every process must call it: it brings the other processes' stages here.
        """
        self.engine.gather_parameters()
        return self.stages.state_dict()

    def close(self) -> None:
        """End the workers. A closed pipeline cannot step; the model is as usable as ever."""
        self.engine.close()
        self._guard.close()

    def __enter__(self) -> Self:
        """Return the pipeline."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the pipeline."""
        self.engine.close(error)
        self._guard.close()

    def __repr__(self) -> str:
        """Return the plan, what each stage holds, and the devices."""
        return f"Pipeline({self.plan.name}, {self.stages}, on {', '.join(map(str, self.devices))})"

    def caller(self) -> CallerContext:
        """Return the caller's autocast and hooks on saved tensors, which hold in the workers too."""
        return CallerContext.capture(each.device.type for each in self.devices)


class OptimizerGuard:
    """Watches for an optimizer whose state was left behind on another device.

    Moving a stage keeps its parameters the same objects, so an optimizer made before goes on working; but momentum and
    the like, which it made in earlier steps, stay where they were.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note where the parameters are now, before they are moved."""
        self._homes = {parameter: parameter.device for parameter in parameters}
        self._unwatch: Callable[[], object] | None = None

    def watch_if_moved(self) -> None:
        """Look at every optimizer step from now on, if any parameter has moved."""
        if any(parameter.device != home for parameter, home in self._homes.items()):
            watch = weakref.WeakMethod(self._before_step)

            def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001
                if (before_step := watch()) is not None:
                    before_step(optimizer)

            # PyTorch's list of hooks lives as long as the process: it must not keep the pipeline's parameters alive.
            self._unwatch = weakref.finalize(self, register_optimizer_step_pre_hook(hook).remove)

    def close(self) -> None:
        """Stop watching."""
        if self._unwatch is not None:
            self._unwatch()

    def move(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the state of the pipeline's parameters to where the parameters are."""
        for parameter, state in optimizer.state.items():
            if parameter in self._homes:
                for key, value in state.items():
                    if _follows(key, value):
                        state[key] = value.to(parameter.device)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if parameter in self._homes and _follows(key, value) and value.device != parameter.device:
                    raise DeviceError(
                        f"the optimizer's {key!r} for a parameter of shape {tuple(parameter.shape)} is on "
                        f"{value.device}, but the pipeline moved the parameter to {parameter.device}: call "
                        "pipe.move_optimizer_state(optimizer) once, after making the pipeline"
                    )


def _follows(key: str, value: object) -> bool:
    """Tell whether a piece of state lives with its parameter; PyTorch keeps `step` on the CPU."""
    return isinstance(value, torch.Tensor) and key != "step"
