"""Three processes, of which rank 1 does something odd."""

from __future__ import annotations

import os

import plain
from torch import nn

from pipelab import OneFOneB, Pipeline

odd = os.environ["RANK"] == "1"
x, y = plain.batch(12)


def pipeline(model=None, plan=None, **settings):
    """Return a pipeline that is the same on all processes, but for what is given."""
    settings = {"engine": "torch", "timeout": 60, **settings}
    return Pipeline(model or plain.mlp(6), plan or OneFOneB(3, 4), nn.functional.mse_loss, **settings)
