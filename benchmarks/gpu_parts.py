"""The parts of the GPU's benchmark: each takes the setting and returns what it found."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
from gpu_setting import RANKS, SCHEDULES, Setting, Size, mse, sequence, typical

import pipelab
from pipelab.engine.native import local_stage, schedule_class


def makespans(setting: Setting, out: Path) -> dict[str, object]:
    """Every schedule on parts of the GPU and on streams, beside what costs fitted to the naive schedule predict."""
    cost = pipelab.Cost.fit(typical(setting.traces["naive"]))
    streams = setting.measured(setting.streams)
    shown, rows = [], []
    for name in SCHEDULES:
        trace = typical(setting.traces[name])
        predicted = pipelab.simulate(trace.plan, cost)
        shown.append(trace)
        rows.append(
            {
                "schedule": name,
                "predicted_ms": predicted.makespan,
                "measured_ms": trace.makespan,
                "error": predicted.makespan / trace.makespan - 1,
                "over_naive": typical(setting.traces["naive"]).makespan / trace.makespan,
                "predicted_bubble": predicted.bubble,
                "measured_bubble": trace.bubble,
                "on_streams_ms": typical(streams[name]).makespan,
            }
        )
        pipelab.compare(predicted, trace).save(out / f"gpu-{name}.svg")
    pipelab.compare(*shown).save(out / "gpu-schedules.svg")
    return {"forward_ms": cost.forward, "backward_ms": cost.backward, "rows": rows}


def fits(setting: Setting, out: Path) -> dict[str, object]:  # noqa: ARG001 - draws nothing
    """How far costs fitted to one schedule's trace are off for every schedule's makespan."""
    measured = {name: typical(traces) for name, traces in setting.traces.items()}
    errors = {
        fitted: {
            name: pipelab.simulate(trace.plan, pipelab.Cost.fit(measured[fitted])).makespan / trace.makespan - 1
            for name, trace in measured.items()
        }
        for fitted in SCHEDULES
    }
    spread = {
        name: max(trace.makespan for trace in traces) / min(trace.makespan for trace in traces) - 1
        for name, traces in setting.traces.items()
    }
    return {"error_by_fitted_schedule": errors, "spread_of_steps": spread}


def memory(setting: Setting, out: Path) -> dict[str, object]:  # noqa: ARG001 - draws nothing
    """The allocator's peak above what was held before a step, beside the activations that the plan says are held."""
    size = setting.large
    model = size.model()
    x, y = size.batch(setting.device)
    rows = []
    for name in SCHEDULES:
        with pipelab.Pipeline(
            model, pipelab.schedules[name](RANKS, size.microbatches), mse, devices=setting.streams
        ) as pipe:
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
        rows.append({"schedule": name, "peak_bytes": peak, "peak_activations": step.trace.peak_activations})
    return {"rows": rows}


def overhead(setting: Setting, out: Path) -> dict[str, object]:  # noqa: ARG001 - draws nothing
    """Four ranks on ordinary streams beside the same micro-batches in sequence on one stream."""
    return {name: _overhead(setting, size) for name, size in (("large", setting.large), ("small", setting.small))}


def _overhead(setting: Setting, size: Size) -> dict[str, object]:
    model = size.model().to(setting.device)
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
        return {name: _native(setting, size) for name, size in (("large", setting.large), ("small", setting.small))}
    finally:
        dist.destroy_process_group()


def _native(setting: Setting, size: Size) -> dict[str, object]:
    model = size.model().to(setting.device)
    x, y = size.batch(setting.device)
    modules = pipelab.split(model, into=RANKS).modules
    stages = [local_stage(module, index, RANKS, setting.device) for index, module in enumerate(modules)]
    runtime = schedule_class("ScheduleInterleaved1F1B")(stages, size.microbatches, loss_fn=mse)

    def step_natively() -> None:
        model.zero_grad()
        runtime.step(x, target=y, losses=[])

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
    return {"times": times, "largest_gradient_difference": max(norms)}


def tracer(setting: Setting, out: Path) -> dict[str, object]:
    """What taking times costs, and how the traced spans agree with the kernels that PyTorch's profiler saw."""
    return {
        "cost": {name: _tracing(setting, size) for name, size in (("large", setting.large), ("small", setting.small))},
        "kernels": _kernels(setting, out) if setting.device.type == "cuda" else None,
    }


def _tracing(setting: Setting, size: Size) -> dict[str, object]:
    model = size.model()
    x, y = size.batch(setting.device)
    plan = pipelab.OneFOneB(RANKS, size.microbatches)
    with (
        pipelab.Pipeline(model, plan, mse, devices=setting.parts) as traced,
        pipelab.Pipeline(model, plan, mse, devices=setting.parts) as untraced,
    ):
        for lane in untraced._engine.lanes:  # noqa: SLF001 - nobody else would want a pipeline without times
            lane.mark = lambda: None
        times = setting.in_turns({"on": lambda: traced.step(x, y), "off": lambda: untraced.step(x, y)}, size.rounds)
    extra = times["on"]["done_ms"] - times["off"]["done_ms"]
    return {"times": times, "us_per_action": 1e3 * extra / size.actions}


def _kernels(setting: Setting, out: Path) -> dict[str, object]:
    """Profile one step; compare each rank's spans with the kernels on its stream."""
    from torch.profiler import ProfilerActivity, profile

    size = setting.large
    model = size.model()
    x, y = size.batch(setting.device)
    with pipelab.Pipeline(model, pipelab.OneFOneB(RANKS, size.microbatches), mse, devices=setting.parts) as pipe:
        for _ in range(2):
            pipe.step(x, y)
        setting.wait()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step = pipe.step(x, y)
            setting.wait()
    trace = step.trace
    trace.save(out / "gpu-profiled.svg")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return compared(events, [[(event.start, event.end) for event in rank] for rank in _by_rank(trace)])


def _by_rank(trace: pipelab.Trace) -> list[list[pipelab.Event]]:
    return [[event for event in trace.events if event.rank == rank] for rank in range(RANKS)]


def compared(events: list[dict[str, object]], spans: list[list[tuple[float, float]]]) -> dict[str, object]:
    """Return how much of each rank's kernels lies in its spans.

    Args:
        events: the profiler's, with times in microseconds.
        spans: per rank, the start and end of each action in milliseconds, in order.
    """
    streams: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            start = 1e-3 * float(event["ts"])
            stream = event["args"]["stream"]
            streams[stream].append((start, start + 1e-3 * float(event["dur"])))
    busiest = sorted(streams.values(), key=lambda each: -sum(end - start for start, end in each))[: len(spans)]
    ranks = sorted((sorted(each) for each in busiest), key=lambda each: each[0][0])  # stage 0 begins first
    # The two clocks have different zeros: a span's end is recorded right behind its last kernel.
    apart = median(kernels[-1][1] - row[-1][1] for kernels, row in zip(ranks, spans, strict=True))
    rows = []
    for kernels, row in zip(ranks, spans, strict=True):
        moved = [(start - apart, end - apart) for start, end in kernels]
        busy = sum(end - start for start, end in moved)
        inside = sum(max(0.0, min(end, last) - max(start, first)) for start, end in moved for first, last in row)
        rows.append(
            {
                "kernels": len(kernels),
                "kernels_ms": busy,
                "spans_ms": sum(end - start for start, end in row),
                "inside_spans": inside / busy if busy else None,
            }
        )
    return {"rows": rows}
