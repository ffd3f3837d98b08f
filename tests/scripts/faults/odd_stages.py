"""A stage goes wrong in the middle of a step."""

from __future__ import annotations

import os
import signal
import time

import plain
import torch
from facts import attempt
from odd_rank import odd, pipeline, x, y
from torch import nn


class Odd(nn.Module):
    """Does something odd on rank 1, at the so-many-th micro-batch, or at all."""

    def __init__(self, what, at):
        super().__init__()
        self.what, self.at, self.seen = what, at, 0

    def forward(self, value):
        self.seen += 1
        if odd and self.at in (self.seen, None):
            value = self.what(value)
        return value


def run(what, at=5, **settings):
    layers = list(plain.mlp(6))
    stages = [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:4], Odd(what, at)), nn.Sequential(*layers[4:])]
    with pipeline(stages, **settings) as pipe:
        for _ in range(4):
            pipe.step(x, y)


def raises(value):
    raise ValueError("a bug of mine")


attempt("raises", lambda: run(raises))
attempt("narrow", lambda: run(lambda value: value[:, :4], at=None))
attempt("narrow later", lambda: run(lambda value: value[:, :4]))


def overwrites():
    reuses = plain.Made(lambda self, value: self.room.copy_(value.detach()))  # the same memory for every micro-batch
    reuses.register_buffer("room", torch.zeros(3, 6))
    with pipeline([nn.Linear(6, 6), reuses, nn.Linear(6, 6)]) as pipe:
        pipe.step(x, y)


attempt("overwrites", overwrites)
attempt("hangs", lambda: run(lambda value: time.sleep(2) or value, timeout=0.8))


def interrupted(value):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
    return value


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored in the background
attempt("interrupted", lambda: run(interrupted))
