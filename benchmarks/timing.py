"""Measure things in turns, so that a noisy moment disturbs all of them alike."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from datetime import date
from statistics import median, quantiles

import torch


def in_turns(tasks: dict[str, Callable[[], object]], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Return the seconds that each task took in every round, warm-up rounds left out."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(warmup + rounds):
        for name, task in tasks.items():
            began = time.perf_counter()
            task()
            if number >= warmup:
                times[name].append(time.perf_counter() - began)
    return times


def milliseconds(times: list[float]) -> dict[str, float]:
    """Return the median and the quartiles of times, in milliseconds."""
    low, _, high = quantiles(times, n=4)
    return {"median": 1e3 * median(times), "quartile_1": 1e3 * low, "quartile_3": 1e3 * high}


def machine() -> dict[str, object]:
    """Return what a reader must know of the machine and the versions."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "processor": name,
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }
