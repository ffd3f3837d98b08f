"""The torch engine: this process's part of a plan, on PyTorch's pipelining runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from pipelab.engine.device.clocks import StepClock
from pipelab.engine.device.streams import Lane, begin, finish
from pipelab.engine.stage.caller import PLAIN, Surroundings
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import tensors_of
from pipelab.engine.stage.replicas import Buffers, refuse_lost_hooks
from pipelab.engine.stage.stage import Stage
from pipelab.engine.torchrun.agreement import agree, describe_batch, sample_of
from pipelab.engine.torchrun.groups import Connections, PipelineReplica
from pipelab.engine.torchrun.messages import Form, learn_forms
from pipelab.engine.torchrun.replicas import Reducer, ReplicatedBuffers
from pipelab.engine.torchrun.results import Clock, ProcessRun, set_clocks, share
from pipelab.engine.torchrun.runtime import lowered
from pipelab.engine.torchrun.stage import ProcessStage
from pipelab.engine.torchrun.step_state import Passage
from pipelab.engine.torchrun.supervisor import Status, Supervisor, describe_step, peer_of
from pipelab.plan.plan import Plan

__all__ = ["TorchEngine"]

_CLOCKS_SECONDS = 10.0
"""How long a comparison of clocks holds: those of two machines may drift by microseconds per second."""


class TorchEngine:
    """Runs one rank of a plan in this process; the other ranks run in others.

    Args:
        plan: the plan.
        part: the pipeline of the plan that this process belongs to: all of it, or a replica.
        rank: this process's rank.
        runners: all stages, in order.
        lane: what this process runs on.
        connections: to the other processes.
        supervisor: runs this process's work, and watches the others.
        labels: what each rank runs on and in.
        replicated_buffers: what becomes of the buffers that replicated stages write into.
    """

    def __init__(
        self,
        plan: Plan,
        part: PipelineReplica,
        rank: int,
        runners: Sequence[Stage],
        lane: Lane,
        connections: Connections,
        supervisor: Supervisor,
        labels: list[str],
        replicated_buffers: Buffers,
    ) -> None:
        """Lower the pipeline onto PyTorch's runtime."""
        self.plan = plan
        self.group = connections.everyone
        self.labels = labels
        self._part = part
        self._place = part.ranks.index(rank)
        self._runners = runners
        self._lane = lane
        self._connections = connections
        self._supervisor = supervisor
        held = [stage for stage, (home,) in part.plan.replicas.items() if home == self._place]
        self._reducers = {
            stage: Reducer(runners[stage].module, connections.replicas, connections.transport_device)
            for stage in held
            if connections.replicas is not None
        }
        self._buffers = (
            ReplicatedBuffers(
                rank,
                {stage: runners[stage] for stage in held},
                plan.replicas,
                connections.replicas,
                connections.transport_device,
                replicated_buffers,
            )
            if connections.replicas is not None
            else None
        )
        self._stages = [
            ProcessStage(runners[stage], part, rank, connections, self._reducers.get(stage)) for stage in held
        ]
        self._marks = {stage.stage_index: stage.marks for stage in self._stages}
        action = plan.program.numbering.action
        self._row = [action(code) for code in plan.program.rows[rank]]
        self._runtime = lowered(part.plan, self._place, self._stages, self._receive)
        self._forms: dict[str, dict[int, list[Form]]] = {}
        self._clock = Clock()
        self._passage: Passage | None = None
        self._call = "begin"
        self._status = Status(
            self._describe, self._progress, lambda: peer_of(plan, self._passage), lambda: self._computing
        )

    def run(
        self, inputs: list[Any], loss: Loss | None, *, watch_nan: bool = False, around: Surroundings = PLAIN
    ) -> ProcessRun:
        """Run this process's part of all micro-batches; return what all processes made of it.

        Raises:
            EngineError: if a replicated stage has a hook that would see a part of its gradients.
            BatchError: if the processes were given different batches, or do not make the same call.
            LossError: if the loss does not average as it is said to.
            StageError: if a stage or the loss raised.
            RankError: if another process failed, or is gone.
            StepTimeoutError: if nothing moved for `timeout` seconds.
            PipelineClosedError: if the pipeline was closed, or has failed before.
        """
        for stage in () if loss is None else self._reducers:
            refuse_lost_hooks(stage, self._runners[stage].module, self.plan.replicas[stage])
        (clock,) = begin([self._lane])
        call = "forward(x)" if loss is None else "step(x, y)"
        ran: ProcessRun = self.attend(partial(self._run, call, inputs, loss, watch_nan, around, clock), call)
        finish([self._lane], [ran.outputs, [] if loss is None else loss.values])
        return ran

    def attend(self, work: Callable[[], Any], call: str) -> Any:
        """Do something that communicates, looked after."""
        self._call = call
        return self._supervisor.run(work, self._status)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the pipeline; if the caller's own code failed, tell the others of what."""
        clean = error is None and not self._supervisor.over
        self._supervisor.close(error)
        if clean:  # after a failure something may be under way for ever
            self._connections.close()
            # The threads of a group end with the last reference to it. Left to the end of the process, they might let
            # go of tensors while Python is being taken down, which aborts the process.
            self._reducers.clear()
            self._stages.clear()
            self._marks.clear()
            del self._connections, self._buffers, self._runtime, self.group

    def _run(
        self,
        call: str,
        inputs: list[Any],
        loss: Loss | None,
        watch_nan: bool,
        around: Surroundings,
        clock: StepClock,
    ) -> ProcessRun:
        """Do one step, in the worker thread, on the lane's stream: what is read of a device is there."""
        with ExitStack() as stack:
            self._lane.enter(stack)
            # [1] does everybody mean the same step?
            shapes = self._shapes(inputs, around, learning=loss is not None)
            self._agree(call, shapes, inputs, loss)
            if loss is not None:
                loss.require()
            own = [inputs[microbatch] for microbatch in self._part.microbatches]
            counts = [len(tensors_of(each)[0]) for each in own]
            around.enter(stack)
            # [2] what will travel?
            if shapes not in self._forms:
                place = (self._part, self._place, self._runners, self._lane, self._connections.pipeline)
                self._forms[shapes] = learn_forms(*place, own, counts, learning=loss is not None)
            # [3] PyTorch's runtime runs this rank's order
            row = [action for action in self._row if loss is not None or action.kind == "F"]
            ours = None if loss is None else loss.some(self._part.microbatches)
            passage = Passage(row, self._lane, clock, ours, counts, self._forms[shapes], watch_nan, around)
            self._go(passage, own)
            # [4] times and losses to everybody
            ran = share(self.group, self.plan, self._part, passage, loss, self._clock)
        self._passage = None
        return ran

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

    def _go(self, passage: Passage, inputs: list[Any]) -> None:
        """Run this rank's order."""
        self._passage = passage
        with ExitStack() as stack:
            for stage in self._stages:
                stage.begin(passage)
                stack.callback(stage.end)
            if passage.loss is None:
                stack.enter_context(torch.no_grad())
            else:
                for reducer in self._reducers.values():
                    reducer.begin()
                    stack.callback(reducer.end)
            if self._buffers is not None:
                self._buffers.begin()
            self._runtime([(each,) for each in inputs])
            for stage in self._stages:
                stage.marks.finish()
                stage.refuse_overwritten()
            if self._buffers is not None:
                self._buffers.end()

    def _receive(self, stage: int, microbatch: int, works: list[Any]) -> None:
        """Wait for what comes from another rank for an action: for an evaluation's backwards nothing does."""
        assert self._passage is not None
        marks = self._marks[stage].under_way(microbatch)
        if works or marks:
            self._passage.wait(works, marks)

    def _shapes(self, inputs: list[Any], around: Surroundings, *, learning: bool) -> str:
        """Return what the forms of the values that travel depend on."""
        modes = " ".join(_mode(runner.module) for runner in self._runners)
        words = [f"x {describe_batch(inputs)}", f"modes {modes}", "to learn" if learning else "to evaluate"]
        if learning:
            frozen = [_frozen(stage, runner.module) for stage, runner in enumerate(self._runners)]
            words += [f"frozen {', '.join(filter(None, frozen)) or 'nothing'}"]
            wants = [any(tensor.requires_grad for tensor in tensors_of(each)) for each in inputs]
            words += ["x wants a gradient"] if any(wants) else []
        words += [f"autocast {cast.args[0]} {cast.keywords['dtype']}" for cast in around.autocast]
        return "; ".join(words)

    @property
    def _computing(self) -> bool:
        return self._passage is not None and self._passage.computing

    def _describe(self) -> str:
        line = self._supervisor.line() if self._computing else ""
        return describe_step(self.plan, self._call, self._passage) + line

    def _progress(self) -> object:
        passage = self._passage
        return None if passage is None else (id(passage), passage.position, passage.computing)


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
