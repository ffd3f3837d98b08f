"""One of several ranks does something odd in an action; arguments say which rank, what, and at which call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import plain
import torch
from torch import nn

import pipelab

culprit, what, moment, ranks = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(os.environ["WORLD_SIZE"])


def misbehave():
    """Do it."""
    if what == "raises":
        raise ValueError("odd")
    if what == "exits":
        sys.exit(3)
    if what == "leaves":
        os._exit(4)
    if what == "hangs":
        time.sleep(60)
    if what == "freezes":
        subprocess.Popen(["sh", "-c", f"sleep 15; kill -9 {os.getpid()}"])  # nobody else would end it
        os.kill(os.getpid(), signal.SIGSTOP)
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))


class Odd(torch.autograd.Function):
    """Passes tensors and gradients on, and counts how often it is called."""

    calls = 0

    @staticmethod
    def forward(ctx, value):
        Odd.count()
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        Odd.count()
        return gradient

    @classmethod
    def count(cls):
        cls.calls += 1
        if cls.calls == moment and os.environ["RANK"] == str(culprit):
            misbehave()


class Layer(nn.Linear):
    def forward(self, value):
        return Odd.apply(super().forward(value))


torch.manual_seed(0)
stages = [nn.Sequential(Layer(6, 6)) for _ in range(ranks)]
plan = pipelab.OneFOneB(ranks, 4)
with pipelab.Pipeline(stages, plan, nn.functional.mse_loss, engine="torch", timeout=6) as pipe:
    for _ in range(3):
        pipe.step(*plain.batch(8))
