"""Both engines beside PyTorch's native schedules, for every schedule that PyTorch has: two ranks, side by side."""

from __future__ import annotations

from statistics import median

import torch
from native import NATIVE, RANKS, Native, linear_stack
from timing import in_turns, milliseconds, one_thread, timed
from torch import nn

import pipelab

BATCH = 256
MICROBATCHES = (2, 4, 8)
SIZES = ((1024, 5, 2), (256, 8, 5), (64, 8, 10))
"""Width, rounds, and steps in each round."""
LIKE_FOR_LIKE = ("gpipe", "1f1b")
"""The schedules that are measured at every width, with every number of micro-batches; others at `OTHERS` only."""
OTHERS = {(width, microbatches) for width in (1024, 64) for microbatches in (4, 8)}

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
    rows = []
    for microbatches in MICROBATCHES:
        for name in NATIVE if (width, microbatches) in OTHERS else LIKE_FOR_LIKE:
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
    rows: list[dict] = found["rows"]  # type: ignore[assignment]
    lines = [
        "**Like for like**: two processes on both sides; milliseconds per step, median and least",
        "",
        "| schedule | width | M | pipelab, torch | PyTorch | PyTorch over pipelab: medians | least |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in LIKE_FOR_LIKE:
        for row in (row for row in rows if row["schedule"] == name):
            ours, theirs = row["ms"]["torch"], row["ms"]["native"]
            both = " | ".join(f"{each['median']:.2f}, {each['least']:.2f}" for each in (ours, theirs))
            ratios = " | ".join(f"{theirs[key] / ours[key]:.2f}" for key in ("median", "least"))
            lines.append(f"| {name} | {row['width']} | {row['microbatches']} | {both} | {ratios} |")
    lines.append("")
    for width in sorted({width for width, _ in OTHERS} & {row["width"] for row in rows}, reverse=True):
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
