"""Make a pipeline of two ranks with a timeout, and say how that ends; with a folder, once a file "go" is in it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import plain
from torch import nn

import pipelab

timeout = float(sys.argv[1])
for folder in map(Path, sys.argv[2:]):
    (folder / os.environ["RANK"]).write_text(str(os.getpid()))
    while not (folder / "go").exists():
        time.sleep(0.02)
model = plain.mlp(4)
began = time.monotonic()
print("connecting")
try:
    pipe = pipelab.Pipeline(model, pipelab.GPipe(2, 2), nn.functional.mse_loss, engine="torch", timeout=timeout)
except (pipelab.RankError, KeyboardInterrupt) as error:
    print(type(error).__name__, time.monotonic() - began, error)
else:
    print("made")
    time.sleep(60)
