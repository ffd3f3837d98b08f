"""Some of three processes do not come, where rank 0 holds the store: "no rank 2", "only rank 1" or "no port"."""

from __future__ import annotations

import os
import sys
import time

import plain
from torch import nn

import pipelab

case = sys.argv[1]
os.environ["WORLD_SIZE"] = "3"
if case == "only rank 1":
    os.environ["RANK"] = "1"
elif case == "no port":
    del os.environ["MASTER_PORT"]
try:
    pipelab.Pipeline(plain.mlp(6), pipelab.GPipe(3, 3), nn.functional.mse_loss, engine="torch", timeout=1)
except pipelab.EngineError as error:
    print(error)
    if case == "no rank 2" and os.environ["RANK"] == "0":
        time.sleep(2)  # the store is here, and rank 1 still asks it
