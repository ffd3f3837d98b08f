"""PyTorch's own schedules in two processes, kept waiting for commands so that they can be measured in turns."""

from __future__ import annotations

import os
import socket
import time
from multiprocessing.connection import Connection

import torch
from torch import multiprocessing, nn


def linear_stack(width: int, layers: int = 8) -> nn.Sequential:
    """Return `layers` layers of Linear and ReLU."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())))


class Native:
    """Two processes that run PyTorch's GPipe and 1F1B on halves of a linear stack."""

    def __init__(self, width: int, batch: int) -> None:
        """Start the processes."""
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, width, batch, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def steps(self, schedule: str, microbatches: int, count: int) -> list[float]:
        """Run some steps; return the seconds of each, as rank 0 saw them."""
        for pipe in self._pipes:
            pipe.send((schedule, microbatches, count))
        first, _ = [pipe.recv() for pipe in self._pipes]
        return first

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)


def _serve(rank: int, port: int, width: int, batch: int, commands: Connection) -> None:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = linear_stack(width)
    half = model[:8] if rank == 0 else model[8:]
    x, y = torch.randn(batch, width), torch.randn(batch, width)
    kinds = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
    made = {}
    while (command := commands.recv()) is not None:
        name, microbatches, count = command
        if (name, microbatches) not in made:
            stage = PipelineStage(half, rank, 2, torch.device("cpu"))
            made[name, microbatches] = kinds[name](stage, microbatches, loss_fn=nn.functional.mse_loss)
        schedule = made[name, microbatches]
        times = []
        for _ in range(count):
            half.zero_grad()
            dist.barrier()
            began = time.perf_counter()
            schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])
            times.append(time.perf_counter() - began)
        commands.send(times)
    dist.destroy_process_group()
