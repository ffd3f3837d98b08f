"""Homework 1: a benchmark of data parallelism that gives the same losses every time.

    torchrun --nproc-per-node 2 ddp_homework.py    runs it, with or without your code in the holes
    pipelab grade ddp_homework.py                  runs it in two processes, with a clock of its own

Each of the processes trains the same model on its share of one batch of 64 rows, and DistributedDataParallel averages
the gradients. Fill the four holes, and change nothing else. Then answer:

- Why are the first steps thrown away? Why are the seeds fixed?
- Run it with 1, 2 and 4 processes, and fill a table: processes, time of a step, speed-up, efficiency.
"""

import csv
import random
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 30
DROPPED = 5  # the first steps, which warm up
BATCH = 64  # rows of all processes together
LOG = "steps.csv"


def make_model(width=16, depth=2):
    """Return the model; its weights come from PyTorch's random numbers."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))


def make_batch(width=16):
    """Return the inputs and targets of all processes, `[64, 16]` each; they come from Python's random numbers."""
    x, y = (torch.tensor([[random.gauss(0, 1) for _ in range(width)] for _ in range(BATCH)]) for _ in range(2))
    return x, y


def benchmark(rank, processes):
    """Train for 30 steps, and return the median time of a step in ms, without the first 5.

    `rank` is this process's number. Rank 0 alone prints the result, and writes a line for every step into `steps.csv`:
    step (from 0), ms, loss.
    """
    # Hole 1: fix both seeds, Python's and PyTorch's, to the same numbers in all processes.
    random.seed(0)
    torch.manual_seed(0)

    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss_fn = nn.MSELoss()
    log = []  # (step, ms, loss)
    for step in range(STEPS):
        x, y = make_batch()
        # Hole 2: keep this process's share of the rows: no row twice, and together all of them.
        share = slice(rank * BATCH // processes, (rank + 1) * BATCH // processes)
        x, y = x[share], y[share]

        # Hole 3: train for a step. Read time.perf_counter() before the forward and after the optimizer, and log it.
        # On a GPU, call torch.cuda.synchronize() before you read the clock.
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        log.append((step, 1e3 * (time.perf_counter() - began), loss.item()))

    # Hole 4: throw the first steps away; rank 0 writes steps.csv and prints the result.
    result = median(ms for _, ms, _ in log[DROPPED:])
    if rank == 0:
        with open(LOG, "w", newline="") as file:
            csv.writer(file).writerows([("step", "ms", "loss"), *log])
        print(f"a step takes {result:.2f} ms")

    return result


def main():
    """Start what torchrun has prepared, and run the benchmark."""
    dist.init_process_group("gloo")
    benchmark(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
