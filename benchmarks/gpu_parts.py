"""The parts of the GPU's benchmark: each takes the setting and a folder for pictures, and returns what it found."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from gpu_kernels import profiled
from gpu_setting import RANKS, SCHEDULES, Setting, Size, mse, sequence, typical
from torch import nn
from torch.distributed.pipelining import PipelineStage

import pipelab
from pipelab.conformance.native import schedule_class


def makespans(setting: Setting, out: Path) -> dict[str, object]:
    """Every schedule on parts of the GPU and on streams, beside what costs fitted to one schedule's steps predict."""
    return {name: _makespans(setting, name, size, out) for name, size in setting.sizes("large", "middle").items()}


def _makespans(setting: Setting, name: str, size: Size, out: Path) -> dict[str, object]:
    traces = setting.measured(size, setting.parts)
    streams = setting.measured(size, setting.streams)
    measured = {schedule: typical(each) for schedule, each in traces.items()}
    naive = measured["naive"]
    cost = pipelab.Cost.fit(naive)
    alone = pipelab.simulate(naive.plan, cost).makespan
    rows = []
    for schedule, trace in measured.items():
        predicted = pipelab.simulate(trace.plan, cost)
        rows.append(
            {
                "schedule": schedule,
                "predicted_ms": predicted.makespan,
                "measured_ms": trace.makespan,
                "over_naive": naive.makespan / trace.makespan,
                "of_predicted_gain": (naive.makespan / trace.makespan) / (alone / predicted.makespan),
                "predicted_bubble": predicted.bubble,
                "measured_bubble": trace.bubble,
                "on_streams_ms": typical(streams[schedule]).makespan,
                "steps_differ_by": max(each.makespan for each in traces[schedule])
                / min(each.makespan for each in traces[schedule])
                - 1,
            }
        )
        pipelab.compare(predicted, trace).save(out / f"gpu-{name}-{schedule}.svg")
    pipelab.compare(*measured.values()).save(out / f"gpu-{name}-schedules.svg")
    errors = {
        fitted: {
            schedule: pipelab.simulate(trace.plan, pipelab.Cost.fit(measured[fitted])).makespan / trace.makespan - 1
            for schedule, trace in measured.items()
        }
        for fitted in SCHEDULES
    }
    return {
        "forward_ms": cost.forward,
        "backward_ms": cost.backward,
        "rows": rows,
        "error_by_fitted_schedule": errors,
    }


def memory(setting: Setting, out: Path) -> dict[str, object]:  # noqa: ARG001 - draws nothing
    """The allocator's peak above what was held before a step, beside the activations that the plan says are held."""
    size = setting.sizes("large")["large"]
    model = size.model(setting.device)
    x, y = size.batch(setting.device)
    each = _activations(setting, model, x.chunk(size.microbatches)[0])
    rows = []
    for name in SCHEDULES:
        schedule = pipelab.schedules[name](RANKS, size.microbatches)
        with pipelab.Pipeline(model, schedule, mse, devices=setting.streams) as pipe:
            pipe.step(x, y)
            setting.wait()
            peak = None
            if setting.device.type == "cuda":
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                step = pipe.step(x, y)
                setting.wait()
                peak = torch.cuda.max_memory_allocated() - before
            else:
                step = pipe.step(x, y)
        held = step.trace.peak_activations
        predicted = None if each is None else sum(held) * each
        rows.append({"schedule": name, "peak_bytes": peak, "peak_activations": held, "predicted_bytes": predicted})
    return {"bytes_of_an_activation": each, "rows": rows}


def _activations(setting: Setting, model: nn.Sequential, x: torch.Tensor) -> int | None:
    """Return the bytes that one stage keeps of one micro-batch between its forward and its backward."""
    if setting.device.type != "cuda":
        return None
    stage = pipelab.split(model, into=RANKS).modules[1]
    stage(x.clone().requires_grad_())  # what is reserved once and for all
    setting.wait()
    before = torch.cuda.memory_allocated()
    kept = stage(x.detach().requires_grad_())
    found = torch.cuda.memory_allocated() - before
    del kept
    return found


def overhead(setting: Setting, out: Path) -> dict[str, object]:  # noqa: ARG001 - draws nothing
    """Four ranks on ordinary streams beside the same micro-batches in sequence on one stream."""
    return {name: _overhead(setting, size) for name, size in setting.sizes("large", "middle", "small").items()}


def _overhead(setting: Setting, size: Size) -> dict[str, object]:
    model = size.model(setting.device)
    x, y = size.batch(setting.device)
    pipes = {
        name: pipelab.Pipeline(model, pipelab.schedules[name](RANKS, size.microbatches), mse, devices=setting.streams)
        for name in ("gpipe", "1f1b")
    }
    tasks = {"sequence": lambda: sequence(model, x, y, size.microbatches)}
    tasks |= {f"pipelab {name}": lambda pipe=pipe: pipe.step(x, y) for name, pipe in pipes.items()}
    times = setting.in_turns(tasks, size.rounds)
    for pipe in pipes.values():
        pipe.close()
    return {
        "actions": size.actions,
        "times": times,
        "over_sequence": {name: each["done_ms"] / times["sequence"]["done_ms"] for name, each in times.items()},
        "us_per_action_above_sequence": {
            name: 1e3 * (each["done_ms"] - times["sequence"]["done_ms"]) / size.actions for name, each in times.items()
        },
        "us_of_launching_per_action": {name: 1e3 * each["launched_ms"] / size.actions for name, each in times.items()},
    }


def native(setting: Setting, out: Path) -> dict[str, object]:  # noqa: ARG001 - draws nothing
    """PyTorch's own runtime with all stages in one process, one action after the other, beside the threads engine."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return {name: _native(setting, size) for name, size in setting.sizes("large", "middle", "small").items()}
    finally:
        dist.destroy_process_group()


def _native(setting: Setting, size: Size) -> dict[str, object]:
    model = size.model(setting.device)
    x, y = size.batch(setting.device)
    modules = pipelab.split(model, into=RANKS).modules
    stages = [PipelineStage(module, index, RANKS, setting.device) for index, module in enumerate(modules)]
    runtime = schedule_class("ScheduleInterleaved1F1B")(stages, size.microbatches, loss_fn=mse)

    def step_natively() -> None:
        model.zero_grad()
        runtime.step(x, target=y, losses=[])
        for stage in stages:  # else it holds on to its graph, and the next gradients are added on its stream
            stage.clear_runtime_states()

    def step(pipe: pipelab.Pipeline) -> None:
        model.zero_grad()
        pipe.step(x, y)

    plan = pipelab.OneFOneB(RANKS, size.microbatches)
    with (
        pipelab.Pipeline(model, plan, mse, devices=setting.streams) as streams,
        pipelab.Pipeline(model, plan, mse, devices=setting.parts) as parts,
    ):
        step(streams)
        ours = [parameter.grad.float() for parameter in model.parameters()]
        step_natively()  # the first one learns shapes
        step_natively()
        norms = [
            float((parameter.grad.float() - grad).norm() / grad.norm().clamp_min(1e-12))
            for parameter, grad in zip(model.parameters(), ours, strict=True)
        ]
        tasks = {
            "native": step_natively,
            "pipelab on streams": lambda: step(streams),
            "pipelab on parts": lambda: step(parts),
        }
        times = setting.in_turns(tasks, size.rounds)
    return {
        "times": times,
        "us_of_launching_per_action": {name: 1e3 * each["launched_ms"] / size.actions for name, each in times.items()},
        "largest_gradient_difference": max(norms),
    }


def tracer(setting: Setting, out: Path) -> dict[str, object]:  # noqa: ARG001 - draws nothing
    """What taking times costs."""
    return {name: _tracing(setting, size) for name, size in setting.sizes("large", "middle", "small").items()}


def _tracing(setting: Setting, size: Size) -> dict[str, object]:
    model = size.model(setting.device)
    x, y = size.batch(setting.device)
    plan = pipelab.OneFOneB(RANKS, size.microbatches)
    with (
        pipelab.Pipeline(model, plan, mse, devices=setting.parts) as traced,
        pipelab.Pipeline(model, plan, mse, devices=setting.parts) as untraced,
    ):
        for stream in untraced.engine.streams:
            stream.mark = lambda: None
        times = setting.in_turns({"on": lambda: traced.step(x, y), "off": lambda: untraced.step(x, y)}, 2 * size.rounds)
    extra = times["on"]["done_ms"] - times["off"]["done_ms"]
    return {"times": times, "share": extra / times["off"]["done_ms"], "us_per_action": 1e3 * extra / size.actions}


def kernels(setting: Setting, out: Path) -> dict[str, object] | None:
    """How the traced spans agree with the kernels that PyTorch's profiler saw."""
    return profiled(setting, out) if setting.device.type == "cuda" else None


def graphs(setting: Setting, out: Path) -> dict[str, object] | None:  # noqa: ARG001 - draws nothing
    """One stage's forward and backward of one micro-batch, launched kernel by kernel, and as CUDA graphs."""
    if setting.device.type != "cuda":
        return None
    return {name: _graphs(setting, size) for name, size in setting.sizes("large", "middle", "small").items()}


def _graphs(setting: Setting, size: Size) -> dict[str, object]:
    stage = pipelab.split(size.model(setting.device), into=RANKS).modules[1]
    x = size.batch(setting.device)[0].chunk(size.microbatches)[0].clone().requires_grad_()
    gradient = torch.ones_like(x)
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(stage), (x,))

    def both(module: nn.Module) -> None:
        module(x.detach().requires_grad_()).backward(gradient)

    times = setting.in_turns({"kernels": lambda: both(stage), "graphs": lambda: both(graphed)}, 3 * size.rounds)
    return {"times": times}


def practical(setting: Setting, out: Path) -> dict[str, object]:
    """Practical 9: a stack of linear layers on two parts, naive (A), GPipe (B), the single loop (C) and 1F1B."""
    width, rows = (16, 8) if setting.quick else (4096, 4096)
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width, device=setting.device), nn.ReLU())]
    model = nn.Sequential(*layers)
    x, y = (torch.randn(rows, width, device=setting.device) for _ in range(2))
    devices, rounds = setting.parts_for(2), 2 if setting.quick else 5
    found = []
    for microbatches in (1, 2, 4, 8):
        for name in ("naive",) if microbatches == 1 else ("naive", "gpipe", "delayed", "1f1b"):
            schedule = pipelab.schedules[name](2, microbatches)
            trace = typical(setting.steps(model, schedule, x, y, devices, rounds))
            with pipelab.Pipeline(model, schedule, mse, devices=devices) as pipe:
                loss = float(pipe.step(x, y).loss)
            found.append(
                {
                    "schedule": name,
                    "microbatches": microbatches,
                    "ms": trace.makespan,
                    "busy": 1 - trace.bubble,
                    "loss": loss,
                }
            )
            if microbatches == 4:
                trace.save(out / f"gpu-practical-{name}.svg")
    return {"rows": found, "spread_of_losses": max(row["loss"] for row in found) - min(row["loss"] for row in found)}


PARTS = {
    "makespans": makespans,
    "kernels": kernels,
    "memory": memory,
    "overhead": overhead,
    "tracer": tracer,
    "native": native,
    "practical": practical,
    "graphs": graphs,
}
"""In the order of what is worth most, should the time not suffice."""
