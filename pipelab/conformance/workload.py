"""The model and the batch for comparing numbers, the same in every process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pipelab.conformance.steps import Task

_WIDTH = 16
_ROWS = 2


def fixed_model(stages: int) -> nn.Sequential:
    """Return a small model with one layer per stage and the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(stages)]
        return nn.Sequential(*layers)


def fixed_task(microbatches: int) -> Task:
    """Return a batch with a few rows in every micro-batch, the same every time."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, _ROWS * microbatches, _WIDTH, generator=generator)
    return Task(x, y, nn.functional.mse_loss, microbatches)


@contextmanager
def one_thread() -> Iterator[int]:
    """Let operations of this thread use one core, and yield how many cores they used before.

    The last bits of a number may depend on the number of cores, so both sides of a comparison run inside.
    """
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield cores
    finally:
        torch.set_num_threads(cores)
