"""Rank 1 is stopped between two steps, as by Ctrl+Z."""

from __future__ import annotations

import os
import signal
import subprocess

import plain
from torch import nn

import pipelab

with pipelab.Pipeline(plain.mlp(3), pipelab.OneFOneB(3, 4), nn.MSELoss(), engine="torch", timeout=2) as pipe:
    pipe.step(*plain.batch(8))
    if os.environ["RANK"] == "1":
        subprocess.Popen(["sh", "-c", f"sleep 12; kill -9 {os.getpid()}"])  # nobody else would end it
        os.kill(os.getpid(), signal.SIGSTOP)
    pipe.step(*plain.batch(8))
