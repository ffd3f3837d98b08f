"""What a pipeline asks of its engine; and one step of the ranks in this process: its state, an action, the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipelab.engine.device import RankDevice, RankStream, StepClock, here
from pipelab.engine.model.split import Stages
from pipelab.engine.stage.autograd import CallerContext
from pipelab.engine.stage.batch import Cut, Part, Reduction, join
from pipelab.engine.stage.errors import PARTIAL
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import tensors_of
from pipelab.engine.stage.replicas import Buffers, Runners
from pipelab.engine.stage.stage import Stage
from pipelab.engine.stage.streams import StepStreams, Streams, thread
from pipelab.engine.stage.updates import MakeOptimizer
from pipelab.errors import EngineError, StageError
from pipelab.plan.actions import Action
from pipelab.plan.plan import Plan
from pipelab.plan.transfers import Transport
from pipelab.trace.events import Event
from pipelab.trace.trace import Trace


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

    plan: Plan  # what a step runs
    forwards: Plan  # what an evaluation runs
    devices: Sequence[RankDevice]  # the device of each rank
    stage_devices: Sequence[torch.device]  # for each stage, the device on which this process runs it in plain training
    local_stages: Sequence[int]  # the stages whose parameters learn in this process
    labels: Sequence[str]  # the device and the thread or process of each rank, for drawings
    runners: Runners  # what runs each stage
    random: Streams  # the random numbers of steps
    intra_op_threads: int  # how many processor threads each operation on a CPU rank uses
    transport: Transport = "buffered"  # what waits for what among the values between ranks: see `simulate`

    def agree(self, call: str, parts: Sequence[Part], caller: CallerContext, named: Part, *, learning: bool) -> None:  # noqa: ARG002 - one process
        """Compare a call with the other processes', and complete the parts of its batch; all raise what is wrong."""
        for error in filter(None, (part.error for part in (*parts, named))):
            raise error

    def share_batch(self, x: Any, y: Any, keywords: dict[str, Any]) -> Sequence[Any]:
        """Return inputs, targets and keywords, from other processes where this one was given none."""
        return x, y, keywords

    @abstractmethod
    def run(
        self, inputs: list[Any], loss: Loss | None, caller: CallerContext, *, learning: bool, watch_nan: bool
    ) -> StepState:
        """Run all micro-batches; only their forwards, unless `learning`."""

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


# ── One step of the ranks in this process ─────────────────────────────────────────────────────────────────────────────


Measured = tuple[Sequence[tuple[list[Any], list[Any], list[Any]]], Mapping[int, float]]
"""By rank, the clock at the start and at the end of each action, and at both of each gather and free; and by value, the
milliseconds that it travelled between ranks."""

Act = Callable[[int, Any, dict[int, Any], Any], Any]
"""The method of a stage that runs an action: of micro-batch, input, `kept` and loss; it returns the output."""


@dataclass(slots=True)
class RankState:
    """How far one rank is in a step."""

    rank: int
    actions: Sequence[Action]  # the rank's actions, in order
    stream: RankStream
    kept: dict[int, dict[int, Any]]  # per stage, what forwards store for their backwards
    begun: list[Any] = field(default_factory=list)  # the clock at the start of each action
    ended: list[Any] = field(default_factory=list)  # the clock at the end of each action
    moves: list[Sequence[Any]] = field(default_factory=list)  # the same two of each gather and free, if measured
    position: int = 0  # how many actions are done
    computing: bool = False  # whether the next one is running


@dataclass(slots=True)
class StepState:
    """One step, or one evaluation. Each has a new state, so that a step that failed leaves nothing behind."""

    plan: Plan  # what runs: of an evaluation, forwards alone
    inputs: list[Any]  # the batch, per micro-batch
    loss: Loss | None  # `None` if none is asked for
    watch_nan: bool  # whether to look for NaN and infinity after every action
    caller: CallerContext  # the caller's autocast and hooks on saved tensors, which the workers apply too
    ranks: Sequence[RankState] = ()  # the ranks that run in this process
    outputs: list[Any] = field(default_factory=list)  # per micro-batch, the model's output
    outputs_on: Sequence[int] | None = None  # the ranks whose processes have outputs; `None` if all are here
    clocks: Sequence[StepClock] = ()  # per rank, the clock that converts its readings into times
    measured: Callable[[], Measured] | None = None  # the times of all ranks, if they are not all in `ranks`
    note: str = ""  # a remark for readers of the trace
    streams: StepStreams = field(default_factory=partial(StepStreams, 0))  # its random numbers
    counts: Sequence[int] = ()  # per micro-batch, how many rows it has
    joined: Callable[[list[Any]], Any] = join

    def __post_init__(self) -> None:
        self.outputs = [None] * len(self.inputs)

    @property
    def left(self) -> str:
        """What the actions that have begun leave in the model, if anything."""
        begun = [action.traits for each in self.ranks for action in each.actions[: each.position + each.computing]]
        updated = self.loss is not None and self.loss.updates and any(each.updates for each in begun)
        added = PARTIAL * any(each.weight_grad or each.collective for each in begun)
        return added + "; the updates (U) that it ran stay in the weights" * updated


def run_action(
    step: StepState, rank: RankState, stage: Stage, action: Action, act: Act, microbatch: int, given: Any
) -> Any:
    """Run a rank's next action between two readings of its clock; return its output for another stage.

    Backwards and updates run outside of the caller's autocast, as in plain training.
    """
    kept, mark = rank.kept[stage.index], rank.stream.mark
    reads = step.watch_nan and stage.is_first and action.traits.forward  # and may write into what it reads
    had_nan = reads and any(bool(tensor.isnan().any()) for tensor in tensors_of(given))
    rank.computing = True
    here.began = mark()
    rank.begun.append(here.began)
    traits = action.traits
    plainly = step.caller.autocast_off() if step.caller.autocast and traits.in_flight <= 0 else nullcontext()
    thread.draws_for = step.streams, stage.index, action
    try:
        with plainly:
            made = act(microbatch, given, kept, step.loss)
    finally:
        thread.draws_for = None
    rank.ended.append(mark())
    if step.watch_nan:
        named = rank.actions[rank.position]  # as the whole plan numbers it
        value = None if step.loss is None or traits.collective else step.loss.values[microbatch]
        _refuse_nan(rank.rank, named, stage, made, value, had_nan=had_nan)
    rank.computing = False
    rank.position += 1
    return made


def describe(plan: Plan, rank: RankState, line: str = "", absent: Collection[int] = ()) -> str:
    """Return what a rank is doing, or waiting for, as in "rank 0 was running 1F0 (stage 1, position 0)".

    `line` is the line that its thread runs, if known; `absent` are the ranks that have not reached an all-reduce.
    """
    if rank.position >= len(rank.actions):
        return "is done"
    action = rank.actions[rank.position]
    place = f"{action} (stage {action.stage}, position {rank.position})"
    if rank.computing:
        return f"was running {place}{line}"
    if absent:
        return f"waits, before {place}, for rank {', '.join(map(str, sorted(absent)))} to come to it too"
    awaited = awaited_action(plan, rank)
    if awaited is None:
        return f"was about to run {place}"
    value, giver, on = awaited
    return f"waits, before {place}, for {value}, given by {giver} on rank {on}"


def awaited_action(plan: Plan, rank: RankState) -> tuple[str, Action, int] | None:
    """Return what a rank's next action needs from another rank, the action that gives it, and on which rank."""
    bound = plan.bound
    codes = bound.codes
    for value in codes.needs(codes.code(rank.actions[rank.position])):
        giver = bound.giver_of[value]
        if bound.rank_of[giver] != rank.rank:
            return codes.value_words(value), codes.action(giver), bound.rank_of[giver]
    return None


class Step:
    """The result of one step, or of one evaluation.

    Attributes:
        loss: the loss of the whole batch, a tensor without dimensions or history.
    """

    def __init__(self, loss: torch.Tensor, state: StepState, labels: Sequence[str]) -> None:
        self.loss = loss
        self._outputs, self._outputs_on, self._joined = state.outputs, state.outputs_on, state.joined
        self._marks = [(each.begun, each.ended, [*chain(*each.moves)]) for each in state.ranks]
        self._clocks, self._note, self._measured = state.clocks, state.note, state.measured
        self._plan = state.plan
        self._labels = labels

    @cached_property
    def outputs(self) -> Any:
        """The model's outputs for the whole batch, rows in the batch's order, without history.

        With `engine="torch"` only the process of the last stage has them; `Pipeline.forward` sends them to all.
        """
        if self._outputs_on is not None and any(piece is None for piece in self._outputs):
            ranks = f"rank{'s' if len(self._outputs_on) > 1 else ''} {', '.join(map(str, self._outputs_on))}"
            raise EngineError(
                f"the outputs of a step are on {ranks} only, which holds the last stage\n"
                "  try: pipe.forward(x), which sends them to every process"
            )
        return self._joined(self._outputs)

    @cached_property
    def trace(self) -> Trace:
        """When each action started and ended, in milliseconds since the step began; measured in the workers."""
        each, travel = self._measured() if self._measured else (self._marks, {})
        readings = [[*map(clock.nanoseconds, marks)] for clock, marks in zip(self._clocks, each, strict=True)]
        origin = min(chain(*chain(*readings)), default=0)
        times = [[[(mark - origin) / 1e6 for mark in marks] for marks in rank] for rank in readings]
        starts, ends, moved = zip(*times, strict=True)
        edges = [*chain(*moved)]
        moves = zip(self._plan.bound.moves, edges[::2], edges[1::2], strict=False)  # in threads, none are measured
        return Trace(
            self._plan,
            starts,
            ends,
            "ms",
            "measured",
            delay=(lambda value: travel.get(value, 0.0)) if travel else None,
            moves=[Event(move.rank, move.action, start, end) for move, start, end in moves],
            lanes=self._labels,
            note=self._note,
        )

    @cached_property
    def clock_error_ms(self) -> float:
        """The largest error between the trace's times on two devices, in milliseconds; 0 if all ranks share a clock.

        Ranks on one GPU do: its events are compared with one another.
        """
        if len(set(self._clocks)) == 1:
            return 0.0
        _ = self.trace  # by its last event a clock knows how far it may have drifted
        errors = sorted(clock.error_ns for clock in set(self._clocks))
        return sum(errors[-2:]) / 1e6

    def __repr__(self) -> str:
        return f"Step(loss={float(self.loss):g})"


# ── NaN and infinity in an action's output ────────────────────────────────────────────────────────────────────────────


def _refuse_nan(
    rank: int, action: Action, stage: Stage, made: Any, loss: torch.Tensor | None, *, had_nan: bool
) -> None:
    if action.traits.forward:
        looked_at = [("output", made), ("loss", loss if stage.is_last else None)]
    else:
        named = ((stage.names.get(name, name), each) for name, each in stage.module.named_parameters())
        what = "new weight" if action.traits.updates else "input gradient"
        looked_at = [(what, made), *((f"gradient of {name}", each.grad) for name, each in named)]
    for what, value in looked_at:
        found = _found(value)
        if found is not None:
            kind, tensor = found
            of_microbatch = "" if action.microbatch is None else f", micro-batch {action.microbatch}"
            raise StageError(
                f"{action} on rank {rank} made {kind}: the {what} of stage {stage.index}"
                f"{of_microbatch}, shape {tuple(tensor.shape)}, is not finite{_source(action, stage, had_nan=had_nan)}",
                rank,
                stage.index,
                str(action),
            )


def _found(value: Any) -> tuple[str, torch.Tensor] | None:
    """Return `"NaN"` or `"infinity"`, and the first tensor that has it."""
    for tensor in tensors_of(value):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return ("NaN" if bool(torch.isnan(tensor).any()) else "infinity"), tensor
    return None


def _source(action: Action, stage: Stage, *, had_nan: bool) -> str:
    """Return whether a forward's NaN was in the batch or in a parameter before."""
    if had_nan:
        return f"\n  there was NaN in its input: in the rows of x of micro-batch {action.microbatch}"
    if action.traits.forward:
        for name, parameter in stage.module.named_parameters():
            if bool(parameter.isnan().any()):
                full = stage.names.get(name, name)
                return f"\n  there was NaN in {full} of stage {stage.index} before: look at the step before this one"
    return ""
