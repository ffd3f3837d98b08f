"""What the backward costs in two halves: `I` and then `W`, beside `B`; ours and PyTorch's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from native import linear_stack
from timing import in_turns, timed
from torch import nn

import pipelab
from pipelab.engine.autograd import run_backward
from pipelab.engine.native import load
from pipelab.engine.split_backward import input_gradients, weight_gradients

ROWS = 256
SIZES = ((1024, 41), (512, 81), (256, 201))
"""Width and rounds."""


def measure() -> dict[str, object]:
    """Return medians in milliseconds, one processor thread for each rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {
            "rows_of_a_microbatch": ROWS,
            "stages": [_stage(*size) for size in SIZES],
            "steps": [_steps(*size) for size in SIZES],
        }
    finally:
        torch.set_num_threads(threads)


def _stage(width: int, rounds: int) -> dict[str, object]:
    """Measure one stage's backward, whole and in halves."""
    model = linear_stack(width)
    x, gradient = torch.randn(ROWS, width), torch.randn(ROWS, width)
    native = load()
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
            lambda made=made, leaf=leaf: native.stage_backward_input([made], [gradient], [leaf], model.parameters()),
        )
        clocked("native W", lambda left=left: native.stage_backward_weight(model.parameters(), left))
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
    """Measure whole steps of 1F1B on two ranks, with `B`, and with `I` and `W` in the place of each `B`."""
    whole = pipelab.OneFOneB(2, 8).plan()
    halves = [[each for action in row for each in _halves(action)] for row in whole.rows]
    model, x, y = linear_stack(width), torch.randn(8 * ROWS, width), torch.randn(8 * ROWS, width)
    plans = {"B": whole, "I and W": pipelab.Plan(halves, 2, 8)}
    pipes = {
        name: pipelab.Pipeline(model, plan, nn.functional.mse_loss, intra_op_threads=1) for name, plan in plans.items()
    }

    sets = {name: lambda pipe=pipe: timed(model, lambda: pipe.step(x, y), 1) for name, pipe in pipes.items()}
    times = in_turns(sets, max(rounds // 3, 5))
    for pipe in pipes.values():
        pipe.close()
    typical = {name: 1e3 * median(found) for name, found in times.items()}
    return {"width": width, "ms": typical, "over_b": typical["I and W"] / typical["B"]}


def _halves(action: pipelab.Action) -> tuple[pipelab.Action, ...]:
    if action.kind != "B":
        return (action,)
    return tuple(pipelab.Action(kind, action.microbatch, action.stage) for kind in ("I", "W"))


def report(found: dict[str, object]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "| width | B | I | W | (I + W) / B | PyTorch's own (I + W) / B | 1F1B step, I and W over B |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for stage, step in zip(found["stages"], found["steps"], strict=True):  # type: ignore[call-overload]
        ms = stage["ms"]
        lines.append(
            f"| {stage['width']} | {ms['B']:.2f} ms | {ms['I']:.2f} ms | {ms['W']:.2f} ms | **{stage['over_b']:.3f}** "
            f"| {stage['native_over_b']:.3f} | {step['over_b']:.3f} |"
        )
    return "\n".join(lines)
