"""Profile PyTorch's own schedules in processes that never heard of pipelab: one Kineto file for each rank."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.profiler import ProfilerActivity, profile

MICROBATCHES, STEPS = 4, 2
FORWARD, BACKWARD = 0.002, 0.004  # seconds


class Slow(torch.autograd.Function):
    """Sleeps in both directions, so that times hardly depend on the machine."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        time.sleep(FORWARD * factor)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD * ctx.factor)
        return gradient, None


class Layer(nn.Module):
    """A linear layer that takes a known time."""

    def __init__(self, factor):
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), factor

    def forward(self, x):
        return Slow.apply(self.linear(x), self.factor)


def main(folder, name, slow_rank=None, with_stack=False):
    """Train three steps and profile the last two; the stages of a slow rank take three times as long."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kind = schedules.get_schedule_class(name)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    held = (
        [rank]
        if single
        else [rank, 2 * ranks - 1 - rank]
        if name in ("ZBVZeroBubble", "DualPipeV")
        else [rank, rank + ranks]
    )
    count = ranks if single else 2 * ranks
    factor = 3 if rank == slow_rank else 1
    stages = [PipelineStage(Layer(factor), stage, count, torch.device("cpu")) for stage in held]
    schedule = kind(stages[0] if single else stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(2 * MICROBATCHES, 4), torch.randn(2 * MICROBATCHES, 4)

    def step():
        schedule.step(*([x] if 0 in held else []), **({"target": y} if count - 1 in held else {}))

    step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], with_stack=with_stack) as profiler:
        for _ in range(STEPS):
            step()
    profiler.export_chrome_trace(str(Path(folder, f"rank{rank}.json.gz")))


dist.init_process_group("gloo")
torch.manual_seed(0)
given, schedule_name, slow = sys.argv[1:4]
main(given, schedule_name, int(slow) if slow.isdigit() else None, "with_stack" in sys.argv)
dist.destroy_process_group()
