"""How long drawing 1F1B takes, and how large the files are."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import pipelab

SIZES = ((8, 64), (16, 256), (32, 1024))


def measure() -> dict[str, object]:
    """Return seconds and bytes by size and format."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks, microbatches in SIZES:
            for suffix in ("txt", "svg", "html"):
                path = Path(folder) / f"trace.{suffix}"
                times = []
                for _ in range(4):
                    trace = pipelab.simulate(pipelab.OneFOneB(ranks, microbatches))
                    began = time.perf_counter()
                    trace.save(path)
                    times.append(time.perf_counter() - began)
                rows.append(
                    {
                        "ranks": ranks,
                        "microbatches": microbatches,
                        "format": suffix,
                        "seconds": median(times[1:]),
                        "bytes": path.stat().st_size,
                    }
                )
    return {"rows": rows}


def report(found: dict[str, object]) -> str:
    """Return the figures as Markdown."""
    lines = ["| 1F1B, ranks x micro-batches | text | SVG | HTML page |", "|---|---:|---:|---:|"]
    for ranks, microbatches in SIZES:
        cells = [
            f"{row['seconds']:.2f} s, {row['bytes'] / 1e3:,.0f} kB"
            for row in found["rows"]  # type: ignore[attr-defined]
            if (row["ranks"], row["microbatches"]) == (ranks, microbatches)
        ]
        lines.append(f"| {ranks} x {microbatches} | {' | '.join(cells)} |")
    return "\n".join(lines)
