"""Both engines beside PyTorch's native schedules, for every schedule that PyTorch has: two ranks, side by side."""

from __future__ import annotations

from statistics import median

import torch
from native import NATIVE, RANKS, Native, linear_stack
from timing import in_turns, milliseconds, one_thread, timed
from torch import nn

import pipelab

BATCH = 256
MICROBATCHES = (4, 8)
SIZES = ((1024, 5, 2), (64, 8, 10))
"""Width, rounds, and steps in each round."""

HEADINGS = {"threads": "pipelab, threads", "torch": "pipelab, torch", "native": "PyTorch"}


def measure(*, quick: bool = False) -> dict[str, object]:
    """Return step times in milliseconds, by width, schedule, micro-batches and contender; quick ones mean nothing."""
    with one_thread():
        sizes = [(64, 1, 2)] if quick else SIZES
        return {"batch": BATCH, "ranks": RANKS, "rows": [row for size in sizes for row in _width(*size)]}


def _width(width: int, rounds: int, steps: int) -> list[dict[str, object]]:
    x, y = torch.randn(BATCH, width), torch.randn(BATCH, width)
    model = linear_stack(width)
    processes = Native(width, BATCH)
    names = [name for name in pipelab.schedules if name in NATIVE]
    rows = []
    for microbatches in MICROBATCHES:
        for name in names:
            plan = pipelab.schedules[name](RANKS, microbatches).plan()
            with pipelab.Pipeline(model, plan, nn.functional.mse_loss, ["cpu"] * RANKS, intra_op_threads=1) as pipe:
                sets = {"threads": lambda pipe=pipe: timed(model, lambda: pipe.step(x, y), steps)}
                for engine in ("torch", "native"):
                    sets[engine] = lambda name=name, m=microbatches, engine=engine: processes.steps(
                        name, m, steps, engine=engine
                    )
                times = in_turns(sets, rounds)
            typical = {engine: median(found) for engine, found in times.items()}
            rows.append(
                {
                    "width": width,
                    "schedule": name,
                    "microbatches": microbatches,
                    "ms": {engine: milliseconds(found) for engine, found in times.items()},
                    "over_native": {engine: typical["native"] / found for engine, found in typical.items()},
                }
            )
    processes.close()
    return rows


def report(found: dict[str, object]) -> str:
    """Return the figures as Markdown."""
    lines = []
    rows: list[dict] = found["rows"]  # type: ignore[assignment]
    for width in sorted({row["width"] for row in rows}, reverse=True):
        engines = list(rows[0]["ms"])
        ours = [engine for engine in engines if engine != "native"]
        lines += [
            f"**Width {width}**, milliseconds per step (median)",
            "",
            f"| schedule | M | {' | '.join(HEADINGS[engine] for engine in engines)} "
            f"| {' | '.join(f'PyTorch over {HEADINGS[engine]}' for engine in ours)} |",
            "|---" + "|---:" * (1 + len(engines) + len(ours)) + "|",
        ]
        for row in rows:
            if row["width"] == width:
                times = " | ".join(f"{row['ms'][engine]['median']:.2f}" for engine in engines)
                ratios = " | ".join(f"{row['over_native'][engine]:.2f}" for engine in ours)
                lines.append(f"| {row['schedule']} | {row['microbatches']} | {times} | {ratios} |")
        lines.append("")
    return "\n".join(lines).rstrip()
