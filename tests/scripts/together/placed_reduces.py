"""All-reduces that a schedule places by hand: gradients as in the threads engine, beside backwards of other ranks."""

from __future__ import annotations

import placing
import plain
import torch
from facts import say
from torch import nn

import pipelab
from pipelab import Pipeline

mse = nn.functional.mse_loss
plan = pipelab.replicate(placing.ReducesEarly(2, 2), 2).plan()
model, twin = plain.mlp(8), plain.mlp(8)
x, y = plain.batch(8)
with Pipeline(twin, plan, mse) as pipe:
    pipe.step(x, y)
expected = plain.taken(twin)
with Pipeline(model, plan, mse, engine="torch", timeout=60) as pipe:
    pipe.step(x, y)
    ours = {name: gradient for name, gradient in plain.taken(model).items() if gradient is not None}

short = pipelab.replicate(placing.ReducesEarly(2, 1), 2).plan()
with Pipeline(pipelab.emulated(4, 2, 20, all_reduce_ms=1000), short, mse, engine="torch", timeout=60) as pipe:
    trace = pipe.step(torch.ones(2, 1), torch.ones(2, 1)).trace
say(
    case="placed reduces",
    parameters=len(ours),
    difference=plain.difference(ours, {name: expected[name] for name in ours}),
    beside=sorted(placing.beside(trace, 3)),
)
