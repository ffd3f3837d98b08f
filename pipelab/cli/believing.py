"""Whether a measured figure can be believed: it is near its prediction, and other programs left the processor alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

_OFF, _NOTICED = 0.15, 0.1
"""Beyond which part of its prediction a figure is off, and beyond which share of the processor programs disturb it."""

LEGEND = (
    "*: more than 15 % off its prediction, or measured while other programs used over 10 % of the processor: not "
    "reliable."
)
"""What the mark of a figure that is not believed means."""

BUSY = (
    "The machine is busy: no time with a * is reliable. Close other programs and measure again, or trust the predicted "
    "figures."
)
"""What is said instead if none is believed."""


def believable(measured: float, predicted: float | None, others: float) -> bool:
    """Return whether a measured figure can be believed."""
    return others <= _NOTICED and (predicted is None or abs(measured - predicted) <= _OFF * abs(predicted))


class Watch:
    """Watch the processor while steps run: `with watch:` adds a span.

    Attributes:
        own: processor seconds of this process.
    """

    def __init__(self) -> None:
        self.own = self._used = self._whole = 0.0

    def __enter__(self) -> None:
        self._before = _processor()

    def __exit__(self, *_: object) -> None:
        own, used, whole = (now - before for now, before in zip(_processor(), self._before, strict=True))
        self.own, self._used, self._whole = self.own + own, self._used + used, self._whole + whole

    def others(self, own: float | None = None) -> float:
        """Return the share of the processor that other programs used, from 0 to 1; 0 without `/proc/stat`."""
        used = self._used - (self.own if own is None else own) - (os.cpu_count() or 1) / _TICKS  # a tick may be cut
        return max(0.0, used / self._whole) if self._whole else 0.0


_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
"""The kernel's counts in a second."""


def _processor() -> tuple[float, float, float]:
    """Return processor seconds so far: this process's, all programs', and those that all cores had, idle or not."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]]
    except OSError:  # another system
        ticks = [0] * 8
    idle, waiting = ticks[3:5]
    return time.process_time(), (sum(ticks) - idle - waiting) / _TICKS, sum(ticks) / _TICKS
