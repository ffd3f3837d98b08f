"""Measure things in turns, so that a noisy moment disturbs all of them alike."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from statistics import median, quantiles

import torch
from torch import nn


@contextmanager
def one_thread() -> Iterator[None]:
    """Give each operation of this thread one processor thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def in_turns(sets: dict[str, Callable[[], list[float]]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every step of every set of steps, the first round, which warms up, left out."""
    times: dict[str, list[float]] = {name: [] for name in sets}
    for number in range(rounds + 1):
        for name, run in sets.items():
            found = run()
            if number:
                times[name].extend(found)
    return times


def timed(model: nn.Module, step: Callable[[], object], count: int) -> list[float]:
    """Return the seconds of each of some steps of a model, its gradients cleared before each."""
    times = []
    for _ in range(count):
        model.zero_grad()
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times


def milliseconds(times: list[float]) -> dict[str, float]:
    """Return the median, the quartiles and the least of times, in milliseconds."""
    low, _, high = quantiles(times, n=4)
    return {"median": 1e3 * median(times), "quartile_1": 1e3 * low, "quartile_3": 1e3 * high, "least": 1e3 * min(times)}


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
