"""Data parallelism, timed: what each process runs, and how the processes are started and ended.

PyTorch's launcher, the part of torchrun that starts processes, runs `python -m pipelab_course.ddp JOB FOLDER` in each
of them. They connect by the loopback device alone.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes
from torch.distributed.elastic.multiprocessing.errors import record
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from pipelab.catalogue import Naive
from pipelab.cli.believing import Watch
from pipelab.engine.pipeline import Pipeline
from pipelab.engine.torchrun.launch import decisive, end_with_launcher, loopback_job
from pipelab.errors import EngineError, RankError, counted
from pipelab_course.figures import kernel_bytes

DROPPED = 5
"""How many steps are dropped before the first one that counts."""
_ALONE = 10
"""How many steps are measured without the all-reduce."""
_CLOSE_SECONDS = 5
"""How long processes may take to end after SIGTERM; then they are killed."""
_COPIES = 4
"""Parameters, gradients, the optimizer's momentum, and the buckets in which DDP all-reduces."""
_PYTORCH_BYTES = 300e6
"""What a process needs before it has a model."""


@dataclass(frozen=True)
class Job:
    """A model to train in one or several processes.

    Attributes:
        processes: how many.
        width: features of every layer.
        depth: how many layers, Linear and ReLU each.
        batch: rows of the global batch, which the processes share equally.
        steps: how many steps; the first `DROPPED` do not count.
        seed: of the weights and of the data.
        threads: how many processor threads each process computes with.
        delay_ms: a sleep at the beginning of every step.
        delayed: the one rank that sleeps; `None` for all.
        data_parallel: `DataParallel` in one process, instead of DDP.
        devices: how many it has without GPUs: they are emulated.
        gpus: whether each process has its own GPU; `DataParallel` has all.
    """

    processes: int
    width: int
    depth: int
    batch: int = 64
    steps: int = 35
    seed: int = 0
    threads: int = 1
    delay_ms: float = 0.0
    delayed: int | None = None
    data_parallel: bool = False
    devices: int = 1
    gpus: bool = False


@dataclass(frozen=True)
class Amdahl:
    """Amdahl's law, fitted: `n` processes take `serial + (1 - serial) / n` of the time of one.

    Attributes:
        serial: the fraction of one process's time that others do not shorten. Above 1 if more processes are slower.
        residual: the root mean square of fitted minus measured time, divided by the time of one process; `None` if one
            point alone was fitted, which every curve meets.
    """

    serial: float
    residual: float | None

    def speed_up(self, processes: int) -> float:
        """Return how many times as fast so many processes are."""
        return 1 / (self.serial + (1 - self.serial) / processes)

    @property
    def limit(self) -> float:
        """The speed-up that no number of processes exceeds."""
        return 1 / self.serial if self.serial > 0 else math.inf


def fit_amdahl(times: Mapping[int, float]) -> Amdahl | None:
    """Fit Amdahl's law to step times by least squares.

    The time of one process is taken as measured, so the law has one unknown, the serial fraction `s`: for every other
    number of processes `n`, `T(n) / T(1) - 1 / n = s (1 - 1 / n)`.
    """
    others = [count for count in times if count != 1]
    if 1 not in times or not others:
        return None
    xs = [1 - 1 / count for count in others]
    ys = [times[count] / times[1] - 1 / count for count in others]
    serial = sum(x * y for x, y in zip(xs, ys, strict=True)) / sum(x * x for x in xs)
    misses = [serial * x - y for x, y in zip(xs, ys, strict=True)]
    residual = math.sqrt(sum(miss * miss for miss in misses) / len(misses))
    return Amdahl(serial, residual if len(misses) > 1 else None)


def memory_needed(width: int, depth: int) -> float:
    """Return the bytes that each process needs: parameters, gradients, momentum, DDP's buckets, and PyTorch itself.

    Example:
        >>> f"{memory_needed(8192, 8) / 1e9:.1f} GB"
        '8.9 GB'
    """
    return _COPIES * 4 * depth * (width * width + width) + _PYTORCH_BYTES


def free_memory() -> float:
    """Return how many bytes new processes may use."""
    found = kernel_bytes("/proc/meminfo", "MemAvailable")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if found is None else found


def run_job(job: Job, timeout: float = 600.0) -> dict[str, Any]:
    """Run a job in its own processes; return what rank 0 measured.

    No process is left behind: neither by an error or an interrupt, nor if this process is killed.
    """
    _store, shared = loopback_job(job.processes)
    shared["OMP_NUM_THREADS"] = str(job.threads)
    envs = {rank: shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(job.processes)}
    with tempfile.TemporaryDirectory() as folder:
        words = ("-m", "pipelab_course.ddp", json.dumps(asdict(job)), folder, str(timeout))
        logs = DefaultLogsSpecs(str(Path(folder, "logs")))
        with _own_signals():
            started = start_processes("ddp", sys.executable, dict.fromkeys(envs, words), envs, logs)
        try:
            ended = started.wait(timeout, period=0.05)
        finally:
            started.close(timeout=_CLOSE_SECONDS)
        if ended is None:
            raise EngineError(
                f"{counted(job.processes, 'process')} did not end within {timeout:g} s, and "
                f"were stopped: choose a smaller model, fewer steps, or a longer --timeout"
            )
        if ended.failures:
            first = decisive(ended.failures).removeprefix("pipelab: ")
            raise EngineError(f"of {job.processes} processes, {first}")
        found: dict[str, Any] = json.loads(Path(folder, "answer.json").read_text())
        return found


@contextmanager
def _own_signals() -> Iterator[None]:
    """Put this process's signal handlers back afterwards: PyTorch's launcher sets its own, and leaves them."""
    main = threading.current_thread() is threading.main_thread()
    handlers = {each: signal.getsignal(each) for each in signal.valid_signals()} if main else {}
    try:
        yield
    except SignalException as stopped:
        raise KeyboardInterrupt from stopped
    finally:
        for each, handler in handlers.items():
            if signal.getsignal(each) is not handler:
                signal.signal(each, handler)


@record
def _main() -> None:
    """Run the job as one of its processes; rank 0 writes the answer."""
    end_with_launcher()
    words, folder, timeout = sys.argv[1:]
    for stream in (1, 2):  # the launcher says what failed, once; PyTorch's own reports would come from every process
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    job, rank = Job(**json.loads(words)), int(os.environ["RANK"])
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    try:
        if not job.data_parallel:
            dist.init_process_group("nccl" if job.gpus else "gloo", timeout=timedelta(seconds=float(timeout)))
        answer = _train(job, rank)
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):  # what another process's end looks like here
            raise RankError(f"rank {rank} lost its connection: {error}", -1) from error
        raise
    if rank == 0:
        Path(folder, "answer.json").write_text(json.dumps(answer))
    if not job.data_parallel:
        dist.destroy_process_group()


def _train(job: Job, rank: int) -> dict[str, Any]:
    """Train, and return what this rank measured, with the other ranks' figures."""
    device = torch.device("cuda", rank) if job.gpus else torch.device("cpu")
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # the first optimizer loads much of PyTorch
    memory_before = _resident("VmRSS")
    layers = (layer for _ in range(job.depth) for layer in (nn.Linear(job.width, job.width), nn.ReLU()))
    plain = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    mine = slice(rank * job.batch // job.processes, (rank + 1) * job.batch // job.processes)
    x, y = (torch.randn(job.batch, job.width)[mine].to(device) for _ in range(2))
    model = nn.DataParallel(plain) if job.data_parallel else DistributedDataParallel(plain)
    delay = job.delay_ms / 1e3 if job.delayed in (None, rank) else 0.0

    def step() -> tuple[float, torch.Tensor]:
        began = time.perf_counter()
        time.sleep(delay)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if job.gpus:
            torch.cuda.synchronize(device)
        return 1e3 * (time.perf_counter() - began), loss.detach()

    busy = list[list[float]]()
    if job.data_parallel and not job.gpus:
        step = partial(_emulated_step, job, plain, optimizer, x, y, busy)
    for _ in range(DROPPED):
        step()
    began, watch = time.perf_counter(), Watch()
    with watch:
        times, losses = zip(*(step() for _ in range(job.steps - DROPPED)), strict=True)
    processor, memory_mb = watch.own / (time.perf_counter() - began), _memory_mb(job, device, memory_before)
    own = [median(times), processor / job.threads, memory_mb, losses[-1].item(), watch.own]
    ranks = [own]
    if busy:
        shares = [median(each) for each in zip(*busy[DROPPED:], strict=True)]
        held = _devices_mb(plain, optimizer, x, y, job.devices)
        ranks = [[own[0], share, mb, own[3], watch.own / job.devices] for share, mb in zip(shares, held, strict=True)]
    alone: list[float] = []
    if isinstance(model, DistributedDataParallel) and job.processes > 1:
        ranks = [[] for _ in range(job.processes)]
        dist.all_gather_object(ranks, own)
        with model.no_sync():  # from here on, the processes' weights differ
            alone = [step()[0] for _ in range(_ALONE)]
    rank_ms, utilisation, memory, loss, seconds = map(list, zip(*ranks, strict=True))
    return {
        "times_ms": times,
        "alone_ms": alone,
        "loss": sum(loss) / len(loss),
        "rank_ms": rank_ms,
        "utilisation": utilisation,
        "memory_mb": memory,
        "others": watch.others(sum(seconds)),
    }


def _emulated_step(
    job: Job, plain: nn.Module, optimizer: torch.optim.SGD, x: Tensor, y: Tensor, busy: list[list[float]]
) -> tuple[float, Tensor]:
    """Train a step as `DataParallel` does; add to `busy` which share of it each device works.

    The devices are emulated: they compute one after another, which counts as simultaneous. What device 0 does for all
    is added: it copies the model, scatters, gathers, adds up gradients and updates.
    """
    marks, own = [time.perf_counter()], dict[str, Tensor](plain.named_parameters())

    def lap() -> float:
        marks.append(time.perf_counter())
        return 1e3 * (marks[-1] - marks[-2])

    optimizer.zero_grad()
    copies = [
        {name: each.detach().clone().requires_grad_() for name, each in own.items()} for _ in range(1, job.devices)
    ]
    shares = [rows.clone() for rows in x.chunk(job.devices)]
    outputs, forwards, backwards, serial = list[Tensor](), list[float](), list[float](), lap()
    for model, rows in zip([own, *copies], shares, strict=True):
        outputs.append(functional_call(plain, model, (rows,)))
        forwards.append(lap())
    gathered = torch.cat(outputs).detach().requires_grad_()
    loss = nn.functional.mse_loss(gathered, y)
    parts = torch.autograd.grad(loss, gathered)[0].chunk(job.devices)
    serial += lap()
    for output, gradient in zip(outputs, parts, strict=True):
        output.backward(gradient)
        backwards.append(lap())
    for model in copies:
        for each, copy in zip(own.values(), model.values(), strict=True):
            assert each.grad is not None
            assert copy.grad is not None
            each.grad += copy.grad
    optimizer.step()
    serial += lap()
    took = serial + max(forwards) + max(backwards)
    worked = [sum(each) / took for each in zip(forwards, backwards, strict=True)]
    busy.append([worked[0] + serial / took, *worked[1:]])
    return took, loss.detach()


def _devices_mb(plain: nn.Module, optimizer: torch.optim.SGD, x: Tensor, y: Tensor, devices: int) -> Iterator[float]:
    """Yield what each emulated device holds; device 0 has all rows, targets, outputs, their gradients and momenta."""
    momenta = sum(state["momentum_buffer"].nbytes for state in optimizer.state.values())
    for device, rows in enumerate(x.chunk(devices)):
        with Pipeline([plain], Naive(1, 1), nn.functional.mse_loss, ["cpu"]) as pipe:
            memory: Any = pipe.memory(rows, y[: len(rows)])
        held = memory.weights[0] + memory.gradients[0] + memory.activations[0]
        yield (held + (rows.nbytes if device else x.nbytes + 3 * y.nbytes + momenta)) / 1e6


def _memory_mb(job: Job, device: torch.device, before: int) -> float:
    """Return the peak of what training added to the memory, in MB."""
    if not job.gpus:
        return max(0, _resident("VmHWM") - before) / 1e6
    found = range(torch.cuda.device_count()) if job.data_parallel else [device]
    return max(torch.cuda.max_memory_allocated(each) for each in found) / 1e6


def _resident(key: str) -> int:
    """Return this process's memory in bytes: now (`VmRSS`), or at its peak (`VmHWM`)."""
    found = kernel_bytes("/proc/self/status", key)  # elsewhere there is only the peak, on macOS in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if found is None else found


if __name__ == "__main__":
    _main()
