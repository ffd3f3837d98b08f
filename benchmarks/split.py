"""What the backward costs in two halves: `I` and then `W`, beside `B`; ours and PyTorch's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from native import linear_stack
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import pipelab
from pipelab.engine.autograd import run_backward
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
    """Measure whole steps with `B`, and with `I` and `W` in the place of each `B`, on one rank and on two."""
    schedules = {"one rank": pipelab.GPipe(1, 8), "1F1B, two ranks": pipelab.OneFOneB(2, 8)}
    return {"width": width, **{name: _in_steps(width, rounds, each.plan()) for name, each in schedules.items()}}


def _in_steps(width: int, rounds: int, whole: pipelab.Plan) -> dict[str, object]:
    """Measure the backwards inside a plan's steps, and the steps."""
    halves = [[each for action in row for each in _halves(action)] for row in whole.rows]
    model, x, y = linear_stack(width), torch.randn(8 * ROWS, width), torch.randn(8 * ROWS, width)
    plans = (whole, pipelab.Plan(halves, whole.stages, whole.microbatches))
    pipes = [pipelab.Pipeline(model, plan, nn.functional.mse_loss, intra_op_threads=1) for plan in plans]
    backwards, makespans = [], []
    for _ in range(max(rounds // 3, 5) + 1):
        traces = []
        for pipe in pipes:
            model.zero_grad()
            traces.append(pipe.step(x, y).trace)
        full, split = ([event for event in trace.events if event.action.kind in "BIW"] for trace in traces)
        backwards.append(tuple(sum(event.end - event.start for event in events) for events in (full, split)))
        makespans.append((traces[0].makespan, traces[1].makespan))
    for pipe in pipes:
        pipe.close()
    return {
        "backward_over_b": median(split / full for full, split in backwards[1:]),
        "step_over_b": median(split / full for full, split in makespans[1:]),
    }


def _halves(action: pipelab.Action) -> tuple[pipelab.Action, ...]:
    if action.kind != "B":
        return (action,)
    return tuple(pipelab.Action(kind, action.microbatch, action.stage) for kind in ("I", "W"))


def report(found: dict[str, object]) -> str:
    """Return the figures as Markdown."""
    lines = ["| width | B | I | W | (I + W) / B | PyTorch's own (I + W) / B |", "|---:|---:|---:|---:|---:|---:|"]
    for stage in found["stages"]:  # type: ignore[attr-defined]
        ms = stage["ms"]
        lines.append(
            f"| {stage['width']} | {ms['B']:.2f} ms | {ms['I']:.2f} ms | {ms['W']:.2f} ms | **{stage['over_b']:.3f}** "
            f"| {stage['native_over_b']:.3f} |"
        )
    lines += [
        "",
        "| width | (I + W) / B inside steps, one rank | 1F1B on two ranks | the whole 1F1B step |",
        "|---:|---:|---:|---:|",
    ]
    for step in found["steps"]:  # type: ignore[attr-defined]
        one, two = step["one rank"], step["1F1B, two ranks"]
        lines.append(
            f"| {step['width']} | **{one['backward_over_b']:.3f}** | {two['backward_over_b']:.3f} "
            f"| {two['step_over_b']:.3f} |"
        )
    return "\n".join(lines)
