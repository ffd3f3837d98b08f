"""How long planning, checking and simulating takes, up to half a million actions, and for a job of 1,024 ranks."""

# ruff: noqa: SLF001 - PyTorch keeps these names private, and it is them that are timed

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

from torch.distributed.pipelining import schedules as native

import pipelab

SIZES = ((8, 64), (16, 256), (32, 1024), (64, 4096))
JOB = (16, 512, 8, 64)
"""Ranks, micro-batches, stages per rank and replicas of interleaved 1F1B: as large as published jobs."""
ALONE = {
    "plan and check interleaved 1F1B, 128 x 4,096, 8 stages on each rank: 8.4 M actions": (
        "pass",
        "pipelab.Interleaved1F1B(128, 4096, 8).plan()",
    ),
    "peaks of `memory_use`, of a trace of 1F1B, 256 x 2,048: 1.05 M actions": (
        "trace = pipelab.simulate(pipelab.OneFOneB(256, 2048))",
        "pipelab.memory_use(trace, pipelab.Memory(weights=4000, activations=100)).peaks",
    ),
    "`frontier(8, 32)`": ("pass", "pipelab.frontier(8, 32)"),
    "`frontier(16, 64)`": ("pass", "pipelab.frontier(16, 64)"),
    "`frontier(32, 128)`": ("pass", "pipelab.frontier(32, 128)"),
}
"""What runs once, each in a process of its own: what comes before it, and what is timed."""
PEER_SECONDS = {(8, 64): 0.004, (16, 256): 0.039, (32, 1024): 0.82}
"""Build and simulate 1F1B: the fastest of three other simulators in November 2026 (PP-Schedule-Visualization)."""
KINDS = {"F": native.FORWARD, "B": native.FULL_BACKWARD}


def measure() -> dict[str, object]:
    """Return seconds per size, and what `import pipelab` costs."""
    rows = []
    for ranks, microbatches in SIZES:
        spans, beside = [], []
        for _ in range(9 if ranks < 64 else 3):
            spans.append(_once(ranks, microbatches))
            if ranks < 64:
                beside.append(_native_once(ranks, microbatches))
        planned, simulated, read = (median(column) for column in zip(*spans, strict=True))
        actions = 2 * ranks * microbatches
        whole = median(sum(span[:2]) for span in spans)
        rows.append(
            {
                "ranks": ranks,
                "microbatches": microbatches,
                "actions": actions,
                "plan_and_check_s": planned,
                "simulate_s": simulated,
                "without_events_s": whole,
                "read_events_s": read,
                "with_events_s": median(sum(span) for span in spans),
                "microseconds_per_action": 1e6 * whole / actions,
                "native_s": median(beside) if beside else None,
                "peer_s": PEER_SECONDS.get((ranks, microbatches)),
            }
        )
    alone = {name: _alone(*lines) for name, lines in ALONE.items()}
    job = median(_job() for _ in range(5))
    return {"sizes": rows, "job": JOB, "job_s": job, "alone": alone, "import_s": _import_seconds()}


def _job() -> float:
    """Return how long planning, checking and simulating all replicas of a large job takes."""
    began = time.perf_counter()
    ranks, microbatches, stages_per_rank, replicas = JOB
    schedule = pipelab.Interleaved1F1B(ranks, microbatches, stages_per_rank)
    pipelab.simulate(schedule, pipelab.Cost(all_reduce=1), replicas=replicas)
    return time.perf_counter() - began


def _once(ranks: int, microbatches: int) -> tuple[float, float, float]:
    began = time.perf_counter()
    plan = pipelab.OneFOneB(ranks, microbatches).plan()
    planned = time.perf_counter()
    trace = pipelab.simulate(plan)
    simulated = time.perf_counter()
    assert len(trace.events) == 2 * ranks * microbatches
    return planned - began, simulated - planned, time.perf_counter() - simulated


def _native_once(ranks: int, microbatches: int) -> float:
    """Return how long PyTorch takes to lower a finished order and to simulate it in unit steps."""
    plan = pipelab.OneFOneB(ranks, microbatches).plan()
    orders = {
        rank: [native._Action(each.stage, KINDS[each.kind], each.microbatch) for each in row]
        for rank, row in enumerate(plan.rows)
    }
    began = time.perf_counter()
    lowered = native._add_send_recv(orders, stage_to_rank=lambda stage: stage, num_stages=ranks)
    native._simulate_comms_compute(lowered, stage_to_rank=lambda stage: stage, num_stages=ranks)
    return time.perf_counter() - began


def _alone(before: str, line: str) -> list[float]:
    """Return the processor's seconds of a line in a new process, and the most memory that the process had, in GB."""
    code = (
        f"import pipelab, time; {before}; began = time.process_time(); {line}; print(time.process_time() - began); "
        "print(*(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"  # in kB
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, most = map(float, run.stdout.split())
    return [seconds, 1024 * most / 1e9]


def _import_seconds() -> float:
    code = "import time; began = time.perf_counter(); import pipelab; print(time.perf_counter() - began)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return median(float(run.stdout) for run in runs)


def report(found: dict[str, object]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "| 1F1B, ranks x micro-batches | actions | plan + check | simulate | together | and reading the events "
        "| µs per action | PyTorch, in turns | fastest peer |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["sizes"]:  # type: ignore[attr-defined]
        beside, peer = (f"{row[key]:.3f} s" if row[key] else "not run" for key in ("native_s", "peer_s"))
        lines.append(
            f"| {row['ranks']} x {row['microbatches']} | {row['actions']:,} | {row['plan_and_check_s']:.4f} s "
            f"| {row['simulate_s']:.4f} s | **{row['without_events_s']:.4f} s** | {row['with_events_s']:.4f} s "
            f"| {row['microseconds_per_action']:.2f} | {beside} | {peer} |"
        )
    lines.append("")
    if "job" in found:
        ranks, microbatches, stages_per_rank, replicas = found["job"]  # type: ignore[misc]
        lines.append(
            f"Interleaved 1F1B with {ranks} ranks x {stages_per_rank} stages, {microbatches} micro-batches and "
            f"{replicas} replicas, planned, checked and simulated in one call: {float(found['job_s']):.2f} s.\n"  # type: ignore[arg-type]
        )
    if "alone" in found:
        lines += ["| alone in a process | processor time | peak memory |", "|---|---:|---:|"]
        alone = found["alone"].items()  # type: ignore[attr-defined]
        lines += [f"| {name} | {seconds:.1f} s | {memory:.2f} GB |" for name, (seconds, memory) in alone]
        lines.append("")
    lines.append(f"`import pipelab` takes {1e3 * float(found['import_s']):.0f} ms and loads no torch.")  # type: ignore[arg-type]
    return "\n".join(lines)
