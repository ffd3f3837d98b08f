"""Orders and transports on gloo: makespans as pipelab predicts them, and of four processes whose actions sleep."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pipelab

SCRIPT = Path(__file__).parents[1] / "tests" / "scripts" / "gloo_rows.py"
ON_GLOO = {"posted": "buffered", "holding": "holding", "blocking": "rank"}
PLANS = {"1f1b": (4, 8), "interleaved-1f1b": (4, 8)}
ORDERS = ("pytorch", "at-use", "deferred", "by-time")


def measure(quick: bool = False) -> dict[str, object]:
    """Return, for each plan, order and way to send, the makespan: predicted, and on gloo."""
    unit, times = (0.002, 1) if quick else (0.02, 3)
    rows = []
    with subprocess.Popen([sys.executable, SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as real:
        for name, size in PLANS.items():
            plan = pipelab.schedules[name](*size).plan()
            for order in ORDERS:
                for how, transport in ON_GLOO.items():
                    hangs = bool(pipelab.check(plan, order=order, transport=transport))
                    wire = {"order": order, "transport": transport}
                    predicted = None if hangs else pipelab.simulate(plan, pipelab.Cost(per="stage"), **wire).makespan
                    lowered = pipelab.lower(plan, order=order, transport=transport).rows
                    found = []
                    for _ in range(1 if hangs else times):
                        job = {"rows": lowered, "how": how, "unit": unit}
                        real.stdin.write(json.dumps([job]) + "\n")
                        real.stdin.flush()
                        found += json.loads(real.stdout.readline())
                    measured = None if None in found else median(found)
                    rows.append([name, f"{size[0]} x {size[1]}", order, how, transport, predicted, measured])
        real.stdin.close()
    return {"unit_ms": 1000 * unit, "rows": rows}


def report(found: dict[str, object]) -> str:
    """Return the table."""
    lines = [
        "Four processes on gloo run the rows that `pipelab.lower` makes. An action sleeps: a forward of a stage for",
        f"one unit of {found['unit_ms']:g} ms, a backward for two. A rank sends and receives in one of three ways:",
        "",
        "- *posted*: `isend` and `irecv`, and a wait before the action that needs the value, as PyTorch's runtime does",
        "- *holding*: `isend`, and `recv`, which holds the rank",
        "- *blocking*: `send` and `recv`. On the transport `rank`, a rank computes while its transfers wait. A script",
        "  with blocking sends cannot: it hangs where the model does, and takes longer where neither hangs.",
        "",
        "| schedule | ranks x micro-batches | order | on gloo | transport | predicted, units | measured | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for *about, predicted, measured in found["rows"]:
        cells = ["hangs" if each is None else f"{each:.1f}" for each in (predicted, measured)]
        both = predicted is not None and measured is not None
        cells.append(f"{100 * (measured / predicted - 1):+.1f} %" if both else "")
        lines.append(f"| {' | '.join([*about, *cells])} |")
    return "\n".join(lines)
