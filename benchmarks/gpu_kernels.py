"""Hold a traced step against the kernels that PyTorch's profiler saw in it."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from gpu_setting import RANKS, Setting, mse

import pipelab

_LONG_MS = 1.0
"""From which length on an action's span is held against its kernels'."""

_SLACK_MS = 0.02
"""How much earlier than its span a kernel may seem to begin: the profiler's clock is set against the GPU's."""


@dataclass(frozen=True)
class Span:
    """An action as the trace has it, in milliseconds."""

    kind: str
    start: float
    end: float


def profiled(setting: Setting, out: Path) -> dict[str, object]:
    """Profile one step; compare each rank's spans with the kernels on its stream."""
    from torch.profiler import ProfilerActivity, profile

    size = setting.sizes("large")["large"]
    model = size.model(setting.device)
    x, y = size.batch(setting.device)
    with pipelab.Pipeline(model, pipelab.OneFOneB(RANKS, size.microbatches), mse, devices=setting.parts) as pipe:
        with profile(activities=[ProfilerActivity.CUDA]):  # the first profile of a process is slow, and may miss things
            pipe.step(x, y)
            setting.wait()
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
    rows = [
        [Span(event.action.kind, event.start, event.end) for event in trace.events if event.rank == rank]
        for rank in range(RANKS)
    ]
    return compared(events, rows)


def compared(events: list[dict[str, object]], rows: list[list[Span]]) -> dict[str, object]:
    """Return how each rank's spans agree with its kernels.

    Args:
        events: the profiler's, with times in microseconds.
        rows: per rank, its actions in order.
    """
    streams: dict[object, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            start, where = 1e-3 * float(event["ts"]), event["args"]
            # Streams are numbered within their context, and every part of a GPU may be shown as a context of its own.
            stream = where.get("context"), where["stream"]
            streams[stream].append((start, start + 1e-3 * float(event["dur"]), str(event.get("name", ""))))
    busiest = sorted(streams.values(), key=lambda each: -sum(end - start for start, end, _ in each))[: len(rows)]
    ranks = sorted((sorted(each) for each in busiest), key=lambda each: each[0][0])  # stage 0 begins first
    if len(ranks) < len(rows):
        raise RuntimeError(f"the profiler saw kernels on {len(ranks)} streams, and there are {len(rows)} ranks")
    # The two clocks have different zeros: a span's end is recorded right behind its last kernel.
    apart = median(kernels[-1][1] - row[-1].end for kernels, row in zip(ranks, rows, strict=True))
    moved = [[(start - apart, end - apart, name) for start, end, name in kernels] for kernels in ranks]
    return {"rows": [_of_a_rank(kernels, row) for kernels, row in zip(moved, rows, strict=True)]}


def _of_a_rank(kernels: list[tuple[float, float, str]], row: list[Span]) -> dict[str, object]:
    """Return how the spans of one rank agree with the kernels of its stream."""
    of: list[list[tuple[float, float, str]]] = [[] for _ in row]
    starts = [span.start - _SLACK_MS for span in row]
    for kernel in kernels:
        of[max(0, bisect_right(starts, kernel[0]) - 1)].append(kernel)
    names: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for span, each in zip(row, of, strict=True):
        names[span.kind].add(tuple(name for _, _, name in each))
    # From its first kernel's start to its last one's end, an action is as long as its span.
    off = [
        abs((each[-1][1] - each[0][0]) / (span.end - span.start) - 1)
        for span, each in zip(row, of, strict=True)
        if each and span.end - span.start >= _LONG_MS
    ]
    busy = sum(end - start for start, end, _ in kernels)
    inside = sum(
        max(0.0, min(end, span.end) - max(start, span.start))
        for span, each in zip(row, of, strict=True)
        for start, end, _ in each
    )
    return {
        "kernels": len(kernels),
        "kernels_ms": busy,
        "spans_ms": sum(span.end - span.start for span in row),
        "inside_spans": inside / busy if busy else None,
        "actions_without_kernels": sum(not each for each in of),
        "same_kernels": all(len(each) == 1 for each in names.values()),
        "long_actions": len(off),
        "largest_difference": max(off, default=None),
    }
