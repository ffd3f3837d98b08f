"""Attacks on updates (`U`): random models and legal plans with updates anywhere, against plain stashed training."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from functools import partial
from random import Random

import pytest
import torch
from stashed import Stashed
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipelab

SGD, ADAM = partial(torch.optim.SGD, lr=0.2, weight_decay=0.1), partial(torch.optim.Adam, lr=0.05, eps=1e-3)
OPTIMIZERS = (SGD, partial(SGD, momentum=0.9), ADAM, partial(ADAM, weight_decay=0.1))
PARTS = {"norm": nn.BatchNorm1d, "recurrent": partial(nn.RNN, batch_first=True)}


class Layer(nn.Module):
    """Does one thing, by name. It records its dropout masks by thread; the oracle's runs one that it is given."""

    def __init__(self, what):
        super().__init__()
        self.what, self.part = what, PARTS.get(what, nn.Linear)(4, 4)
        self.masks, self.mask, self.join = defaultdict(list), None, pipelab.cached

    def forward(self, x):
        if self.what == "drop":
            mask = nn.functional.dropout(torch.ones_like(x)) if self.mask is None else self.mask
            self.masks[threading.current_thread().name].append(mask)
            return self.part(x) * mask
        if self.what == "past":
            return self.part(x) + self.join(x).tanh().mean(-2, keepdim=True)
        if self.what == "again" and self.join is pipelab.cached:
            return checkpoint(lambda x: self.part(x).tanh(), x, use_reentrant=False)
        made = self.part(x)
        return (made[0] if self.what == "recurrent" else made).tanh()


def _plan(random, slices):
    """Return a legal plan: actions in an order in which one rank could run them all, each on its own rank."""
    if slices == 1 and random.random() < 0.2:
        return random.choice([pipelab.PipeDream, pipelab.TwoBW])(random.randint(1, 3), random.randint(1, 6)).plan()
    ranks = random.randint(1, 3)
    ranks_of = [[s] if s < ranks else [random.randrange(ranks)] for s in range(ranks + random.randrange(3))]
    if ranks > 1 and slices == 1 and random.random() < 0.3:
        random.choice(ranks_of)[:] = random.sample(range(ranks), 2)
    split, again, updated = random.choice([0, 0, 1, 0.5]), random.choice([0, 0, 0.5]), random.choice([0.2, 0.6, 1])
    microbatches, waits = slices * random.randint(1, 6 // slices), {}  # for each action, those that it needs
    for s, on in enumerate(ranks_of):
        group, updates = [], updated if len(on) == 1 and random.random() < 0.8 else 0
        for m in range(microbatches):
            splits = random.random() < split
            back = "I" if splits else "B"
            waits["F", m, s] = [("F", m, s - 1)] * (s > 0) + [("F", m - 1, s)] * (m % slices > 0)
            waits[back, m, s] = [("F", m, s)]
            if slices == 1 and random.random() < again:
                waits["C", m, s] = [("F", m, s)]
                waits[back, m, s].append(("C", m, s))
            if splits:
                waits["W", m, s] = [("I", m, s)]
            group.append(("W" if splits else "B", m, s))
            if random.random() < updates:
                waits["U", m, s], group = group, [("U", m, s)]
    for kind, m, s in waits:
        if kind in "BI":  # after the next stage's, and after the sequence's next slice
            later = [(m, s + 1), *[(m + 1, s)] * ((m + 1) % slices > 0)]
            waits[kind, m, s] += [(each, *at) for at in later for each in "BI" if (each, *at) in waits]
    early = {kind: random.random() * 8 for kind in "FBIWCU"}
    rows = [[] for _ in range(ranks)]
    while waits:
        ready = [each for each, needs in waits.items() if not any(need in waits for need in needs)]
        kind, m, s = min(ready, key=lambda each: each[1] + early[each[0]] + random.random() * 3)
        del waits[kind, m, s]
        rows[ranks_of[s][m % len(ranks_of[s])]].append(pipelab.Action(kind, m, s))
    after = (lambda m, _s: range(m - 1, m) if m % slices else ()) if slices > 1 else None
    place = lambda m, s: ranks_of[s][m % len(ranks_of[s])]  # noqa: E731 - it reads best in place
    return pipelab.Plan(rows, len(ranks_of), microbatches, place, after=after)


def _stages(random, plan, slices):
    """Return random modules for a plan, and which two of them share a weight, if any."""
    stages = nn.ModuleList()
    for s in range(plan.stages):
        kinds = ["linear", "linear", "drop", "again", "past" if slices > 1 else "recurrent"]
        kinds += ["norm"] * (len(plan.replicas[s]) == 1 and slices == 1)
        layers = [Layer("linear"), *(Layer(random.choice(kinds)) for _ in range(random.randrange(3)))]
        if random.random() < 0.3:
            [each for each in layers if each.what == "linear"][-1].part.weight = layers[0].part.weight
        stages.append(nn.Sequential(*layers))
    for each in [*stages[:-1].parameters(), *(random.choice(stages[:-1] or [nn.ReLU()]).parameters())]:
        each.requires_grad_(random.random() < 0.9)
    tied = random.sample(range(plan.stages), 2) if plan.stages > 1 and random.random() < 0.2 else ()
    if tied:
        stages[tied[1]][0].part.weight = stages[tied[0]][0].part.weight
    return stages.double(), tied


def fuzz_updates(number: int) -> str | None:
    """Train two steps, adding up what no update takes: weights, gradients and buffers are those of the oracle."""
    random = Random(number)
    torch.manual_seed(number)
    slices = random.choice([1, 1, 1, 2, 3])
    plan, make = _plan(random, slices), random.choice(OPTIMIZERS)
    stages, tied = _stages(random, plan, slices)
    settings = {"sequence_dim": 1 if slices > 1 else None, "watch_nan": random.random() < 0.3}
    settings["optimizer"] = make if "U" in plan.bound.kinds else None
    pipeline = partial(pipelab.Pipeline, list(stages), plan, nn.MSELoss(), ["cpu"] * plan.ranks, **settings)
    if tied and stages[tied[0]][0].part.weight.requires_grad and any(plan.bound.listed("U", s) for s in tied):
        with pytest.raises(pipelab.EngineError, match="use one parameter"):
            pipeline()
        return None
    oracle = Stashed(copy.deepcopy(stages), plan, make, slices)
    for ours, theirs in zip(stages.parameters(), oracle.stages.parameters(), strict=True):
        if ours.requires_grad and random.random() < 0.3:
            ours.grad, theirs.grad = torch.ones_like(ours), torch.ones_like(ours)
    with pipeline() as pipe:
        for _ in range(2):
            rows = plan.microbatches // slices * 2 + random.randrange(3) * (slices == 1)
            x, y = torch.randn(2, rows, *[slices * 2] * (slices > 1), 4, dtype=torch.float64)
            loss = pipe.step(x, y).loss
            oracle.prepare = _prepare(oracle, plan, stages)
            xs, ys = (
                [piece for rows in batch.tensor_split(plan.microbatches // slices) for piece in rows.chunk(slices, 1)]
                for batch in (x, y)
            )
            theirs = {"loss": oracle.step(xs, ys, nn.functional.mse_loss), **_state(oracle.stages)}
            for name, ours in {"loss": loss, **_state(stages)}.items():
                none = ours is None or theirs[name] is None
                if ours is not theirs[name] if none else not torch.allclose(ours, theirs[name]):
                    return f"{name}: {ours}, expected {theirs[name]}\n{plan}\n{stages}"
    return None


def _state(stages):
    gradients = {f"gradient of {name}": each.grad for name, each in stages.named_parameters()}
    return {**stages.state_dict(), **gradients}


def _prepare(oracle, plan, stages):
    """Return what gives the oracle's layers a forward's masks, and what earlier slices passed to `cached`."""
    masks, joined = {}, defaultdict(list)
    for rank, row in enumerate(plan.rows):
        for s, stage in enumerate(stages):
            runs = [each.microbatch for each in row if each.kind in "FC" and each.stage == s]
            for layer in stage:
                for m, mask in zip(runs, layer.masks.pop(f"pipelab-rank-{rank}", ()), strict=False):
                    assert torch.equal(masks.setdefault((s, m, layer), mask), mask), "C drew another mask than F"

    def prepare(s, m):
        for own, layer in zip(oracle.stages[s], stages[s], strict=True):
            kept = joined[own, m // oracle.slices]
            own.mask, own.join = masks.get((s, m, layer)), lambda x, kept=kept: kept.append(x) or torch.cat(kept, -2)

    return prepare


fuzz_updates.seeds = 12
