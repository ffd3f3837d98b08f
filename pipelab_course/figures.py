"""The figures of the labs: how much memory a process has, and how a measured figure is marked and quoted."""

from __future__ import annotations

import re
from pathlib import Path

DOUBTED = "*: not reliable, because {}. Measure again on a quiet machine, or argue from what is counted."
"""What a mark means in a table without predictions."""


def kernel_bytes(path: str, key: str) -> int | None:
    """Return how much memory a file of Linux's /proc tells under a key, in bytes; `None` on another system."""
    try:
        found = re.search(rf"^{key}:\s*(\d+) kB", Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None


def quoted(measured: str, predicted: str | None, believed: bool) -> str:
    """Return a measured figure with its prediction, which comes first if the measured one is not believed."""
    shown = measured if believed else f"{measured}*"
    if predicted is None:
        return shown
    return f"{shown} (predicted {predicted})" if believed else f"predicted {predicted} (measured {shown})"
