"""The torch engine: this process's part of a plan, on PyTorch's pipelining runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from pipelab.engine.device.streams import RankStream, begin, finish
from pipelab.engine.engine import Engine
from pipelab.engine.stage.caller import CallerContext
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import tensors_of
from pipelab.engine.stage.replicas import Buffers, refuse_lost_hooks
from pipelab.engine.stage.stage import Stage
from pipelab.engine.step import RankState, StepState, describe
from pipelab.engine.torchrun.agreement import agree, describe_batch, sample_of
from pipelab.engine.torchrun.groups import Connections, Part
from pipelab.engine.torchrun.messages import ValueMeta, learn_metas
from pipelab.engine.torchrun.model_state import ManyProcesses
from pipelab.engine.torchrun.replicas import Reducer, ReplicatedBuffers
from pipelab.engine.torchrun.results import Clock, set_clocks, share
from pipelab.engine.torchrun.runtime import lowered
from pipelab.engine.torchrun.stage import ProcessStage
from pipelab.engine.torchrun.step_state import ProcessStep
from pipelab.engine.torchrun.supervisor import Doing, Watch
from pipelab.plan.plan import Plan

__all__ = ["TorchEngine"]

_CLOCKS_SECONDS = 10.0
"""How long a comparison of clocks holds: those of two machines may drift by microseconds per second."""


class TorchEngine(Engine):
    """Runs one rank of a plan in this process; the other ranks run in others.

    Args:
        plan: the plan.
        part: the pipeline of the plan that this process belongs to: all of it, or a replica.
        rank: this process's rank.
        runners: all stages, in order.
        stream: what this process runs on.
        connections: to the other processes.
        watch: looks after this process.
        labels: what each rank runs on and in.
        replicated_buffers: what becomes of the buffers that replicated stages write into.
    """

    model: ManyProcesses

    def __init__(
        self,
        plan: Plan,
        part: Part,
        rank: int,
        runners: Sequence[Stage],
        stream: RankStream,
        connections: Connections,
        watch: Watch,
        labels: list[str],
        replicated_buffers: Buffers,
    ) -> None:
        """Lower the pipeline onto PyTorch's runtime."""
        self.plan = plan
        self.group = connections.everyone
        self.labels = labels
        self._part = part
        self._rank = rank
        self._place = part.ranks.index(rank)
        self._runners = runners
        self._stream = stream
        self._connections = connections
        self._watch = watch
        held = [stage for stage, (home,) in part.plan.replicas.items() if home == self._place]
        self._reducers = {
            stage: Reducer(runners[stage].module, connections.replicas, connections.carrier)
            for stage in held
            if connections.replicas is not None
        }
        self._buffers = (
            ReplicatedBuffers(
                rank,
                {stage: runners[stage] for stage in held},
                plan.replicas,
                connections.replicas,
                connections.carrier,
                replicated_buffers,
            )
            if connections.replicas is not None
            else None
        )
        self._stages = [
            ProcessStage(runners[stage], part, rank, connections, self._reducers.get(stage)) for stage in held
        ]
        self._presence = {stage.stage_index: stage.presence for stage in self._stages}
        action = plan.bound.codes.action
        self._row = [action(code) for code in plan.bound.rows[rank]]
        self._runtime = lowered(part.plan, self._place, self._stages, self._receive)
        self._metas: dict[str, dict[int, list[ValueMeta]]] = {}
        self._clock = Clock()
        self._step: ProcessStep | None = None
        self._call = "begin"
        self._doing = Doing(self._status, self._progress, self._met_rank, lambda: self._step is not None)

    def run(self, inputs: list[Any], loss: Loss | None, caller: CallerContext, *, watch_nan: bool = False) -> StepState:
        """Run this process's part of all micro-batches; return what all processes made of it.

        Raises:
            EngineError: if a replicated stage has a hook that would see a part of its gradients.
            BatchError: if the processes were given different batches, or do not make the same call.
            LossError: if the loss does not average as it is said to.
            StageError: if a stage or the loss raised.
            RankError: if another process failed, or is gone.
            StepTimeoutError: if nothing moved for `timeout` seconds.
            UsageError: if the pipeline was closed, or has failed before.
        """
        for stage in () if loss is None else self._reducers:
            refuse_lost_hooks(stage, self._runners[stage].module, self.plan.replicas[stage])
        clocks = begin([self._stream])
        step = ProcessStep(inputs, loss, watch_nan, caller, clocks=clocks)
        call = "forward(x)" if loss is None else "step(x, y)"
        state: StepState = self.attend(partial(self._run, call, step), call)
        finish([self._stream], [state.outputs, [] if loss is None else loss.values])
        return state

    def attend(self, work: Callable[[], Any], call: str) -> Any:
        """Do something that communicates, looked after."""
        self._call = call
        return self._watch.attend(work, self._doing)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the pipeline; if the caller's own code failed, tell the others of what."""
        clean = error is None and not self._watch.over
        self._watch.close(error)
        if clean:  # after a failure something may be under way for ever
            self._connections.close()
            # The threads of a group end with the last reference to it. Left to the end of the process, they might let
            # go of tensors while Python is being taken down, which aborts the process.
            self._reducers.clear()
            self._stages.clear()
            self._presence.clear()
            del self._connections, self._buffers, self._runtime, self.group

    def gather_parameters(self) -> None:
        """Bring every stage's parameters and buffers here from the process that holds it."""
        self.model.gather_state()

    def gather_gradients(self) -> None:
        """Bring every stage's gradients here from the process that holds it."""
        self.model.gather_gradients()

    def full_model(self) -> AbstractContextManager[None]:
        """Have all stages here for a while, as they are now, on this process's device."""
        return self.model.whole()

    def first_to_say(self, words: str) -> str:
        """Return what the lowest rank says that says anything, on all processes alike; "" if none does."""
        return self.model.first_to_say(words)

    def clip_grad_norm_(self, parameters: list[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale this process's gradients so that those of all processes have a norm of at most `max_norm`."""
        return self.model.clip_grad_norm_(parameters, max_norm, norm_type)

    def _run(self, call: str, whole: ProcessStep) -> StepState:
        """Do one step, in the worker thread, on the rank's stream: what is read of a device is there."""
        inputs, loss, learning = whole.inputs, whole.loss, whole.loss is not None
        with ExitStack() as stack:
            self._stream.enter(stack)
            # [1] does everybody mean the same step?
            shapes = self._shapes(inputs, whole.caller, learning=learning)
            self._agree(call, shapes, inputs, loss)
            if loss is not None:
                loss.require()
            whole.caller.enter(stack)
            # [2] what will travel?
            own = [inputs[microbatch] for microbatch in self._part.microbatches]
            counts = [len(tensors_of(each)[0]) for each in own]
            if shapes not in self._metas:
                place = (self._part, self._place, self._runners, self._stream, self._connections.pipeline)
                self._metas[shapes] = learn_metas(*place, own, counts, learning=learning)
            # [3] PyTorch's runtime runs this rank's order
            row = [action for action in self._row if learning or action.kind == "F"]
            step = ProcessStep(
                own,
                None if loss is None else loss.some(self._part.microbatches),
                whole.watch_nan,
                whole.caller,
                [RankState(self._rank, row, self._stream, {})],
                clocks=whole.clocks,
                counts=counts,
                metas=self._metas[shapes],
                waited=[0] * len(row),
            )
            self._go(step)
            # [4] times and losses to everybody
            state = share(self.group, self.plan, self._part, step, loss, self._clock)
        self._step = None
        return state

    def _agree(self, call: str, about: str, inputs: list[Any], loss: Loss | None) -> None:
        """Compare what this process is about to do with the others; set the clocks anew if it has been long.

        Raises:
            BatchError: if the processes differ.
        """
        sample = sample_of(inputs)
        if loss is not None:
            weights = " ".join(f"{weight:g}" for weight in loss.weights)
            about += f"; y {describe_batch(loss.targets)}; weights {weights}"
            sample += sample_of(loss.targets)
        old = time.perf_counter_ns() - self._clock.set_at > _CLOCKS_SECONDS * 1e9
        if agree(self.group, call, about, sample, int(old))[0]:
            self._clock = set_clocks(self.group)

    def _go(self, step: ProcessStep) -> None:
        """Run this rank's order."""
        self._step = step
        with ExitStack() as stack:
            for stage in self._stages:
                stage.begin(step)
                stack.callback(stage.end)
            if step.loss is None:
                stack.enter_context(torch.no_grad())
            else:
                for reducer in self._reducers.values():
                    reducer.begin()
                    stack.callback(reducer.end)
            if self._buffers is not None:
                self._buffers.begin()
            self._runtime([(each,) for each in step.inputs])
            for stage in self._stages:
                stage.presence.finish()
                stage.refuse_overwritten()
            if self._buffers is not None:
                self._buffers.end()

    def _receive(self, stage: int, microbatch: int, works: list[Any]) -> None:
        """Wait for what comes from another rank for an action: for an evaluation's backwards nothing does."""
        assert self._step is not None
        flags = self._presence[stage].under_way(microbatch)
        if works or flags:
            self._step.wait(works, flags)

    def _shapes(self, inputs: list[Any], caller: CallerContext, *, learning: bool) -> str:
        """Return what the metas of the values that travel depend on."""
        modes = " ".join(_mode(runner.module) for runner in self._runners)
        words = [f"x {describe_batch(inputs)}", f"modes {modes}", "to learn" if learning else "to evaluate"]
        if learning:
            frozen = [_frozen(stage, runner.module) for stage, runner in enumerate(self._runners)]
            words += [f"frozen {', '.join(filter(None, frozen)) or 'nothing'}"]
            wants = [any(tensor.requires_grad for tensor in tensors_of(each)) for each in inputs]
            words += ["x wants a gradient"] if any(wants) else []
        words += [f"autocast {cast.args[0]} {cast.keywords['dtype']}" for cast in caller.autocast]
        return "; ".join(words)

    def _status(self) -> str:
        """Return what this process is doing, as in "rank 0 waits …"."""
        step = self._step
        if step is None:
            return f"waits for all processes in {self._call}"
        if step.mine.position >= len(step.mine.actions):
            return f"is done with its part of {self._call}, and waits for all processes"
        return describe(self.plan, step.mine, self._watch.line())

    def _progress(self) -> object:
        step = self._step
        return None if step is None else (id(step), step.mine.position, step.mine.computing)

    def _met_rank(self) -> int | None:
        return None if self._step is None else self._step.met_rank(self.plan)


def _mode(module: nn.Module) -> str:
    """Return the mode of a stage's layers: `"train"`, `"eval"`, or how many of them train."""
    layers = [part.training for part in module.modules() if next(part.children(), None) is None]
    train = sum(layers)
    return "train" if train == len(layers) else f"{train} of {len(layers)} train" if train else "eval"


def _frozen(stage: int, module: nn.Module) -> str:
    """Return which of a stage's parameters do not learn: `"stage 0"` if none does, else their names."""
    named = list(module.named_parameters())
    names = [name for name, parameter in named if not parameter.requires_grad]
    if not names:
        return ""
    return f"stage {stage}" if len(names) == len(named) else f"{' '.join(names)} of stage {stage}"
