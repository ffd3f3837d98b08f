"""Buffers of a stage on several processes: the lowest rank's are everybody's, or writing into them is refused."""

from __future__ import annotations

import json

import processes
import pytest

pytestmark = pytest.mark.dist

SCRIPT = """
import json
import plain, torch
from torch import nn
import pipelab

mse = nn.functional.mse_loss
plan = pipelab.replicate(pipelab.OneFOneB(1, 2), 2).plan()
x, y = plain.batch(8)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.sum()
        return self.linear(x)


found = []
for engine in ("torch", "threads"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    with pipelab.Pipeline(model, plan, mse, engine=engine, replicated_buffers="lowest", timeout=60) as pipe:
        pipe.step(x, y)
        found.append([buffer.tolist() for buffer in model.buffers()])
try:
    with pipelab.Pipeline([Counts()], plan, mse, engine="torch", timeout=60) as pipe:
        pipe.step(x, y)
        refused = ""
except pipelab.EngineError as error:
    refused = f"{type(error).__name__}: {error}"
print(json.dumps({"ours": found[0], "theirs": found[1], "refused": refused}))
"""


@pytest.fixture(scope="module")
def said():
    """What each of two processes said."""
    ended = processes.run_in(2, SCRIPT)
    assert [each.code for each in ended] == [0, 0], processes.shown(ended)
    return [json.loads(each.out) for each in ended]


def test_all_processes_have_the_lowest_ranks_running_statistics(said):
    for fact in said:
        assert fact["ours"] == fact["theirs"]
        assert fact["ours"][2] == 2  # its own micro-batches


def test_a_buffer_that_is_written_into_is_refused_by_name_on_every_process(said):
    for fact in said:
        assert "stage 0 writes into its buffer 'seen', and rank 1 runs a copy of the stage" in fact["refused"]
    assert said[1]["refused"].startswith("EngineError: ")
    assert said[0]["refused"].startswith("RankError: ")
