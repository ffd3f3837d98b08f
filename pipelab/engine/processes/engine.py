"""The torch engine: this process's part of a plan, on PyTorch's pipelining runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.lanes import Lane
from pipelab.engine.processes.agreement import agree, describe_batch, sample_of
from pipelab.engine.processes.clocks import Clock, set_clocks
from pipelab.engine.processes.forms import Form
from pipelab.engine.processes.gathering import ProcessRun, share
from pipelab.engine.processes.learning import learn_forms
from pipelab.engine.processes.lowering import lowered
from pipelab.engine.processes.passage import Passage
from pipelab.engine.processes.stages import ProcessStage
from pipelab.engine.processes.watch import Doing, Watch
from pipelab.engine.processes.wording import awaited_rank, doing
from pipelab.engine.stage import Loss, Stage
from pipelab.engine.surroundings import PLAIN, Surroundings
from pipelab.engine.trees import tensors_of
from pipelab.plan import Plan

__all__ = ["TorchEngine"]

_CLOCKS_SECONDS = 10.0
"""How long a comparison of clocks holds: those of two machines may drift by microseconds per second."""


class TorchEngine:
    """Runs one rank of a plan in this process; the other ranks run in others.

    Args:
        plan: the plan.
        runners: all stages, in order.
        rank: this process's rank.
        lane: what it runs on.
        group: all processes, for what is small and on the processor.
        pipeline: the pipeline's processes, for what travels between stages.
        carrier: the device on which values travel.
        watch: looks after this process.
        labels: what each rank runs on and in.
    """

    def __init__(
        self,
        plan: Plan,
        runners: Sequence[Stage],
        rank: int,
        lane: Lane,
        group: dist.ProcessGroup,
        pipeline: dist.ProcessGroup,
        carrier: torch.device,
        watch: Watch,
        labels: list[str],
    ) -> None:
        """Lower the plan onto PyTorch's runtime."""
        self.plan = plan
        self.runners = runners
        self.rank = rank
        self.lane = lane
        self.group = group
        self.pipeline = pipeline
        self.watch = watch
        self.labels = labels
        action = plan.program.numbering.action
        self._row = [action(code) for code in plan.program.rows[rank]]
        self._stages = [
            ProcessStage(runners[stage], plan.stages, rank, plan.ranks, pipeline, carrier)
            for stage, ranks in plan.replicas.items()
            if rank in ranks
        ]
        self._runtime = lowered(plan, rank, self._stages, self._receive)
        self._forms: dict[tuple[str, tuple[int, ...]], dict[int, list[Form]]] = {}
        self._clock = Clock()
        self._passage: Passage | None = None
        self._call = "begin"
        self._doing = Doing(self._told, self._progress, lambda: awaited_rank(self.plan, self._passage))

    def run(
        self, inputs: list[Any], loss: Loss | None, *, watch_nan: bool = False, around: Surroundings = PLAIN
    ) -> ProcessRun:
        """Run this process's part of all micro-batches; return what all processes made of it.

        Raises:
            BatchError: if the processes were given different batches, or do not make the same call.
            StageError: if a stage or the loss raised.
            RankError: if another process failed, or is gone.
            StepTimeoutError: if nothing moved for `timeout` seconds.
            PipelineClosedError: if the pipeline was closed, or has failed before.
        """
        self._call = "forward(x)" if loss is None else "step(x, y)"
        self.lane.begin()
        ran: ProcessRun = self.attend(partial(self._run, inputs, loss, watch_nan, around))
        self.lane.finish([ran.outputs, [] if loss is None else loss.values])
        return ran

    def attend(self, work: Callable[[], Any], call: str | None = None) -> Any:
        """Do something that communicates, looked after."""
        self._call = call or self._call
        return self.watch.attend(work, self._doing)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the pipeline; if the caller's own code failed, tell the others of what."""
        self.watch.close(error)

    def _run(self, inputs: list[Any], loss: Loss | None, watch_nan: bool, around: Surroundings) -> ProcessRun:
        """Do one step, in the worker thread."""
        counts = [len(tensors_of(each)[0]) for each in inputs]
        # [1] does everybody mean the same step?
        about = self._about(inputs, loss, around)
        sample = sample_of(inputs) + (b"" if loss is None else sample_of(loss.targets))
        old = time.perf_counter_ns() - self._clock.set_at > _CLOCKS_SECONDS * 1e9
        if agree(self.group, self._call, about, sample, int(old))[0]:
            self._clock = set_clocks(self.group)
        with ExitStack() as stack:
            self.lane.enter(stack)
            around.enter(stack)
            # [2] what will travel?
            key = (about, tuple(sorted(set(counts))))
            if key not in self._forms:
                place = (self.plan, self.rank, self.runners, self.lane, self.pipeline)
                self._forms[key] = learn_forms(*place, inputs, counts, learning=loss is not None)
            row = self._row if loss is not None else [action for action in self._row if action.kind == "F"]
            passage = Passage(row, self.lane, loss, counts, self._forms[key], watch_nan, around)
            # [3] PyTorch's runtime runs this rank's order
            self._passage = passage
            for stage in self._stages:
                stage.begin(passage)
            if loss is None:
                stack.enter_context(torch.no_grad())
            self._runtime([(each,) for each in inputs])
        # [4] times and losses to everybody
        ran = share(self.group, self.plan, passage, self._clock)
        self._passage = None
        return ran

    def _receive(self, stage: int, microbatch: int, wait: Callable[[], None]) -> None:  # noqa: ARG002 - the order says which
        assert self._passage is not None
        self._passage.wait(wait)

    def _about(self, inputs: list[Any], loss: Loss | None, around: Surroundings) -> str:
        """Return what must be the same about a step on every process."""
        modes = "".join("te"[not runner.module.training] for runner in self.runners)
        words = [f"x {describe_batch(inputs)}", f"modes {modes}"]
        if loss is not None:
            words.append(f"y {describe_batch(loss.targets)}, weights {loss.weights}")
        words += [f"autocast {cast.args[0]} {cast.keywords['dtype']}" for cast in around.autocast]
        return "; ".join(words)

    def _told(self) -> str:
        passage = self._passage
        return doing(self.plan, self._call, passage) + (self.watch.line() if passage and passage.computing else "")

    def _progress(self) -> object:
        passage = self._passage
        return None if passage is None else (id(passage), passage.position, passage.computing)
