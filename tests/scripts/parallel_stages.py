"""Stages that are themselves spread over processes: two steps of training on 2 x 2 processes equal plain training's.

By each argument, as "tp 1f1b": how, and which schedule.
"""

from __future__ import annotations

import sys

import plain
import spreading
import torch
import torch.distributed as dist
from facts import say
from spreading import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pipelab


def model():
    torch.manual_seed(1)
    return nn.Sequential(*(spreading.Block() for _ in range(4)))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "across"))
across = mesh["across"]


def spread(module, how):
    for block in module:
        if how == "tp":
            parallelize_module(block, across, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        else:
            fully_shard(block, mesh=across)
    return module


SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
reduced, reduce_scatter = [], getattr(dist, SCATTER)


def counted(*given, **named):
    reduced.append(given)
    return reduce_scatter(*given, **named)


setattr(dist, SCATTER, counted)  # FSDP2 calls it


def sequential(module, how, x, y):
    """Train the spread model without a pipeline: FSDP2 reduces once, at the last micro-batch."""
    losses = []
    for index, (rows, targets) in enumerate(zip(x.tensor_split(4), y.tensor_split(4), strict=True)):
        for block in module if how == "fsdp" else ():
            block.set_requires_gradient_sync(index == 3)
        loss = nn.functional.mse_loss(module(rows), targets) / 4
        loss.backward()
        losses.append(loss.detach())
    return sum(losses)


def run(case):
    how, schedule = case.split()
    plan = pipelab.schedules[schedule](2, 4).plan()
    ours, same, alone = spread(model(), how), spread(model(), how), model()
    given = list(ours) if plan.stages == len(ours) else ours  # a list of stages, each spread as a whole
    group = mesh["pp"].get_group()

    def refused(**options):
        return spreading.told(
            lambda: pipelab.Pipeline(
                **{"model": ours, "loss_fn": nn.functional.mse_loss, "engine": "torch", "group": group} | options
            )
        )

    gradients, bits, norms, losses = 0.0, True, [], []
    with pipelab.Pipeline(given, plan, nn.functional.mse_loss, engine="torch", group=group, timeout=30) as pipe:
        three = (list(pipe.parameters()), same.parameters(), alone.parameters())
        optimizers = [torch.optim.AdamW(each, lr=0.1, foreach=False) for each in three]
        for number in range(2):
            torch.manual_seed(number)
            x, y = plain.batch(16)
            mine = (x, y) if how == "tp" else (x.chunk(2)[across.get_local_rank()], y.chunk(2)[across.get_local_rank()])
            for optimizer in optimizers:
                optimizer.zero_grad()
            reduced.clear()
            step = pipe.step(*mine)
            reductions = len(reduced)
            bits &= torch.equal(step.loss, sequential(same, how, *mine))
            losses.append(abs(float(step.loss) - float(nn.functional.mse_loss(alone(mine[0]), mine[1]).detach())))
            nn.functional.mse_loss(alone(x), y).backward()
            theirs = {name: full(each.grad) for name, each in same.named_parameters()}
            there = {name: full(each.grad) for name, each in ours.named_parameters() if each.grad is not None}
            bits &= all(torch.equal(each, theirs[name]) for name, each in there.items())
            wanted = {name: alone.get_parameter(name).grad for name in there}
            gradients = max(gradients, plain.difference(there, wanted))
            norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
            own = pipe.clip_grad_norm_(0.01)
            norms.append(float(own / norm))
            nn.utils.clip_grads_with_norm_(same.parameters(), 0.01, own, foreach=False)
            for optimizer in optimizers:
                optimizer.step()
        pipe.eval()
        evaluated = pipe.forward(mine[0])
        state = pipe.state_dict()
        names = [type(each).__name__ for each in state.values()]
        weights = plain.difference({name: full(each) for name, each in state.items()}, alone.state_dict())
        outputs = float((evaluated - alone(mine[0])).detach().norm())
        verified = pipe.verify(*mine)
    say(
        case=case,
        parameters=sorted(there),
        gradients=gradients,
        bits=bits,
        norms=norms,
        losses=losses,
        weights=weights,
        outputs=outputs,
        verified=[verified.parameters, verified.largest_difference],
        reductions=reductions,
        names=sorted(set(names)),
        threads=refused(schedule=plan, engine="threads", group=None),
        grouped=refused(schedule=plan, engine="threads"),
        replicas=refused(schedule=pipelab.replicate(pipelab.GPipe(1, 2), 2)),
        ranks=refused(schedule=pipelab.GPipe(4, 4)),
        split=refused(schedule=pipelab.ZBH1(2, 4)) if how == "fsdp" else "",
    )


for case in sys.argv[1:]:
    run(case)
dist.destroy_process_group()
