"""Processes and their models: who would save, train or begin with weights that are not the right ones is warned."""

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
found["at first"] = warned(model.state_dict)
with Pipeline(model, plan, mse, engine="torch", timeout=60) as pipe:
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1, fused=True)
    train(pipe, optimizer)
    found["trained"] = warned(model.state_dict)
    found["called"] = warned(lambda: model(x))
    found["traced"] = warned(lambda: model.state_dict(keep_vars=True))
    found["verified"] = warned(lambda: (pipe.verify(x, y), model.state_dict()))
    train(pipe, optimizer)
    state = pipe.state_dict()
    found["gathered"] = warned(lambda: (model.state_dict(), model(x)))
    train(pipe, optimizer)
    found["loaded"] = warned(lambda: (model.load_state_dict(state), model.state_dict()))
    train(pipe, optimizer)
found["closed"] = warned(lambda: torch.save(model.state_dict(), io.BytesIO()))

# the same stages here again: nothing is lost
with Pipeline(model, plan, mse, engine="torch", timeout=60) as pipe:
    found["again"] = warned(model.state_dict)
    pipe.state_dict()
    found["up to date again"] = warned(model.state_dict)
hooks = [model._state_dict_pre_hooks, model._load_state_dict_post_hooks, model._forward_pre_hooks]
hooks = sum(map(len, hooks))
# other stages than before: no harm without an optimizer
for case in ("measured", "otherwise"):
    with Pipeline(model, plan, mse, engine="torch", timeout=60) as pipe:
        pipe.step(x, y)
        if case == "otherwise":
            torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Pipeline(model, other, mse, engine="torch", timeout=60) as pipe:
            pipe.state_dict()
    found[case] = [f"{os.path.basename(each.filename)}: {each.message}" for each in told]

# stages that were given one by one; a scripted one takes no hooks
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    stages = [nn.Linear(6, 6), torch.jit.script(nn.Linear(6, 6))]
with Pipeline(stages, plan, mse, engine="torch", timeout=60) as pipe:
    pipe.step(x, y)
found["own stage"] = warned(stages[rank].state_dict)
found["other stage"] = warned(stages[1 - rank].state_dict)
found["calls own stage"] = warned(lambda: stages[rank](x))
found["calls other stage"] = warned(lambda: stages[1 - rank](x))


# one that PyTorch's tracer cuts, again while it is stale
class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.second(self.first(x).relu())


chain = Chain()
for case in ("cut", "cut again"):
    stages = pipelab.split(chain, 2, example=x[:2])
    with Pipeline(stages, plan, mse, engine="torch", timeout=60) as pipe:
        found[case] = warned(lambda: pipe.step(x, y))
found["called in a function"] = warned(lambda: (lambda: chain(x))())
found["called by a layer"] = warned(lambda: nn.Sequential(chain, nn.ReLU())(x))
twin = copy.deepcopy(chain)
found["a copy"] = warned(lambda: twin(x))
hooks += len(twin._forward_pre_hooks)

# where the other stage does not learn, nothing is stale
frozen = plain.mlp(4)
frozen[:2].requires_grad_(False)
with Pipeline(frozen, plan, mse, engine="torch", timeout=60) as pipe:
    pipe.step(x, y)
    found["half frozen"] = warned(lambda: (frozen(x), frozen.state_dict()))
print(json.dumps([found, hooks]))
"""


def test_a_model_that_is_stale_says_so_when_it_is_saved_or_trained_otherwise():
    ended = processes.run_in(2, SCRIPT)
    assert [(each.code, each.err) for each in ended] == [(0, "")] * 2, processes.shown(ended)
    saved = (
        "script.py: model.state_dict(): this process has trained 1 of 2 stages, and the others are here as they were "
        "before\n  try: pipe.state_dict(), in every process, before the pipeline is closed: it brings the model up to "
        "date as well"
    )
    called = (
        "script.py: model(x): this process has trained 1 of 2 stages, and the others are here as they were before\n"
        "  try: pipe.forward(x), in every process; or first pipe.state_dict(), which brings the model up to date"
    )
    anew = (
        "script.py: stage 2 is here as it was before an earlier pipeline, in which another process trained it: it "
        "begins anew from there\n  try: pipe.state_dict() of the earlier pipeline, in every process, before that is "
        "closed"
    )
    for rank, each in enumerate(ended):
        found, hooks = json.loads(each.out)
        warned = {case: told for case, told in found.items() if told}
        expected = {case: [saved] for case in ("trained", "closed", "again")}
        expected |= {case: [called] for case in ("called", "called in a function", "called by a layer")}
        of_rank = {"other stage": [saved], "calls other stage": [called]} if rank else {"otherwise": [anew]}
        if rank == 0:
            of_rank |= {"half frozen": [called, saved]}  # the other one has learnt
        assert warned == expected | of_rank
        assert hooks == 0


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
    told = (
        "script.py: rank {} has other weights for stage {} than rank {}, which trains it: a stage begins with the "
        "weights that its own rank's process has\n  try: the same torch.manual_seed in every process before the model "
        "is made; a saved state is loaded in every process"
    )
    warned = {case: each for case, each in first.items() if each}
    assert warned == {"seed": [told.format(1, 0, 0)], "loaded once": [told.format(1, 0, 0)]}
    assert not any(second.values())
