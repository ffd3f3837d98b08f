"""What the GPU's benchmarks share: a stack of transformer blocks, a batch, the ranks' devices, how time is taken."""

from __future__ import annotations

import platform
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from importlib import metadata
from statistics import median

import torch
from torch import nn

import pipelab
from pipelab import Trace

RANKS = 4
SCHEDULES = ("naive", "gpipe", "1f1b", "delayed")
mse = nn.functional.mse_loss


@dataclass(frozen=True)
class Size:
    """How large the model and the batch are, and how often a thing is measured."""

    layers: int
    width: int
    heads: int
    sequence: int
    rows: int
    microbatches: int
    dtype: torch.dtype
    rounds: int

    def model(self) -> nn.Sequential:
        """Return a stack of transformer blocks, the same for the same size."""
        torch.manual_seed(0)
        blocks = [
            nn.TransformerEncoderLayer(
                self.width, self.heads, 4 * self.width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(self.layers)
        ]
        return nn.Sequential(*blocks).to(self.dtype)

    def batch(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, `[rows, sequence, width]` each."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.rows * self.microbatches, self.sequence, self.width)
        x, y = (torch.randn(shape, generator=generator).to(device, self.dtype) for _ in range(2))
        return x, y

    @property
    def actions(self) -> int:
        """How many actions a step has: a forward and a backward of every micro-batch on every stage."""
        return 2 * RANKS * self.microbatches


LARGE = Size(8, 2048, 16, 512, 8, 16, torch.bfloat16, rounds=5)
"""An action takes milliseconds: what counts is what the GPU does."""

SMALL = Size(8, 64, 4, 16, 2, 16, torch.float32, rounds=20)
"""An action takes less than its launch: what counts is what the host does."""

QUICK = Size(4, 8, 2, 4, 1, 4, torch.float32, rounds=2)
"""Only to see that everything runs."""


@dataclass
class Setting:
    """On what, and at which sizes, to measure."""

    device: torch.device
    large: Size
    small: Size
    told: list[str] = field(default_factory=list)

    @cached_property
    def parts(self) -> list[object]:
        """What four ranks run on: parts of the GPU where it can be cut, or GPUs of their own where there are four."""
        if self.device.type == "cpu":
            return self.streams
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = pipelab.devices(RANKS)
        self.told += [str(each.message) for each in caught]
        return list(found)

    @property
    def streams(self) -> list[object]:
        """Four ranks on one device, with ordinary streams."""
        return [str(self.device)] * RANKS

    def wait(self) -> None:
        """Wait until the device has done all that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @cached_property
    def traces(self) -> dict[str, list[Trace]]:
        """The traces of some steps of each schedule, ranks on parts."""
        return self.measured(self.parts)

    def measured(self, devices: list[object]) -> dict[str, list[Trace]]:
        """Return the traces of some steps of each schedule, the first steps left out."""
        size = self.large
        model = size.model()
        x, y = size.batch(self.device)
        found: dict[str, list[Trace]] = {}
        for name in SCHEDULES:
            with pipelab.Pipeline(
                model, pipelab.schedules[name](RANKS, size.microbatches), mse, devices=devices
            ) as pipe:
                steps = []
                for _ in range(size.rounds + 2):
                    model.zero_grad()
                    steps.append(pipe.step(x, y).trace)
            found[name] = steps[2:]
        return found

    def in_turns(self, tasks: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
        """Return, for each task, the median milliseconds until its work is done, and until its call returned."""
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in tasks}
        for number in range(rounds + 2):
            for name, task in tasks.items():
                self.wait()
                began = time.perf_counter()
                task()
                returned = time.perf_counter()
                self.wait()
                if number >= 2:  # the first ones warm up
                    times[name].append((time.perf_counter() - began, returned - began))
        return {
            name: {"done_ms": 1e3 * median(done for done, _ in each), "launched_ms": 1e3 * median(at for _, at in each)}
            for name, each in times.items()
        }

    def about(self) -> dict[str, object]:
        """Return what a reader must know of the card and the versions."""
        found: dict[str, object] = {
            "date": date.today().isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": str(self.device),
            "ranks": [str(each) for each in self.parts],
            "told": self.told,
        }
        if self.device.type == "cuda":
            card = torch.cuda.get_device_properties(self.device)
            found |= {
                "card": card.name,
                "multiprocessors": card.multi_processor_count,
                "memory_bytes": card.total_memory,
                "cuda": torch.version.cuda,
                "driver": _driver(),
                "cuda_core": _version("cuda-core"),
            }
        return found


def sequence(model: nn.Module, x: torch.Tensor, y: torch.Tensor, microbatches: int) -> None:
    """Run the same micro-batches one after another, in this thread, on the current stream."""
    for micro_x, micro_y in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        (mse(model(micro_x), micro_y) / microbatches).backward()


def typical(traces: Sequence[Trace]) -> Trace:
    """Return the trace with the median makespan."""
    return sorted(traces, key=lambda trace: trace.makespan)[len(traces) // 2]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None
