"""What the backward costs in two halves: `I` and then `W`, beside `B`; ours and PyTorch's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from native import linear_stack
from timing import one_thread
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import pipelab
from pipelab.engine.stage.autograd import run_backward
from pipelab.engine.stage.split_backward import input_gradients, weight_gradients

ROWS = 256
SIZES = ((1024, 41), (512, 81), (256, 201), (128, 401), (64, 401))
"""Width and rounds."""


def measure() -> dict[str, object]:
    """Return medians in milliseconds, one processor thread for each rank."""
    with one_thread():
        stages, steps = ([of(*size) for size in SIZES] for of in (_stage, _steps))
        return {"rows_of_a_microbatch": ROWS, "stages": stages, "steps": steps}


def _stage(width: int, rounds: int) -> dict[str, object]:
    """Measure one stage's backward, whole and in halves."""
    model = linear_stack(width)
    x, gradient = torch.randn(ROWS, width), torch.randn(ROWS, width)
    times: dict[str, list[float]] = {}

    def clocked(name: str, work: Callable[[], object]) -> object:
        began = time.perf_counter()
        result = work()
        times.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
        return result

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        return leaf, model(leaf)

    for _ in range(rounds + 1):
        leaf, made = forward()
        clocked("B", lambda made=made: run_backward((made,), (gradient,)))
        leaf, made = forward()
        _, left = clocked("I", lambda made=made, leaf=leaf: input_gradients((made,), (gradient,), (leaf,)))  # type: ignore[misc]
        clocked("W", lambda left=left: weight_gradients(left))
        leaf, made = forward()
        _, left = clocked(  # type: ignore[misc]
            "native I",
            lambda made=made, leaf=leaf: stage_backward_input([made], [gradient], [leaf], model.parameters()),
        )
        clocked("native W", lambda left=left: stage_backward_weight(model.parameters(), left))
    typical = {name: median(found[1:]) for name, found in times.items()}  # the first round warms up
    return {
        "width": width,
        "ms": typical,
        "over_b": _over(times["B"], times["I"], times["W"]),
        "native_over_b": _over(times["B"], times["native I"], times["native W"]),
    }


def _over(full: list[float], inputs: list[float], weights: list[float]) -> float:
    """Return the median over the rounds of two halves over the whole: what disturbs one round disturbs one ratio."""
    return median((one + other) / whole for whole, one, other in zip(full[1:], inputs[1:], weights[1:], strict=True))


def _steps(width: int, rounds: int) -> dict[str, object]:
    """Measure the backwards inside steps of eight micro-batches on one rank, with `B` and with `I` and `W` instead.

    The stack is the rank's second stage: nobody asks the first one for an input's gradient, so its `W` is all of `B`.
    """
    forwards = [action for m in range(8) for action in (pipelab.F(m, 0), pipelab.F(m, 1))]
    backwards = [action for m in range(8) for action in (pipelab.B(m, 1), pipelab.B(m, 0))]
    rows = [[*forwards, *backwards], [*forwards, *(half for action in backwards for half in _halves(action))]]
    stack = linear_stack(width)
    x, y = torch.randn(8 * ROWS, width), torch.randn(8 * ROWS, width)
    pipes = [
        pipelab.Pipeline([_Shift(width), stack], pipelab.Plan([row]), nn.functional.mse_loss, intra_op_threads=1)
        for row in rows
    ]
    over = []
    for _ in range(max(rounds // 3, 5) + 1):
        spent = []
        for pipe in pipes:
            stack.zero_grad()
            events = pipe.step(x, y).trace.events
            of_stack = [event for event in events if event.action.stage == 1 and event.action.kind != "F"]
            spent.append(sum(event.end - event.start for event in of_stack))
        over.append(spent[1] / spent[0])
    for pipe in pipes:
        pipe.close()
    return {"width": width, "over_b": median(over[1:])}


class _Shift(nn.Module):
    """Adds to its input what it learns: hardly any work."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


def _halves(action: pipelab.Action) -> tuple[pipelab.Action, ...]:
    if action.kind != "B":
        return (action,)
    return tuple(pipelab.Action(kind, action.microbatch, action.stage) for kind in ("I", "W"))


def report(found: dict[str, object]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "| width | B | I | W | (I + W) / B | (I + W) / B inside steps | PyTorch's own (I + W) / B |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for stage, step in zip(found["stages"], found["steps"], strict=True):  # type: ignore[call-overload]
        ms = stage["ms"]
        lines.append(
            f"| {stage['width']} | {ms['B']:.2f} ms | {ms['I']:.2f} ms | {ms['W']:.2f} ms | **{stage['over_b']:.3f}** "
            f"| **{step['over_b']:.3f}** | {stage['native_over_b']:.3f} |"
        )
    return "\n".join(lines)
