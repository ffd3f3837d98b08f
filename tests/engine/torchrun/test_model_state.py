"""Processes and their models: where they begin with other weights, rank 0 warns."""

from __future__ import annotations

import json

import processes
import pytest

pytestmark = pytest.mark.dist

OTHERWISE = """
import json, os, sys, warnings
import plain, torch
from torch import nn
import pipelab

rank = int(os.environ["RANK"])
found = {}


def made(case, model, **settings):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = pipelab.OneFOneB(2, 2)
        with pipelab.Pipeline(model, plan, nn.functional.mse_loss, engine="torch", timeout=60) as pipe:
            step = settings.get("steps")
            if step:
                pipe.step(*plain.batch(4))
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            if settings.get("gathers"):
                pipe.state_dict()
    found[case] = [f"{os.path.basename(each.filename)}: {each.message}" for each in caught]


same = plain.mlp(4)
made("same", same, steps=True)
made("trained on", same, steps=True)
made("gathered", same, steps=True, gathers=True)
made("after that", same)
torch.manual_seed(rank)
made("seed", nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))))
loaded = plain.mlp(4)
if rank == 0:
    loaded.load_state_dict(plain.mlp(4, seed=9).state_dict())
made("loaded once", loaded)
made("half floats", plain.mlp(4).to(torch.bfloat16))
with torch.device("meta"):
    empty = nn.Linear(6, 6)
made("own stages only", [[nn.Linear(6, 6), empty], [empty, nn.Linear(6, 6)]][rank])
class Own(nn.Parameter):
    pass


of_a_class = plain.mlp(4)
of_a_class[0].weight = Own(torch.full((6, 6), 1.0 + rank))
made("of a class", of_a_class)
print(json.dumps(found))
"""


def test_processes_with_other_weights_are_told_before_the_first_step():
    ended = processes.run_in(2, OTHERWISE)
    assert [(each.code, each.err) for each in ended] == [(0, "")] * 2, processes.shown(ended)
    first, second = (json.loads(each.out) for each in ended)
    warned = {case: told for case, told in first.items() if told}
    assert set(warned) == {"seed", "loaded once", "trained on", "gathered"}
    for (told,) in warned.values():
        assert told.startswith("script.py: rank 1 has other weights than rank 0: ")
    assert not any(second.values())
