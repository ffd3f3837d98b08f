"""A training script in which rank 1 goes wrong: `torchrun --nproc-per-node 4 benchmarks/faulty.py raises`."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn

import pipelab

RANKS = 4
TIMEOUT = 5.0
"""After how many seconds without progress a process gives up: only a stage that hangs needs it."""

fault = sys.argv[1]
rank = int(os.environ["RANK"])
odd = rank == 1


def say(word: str) -> None:
    """Write a word where the one who measures sees it at once."""
    sys.stderr.write(f"{word}\n")
    sys.stderr.flush()


class Stage(nn.Module):
    """A layer; on rank 1, the forward of the second step's third micro-batch goes wrong."""

    def __init__(self, width: int) -> None:
        """Make the layer."""
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.forwards = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return what the layer makes, or do not."""
        self.forwards += 1
        if odd and fault in ("raises", "hangs", "shape") and self.forwards == 1 + 8 + 3:
            say("FAULT")
            if fault == "raises":
                raise ValueError("a bug")
            if fault == "hangs":
                time.sleep(60)
            return self.layer(value)[:, 1:]
        return self.layer(value)


torch.manual_seed(0)
if odd and fault == "version":
    torch.__version__ = "2.11.0"
plan = (pipelab.GPipe if odd and fault == "plan" else pipelab.OneFOneB)(RANKS, 8).plan()
model = [Stage(32 if odd and fault == "model" else 64) for _ in range(RANKS)]
x, y = torch.randn(64, 64), torch.randn(64, 64)
say("FAULT")  # the last such line counts: for what differs from the start, when the last process comes
try:
    with pipelab.Pipeline(model, plan, nn.functional.mse_loss, engine="torch", timeout=TIMEOUT) as pipe:
        while True:
            pipe.step(x, y)
except pipelab.PipelabError as error:
    say(f"{error}\n  rank {rank} was told")
    raise
