"""No gradient comes back through a stage that cuts it off: what is before has none, rather than zeros."""

from __future__ import annotations

import copy
import os

import plain
import torch
from facts import say
from torch import nn
from training import ROWS

import pipelab
from pipelab import Pipeline

mse = nn.functional.mse_loss
rank = int(os.environ["RANK"])
x, y = plain.batch(ROWS)


class Cut(nn.Linear):
    def forward(self, x):
        return super().forward(x.detach())


some = [nn.Linear(6, 6), nn.Linear(6, 6), Cut(6, 6), nn.Linear(6, 6)]
for schedule in (pipelab.ZBH1(4, 4), pipelab.Interleaved1F1B(4, 4), pipelab.replicate(pipelab.GPipe(2, 4), 2)):
    plan, found = schedule.plan(), []
    for engine in ("threads", "torch"):
        stages = [copy.deepcopy(each) for each in (some[1:3] if plan.stages == 2 else some * (plan.stages // 4))]
        with Pipeline(stages, plan, mse, engine=engine, timeout=60) as pipe:
            for _ in range(2):  # the second step finds gradients of the first
                pipe.step(x, y)
        held = {stage for stage, ranks in plan.replicas.items() if rank in ranks}
        found.append({f"{stage} {n}": p.grad for stage in held for n, p in stages[stage].named_parameters()})
    theirs, ours = found
    say(
        case="cut",
        none=sorted(name for name, gradient in ours.items() if gradient is None),
        expected=sorted(name for name, gradient in theirs.items() if gradient is None),
        gradients=all(g is theirs[name] or torch.allclose(g, theirs[name]) for name, g in ours.items()),
    )


# one micro-batch only is cut off


class CutsOne(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x.detach() if self.calls == 2 else x)


def uses_in_one(self, x):
    self.calls += 1
    return self.other(x) if self.calls == 2 else self.linear(x)


found, steps = [], []
for engine in ("threads", "torch"):
    torch.manual_seed(0)
    uses = plain.Made(uses_in_one, linear=nn.Linear(6, 6), other=nn.Linear(6, 6), calls=0)
    stages, woken = [nn.Linear(6, 6), uses, CutsOne(6, 6), nn.Linear(6, 6)], []
    stages[0].weight.register_post_accumulate_grad_hook(woken.append)
    with Pipeline(stages, pipelab.GPipe(4, 4), mse, engine=engine, timeout=60) as pipe:
        pipe.forward(x)
        for stage in stages:
            stage.calls = 0
        pipe.step(x, y)
    found.append(plain.taken(stages[rank]))
    steps.append(len(woken))
theirs, ours = found
say(
    case="cut one",
    gradients=plain.equal(ours, theirs),
    none=[gradient is None for gradient in ours.values()],
    steps=steps,
)
