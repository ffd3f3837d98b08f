"""A script that ends with a pipeline in threads still there, in one of the situations below; or by Ctrl+C."""

from __future__ import annotations

import signal
import sys
import threading
import time
import warnings

import torch
from torch import nn

from pipelab import OneFOneB, PipelabError, Pipeline
from pipelab.engine import threads

torch.set_num_threads(1)
warnings.simplefilter("error")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored in the background
situation = sys.argv[1]


class Sleeps(nn.Module):
    seconds = 0.0

    def forward(self, x):
        print("in the stage", flush=True)
        time.sleep(self.seconds)
        return x * 1


sleeper = Sleeps()
model = nn.Sequential(nn.Linear(2, 2), sleeper, nn.Linear(2, 2))
x, y = torch.randn(4, 2), torch.randn(4, 2)
hangs = situation == "a stage that still hangs"
pipe = Pipeline(model, OneFOneB(3, 2), nn.functional.mse_loss, timeout=0.5 if hangs else 60)
if situation == "an open pipeline":
    pipe.step(x, y)
elif situation == "a pipeline that never stepped":
    pass
elif situation == "a failed step whose error is kept":
    try:
        pipe.step(x[:, :1], y)
    except PipelabError as error:
        kept = error
elif hangs:
    threads._GRACE_SECONDS = 0.1
    sleeper.seconds = 1000
    try:
        pipe.step(x, y)
    except PipelabError as error:
        print(type(error).__name__)
elif situation == "a step under way on a daemon thread":
    sleeper.seconds = 0.5
    threading.Thread(target=pipe.step, args=(x, y), daemon=True).start()
    time.sleep(0.2)
elif situation == "interrupted":
    sleeper.seconds = 1
    try:
        pipe.step(x, y)
    except KeyboardInterrupt as interrupt:
        print(interrupt.__notes__[0])
    sleeper.seconds = 0
    pipe.step(x, y)
    print("stepped")
    sleeper.seconds = 1
    pipe.step(x, y)
else:
    raise SystemExit(f"no such situation: {situation}")
