"""Every process makes its own stages only: from a meta model, or functions; the numbers are those of one process."""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from pathlib import Path

import plain
import torch
import torch.distributed.checkpoint as dcp
from facts import attempt, say
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import pipelab
from pipelab import Pipeline

mse, folder, size = nn.functional.mse_loss, Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
x, y = plain.batch(16)
warnings.filterwarnings("ignore", "the largest stage")


def layer(index):
    """Return a layer with parameters, buffers, and a module of PyTorch that keeps its parameters elsewhere too."""
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6) if index % 2 else nn.Tanh())


def meta():
    with torch.device("meta"):
        return nn.Sequential(
            *map(layer, range(8)),
            nn.GRU(6, 6, batch_first=True),
            plain.Made(lambda _, value: value[0]),
            nn.Linear(6, 6),
        )


def tied():
    with torch.device("meta"):
        first, last = nn.Linear(6, 6), nn.Linear(6, 6)
        last.weight = first.weight
        return nn.Sequential(first, *map(layer, (0, 0)), last)


def functions():
    return [partial(layer, index) for index in range(8)]


def train(pipe, steps, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(pipe.parameters(), 0.01)
    losses = []
    for number in steps:
        optimizer.zero_grad()
        data = plain.batch(16, seed=number)
        step = pipe.step(data[0] if pipe.is_first else None, data[1] if pipe.is_last else None)
        losses.append((float(step.loss), float(pipe.clip_grad_norm_(1.0))))
        optimizer.step()
    return losses, optimizer


CASES = {
    "meta": (meta, pipelab.OneFOneB(size, 4)),
    "v-shape": (functions, pipelab.ZBV(size, 2 * size)),
    "functions": (functions, pipelab.Interleaved1F1B(size, 4)),
    "tied": (tied, pipelab.OneFOneB(size, 4)),
    "stages": (lambda: pipelab.split(functions(), into=size, by="parameters"), pipelab.GPipe(size, 4)),
}
if size == 4:
    CASES["replicas"] = (lambda: functions()[::2], pipelab.replicate(pipelab.OneFOneB(2, 4), 2))
for name, (make, schedule) in CASES.items():
    torch.manual_seed(5)
    with Pipeline(make(), schedule, mse) as pipe:
        expected, _ = train(pipe, range(3))
        theirs, own = pipe.state_dict(), len(list(pipe.stages.model.parameters()))
    torch.manual_seed(5)
    torch.randn(int(os.environ["RANK"]))  # numbers that a process has drawn before change nothing
    with Pipeline(make(), schedule, mse, engine="torch", timeout=60) as pipe:
        before = torch.random.get_rng_state()
        losses, _ = train(pipe, range(3))
        real = [each for each in pipe.stages.model.parameters() if not each.is_meta]
        mine, whole = pipe.state_dict(whole=False), pipe.state_dict()
        proof = pipe.verify(x if pipe.is_first else None, y if pipe.is_last else None)
        still = [each for each in pipe.stages.model.parameters() if not each.is_meta]
        held = list(pipe.engine.local_stages)
        first = {name for name, _ in pipe.named_parameters()}
        say(
            case=name,
            losses=losses == expected,
            state=plain.equal(whole, theirs) or max(float((whole[k] - theirs[k]).abs().max()) for k in theirs),
            exact=proof.exact or proof.largest_difference,
            own=set(map(id, real)) == set(map(id, still)) == set(map(id, pipe.parameters())),
            few=len(real) < own,
            alone=set(mine) >= first
            and all(not each.is_meta and torch.equal(each, whole[k]) for k, each in mine.items()),
            left=len(whole) - len(mine),
            random=torch.equal(before, torch.random.get_rng_state()),
            again=float(pipe.step(x, y).loss) > 0,
        )

# a run goes on from a checkpoint with other ranks, and starts from a file of whole weights
torch.manual_seed(1)
with Pipeline(meta(), pipelab.OneFOneB(size, 4), mse, engine="torch", timeout=60) as pipe:
    optimizer = torch.optim.AdamW([{"params": list(pipe.parameters())}], 0.01)
    if size == 4:
        train(pipe, range(2), optimizer)
        state = {"model": pipe.state_dict(whole=False), "optimizer": pipe.optimizer_state_dict(optimizer)}
        dcp.save(state, checkpoint_id=folder / "two")
        whole = pipe.state_dict()
        if pipe.is_first:
            save_file(whole, folder / "two.safetensors")
    else:
        with safe_open(folder / "two.safetensors", "pt") as file:
            for name, tensor in pipe.state_dict(whole=False).items():
                tensor.copy_(file.get_tensor(name))
        from_file = pipe.state_dict()
        for each in pipe.parameters():
            each.data.zero_()
        saved = {"model": pipe.state_dict(whole=False), "optimizer": pipe.optimizer_state_dict(optimizer)}
        dcp.load(saved, checkpoint_id=folder / "two")
        pipe.load_optimizer_state_dict(optimizer, saved["optimizer"])
        same = plain.equal(pipe.state_dict(), from_file)
        train(pipe, [2, 3], optimizer)
        state = pipe.state_dict()
        torch.manual_seed(1)
        with Pipeline(meta(), pipelab.OneFOneB(1, 4), mse) as pipe:
            train(pipe, range(4))
            say(case="resumed", same=same, state=plain.equal(state, pipe.state_dict()))


def refused():
    with torch.device("meta"):
        scale = plain.Made(None, gain=nn.Parameter(torch.ones(6)))
        model = nn.Sequential(*map(layer, range(3)), scale)
    Pipeline(model, pipelab.OneFOneB(size, 4), mse, engine="torch")


attempt("refused", refused)
