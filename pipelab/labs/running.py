"""Run a plan on a model of equal layers, measured, predicted and verified."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pipelab.engine.emulation import emulated
from pipelab.engine.pipeline import Pipeline
from pipelab.engine.verification import Verification
from pipelab.errors import SplitError
from pipelab.plan import Plan
from pipelab.simulation import Cost, simulate
from pipelab.trace import Trace

__all__ = ["Result", "emulated_model", "linear_stack", "run"]


@dataclass(frozen=True, slots=True)
class Result:
    """A measured step, what its own action times predict for the schedule, the batch's loss, and the proof."""

    measured: Trace
    predicted: Trace
    loss: float
    proof: Verification


def linear_stack(width: int, depth: int, stages: int) -> nn.Sequential:
    """Return `depth` layers of Linear and ReLU, dealt out so that no stage begins with a ReLU."""
    if depth < stages:
        raise SplitError(f"{depth} layers are too few for {stages} stages: use --depth {stages} or more")
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))


def emulated_model(plan: Plan, forward_ms: float, backward_ms: float) -> nn.Sequential:
    """Return emulated stages for a plan."""
    return emulated(plan.stages, forward_ms, backward_ms)


def run(plan: Plan, model: nn.Module, shape: tuple[int, int], steps: int) -> Result:
    """Run a plan for some steps, always on the same batch; return the one of median length."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(*shape, generator=generator) for _ in range(2))
    with Pipeline(model, plan, nn.functional.mse_loss) as pipe:
        loss = pipe.step(x, y).loss.item()  # the first step warms up
        traces = sorted((pipe.step(x, y).trace for _ in range(steps)), key=lambda trace: trace.makespan)
        measured = traces[len(traces) // 2]
        proof = pipe.verify(x, y)
    return Result(measured, simulate(plan, Cost.fit(measured)), loss, proof)
