"""How many bytes each rank of the demo holds at most: predicted from one micro-batch, and measured in a step."""

from __future__ import annotations

import torch

import pipelab
from pipelab.cli.demo import Setting, next_byte_loss

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
PARTS = ("activations", "total")
SETTING = Setting()
"""What `pipelab demo` trains."""


def measure() -> dict[str, object]:
    """Return the bytes that each rank holds at its peak, in a step with Adam's state: predicted, and measured."""
    x, y = next(SETTING.batches())
    rows = []
    for name in SCHEDULES:
        schedule, model = pipelab.schedules[name](SETTING.ranks, SETTING.microbatches), SETTING.model()
        optimizer = torch.optim.Adam(model.parameters())
        with pipelab.Pipeline(model, schedule, next_byte_loss, ["cpu"] * SETTING.ranks) as pipe:
            pipe.step(x, y)
            optimizer.step()
            predicted = pipelab.memory_use(schedule, pipe.memory(x, y, optimizer)).at_peak
            measured = pipe.memory_use(x, y, optimizer).at_peak
        for rank, both in enumerate(zip(predicted, measured, strict=True)):
            rows.append(
                {"schedule": name, "rank": rank, **{part: [getattr(each, part) for each in both] for part in PARTS}}
            )
    return {"rows": rows}


def report(found: dict[str, object]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "| schedule | rank | activations, predicted | measured | everything, predicted | measured | difference |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in found["rows"]:  # type: ignore[attr-defined]
        figures = [f"{size / 1e6:.2f} MB" for part in PARTS for size in row[part]]
        predicted, measured = row["total"]
        cells = [f"`{row['schedule']}`", str(row["rank"]), *figures, f"{predicted / measured - 1:+.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
