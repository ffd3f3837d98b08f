"""What a stage keeps beside its parameters comes along, whatever it is."""

from __future__ import annotations

import os

import plain
import torch
from facts import say
from torch import nn
from training import ROWS

import pipelab
from pipelab import Pipeline

rank = int(os.environ["RANK"])
x, y = plain.batch(ROWS)


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.calls = nn.Embedding(9, 6, sparse=True), 0
        self.register_buffer("small", torch.zeros(2, dtype=torch.int16))
        self.register_buffer("phases", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("mask", torch.ones(1, 6).expand(4, 6))
        self.register_buffer("mean", None)

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, calls):
        self.calls = calls

    def forward(self, x):
        self.calls += 1
        self.small += 1
        self.phases += 1j
        self.mean = x.detach().mean(0) if self.mean is None else self.mean + 1
        return x + self.table((x[:, 0] > 0).long()) * self.mask[0]


stages = [Keeps(), Keeps(), Keeps(), Keeps()]
with Pipeline(stages, pipelab.ZBH1(4, 4), nn.functional.mse_loss, engine="torch", timeout=60) as pipe:
    pipe.step(x, y)
    own = {name: value.clone() for name, value in stages[rank].named_buffers()}
    state = pipe.state_dict()
    say(
        case="state",
        small=[state[f"{stage}.small"].tolist() for stage in range(4)],
        phases=[state[f"{stage}.phases"][0].imag.item() for stage in range(4)],
        own=all(torch.equal(value, state[f"{rank}.{name}"]) for name, value in own.items()),
        calls=[state[f"{stage}._extra_state"] for stage in range(4)],
        exact=pipe.verify(x, y).exact,
    )
