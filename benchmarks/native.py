"""PyTorch's own schedules in two processes, kept waiting for commands so that they can be measured in turns."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from multiprocessing.connection import Connection

import torch
from torch import multiprocessing, nn
from torch.distributed.pipelining import PipelineStage, schedules

import pipelab

RANKS = 2
NATIVE = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
    "looped-bfs": schedules.ScheduleLoopedBFS,
    "interleaved-zb": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}
"""PyTorch's class for each schedule that both have."""


def linear_stack(width: int, layers: int = 8) -> nn.Sequential:
    """Return `layers` layers of Linear and ReLU."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())))


class Native:
    """Two processes that run PyTorch's schedules on a linear stack, cut as pipelab cuts it."""

    def __init__(self, width: int, batch: int) -> None:
        """Start the processes."""
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, width, batch, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def steps(self, schedule: str, microbatches: int, count: int, *, engine: str = "native") -> list[float]:
        """Run some steps; return the seconds of each, until the last process was done.

        Args:
            schedule: its registered name.
            microbatches: how many.
            count: how many steps.
            engine: `"native"` for PyTorch's class, `"torch"` for pipelab's torch engine.
        """
        for pipe in self._pipes:
            pipe.send((engine, schedule, microbatches, count))
        return [max(times) for times in zip(*(pipe.recv() for pipe in self._pipes), strict=True)]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)


def _serve(rank: int, port: int, width: int, batch: int, commands: Connection) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    model = linear_stack(width)
    x, y = torch.randn(batch, width), torch.randn(batch, width)

    @cache
    def step(engine: str, name: str, microbatches: int) -> Callable[[], object]:
        plan = pipelab.schedules[name](RANKS, microbatches).plan()
        if engine == "torch":
            made = pipelab.Pipeline(model, plan, nn.functional.mse_loss, engine="torch", intra_op_threads=1)
            pipe = opened.enter_context(made)
            return lambda: pipe.step(x, y)
        return _native_step(NATIVE[name], plan, rank, model, x, y)

    with ExitStack() as opened:
        while (command := commands.recv()) is not None:
            *what, count = command
            run = step(*what)
            times = []
            for _ in range(count):
                model.zero_grad()
                dist.barrier()
                began = time.perf_counter()
                run()
                times.append(time.perf_counter() - began)
            commands.send(times)
    dist.destroy_process_group()


def _native_step(
    kind: type, plan: pipelab.Plan, rank: int, model: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> Callable[[], object]:
    """Return what runs a step of this process's part of a native schedule."""
    modules = pipelab.split(model, into=plan.stages).modules
    held = [stage for stage, ranks in plan.replicas.items() if rank in ranks]
    stages = [PipelineStage(modules[stage], stage, plan.stages, torch.device("cpu")) for stage in held]
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, plan.microbatches, loss_fn=nn.functional.mse_loss)
    arguments = (x,) if 0 in held else ()

    def step() -> None:
        if plan.stages - 1 in held:
            schedule.step(*arguments, target=y, losses=[])
        else:
            schedule.step(*arguments)

    return step
