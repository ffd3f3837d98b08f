"""Training loops as people write them: how far a pipeline ends from plain training over the same micro-batches."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipelab

MICROBATCHES = 4
WAYS = {
    "plainly": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "scaled": {"scale": 2.0**10},
    "scaled float16": {"dtype": torch.float16, "scale": 2.0**10},
    "overflow on the first stage": {"scale": 2.0**118, "steep": True},
    "accumulated": {"accumulate": 3},
    "accumulated and scaled": {"accumulate": 3, "scale": 2.0**10},
    "checkpointed": {"reentrant": False},
    "checkpointed, reentrant": {"reentrant": True},
    "compiled": {"compiled": True},
}
IN_PROCESSES = [
    *("bfloat16", "scaled float16", "overflow on the first stage"),
    *("accumulated and scaled", "checkpointed", "checkpointed, reentrant"),
]


class Block(nn.Module):
    def __init__(self, width, reentrant, drop=0.0):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(drop), nn.Linear(width, width))
        self.reentrant = reentrant

    def forward(self, x):
        if self.reentrant is None or not self.training:
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


def stages_of(reentrant=None, compiled=False, steep=False):
    torch.manual_seed(0)
    made = [nn.Linear(8, 8), *(Block(8, reentrant) for _ in range(3))]
    if steep:  # the gradient of the first layer, and of no other, is beyond the largest float32
        made[1] = nn.Sequential(nn.Linear(8, 8))
        with torch.no_grad():
            made[1][0].weight.mul_(1000)
            made[0].weight.div_(1000)
            made[0].bias.div_(1000)
    stages = [nn.Sequential(*made[:2]), nn.Sequential(*made[2:])]
    return [torch.compile(each, backend="aot_eager") for each in stages] if compiled else stages


def trained(way, schedule, engine):
    """Train four batches, the last one smaller; return distances from plain training, and every step's scale."""
    settings = dict(WAYS[way])
    dtype, scale, every = settings.pop("dtype", None), settings.pop("scale", None), settings.pop("accumulate", 1)
    ours, alone = stages_of(**settings), stages_of(**settings)
    model, plainly = nn.ModuleList(ours), nn.Sequential(*alone)
    mse, scales, losses, norms = nn.functional.mse_loss, [], [0.0], [0.0]

    def mixed():
        return torch.autocast("cpu", dtype=dtype) if dtype else nullcontext()

    def loss_fn(output, target):
        return mse(output.float(), target) / every

    with pipelab.Pipeline(ours, schedule, loss_fn, engine=engine, timeout=60) as pipe:
        sides = [list(pipe.parameters()), list(plainly.parameters())]
        optimizers = [torch.optim.AdamW(each, lr=1e-2) for each in sides]
        schedulers = [torch.optim.lr_scheduler.LinearLR(each, total_iters=4) for each in optimizers]
        scalers = [torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None) for _ in sides]
        for number, rows in enumerate((8, 8, 8, 5)):
            torch.manual_seed(number)
            for optimizer in optimizers:
                optimizer.zero_grad()
            for _ in range(every):
                x, y = torch.randn(rows, 8), torch.randn(rows, 8)
                with mixed():
                    step = pipe.step(x, y, scaler=scalers[0])
                    total = 0.0
                    for some, targets in zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True):
                        loss = loss_fn(plainly(some), targets) * (len(some) / rows)
                        scalers[1].scale(loss).backward()
                        total += loss.item()
                losses.append(abs(step.loss.item() / total - 1))
            for scaler, optimizer in zip(scalers, optimizers, strict=True):
                scaler.unscale_(optimizer)
            own = pipe.clip_grad_norm_(0.5)
            whole = nn.utils.clip_grad_norm_(plainly.parameters(), 0.5)
            norms.append(float(abs(own - whole) / whole) if whole.isfinite() else 0.0)
            for scaler, optimizer, scheduler in zip(scalers, optimizers, schedulers, strict=True):
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
            scales.append([scaler.get_scale() for scaler in scalers])
        pipe.state_dict()  # brings the model up to date, with several processes
    pairs = zip(model.parameters(), plainly.parameters(), strict=True)
    apart = max(float((mine - theirs).detach().norm() / theirs.detach().norm()) for mine, theirs in pairs)
    return {"weights": apart, "losses": max(losses), "norms": max(norms), "scales": scales}


def checkpoints_keep_masks(reentrant, schedule, engine):
    """Tell whether one step with dropout has the same gradients with checkpoints and without, and that it drops."""
    found = []
    for way, drop in ((None, 0.5), (reentrant, 0.5), (None, 0.0)):
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(8, 8), Block(8, way, drop)) for _ in range(2)]
        x, y = torch.randn(8, 8), torch.randn(8, 8)
        with pipelab.Pipeline(stages, schedule, nn.functional.mse_loss, engine=engine, timeout=60) as pipe:
            torch.manual_seed(7)
            pipe.step(x, y)
            found.append(torch.cat([each.grad.flatten() for each in pipe.parameters()]))
    alone, ours, undropped = found
    return torch.equal(alone, ours) and not torch.equal(alone, undropped)
