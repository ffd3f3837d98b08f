"""Pipelines: a model and a schedule, run on tensors."""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from itertools import chain
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn

from pipelab.checking.checker import ScheduleLike, as_plan, require_legal
from pipelab.checking.memory import Memory
from pipelab.engine.device import RankDevice
from pipelab.engine.engine import Assembly, Settings, Start, Step, StepState
from pipelab.engine.memory import alone_on_ranks, stage_memory, step_memory
from pipelab.engine.model.split import Stages, split
from pipelab.engine.model.unmade import Layer, require_makeable
from pipelab.engine.optimizer import load_optimizer_state, optimizer_state
from pipelab.engine.stage.autograd import CallerContext
from pipelab.engine.stage.batch import Cut, Part, Reduction, join_outputs, weights_of
from pipelab.engine.stage.inputs import require_taken
from pipelab.engine.stage.loss import Loss, require_loss, warn_of_another_average, warned_of_targets
from pipelab.engine.stage.replicas import Buffers
from pipelab.engine.stage.updates import MakeOptimizer
from pipelab.engine.threads import ThreadsEngine
from pipelab.engine.torchrun.start import start
from pipelab.engine.verify.verify import Verification, verify
from pipelab.errors import BatchError, EngineError, LossError, UsageError, require_size
from pipelab.plan.actions import OPTIONAL, TRAITS
from pipelab.plan.fault import shorten
from pipelab.plan.plan import Plan
from pipelab.plan.transfers import Transport
from pipelab.simulation.memory import MemoryUse

ENGINES: dict[str, Start] = {"threads": ThreadsEngine, "torch": start}
"""By name, what starts an engine."""


class Pipeline:
    """A model, split into stages, that runs a schedule on real tensors.

    `step` runs all micro-batches forward and backward and **adds** to the parameters' `.grad`, as `backward()` does; it
    never zeroes them. The pipeline uses the model's own parameters: your optimizer, your scheduler and
    `model.state_dict()` work unchanged.

    Args:
        model: an `nn.Sequential`, a list of stage modules, or what `pipelab.split` returned. Layers that are functions
            without arguments, or on the device `"meta"`, are made where their stage is: see `split`.
        schedule: a schedule or a plan.
        loss_fn: takes the model's output and the target of one micro-batch, and returns one number.
        devices: one device per rank; by default, what `pipelab.devices` finds. Ranks may share a device.
        engine: `"threads"`: one worker thread per rank, in this process. `"torch"`: one process per rank, started by
            torchrun or `pipelab launch`; this is one of them.
        reduction: how the loss averages over rows. `"mean"`: each micro-batch weighs its share of the rows, so that
            uneven micro-batches are exact too; `"sum"`: each weighs 1; or a function from a micro-batch's target to its
            weight, such as the number of rows that a cross entropy does not ignore.
        timeout: seconds without progress after which a step stops with an explanation. `None` waits forever, but at
            most 300 seconds for the store that several processes share.
        watch_nan: whether to stop at the first NaN or infinity and name the action that made it.
        intra_op_threads: how many processor threads each operation on a CPU rank may use; by default, the ranks share
            the processor's threads evenly. With `engine="torch"`, each process uses all of its threads.
        group: with `engine="torch"`, the processes of this pipeline, one per rank; by default all. If stages are
            themselves spread over processes (DTensor, FSDP2), it is one dimension of a device mesh,
            `mesh["pp"].get_group()`, and every process makes the pipeline of its own group.
        replicated_buffers: the policy for buffers that a stage on several ranks writes into, such as a BatchNorm's
            running statistics. `"refuse"` raises an error; `"lowest"` uses the lowest rank's, which sees a part of the
            micro-batches.
        whole_model: the model whose layers make up a list of stages: its names are used in `state_dict`,
            `named_parameters` and errors, instead of `"0.weight"` for a parameter of stage 0.
        sequence_dim: with a schedule of slices, the dimension of `x` and `y` along which each sequence is cut, 1 for
            `[rows, tokens, ...]`. Attention then calls `pipelab.cached`. By default, all micro-batches are rows.
        batch_dim: the dimension of `x` and `y` along which their rows are: 0 by default, and 1 for modules that have
            the sequence first, as `nn.LSTM` and `nn.TransformerEncoderLayer` do without `batch_first=True`. Outputs are
            joined along it too, where they have rows there. `pipelab.rows` marks a tensor with its rows elsewhere.
        optimizer: for a plan with updates (`U`) and `engine="threads"`: makes the optimizer of one stage from its
            parameters, such as `partial(torch.optim.SGD, lr=0.1)`. An update applies the gradients of its micro-batches
            and clears them; a micro-batch's loss weighs its share of the batch, as `reduction` says. Gradients that no
            update uses add to `.grad`. Updates move weights to new memory: a `state_dict()` taken before a step may
            have the earlier ones. Without an optimizer, updates change nothing, and a step adds up all gradients.
        all_reduce_runs: with `engine="torch"`: `"in-row"`, a rank waits at each `R` for the sum of the gradients; or
            `"beside"`, it goes on, and waits for all sums at the step's end.

    Example:
        >>> import pipelab, torch
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> x, y = torch.randn(6, 4), torch.randn(6, 1)
        >>> with pipelab.Pipeline(model, pipelab.OneFOneB(ranks=2, microbatches=3), torch.nn.MSELoss()) as pipe:
        ...     step = pipe.step(x, y)
        ...     verification = pipe.verify(x, y)
        >>> verification.exact, verification.parameters
        (True, 4)
        >>> bool(torch.isclose(step.loss, torch.nn.functional.mse_loss(model(x), y)))
        True

    Raises:
        ScheduleError: if the plan has faults.
        SplitError: if the model cannot be cut into the plan's stages, or `whole_model` has other parameters.
        DeviceError: if the devices do not fit.
        BatchError: if there is a `sequence_dim`, and the schedule does not cut all sequences into as many slices.
        LossError: if `loss_fn` is not a function, or does not reduce as `reduction` says.
        EngineError: if a stage cannot be on several ranks, or the engine cannot run the plan.
        RankError: if another process makes no pipeline, or has another plan, model or torch.
        UsageError: if `engine`, `reduction`, `timeout` or `replicated_buffers` has another value than these, or
            `whole_model` comes without a list of stages.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[Layer] | Stages,
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
        whole_model: nn.Module | None = None,
        group: dist.ProcessGroup | None = None,
        sequence_dim: int | None = None,
        batch_dim: int | None = None,
        optimizer: MakeOptimizer | None = None,
        all_reduce_runs: Literal["in-row", "beside"] = "in-row",
    ) -> None:
        """Check the plan, split the model, move the stages to their devices, and start the workers."""
        _require_one_of(list(ENGINES), engine=engine)
        if not callable(reduction) and reduction not in ("mean", "sum"):
            raise UsageError(f"reduction={reduction!r}: expected 'mean', 'sum', or a function from target to weight")
        _require_one_of(["refuse", "lowest"], replicated_buffers=replicated_buffers)
        _require_one_of(["in-row", *["beside"] * (engine == "torch")], all_reduce_runs=all_reduce_runs)
        if timeout is not None and not timeout > 0:
            raise UsageError(f"timeout={timeout!r}: expected seconds, more than 0, or None to wait for ever")
        if group is not None and engine != "torch":
            raise UsageError(f"group= names processes, and engine={engine!r} has one: write engine='torch'")
        if intra_op_threads is not None:
            intra_op_threads = require_size("intra_op_threads", intra_op_threads)
        if isinstance(model, (Plan, ScheduleLike)) and not isinstance(model, nn.Module):
            raise TypeError(f"Pipeline(model, schedule, loss_fn): expected a model first, got {shorten(model)}")
        self.plan = as_plan(schedule).reducing(beside=False)
        require_legal(self.plan)
        _require_runnable(self.plan, engine, sequence_dim)
        self.plan = self.plan.reducing(beside=all_reduce_runs == "beside")
        self._updates = optimizer is not None
        if self._updates and not callable(optimizer):
            raise TypeError(f"optimizer={shorten(optimizer)}: expected what makes one from a stage's parameters")
        if self._updates and not any(TRAITS[kind].updates for kind in self.plan.bound.kinds):
            own = "call optimizer.step() yourself, after pipe.step"
            raise UsageError(f"optimizer= is for updates (U): {self.plan.name} has none\n  try: {own}")
        require_loss(loss_fn, reduction)
        self.loss_fn, self.reduction, self.watch_nan = loss_fn, reduction, watch_nan
        _require_dimensions(batch_dim, sequence_dim)
        self.cut = Cut(self.plan, sequence_dim, batch_dim or 0)
        self.stages = split(model, into=self.plan.stages)
        require_makeable(self.stages.model)
        if whole_model is not None:
            if isinstance(model, (nn.Module, Stages)):
                raise UsageError(
                    "whole_model= is for a list of stages: a model that pipelab splits keeps its own names"
                )
            self.stages.name_after(whole_model)
        if batch_dim is None:
            _warn_of_sequence_first(self.stages.named)
        spread = (name for name, each in self.stages.model.named_parameters() if hasattr(each, "to_local"))
        if engine != "torch" and self.plan.ranks > 1 and (name := next(spread, "")):
            raise UsageError(
                f"parameter {name!r} is a DTensor, spread over processes, and the threads of engine={engine!r} would "
                "communicate in another order in each process\n  try: engine='torch', group=mesh[\"pp\"].get_group()"
            )
        named = reduction if isinstance(reduction, str) else "a function"
        settings = Settings(devices, named, timeout, intra_op_threads, replicated_buffers, loss_fn, group, optimizer)
        self.engine = ENGINES[engine](self.plan, self.stages, settings)
        for (stage, _), runner in self.engine.runners.of.items():
            runner.names = self.stages.names[stage]
            runner.earlier = self.cut.earlier
        self._one_at_a_time = threading.RLock()  # an RLock, as the thread that holds it gets an error, not a wait
        self._process, self._running, self._warned_of_nan = os.getpid(), False, False
        self._warned = False  # of a loss that does not average over rows: once is enough

    def step(
        self,
        x: Any = None,
        y: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        *,
        keywords: Mapping[str, Any] | None = None,
    ) -> Step:
        """Run all micro-batches forward and backward, adding to the parameters' `.grad`.

        Args:
            x: the batch, `[rows, ...]`: a tensor, or a tuple or dict of tensors, as the first stage takes it. It is cut
                by rows; `pipelab.whole`, `rows` and `microbatches` mark what is cut differently. A process that does
                not hold the first stage (`is_first`) needs none.
            y: the targets, `[rows, ...]`, as `loss_fn` takes them. A process that does not hold the last stage
                (`is_last`) needs none.
            scaler: pass it instead of calling `scaler.scale(loss).backward()`: pipelab multiplies gradients by its
                scale, but not the loss. Call `scaler.unscale_`, `step` and `update` as usual. If gradients overflow in
                one process, the scalers of all processes skip the step. A plan with updates does not accept one.
            keywords: values by name, cut as `x` is: each stage's module gets those that its `forward` names, in
                addition to its input. With several processes, each needs those of its own stages.

        Returns:
            The loss of the whole batch, its outputs, and the trace.

        Raises:
            BatchError: if the batch cannot be cut into the plan's micro-batches, or a process lacks its part.
            LossError: if a cross entropy ignores targets, or weighs classes, and `reduction` does not say so.
            StageError: if a stage or the loss raised, with rank, stage and action. In threads the pipeline can be used
                again; with several processes it has ended.
            StepTimeoutError: if there was no progress for `timeout` seconds.
            RankError: if another process failed or ended.
            SplitError: if a layer of the model was replaced, or a parameter of a traced model.
            UsageError: if the pipeline was closed or forked, in `torch.no_grad()`, or in a signal handler of a step.
        """
        if not torch.is_grad_enabled():
            raise UsageError(
                "step(x, y) computes gradients, but it was called inside torch.no_grad() or torch.inference_mode()\n"
                "  try: pipe.evaluate(x, y)"
            )
        if scaler is None or not scaler.is_enabled():
            state, loss = self.run(x, y, keywords, updates=True)
        elif self._updates:
            raise UsageError(
                f"{self.plan.name} updates weights within the step (U), with gradients that scaler has multiplied by "
                f"{scaler.get_scale():g}\n  try: autocast with bfloat16, which needs no scaler; or a plan without U"
            )
        else:
            own = list(self.parameters())
            scale = float(scaler.scale(torch.ones((), device=own[0].device)))
            state, loss = self.run(x, y, keywords, scale=scale)
            if own[-1] is self._nothing:
                self._nothing.grad = torch.zeros_like(self._nothing)  # a scaler refuses an optimizer without gradients
            self.engine.share_overflow(own, scale)
        return self._result(state, loss)

    def evaluate(self, x: Any = None, y: Any = None, *, keywords: Mapping[str, Any] | None = None) -> Step:
        """Run the plan's forwards, without gradients; return the loss of the whole batch, the outputs and the trace.

        Weights and gradients do not change. You set the modules' training mode, as in `forward`.

        Args:
            x: the batch, `[rows, ...]`, as in `step`.
            y: the targets.
            keywords: as in `step`.

        Example:
            >>> import pipelab, torch
            >>> layers = [torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)]
            >>> x, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 2, 1, 0])
            >>> with pipelab.Pipeline(layers, pipelab.OneFOneB(2, 3), torch.nn.CrossEntropyLoss()) as pipe:
            ...     found = pipe.eval().evaluate(x, labels)
            >>> found.loss.shape, found.outputs.argmax(1).shape, found.trace.plan.rows[0]
            (torch.Size([]), torch.Size([6]), (0F0, 0F1, 0F2))

        Raises:
            BatchError: as in `step`, which lists the other errors.
        """
        return self._result(*self.run(x, y, keywords, learning=False))

    def _result(self, state: StepState, loss: Loss) -> Step:
        """Return the result of a step or an evaluation; warn of its loss, once."""
        total = loss.total()
        if not self._warned_of_nan and total.device.type == "cpu" and not math.isfinite(total):
            self._warned_of_nan = True
            warnings.warn(
                f"the loss of this step is {float(total):g}\n"
                "  try: Pipeline(..., watch_nan=True), whose step names the first action that makes NaN or infinity",
                stacklevel=3,
            )
        if not self._warned:
            self._warned = True
            together = lambda first: join_outputs(state.outputs[:first], state.counts, self.cut.batch_dim)  # noqa: E731
            warn_of_another_average(loss, self.reduction, together)
        return Step(total, state, tuple(self.engine.labels))

    def run(
        self, x: Any, y: Any, keywords: Any, only: int | None = None, *, learning: bool = True, **of_loss: Any
    ) -> tuple[StepState, Loss]:
        """Run a step or evaluation; return its raw state and loss, in which with `only` no other sequence counts."""
        if learning and self.plan.forwards_only:
            raise UsageError(
                f"{self.plan.name} has only forwards, so there are no gradients\n"
                "  try: pipe.evaluate(x, y); or a Pipeline of the whole plan, which evaluates too"
            )
        inputs, targets, named = self._cut(x, y, keywords, only)
        call = "step(x, y)" if learning else "evaluate(x, y)"
        with self._alone(call, named, inputs, targets, learning=learning) as caller:
            loss = Loss(self.loss_fn, targets.pieces, targets.weights, ways=targets.ways, **of_loss)
            state = self.engine.run(inputs.pieces, loss, caller, learning=learning, watch_nan=self.watch_nan)
            state.counts, state.joined = inputs.counts, partial(self.cut.joined, inputs=inputs)
            return state, loss

    def forward(self, x: Any = None, *, keywords: Mapping[str, Any] | None = None) -> Any:
        """Run all micro-batches forward, without gradients; return the outputs, rows in the batch's order.

        You set the modules' training mode: call `pipe.eval()` before and `pipe.train()` after.

        Args:
            x: the batch, `[rows, ...]`, as in `step`.
            keywords: as in `step`.

        Raises:
            BatchError: as in `step`, which lists the other errors.
        """
        inputs, _, named = self._cut(x, None, keywords)
        with self._alone("forward(x)", named, inputs, learning=False) as caller:
            state = self.engine.run(inputs.pieces, None, caller, learning=False, watch_nan=self.watch_nan)
        return self.cut.joined(state.outputs, inputs)

    def _cut(
        self, x: Any, y: Any, keywords: Mapping[str, Any] | None, only: int | None = None
    ) -> tuple[Part, Part, Part]:
        """Cut what this process was given of a batch into micro-batches, and weigh their losses."""
        self.stages.require_same_parts()
        self.stages.require_no_lost_hooks()
        named = dict(keywords) if isinstance(keywords, Mapping) else keywords  # what is none is refused
        given = {"x": x, "y": y, "keywords": named or None}
        inputs, targets, others = (self._part(name, given) for name in given)
        try:
            if targets.pieces:
                _require_same_rows([inputs, targets])
                targets.weights = weights_of(self.reduction, targets.counts, targets.pieces)
                if warned_of_targets(self.loss_fn, self.reduction, targets.pieces, targets.counts):
                    self._warned = True
        except (BatchError, LossError) as error:
            targets.error = error
        if only is not None:
            counted = self.cut.sequences[only]
            targets.weights = [weight if m in counted else 0.0 for m, weight in enumerate(targets.weights)]
        return inputs, targets, others

    def _part(self, name: str, given: Mapping[str, Any]) -> Part:
        """Return inputs, targets or keywords in micro-batches, if this process was given them."""
        part = Part(name, given[name] is not None)
        which = "first" * (name == "x" and self.is_first) or "last" * (name == "y" and self.is_last)
        if not part.here and which:
            part.error = BatchError(
                f"{name} is missing, and this process holds the {which} stage\n"
                f"  try: give x and y; of several processes, one may leave {name} out if not pipe.is_{which}"
            )
        try:
            if part.here and name == "keywords":
                require_taken(self.stages.modules, given[name])
            if part.here:
                return self.cut.part(name, given[name], self.cut.ready(given))
        except (BatchError, UsageError) as error:
            part.error = error
        return part

    @contextmanager
    def _alone(self, call: str, named: Part, *parts: Part, learning: bool) -> Iterator[CallerContext]:
        """Return a context in which no other thread runs micro-batches, nor a signal handler of this one.

        All processes have agreed on the call and the batch, and the stages are ready for it.
        """
        if self._process != os.getpid():
            raise UsageError(
                f"{call}: this pipeline's workers are in process {self._process}, not in its fork {os.getpid()}\n"
                "  try: make the pipeline after the fork"
            )
        with self._one_at_a_time:
            if self._running:
                raise UsageError(
                    "a signal handler called this pipeline in the middle of a step or forward\n"
                    "  try: set a variable in the handler, and look at it after the step"
                )
            try:
                self._running = True
                caller = self.caller()
                self.engine.agree(call, parts, caller, named, learning=learning)
                _require_same_rows(parts)
                _require_same_rows([parts[0], named])
                modules = self.stages.ready(parts[0].pieces, parts[0].counts)
                with (
                    self.engine.runners.running(modules, learning=learning),
                    self.engine.runners.called_with(named.pieces) if named.pieces else nullcontext(),
                ):
                    yield caller
            finally:
                self._running = False

    def verify(
        self,
        x: Any = None,
        y: Any = None,
        *,
        against: Literal["batch", "microbatches"] = "batch",
        keywords: Mapping[str, Any] | None = None,
    ) -> Verification:
        """Check that the pipeline's gradients equal the plain model's; return by how much they differ.

        Gradients, buffers, random state and the batch are restored afterwards. Every process runs the whole batch. A
        process without `x` or `y` gets it from another.

        Args:
            x: the batch, as `step` takes it.
            y: the targets.
            against: `"batch"`: compare with the same micro-batches one after another, and with the whole batch at once.
                `"microbatches"`: with the micro-batches only, for a loss that is meant to differ between them, such as
                an auxiliary loss that balances experts.
            keywords: as in `step`.

        Raises:
            VerificationError: naming the parameter and the micro-batch that differ first, or why the whole batch has
                other gradients.
            UsageError: if `against` has another value.
        """
        _require_one_of(["batch", "microbatches"], against=against)
        return verify(self._assembly, x, y, keywords, at_once=against == "batch")

    def memory(
        self,
        x: Any,
        y: Any,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        keywords: Mapping[str, Any] | None = None,
    ) -> Memory:
        """Measure how many bytes each stage takes, from one micro-batch of this batch: for `pipelab.memory_use`.

        The first micro-batch runs through all stages, with a split backward. Activations are what autograd saves, and
        the stage's output. Parameters, buffers, the batch and the model's output do not count there, and memory that
        two tensors share counts once. Gradients, buffers, random state and the batch are restored afterwards.

        Args:
            x: the batch, as `step` takes it.
            y: the targets.
            optimizer: an optimizer whose present state counts too. Most make it in their first step.
            keywords: as in `step`.

        Raises:
            BatchError: if the batch cannot be cut into the plan's micro-batches.
            UsageError: if `engine` is not `"threads"`, or inside hooks on saved tensors.
        """
        plan, batch = alone_on_ranks(self._assembly, x, y, keywords)
        settings: dict[str, Any] = {"reduction": self.reduction, "batch_dim": self.cut.batch_dim}
        with Pipeline(self.stages.modules, plan, self.loss_fn, self.engine.stage_devices, **settings) as alone:
            return stage_memory(alone._assembly, batch, optimizer)

    def memory_use(
        self,
        x: Any,
        y: Any,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        keywords: Mapping[str, Any] | None = None,
    ) -> MemoryUse:
        """Run one step, and measure how many bytes every rank holds after each of its actions.

        It counts the same things as `memory`, but only what exists after the action; it does not show a rank's peak
        within an action. On GPUs, `allocated` shows it. Gradients, buffers, random state and the batch are restored
        afterwards. This step is slower than others, so do not use its trace for times.

        Example:
            >>> import pipelab, torch
            >>> layers = [torch.nn.Linear(8, 8) for _ in range(2)]
            >>> x, y = torch.randn(12, 8), torch.randn(12, 8)
            >>> with pipelab.Pipeline(layers, pipelab.OneFOneB(2, 4), torch.nn.MSELoss(), ["cpu"] * 2) as pipe:
            ...     measured = pipe.memory_use(x, y)
            ...     predicted = pipelab.memory_use(measured.trace, pipe.memory(x, y))
            >>> measured.peaks == predicted.peaks
            True

        Args:
            x: the batch, as `step` takes it.
            y: the targets.
            optimizer: an optimizer whose state counts too.
            keywords: as in `step`.

        Raises:
            BatchError: if the batch cannot be cut into the plan's micro-batches.
            StageError: if a stage or the loss raised.
            UsageError: if `engine` is not `"threads"`, or inside hooks on saved tensors.
        """
        return step_memory(self._assembly, x, y, keywords, optimizer)

    @property
    def _assembly(self) -> Assembly:
        return Assembly(
            self.plan, self.stages, self.engine, self.cut, self.loss_fn, self.reduction, self.run, self.caller
        )

    @property
    def is_first(self) -> bool:
        """Whether this process holds the first stage, which reads `x`; with `engine="threads"` it does."""
        return 0 in self.engine.local_stages

    @property
    def is_last(self) -> bool:
        """Whether this process holds the last stage, whose loss reads `y`; with `engine="threads"` it does."""
        return self.plan.stages - 1 in self.engine.local_stages

    @property
    def devices(self) -> Sequence[RankDevice]:
        """The device of each rank."""
        return self.engine.devices

    @property
    def transport(self) -> Transport:
        """Which transfers between ranks wait for each other: see `simulate`.

        Simulate with `transport=pipe.transport` to predict this pipeline.
        """
        return self.engine.transport

    def train(self, mode: bool = True) -> Self:
        """Set the model's training mode, as `model.train()` does; return the pipeline."""
        self.stages.model.train(mode)
        self.stages.named.train(mode)
        return self

    def eval(self) -> Self:
        """Set the model's evaluation mode, as `model.eval()` does; return the pipeline."""
        return self.train(mode=False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the stages that this process holds, stage by stage, each once.

        With `engine="threads"` it holds all of them, with `engine="torch"` only its rank's. If none of them learns, an
        empty one comes last, because PyTorch's optimizers refuse an empty list.
        """
        held = self._held()
        return iter([*held] if any(each.requires_grad for each in held) else [*held, self._nothing])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the stages that this process holds, with the model's own names."""
        names = self._names()
        return ((names[parameter], parameter) for parameter in self._held())

    def move_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Move an optimizer's state to the devices of its parameters.

        Needed only for an optimizer that has stepped before the pipeline moved the stages to other devices.
        """
        ours = set(self.stages.model.parameters())
        for parameter in ours & optimizer.state.keys():
            state = optimizer.state[parameter]
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and key != "step":  # PyTorch keeps `step` on the CPU
                    state[key] = value.to(parameter.device)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state under the model's own names, for `torch.distributed.checkpoint.save` and `load`.

        With `engine="torch"` it has this process's parameters, and saving merges the dictionaries of all processes. So
        a run with another number of ranks can go on. The keys are PyTorch's, of `flatten_optimizer_state_dict=True`.

        Example:
            >>> import pipelab, torch
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            >>> with pipelab.Pipeline(model, pipelab.OneFOneB(2, 3), torch.nn.MSELoss()) as pipe:
            ...     optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
            ...     state = pipe.optimizer_state_dict(optimizer)
            ...     pipe.load_optimizer_state_dict(optimizer, state)
            >>> state["param_groups.0.weight.lr"], state["state.0.weight.momentum_buffer"].shape
            (0.1, torch.Size([8, 4]))

        Raises:
            UsageError: if the optimizer has a parameter that is not the model's.
        """
        return optimizer_state(optimizer, self._names(), self._held())

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load what `optimizer_state_dict` returned, here or in a pipeline with other ranks, cuts or engine.

        Raises:
            UsageError: if the state lacks a parameter of the optimizer, or a group's parameters were saved with
                different settings. The optimizer is unchanged.
        """
        load_optimizer_state(optimizer, self._names(), self._held(), state)

    @cached_property
    def _nothing(self) -> nn.Parameter:
        """A parameter without numbers, for an optimizer where no parameter learns."""
        return nn.Parameter(torch.empty(0, device=self.engine.stage_devices[min(self.engine.local_stages)]))

    def _held(self) -> dict[nn.Parameter, None]:
        of_stages = (self.stages.modules[stage].parameters() for stage in self.engine.local_stages)
        return dict.fromkeys(chain.from_iterable(of_stages))

    def _names(self) -> dict[nn.Parameter, str]:
        return {self._nothing: ""} | {parameter: name for name, parameter in self.stages.named.named_parameters()}

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients of all stages so that their common norm is at most `max_norm`; return the norm before."""
        return self.engine.clip_grad_norm_(list(self.parameters()), max_norm, norm_type)

    def state_dict(self, *, whole: bool = True) -> dict[str, torch.Tensor]:
        """Return the state of the whole model, under the model's own names; or only of this process's stages.

        With `engine="torch"` every process must call it for the whole: it gathers the stages of the other processes.

        Args:
            whole: `False` leaves out the stages that this process does not hold. `torch.distributed.checkpoint.save`
                merges the dictionaries of all processes, and `load` reads into these tensors.
        """
        if not whole:
            return self.stages.state_dict(self.engine.local_stages)
        with self.engine.full_state():
            return self.stages.state_dict()

    def close(self) -> None:
        """End the workers. A closed pipeline cannot step; the model stays usable."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close(error)

    def __repr__(self) -> str:
        return f"Pipeline({self.plan.name}, {self.stages}, on {', '.join(map(str, self.devices))})"

    def caller(self) -> CallerContext:
        """Return the caller's autocast and hooks on saved tensors, which the workers apply too."""
        return CallerContext.capture(each.device.type for each in self.devices)


def _require_same_rows(parts: Sequence[Part]) -> None:
    counts, names = [part.counts for part in parts if part.counts], [part.name for part in parts]
    if all(each == counts[0] for each in counts) or all(part.ready for part in parts):
        return
    rows = [*map(sum, counts)]
    if len(set(rows)) > 1:
        needs = "every row of x needs a target" if names[1] == "y" else "every row of x needs its keywords"
        raise BatchError(f"x has {rows[0]} rows and {names[1]} has {rows[1]}: {needs}")
    raise BatchError(
        f"the micro-batches of x have {', '.join(map(str, counts[0]))} rows and those of {names[1]} "
        f"{', '.join(map(str, counts[1]))}\n  try: pipelab.microbatches([...]) for both, or for neither"
    )


def _require_dimensions(batch_dim: int | None, sequence_dim: int | None) -> None:
    if batch_dim is not None and (isinstance(batch_dim, bool) or not isinstance(batch_dim, int) or batch_dim < 0):
        raise UsageError(f"batch_dim={batch_dim!r}: expected a dimension, 0 or more")
    if sequence_dim == (batch_dim or 0):
        raise UsageError(f"sequence_dim={sequence_dim} is the dimension of the rows too: batch_dim={batch_dim or 0}")


def _warn_of_sequence_first(model: nn.Module) -> None:
    """Warn of the first layer that has the sequence before the rows, unless the user has said where rows are."""
    for name, layer in model.named_modules():
        if getattr(layer, "batch_first", getattr(getattr(layer, "self_attn", None), "batch_first", None)) is False:
            warnings.warn(
                f"{name} ({type(layer).__name__}) has batch_first=False: it takes [tokens, rows, ...], and "
                "micro-batches are cut along dimension 0\n"
                "  try: Pipeline(..., batch_dim=1), if x and y are [tokens, rows, ...]; "
                f"{type(layer).__name__}(..., batch_first=True), if they are [rows, tokens, ...]; or batch_dim=0, if "
                "a stage transposes them",
                stacklevel=3,
            )
            return


def _require_one_of(known: list[str], **given: object) -> None:
    for name, value in given.items():
        if value not in known:
            raise UsageError(f"{name}={value!r}: expected {' or '.join(map(repr, known))}")


def _require_runnable(plan: Plan, engine: str, sequence_dim: int | None) -> None:
    """Refuse a plan with kinds of action that no engine runs, or that PyTorch's runtime or slices lack."""
    copied = any(len(ranks) > 1 for ranks in plan.replicas.values())
    if sequence_dim is not None and engine == "torch" and copied:
        raise EngineError(f"{plan.name}: only engine='threads' cuts sequences into slices among replicas")
    if sequence_dim is not None and "C" in plan.bound.kinds:
        raise EngineError(f"{plan.name} has C (recomputation), which no engine runs on slices of a sequence")
    kinds = [kind for kind in plan.bound.kinds if kind in OPTIONAL]
    kinds += dict.fromkeys(move.action.kind for move in plan.bound.moves if move.action.microbatch is not None)
    if simulated := [f"{kind} ({TRAITS[kind].word})" for kind in kinds if not TRAITS[kind].method]:
        raise EngineError(
            f"{plan.name} has {', '.join(simulated)}, which pipelab checks, simulates and draws, and does not run\n"
            "  try: pipelab.simulate(plan)"
        )
    lacking = [f"{kind} ({TRAITS[kind].word})" for kind in kinds]
    if engine == "torch" and lacking:
        raise EngineError(
            f"{plan.name} has {', '.join(lacking)}, which PyTorch's runtime lacks\n  try: engine='threads'"
        )
