"""Differences that only one process can see, found by `verify` and raised on all."""

from __future__ import annotations

import os

import plain
import torch
from facts import say
from torch import nn
from training import ROWS

import pipelab
from pipelab import Pipeline

mse = nn.functional.mse_loss
x, y = plain.batch(ROWS)

# a stage's state from earlier micro-batches, in no buffer
stages = [nn.Linear(6, 6), plain.Counts(), *plain.mlp(3)[::2]]
with Pipeline(stages, pipelab.GPipe(4, 4), mse, engine="torch", timeout=30) as pipe:
    try:
        told = str(pipe.verify(x, y))
    except pipelab.VerificationError as error:
        told = str(error)
    say(case="stateful", told=told, goes_on=bool(pipe.step(x, y).loss > 0))


class Loss:
    """Another loss on rank 2, for the whole batch only; or one that fails there."""

    fails = False

    def __call__(self, output, target):
        here = os.environ["RANK"] == "2" and len(target) == ROWS
        if here and self.fails:
            raise MemoryError("too much")
        return mse(output, target) * (2 if here else 1)


loss_fn = Loss()
with Pipeline(plain.mlp(4), pipelab.GPipe(4, 4), loss_fn, engine="torch", timeout=30) as pipe:
    for loss_fn.fails in (False, True):
        try:
            told = str(pipe.verify(x, y))
        except (pipelab.VerificationError, MemoryError) as error:
            told = f"{type(error).__name__}: {error}"
        say(case="whole", told=told, goes_on=bool(pipe.step(x, y).loss > 0))


# rank 1 rounds the whole batch otherwise than a part of it, as its processor may
rounds = plain.Made(lambda _, x: x + 1e-6 * (len(x) == ROWS and os.environ["RANK"] == "1"))
model = plain.mlp(3)
with torch.no_grad():  # the input of the ReLU is -5e-7 for some rows; on rank 1, in the whole batch, it is 5e-7
    model[0].bias.copy_(-(model[0].weight @ x[3]) - 5e-7)
before = [parameter.clone() for parameter in model.parameters()]
with Pipeline([model[0], rounds, nn.ReLU(), model[2]], pipelab.GPipe(4, 4), mse, engine="torch", timeout=30) as pipe:
    nearby = pipe.verify(x, y).nearby
    restored = all(map(torch.equal, model.parameters(), before))
    say(case="rounding", nearby=nearby, restored=restored, goes_on=bool(pipe.step(x, y).loss > 0))
