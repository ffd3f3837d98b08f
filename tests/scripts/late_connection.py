"""A pipeline that is closed without a step, while the other process still connects: nobody has it before all do."""

from __future__ import annotations

import os
import time

import plain
from facts import say
from torch import nn

import pipelab
from pipelab.engine.torchrun import start

connect = start.connect


def late(*given):
    made = connect(*given)
    time.sleep(0.5)
    return made


if os.environ["RANK"] == "0":
    start.connect = late
began = time.monotonic()
with pipelab.Pipeline(plain.mlp(4), pipelab.OneFOneB(2, 2), nn.functional.mse_loss, engine="torch", timeout=60):
    seconds = time.monotonic() - began
say(seconds=seconds)
