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

    def model(self, device: torch.device) -> nn.Sequential:
        """Return a stack of transformer blocks, the same for the same size and device."""
        torch.manual_seed(0)
        settings = {"dropout": 0.0, "batch_first": True, "norm_first": True, "device": device, "dtype": self.dtype}
        return nn.Sequential(
            *(
                nn.TransformerEncoderLayer(self.width, self.heads, 4 * self.width, **settings)
                for _ in range(self.layers)
            )
        )

    def batch(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, `[rows, sequence, width]` each."""
        generator = torch.Generator(device).manual_seed(1)
        shape = (self.rows * self.microbatches, self.sequence, self.width)
        x, y = (torch.randn(shape, generator=generator, device=device).to(self.dtype) for _ in range(2))
        return x, y

    @property
    def actions(self) -> int:
        """How many actions a step has: a forward and a backward of every micro-batch on every stage."""
        return 2 * RANKS * self.microbatches


LARGE = Size(8, 2048, 16, 512, 8, 16, torch.bfloat16, rounds=7)
"""An action takes milliseconds, on the tensor cores: what counts is what the GPU does."""

MIDDLE = Size(8, 1024, 8, 256, 4, 16, torch.float32, rounds=7)
"""Likewise on the ordinary cores, which draw less power: here four busy parts are not clocked lower than one."""

SMALL = Size(8, 64, 4, 16, 2, 16, torch.float32, rounds=20)
"""An action takes less than its launch: what counts is what the host does."""

QUICK = Size(4, 8, 2, 4, 1, 4, torch.float32, rounds=2)
"""Only to see that everything runs."""

SIZES = {"large": LARGE, "middle": MIDDLE, "small": SMALL}


@dataclass
class Setting:
    """On what, and at which sizes, to measure."""

    device: torch.device
    quick: bool = False
    told: list[str] = field(default_factory=list)

    def sizes(self, *names: str) -> dict[str, Size]:
        """Return sizes by their names; a single tiny one where it only matters that everything runs."""
        return {names[0]: QUICK} if self.quick else {name: SIZES[name] for name in names}

    @cached_property
    def parts(self) -> list[object]:
        """What four ranks run on: parts of the GPU where it can be cut, or GPUs of their own where there are four."""
        return self.parts_for(RANKS)

    def parts_for(self, ranks: int) -> list[object]:
        """Return what so many ranks run on, likewise."""
        if self.device.type == "cpu":
            return [str(self.device)] * ranks
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = pipelab.devices(ranks)
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

    def measured(self, size: Size, devices: list[object]) -> dict[str, list[Trace]]:
        """Return the traces of some steps of each schedule, the first steps left out."""
        model = size.model(self.device)
        x, y = size.batch(self.device)
        return {
            name: self.steps(model, pipelab.schedules[name](RANKS, size.microbatches), x, y, devices, size.rounds)
            for name in SCHEDULES
        }

    def steps(
        self,
        model: nn.Module,
        schedule: pipelab.Schedule,
        x: torch.Tensor,
        y: torch.Tensor,
        devices: list[object],
        rounds: int,
    ) -> list[Trace]:
        """Return the traces of so many steps of a schedule, after two that warm up."""
        with pipelab.Pipeline(model, schedule, mse, devices=devices) as pipe:
            steps = []
            for _ in range(rounds + 2):
                model.zero_grad()
                steps.append(pipe.step(x, y).trace)
        return steps[2:]

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
                "cuda_bindings": _version("cuda-bindings"),
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
