"""How much memory a process of several holds: with a whole model in each, and with its own stages alone.

`python benchmarks/rank_memory.py` starts 4 processes for each way, with 400 MB of parameters in all, and prints the
resident set of every process above what it was with a small pipeline: once the pipeline is made, and after a step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

import pipelab

RANKS, LAYERS, WIDTH = 4, 24, 2048
"""24 layers of 2048 x 2048 numbers and a bias: 403 MB."""
WAYS = ("whole model", "meta", "functions")


def layer(width: int) -> nn.Module:
    """Return one layer."""
    return nn.Linear(width, width)


def model(way: str, width: int) -> nn.Module | list[partial[nn.Module]]:
    """Return a model that every process builds, one on the meta device, or functions that make its layers."""
    if way == "functions":
        return [partial(layer, width)] * LAYERS
    with torch.device("meta" if way == "meta" else "cpu"):
        return nn.Sequential(*(layer(width) for _ in range(LAYERS)))


def resident() -> int:
    """Return how many bytes of memory this process holds."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def measure(way: str, width: int) -> None:
    """Print what this process holds above its base, in MB: its share, once the pipeline is made, after one step."""
    schedule, loss = pipelab.OneFOneB(RANKS, 4), nn.functional.mse_loss
    with pipelab.Pipeline(model(way, 8), schedule, loss, engine="torch") as pipe:
        pipe.step(torch.ones(4, 8), torch.ones(4, 8))
    base = resident()
    with pipelab.Pipeline(model(way, width), schedule, loss, engine="torch") as pipe:
        figures = [sum(each.nbytes for each in pipe.parameters()), resident() - base]
        pipe.step(torch.ones(4, width) if pipe.is_first else None, torch.ones(4, width) if pipe.is_last else None)
        figures.append(resident() - base)
        line = " ".join([os.environ["RANK"], *(f"{each / 1e6:.1f}" for each in figures)])
        sys.stdout.write(f"{line}\n")  # in one piece: several processes write to one pipe


def main(width: str = str(WIDTH), *ways: str) -> None:
    """Measure every way."""
    print("| way | rank | its parameters | pipeline made | after a step, with gradients |\n|---|--:|--:|--:|--:|")
    for way in ways or WAYS:
        command = [sys.executable, "-m", "pipelab", "launch", __file__, "--ranks", str(RANKS), "--", way, width]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        for line in sorted(found.stdout.splitlines()):
            rank, *figures = line.split()
            print(f"| {way} | {rank} | {' | '.join(f'{each} MB' for each in figures)} |")


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure(sys.argv[1], int(sys.argv[2]))
    else:
        main(*sys.argv[1:])
