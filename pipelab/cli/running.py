"""Run plans on models of equal layers: measured, predicted and verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from pipelab.cli.believing import Watch
from pipelab.engine.emulation import EmulatedStage, emulated, instantly
from pipelab.engine.pipeline import Pipeline
from pipelab.engine.verify.verify import Verification
from pipelab.errors import SplitError, counted
from pipelab.plan.plan import Plan
from pipelab.simulation.clock import simulate
from pipelab.simulation.cost import Cost
from pipelab.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Job:
    """A plan to run on a model with a batch of a given shape.

    Jobs that run together may share a model if their plans have its stages on the same ranks.
    """

    plan: Plan
    model: nn.Module
    shape: tuple[int, int]

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, the same every time."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(*self.shape, generator=generator), torch.randn(*self.shape, generator=generator)

    def pipeline(self) -> Pipeline:
        """Return the pipeline that runs the plan on this machine's devices; emulated stages need no GPU."""
        sleeps = any(isinstance(layer, EmulatedStage) for layer in self.model.modules())
        return Pipeline(self.model, self.plan, nn.functional.mse_loss, ["cpu"] * self.plan.ranks if sleeps else None)


@dataclass(frozen=True, slots=True)
class Result:
    """What running a job gave.

    Attributes:
        measured: the step of median length.
        cost: the costs fitted from all steps.
        predicted: the schedule, simulated with them.
        loss: the batch's loss.
        proof: what `verify` found.
        core_share: for which fraction of their working time the ranks had a processor core; 1 on GPUs.
        others: which share of the processor other programs used while the steps ran.
    """

    measured: Trace
    cost: Cost
    predicted: Trace
    loss: float
    proof: Verification
    core_share: float
    others: float


def core_share(processor_seconds: float, traces: Sequence[Trace]) -> float:
    """Return for which fraction of their working time, from 0 to 1, the ranks of measured steps had a core."""
    working_seconds = sum(sum(trace.busy) for trace in traces) / 1e3
    return min(1.0, processor_seconds / working_seconds) if working_seconds else 1.0


def has_gpu() -> bool:
    """Return whether ranks run on GPUs here."""
    return torch.cuda.is_available()


def linear_stack(width: int, depth: int, stages: int) -> nn.Sequential:
    """Return `depth` layers of Linear and ReLU, grouped so that no stage begins with a ReLU."""
    if depth < stages:
        raise SplitError(f"too few layers for {counted(stages, 'stage')}, {depth}: use --depth {stages} or more")
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))


def make_jobs(
    plans: Sequence[Plan],
    shares: Sequence[int],
    width: int = 1024,
    depth: int = 8,
    batch: int = 256,
    emulate: tuple[float, float] | None = None,
) -> list[Job]:
    """Return what runs plans on a stack of linear layers, or on emulated devices."""
    if emulate is None:
        placements = [tuple(plan.replicas.values()) for plan in plans]
        models = {each: linear_stack(width, depth, len(each)) for each in set(placements)}
        return [Job(plan, models[each], (batch, width)) for plan, each in zip(plans, placements, strict=True)]
    forward, backward = emulate
    return [
        Job(plan, emulated(plan.stages, forward / share, backward / share), (batch, 1))
        for plan, share in zip(plans, shares, strict=True)
    ]


def run_all(jobs: Sequence[Job], steps: int, report: Callable[[str, float], None] = lambda *_: None) -> list[Result]:
    """Run each job for several steps, and return the step of median length of each.

    Several jobs take turns, one step each, so that other programs on the machine disturb all of them alike. Emulated
    stages take time only in the measured steps, not in the warm-up and in the verification.
    """
    turns, each = (1, steps) if len(jobs) == 1 else (steps, 1)
    traces: list[list[Trace]] = [[] for _ in jobs]
    losses, watches = [0.0 for _ in jobs], [Watch() for _ in jobs]
    share = 1 / (len(jobs) * (turns + 1))  # and one turn to verify the gradients
    results: list[Result] = []
    with ExitStack() as stack:
        pipes = [stack.enter_context(job.pipeline()) for job in jobs]
        for turn, (index, job) in product(range(turns), enumerate(jobs)):
            report(job.plan.name, (turn * len(jobs) + index) * share)
            x, y = job.batch()
            if turn == 0:
                with instantly(job.model):
                    pipes[index].step(x, y)  # the first step warms up
            with watches[index]:
                for _ in range(each):
                    step = pipes[index].step(x, y)
                    traces[index].append(step.trace)
                    losses[index] = step.loss.item()
        for index, (job, pipe) in enumerate(zip(jobs, pipes, strict=True)):
            report(f"verifying {job.plan.name}", (turns * len(jobs) + index) * share)
            x, y = job.batch()
            with instantly(job.model):
                proof = pipe.verify(x, y)
            measured = sorted(traces[index], key=lambda trace: trace.makespan)[len(traces[index]) // 2]
            cores = 1.0 if has_gpu() else core_share(watches[index].own, traces[index])
            cost = Cost.fit(traces[index])
            others = watches[index].others()
            results.append(Result(measured, cost, simulate(job.plan, cost), losses[index], proof, cores, others))
    return results
