"""How soon every process says why, and ends, when rank 1 of four goes wrong under torchrun: see `faulty.py`."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("faulty.py")
RANKS = 4
FAULTS = {
    "raises": "a stage raises",
    "hangs": "a stage hangs, with `timeout=5`",
    "shape": "a stage's output has another shape than before",
    "plan": "a process has another plan",
    "version": "a process has another torch version",
    "model": "a process has a model of another shape",
}


def measure(quick: bool = False) -> dict[str, object]:
    """Return, for each fault, the seconds until the last survivor has said why, and until all have ended."""
    rows = []
    for fault, words in FAULTS.items():
        runs = [_run(fault) for _ in range(1 if quick else 5)]
        rows.append({"fault": words, "told": [told for told, _ in runs], "ended": [ended for _, ended in runs]})
    return {"ranks": RANKS, "rows": rows}


def _run(fault: str) -> tuple[float, float]:
    """Return the two times of one run.

    A survivor has spoken when a line is read in which it says what it was doing.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    began, spoken = time.monotonic(), {}
    with subprocess.Popen([*command, str(SCRIPT), fault], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            now = time.monotonic()
            if line == "FAULT\n":
                began, spoken = now, {}
            for rank in (0, 2, 3):
                if re.search(rf"^  rank {rank} (waits|was|is)\b", line):
                    spoken.setdefault(rank, now - began)
        process.wait(60)
        ended = time.monotonic() - began
    if len(spoken) < RANKS - 1:
        raise RuntimeError(f"{fault}: only ranks {sorted(spoken)} said why")
    return max(spoken.values()), ended


def report(found: dict[str, object]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "| what goes wrong on rank 1 | the others have said why after | all processes have ended after |",
        "|---|---:|---:|",
    ]
    lines.extend(
        f"| {row['fault']} | {max(row['told']):.2f} s | {max(row['ended']):.1f} s |"
        for row in found["rows"]  # type: ignore[attr-defined]
    )
    return "\n".join(lines)
