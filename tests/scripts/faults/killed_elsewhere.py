"""Rank 2 is killed on another host, while rank 1 computes and would next wait for rank 0."""

from __future__ import annotations

import os
import signal
import time

import plain
from torch import nn

import pipelab
from pipelab.engine.torchrun import start

info = start.process_info() | {"processes": f"host {os.environ['RANK']}"}
start.process_info = lambda: info  # nobody can look for the processes of other hosts


def acts(self, value):
    self.seen += 1
    if self.stage == 2 and self.seen == 5:  # 2F0 of the second step
        os.kill(os.getpid(), signal.SIGKILL)
    if self.stage == 1 and self.seen == 7:  # 1F1, as one forward was to learn shapes: meanwhile
        time.sleep(0.7)
    if self.stage == 0 and self.seen == 8:  # 0F2: for which rank 1 would wait next
        time.sleep(2.5)
    return value


stages = [nn.Sequential(nn.Linear(6, 6), plain.Made(acts, stage=stage, seen=0)) for stage in range(3)]
with pipelab.Pipeline(stages, pipelab.GPipe(3, 4), nn.functional.mse_loss, engine="torch", timeout=60) as pipe:
    for _ in range(2):
        pipe.step(*plain.batch(8))
