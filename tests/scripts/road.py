"""Print which files a micro-batch passes in one step, and how deep the calls are from `Pipeline.step` to the module."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import FrameType

import torch
from facts import say
from torch import nn

import pipelab

PACKAGE = Path(pipelab.__file__).parent
engine, ranks = sys.argv[1], int(sys.argv[2])
files: set[str] = set()
deepest: dict[str, int] = {"caller": 0, "worker": 0}


def place(frame: FrameType) -> Path:
    return Path(frame.f_code.co_filename)


def depth(frame: FrameType | None) -> int:
    """Count the package's own functions on a stack."""
    own = 0
    while frame is not None:
        own += place(frame).is_relative_to(PACKAGE)
        frame = frame.f_back
    return own


def note(frame: FrameType, event: str, arg: object) -> None:
    if event == "call" and place(frame).is_relative_to(PACKAGE):
        files.add(str(place(frame).relative_to(PACKAGE)))
        if frame.f_code.co_qualname == "Worker.do" and not deepest["caller"]:  # from here on the worker thread goes on
            deepest["caller"] = depth(frame) - 1


class Probe(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deepest["worker"] = max(deepest["worker"], depth(sys._getframe()))
        return super().forward(x)


torch.manual_seed(0)
threading.setprofile(note)  # the workers start when the pipeline is made
with pipelab.Pipeline(
    nn.Sequential(Probe(4, 4), Probe(4, 4)), pipelab.OneFOneB(ranks, 4), nn.MSELoss(), engine=engine
) as pipe:
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe.step(x, y)
    files.clear()
    deepest.update(caller=0, worker=0)
    sys.setprofile(note)
    pipe.step(x, y)
    sys.setprofile(None)
if os.environ.get("RANK", "0") == "0":
    say(files=sorted(files), depth=deepest["caller"] + deepest["worker"])
