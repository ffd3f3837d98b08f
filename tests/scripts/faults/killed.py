"""Rank 1 kills itself in the second step; or, with the argument "hangs", sleeps there."""

from __future__ import annotations

import os
import signal
import sys
import time

import plain
from torch import nn

import pipelab

hangs = sys.argv[1:] == ["hangs"]


class Dies(nn.Module):
    seen = 0

    def forward(self, value):
        self.seen += 1
        if os.environ["RANK"] == "1" and self.seen == 8:  # 1F2 of the second step (one forward was to learn shapes)
            if hangs:
                time.sleep(60)
            os.kill(os.getpid(), signal.SIGKILL)
        return value


stages = [nn.Sequential(nn.Linear(6, 6), Dies()) for _ in range(3)]
plan, timeout = pipelab.OneFOneB(3, 4), 6 if hangs else 60
with pipelab.Pipeline(stages, plan, nn.functional.mse_loss, engine="torch", timeout=timeout) as pipe:
    for _ in range(4):
        pipe.step(*plain.batch(8))
