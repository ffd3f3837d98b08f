"""How close emulated devices come to the simulation: 8 ranks, 32 micro-batches."""

from __future__ import annotations

from statistics import median

import torch
from torch import nn

import pipelab

SETTINGS = ((20.0, 40.0, 5), (5.0, 10.0, 9))


def measure() -> dict[str, object]:
    """Return measured over simulated makespans."""
    rows = []
    for forward, backward, steps in SETTINGS:
        for name in ("gpipe", "1f1b"):
            plan = pipelab.schedules[name](8, 32).plan()
            ideal = pipelab.simulate(plan, pipelab.Cost(forward=forward, backward=backward, unit="ms")).makespan
            batch = torch.ones(32, 1)
            with pipelab.Pipeline(pipelab.emulated(8, forward, backward), plan, nn.functional.mse_loss) as pipe:
                pipe.step(batch, batch)
                spans = [pipe.step(batch, batch).trace.makespan for _ in range(steps)]
            rows.append(
                {
                    "schedule": name,
                    "forward_ms": forward,
                    "backward_ms": backward,
                    "simulated_ms": ideal,
                    "measured_ms": median(spans),
                    "excess": median(spans) / ideal - 1,
                    "worst_excess": max(spans) / ideal - 1,
                }
            )
    return {"ranks": 8, "microbatches": 32, "rows": rows}


def report(found: dict[str, object]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "| schedule | forward / backward | simulated | measured | longer by | worst step |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines.extend(
        f"| {row['schedule']} | {row['forward_ms']:g} / {row['backward_ms']:g} ms | {row['simulated_ms']:.0f} ms "
        f"| {row['measured_ms']:.1f} ms | **{row['excess']:.2%}** | {row['worst_excess']:.2%} |"
        for row in found["rows"]  # type: ignore[attr-defined]
    )
    return "\n".join(lines)
