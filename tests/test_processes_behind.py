"""A model of which other processes train a part: whoever saves it too early, or trains that part here, is told."""

from __future__ import annotations

import json

import processes
import pytest

pytestmark = pytest.mark.dist

SCRIPT = """
import copy, io, json, os, warnings
import plain, torch
from torch import nn
import pipelab
from pipelab import Pipeline

mse = nn.functional.mse_loss
rank = int(os.environ["RANK"])
x, y = plain.batch(8)
plan, other = pipelab.GPipe(2, 4).plan(), pipelab.Interleaved1F1B(2, 4).plan()


def warned(work):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        work()
    return [f"{os.path.basename(each.filename)}: {each.message}" for each in told]


def train(pipe, optimizer):
    optimizer.zero_grad()
    pipe.step(x, y)
    optimizer.step()


found = {}
model = plain.mlp(4)
with Pipeline(model, plan, mse, engine="torch", timeout=60) as pipe:
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
    optimizer.step()
    pipe.step(x, y)
    found["before an optimizer's step"] = warned(model.state_dict)
    train(pipe, optimizer)
    found["after it"] = warned(model.state_dict)
    found["traced"] = warned(lambda: model.state_dict(keep_vars=True))
    found["verified"] = warned(lambda: (pipe.verify(x, y), model.state_dict()))
    train(pipe, optimizer)
    state = pipe.state_dict()
    found["gathered"] = warned(model.state_dict)
    train(pipe, optimizer)
    found["loaded"] = warned(lambda: (model.load_state_dict(state), model.state_dict()))
    train(pipe, optimizer)
found["closed"] = warned(lambda: torch.save(model.state_dict(), io.BytesIO()))
found["copied"] = warned(copy.deepcopy(model).state_dict)

# the same stages here again: nothing is lost
with Pipeline(model, plan, mse, engine="torch", timeout=60) as pipe:
    found["again"] = warned(model.state_dict)
# other stages than before
try:
    Pipeline(model, other, mse, engine="torch", timeout=60)
except pipelab.EngineError as error:
    refused = str(error)
with Pipeline(model, plan, mse, engine="torch", timeout=60) as pipe:
    pipe.state_dict()
    found["up to date again"] = warned(model.state_dict)
with Pipeline(model, other, mse, engine="torch", timeout=60) as pipe:
    verified = pipe.verify(x, y).exact

# stages that were given one by one
stages = [nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)]
with Pipeline(stages, plan, mse, engine="torch", timeout=60) as pipe:
    optimizer = torch.optim.SGD(stages[rank].parameters(), lr=0.1)
    train(pipe, optimizer)
found["own stage"] = warned(stages[rank].state_dict)
found["other stage"] = warned(stages[1 - rank].state_dict)
print(json.dumps([found, refused, verified]))
"""


def test_a_model_that_is_behind_says_so_when_it_is_saved_or_trained_otherwise():
    ended = processes.run_in(2, SCRIPT)
    assert [(each.code, each.err) for each in ended] == [(0, "")] * 2, processes.shown(ended)
    told = (
        "script.py: model.state_dict(): this process has trained 1 of 2 stages, and the others are here as they were "
        "before\n  try: pipe.state_dict(), in every process: it brings the model up to date as well"
    )
    behind = {"after it", "closed", "copied", "again", "other stage"}
    for found, refused, verified in (json.loads(each.out) for each in ended):
        assert {case: warnings for case, warnings in found.items() if warnings} == {case: [told] for case in behind}
        assert "rank 0 has stage 2 as it was before an earlier pipeline, in which another process trained" in refused
        assert verified
