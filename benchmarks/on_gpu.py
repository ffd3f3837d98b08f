"""All that needs a GPU, on one card and in ten minutes at most: `python benchmarks/on_gpu.py --out folder`.

Runs the tests marked gpu (gradients bit for bit, no waiting inside a step, NCCL with a process per GPU), the parts of
this file, and the course's experiments. Each has a separate process, and if it fails or hangs, the others run all the
same. The folder then holds `summary.txt` (read this first), what each of them printed, pictures, and `clocks.txt`: the
card's clocks and power, second by second. Nothing is installed, and no setting of the card is changed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import IO, NamedTuple

import torch
from timing import in_turns, timed
from torch import nn
from torch.profiler import ProfilerActivity, profile

import pipelab
from pipelab import Trace

ROOT = Path(__file__).parent.parent
RANKS = 4
SCHEDULES = ("gpipe", "naive", "1f1b", "delayed")
TESTS = ("tests/engine/test_gpu.py", "tests/engine/torchrun/test_process_gpu.py", "tests/engine/model/test_traced.py")
COMMANDS = {
    "practical9": ["lab", "practical9", "--real", "--width", "4096", "--batch", "4096"],
    "hw3": ["lab", "hw3", "--devices", "2", "--width", "4096", "--batch", "4096"],
}

_SECONDS = 110.0
"""How long each of them may take."""

_LONG_MS = 1.0
"""From which length on an action's span is held against its kernels'."""

_SLACK_MS = 0.02
"""How much earlier than its span a kernel may seem to begin: the profiler's clock is set against the GPU's."""

mse = nn.functional.mse_loss


@dataclass(frozen=True)
class Size:
    """A stack of transformer blocks and its batch, where it runs, and how often a thing is measured."""

    device: torch.device
    out: Path
    layers: int
    width: int
    sequence: int
    rows: int
    microbatches: int
    dtype: torch.dtype
    rounds: int

    def model(self) -> nn.Sequential:
        """Return the model, the same every time."""
        torch.manual_seed(0)
        like = {"dropout": 0.0, "batch_first": True, "norm_first": True, "device": self.device, "dtype": self.dtype}
        heads = max(2, self.width // 128)
        blocks = (nn.TransformerEncoderLayer(self.width, heads, 4 * self.width, **like) for _ in range(self.layers))
        return nn.Sequential(*blocks)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, `[rows, sequence, width]` each."""
        shape = (self.rows * self.microbatches, self.sequence, self.width)
        x, y = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(2))
        return x, y

    def pipeline(self, model: nn.Module, schedule: str) -> pipelab.Pipeline:
        """Return a pipeline of four ranks on one device, with ordinary streams."""
        made = pipelab.schedules[schedule](RANKS, self.microbatches)
        return pipelab.Pipeline(model, made, mse, devices=[str(self.device)] * RANKS)

    def wait(self) -> None:
        """Wait until the device has done all that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def sizes(device: torch.device, out: Path, *, quick: bool) -> list[Size]:
    """Return a size at which the GPU's work counts, and one at which launching it does."""
    large = Size(device, out, 8, 2048, 512, 8, 16, torch.bfloat16, rounds=7)
    small = replace(large, width=64, sequence=16, rows=2, dtype=torch.float32)
    return (
        [replace(small, layers=4, width=8, sequence=4, rows=1, microbatches=4, rounds=1)] if quick else [large, small]
    )


def overhead(size: Size) -> Iterator[str]:
    """Compare four ranks on ordinary streams with the same micro-batches in sequence on one stream."""
    model, (x, y) = size.model(), size.batch()

    def sequence() -> None:
        for rows, targets in zip(x.chunk(size.microbatches), y.chunk(size.microbatches), strict=True):
            (mse(model(rows), targets) / size.microbatches).backward()
        size.wait()

    def step(pipe: pipelab.Pipeline) -> None:
        pipe.step(x, y)
        size.wait()

    with size.pipeline(model, "gpipe") as gpipe, size.pipeline(model, "1f1b") as one_f_one_b:
        steps = {"sequence": sequence, "gpipe": lambda: step(gpipe), "1f1b": lambda: step(one_f_one_b)}
        times = in_turns({name: lambda do=do: timed(model, do, 3) for name, do in steps.items()}, size.rounds)
    alone = median(times["sequence"])
    for name, found in times.items():
        took = median(found)
        extra = 1e6 * (took - alone) / (2 * RANKS * size.microbatches)
        yield f"{name}: {1e3 * took:.2f} ms, {took / alone:.3f} of sequence, {extra:+.1f} us an action"


def memory(size: Size) -> Iterator[str]:
    """Compare the allocator's peak above what was held before a step with what the plan says is held."""
    model, (x, y) = size.model(), size.batch()
    for name in SCHEDULES:
        with size.pipeline(model, name) as pipe:
            predicted = pipelab.memory_use(pipe.plan, pipe.memory(x, y))
            pipe.step(x, y)
            peak = _peak(size, lambda pipe=pipe: pipe.step(x, y))
        held = [max(moment.activations for moment in curve) for curve in predicted.curves]
        yield f"{name}: predicted {sum(held) / 1e6:.1f} MB (by rank {held}), the allocator's peak {peak / 1e6:.1f} MB"


def _peak(size: Size, step: Callable[[], object]) -> int:
    """Return how far a step's peak is above what was held before it, in bytes."""
    if size.device.type == "cpu":
        return 0
    size.wait()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    size.wait()
    return torch.cuda.max_memory_allocated() - before


def prediction(size: Size) -> Iterator[str]:
    """Compare each schedule's measured steps with what the costs fitted on the first one's predict."""
    model, (x, y) = size.model(), size.batch()
    cost = None
    for name in SCHEDULES:
        with size.pipeline(model, name) as pipe:
            traces = [pipe.step(x, y).trace for _ in range(size.rounds + 2)][2:]
        measured = sorted(traces, key=lambda trace: trace.makespan)[len(traces) // 2]
        cost = cost or pipelab.Cost.fit(measured)
        predicted = pipelab.simulate(measured.plan, cost)
        pipelab.compare(predicted, measured).save(size.out / f"{name}-{size.width}.svg")
        error = predicted.makespan / measured.makespan - 1
        yield f"{name}: measured {measured.makespan:.2f} ms, predicted {predicted.makespan:.2f} ms, {error:+.1%}"


def kernels(size: Size) -> Iterator[str]:
    """Hold the spans of a traced step against the kernels that PyTorch's profiler saw in it."""
    if size.device.type == "cpu":
        yield "no kernels: this is no GPU"
        return
    model, (x, y) = size.model(), size.batch()
    with size.pipeline(model, "1f1b") as pipe:
        for _ in range(2):  # the first profile of a process is slow, and may miss things
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                step = pipe.step(x, y)
                size.wait()
    trace = step.trace
    trace.save(size.out / f"profiled-{size.width}.svg")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    for rank, (inside, off) in enumerate(agreement(events, trace)):
        yield f"rank {rank}: {inside:.1%} of its kernels' time inside spans; spans over 1 ms differ by up to {off:.1%}"


class Kernel(NamedTuple):
    """What ran on a stream, in milliseconds."""

    start: float
    end: float


def agreement(events: list[dict[str, object]], trace: Trace) -> list[tuple[float, float]]:
    """Return, by rank, the share of the profiler's kernels inside the trace's spans, and how far a long span is off."""
    streams: dict[object, list[Kernel]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            start = 1e-3 * float(event["ts"])
            streams[event["args"]["stream"]].append(Kernel(start, start + 1e-3 * float(event["dur"])))
    if len(streams) < trace.ranks:
        raise RuntimeError(f"the profiler saw kernels on {len(streams)} streams, and there are {trace.ranks} ranks")
    busiest = sorted(streams.values(), key=lambda some: -sum(end - start for start, end in some))[: trace.ranks]
    ranks = sorted(map(sorted, busiest), key=lambda some: some[0])  # stage 0 begins first
    rows = [[Kernel(event.start, event.end) for event in trace.events_of(rank)] for rank in range(trace.ranks)]
    # The two clocks have different zeros: a span's end is recorded right behind its last kernel.
    apart = median(some[-1].end - row[-1].end for some, row in zip(ranks, rows, strict=True))
    moved = [[Kernel(start - apart, end - apart) for start, end in some] for some in ranks]
    return [_of_rank(some, row) for some, row in zip(moved, rows, strict=True)]


def _of_rank(seen: list[Kernel], row: list[Kernel]) -> tuple[float, float]:
    """Return the share of one rank's kernels inside its spans, and the largest difference of a long span."""
    starts = [span.start - _SLACK_MS for span in row]
    of: list[list[Kernel]] = [[] for _ in row]
    for kernel in seen:
        of[max(0, bisect_right(starts, kernel.start) - 1)].append(kernel)
    inside, off = 0.0, [0.0]
    for span, some in zip(row, of, strict=True):
        inside += sum(max(0.0, min(end, span.end) - max(start, span.start)) for start, end in some)
        if some and span.end - span.start >= _LONG_MS:  # from its first kernel's start to its last one's end
            off.append(abs((some[-1].end - some[0].start) / (span.end - span.start) - 1))
    return inside / sum(end - start for start, end in seen), max(off)


def homework4(size: Size) -> Iterator[str]:
    """Run the solution of homework 4 with both halves of its model on the one device."""
    sys.path.insert(0, str(ROOT / "teacher" / "homework4"))
    import pipeline_homework

    pipeline_homework.two_devices = lambda: [size.device] * 2
    pipeline_homework.main()
    yield f"ran on {size.device}"


PARTS: dict[str, Callable[[Size], Iterator[str]]] = {
    "overhead": overhead,
    "kernels": kernels,
    "memory": memory,
    "prediction": prediction,
    "homework4": homework4,
}


def tasks(given: argparse.Namespace) -> dict[str, list[str]]:
    """Return all commands by name, what is worth most first, should the time not suffice."""
    # PyTorch comes before pytest makes errors of warnings: what it says of the machine is none of ours.
    pytest = [sys.executable, "-c", "import torch, pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"]
    asked = ["-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin", "--timeout=40", "-m", "gpu", "-q", "-ra"]
    again = [sys.executable, __file__, "--device", given.device, *["--quick"] * given.quick, "--out", str(given.out)]
    return {
        **{Path(test).stem: [*pytest, *asked, test] for test in TESTS},
        **{part: [*again, "--part", part] for part in PARTS},
        **{name: [sys.executable, "-m", "pipelab", *words] for name, words in COMMANDS.items()},
    }


def gather(given: argparse.Namespace) -> int:
    """Run everything, with a summary that is whole after each task; return how many failed."""
    until = time.monotonic() + given.seconds
    summary, failed = [f"torch {torch.__version__}, device {given.device}"], 0
    with _clocks(given.out / "clocks.txt"):
        for name, command in tasks(given).items():
            path = given.out / f"{name}.txt"
            with path.open("w") as log:
                error = run_for(command, min(_SECONDS, until - time.monotonic()), log, given.device)
            failed += error is not None
            last = path.read_text(errors="replace").splitlines()[-12:]
            lines = [f"{name}: {error or 'done'}", *(f"  {line[:300]}" for line in last)]
            print("\n".join(lines), flush=True)
            summary += lines
            (given.out / "summary.txt").write_text("\n".join([*summary, f"{failed} failed"]) + "\n")
    return failed


def run_for(command: list[str], seconds: float, log: IO[str], device: str) -> str | None:
    """Run a command, with all the processes that it starts, for so long at most; return what went wrong."""
    if seconds <= 0:
        return "no time was left"
    started = subprocess.Popen(
        command, cwd=ROOT, env=_environment(device), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        code = started.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"it took more than {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # whatever it has left behind
        started.wait()
    return f"its process ended with {code}" if code else None


def _environment(device: str) -> dict[str, str]:
    """Return an environment in which this pipelab, from this folder, is the one that is imported."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "GLOO_SOCKET_IFNAME": "lo",  # a machine that reaches nothing outside has no other way
        "NCCL_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # with the usual eight queues, one rank's stream may wait for another's
        **os.environ,
        **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "MPLBACKEND": "Agg",
    }


@contextmanager
def _clocks(path: Path) -> Iterator[None]:
    """Note the card's clocks and power meanwhile."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    with path.open("w") as file:
        noting = subprocess.Popen(["nvidia-smi", "dmon", "-s", "puc", "-d", "1", "-o", "T"], stdout=file)
        try:
            yield
        finally:
            noting.terminate()
            noting.wait()


def main(words: list[str]) -> int:
    """Run everything, or one part in this process; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is found")
    parser.add_argument("--part", choices=PARTS, help="only this part, in this process")
    parser.add_argument("--seconds", type=float, default=570.0, help="how long it may take at most")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only to see that everything runs")
    given = parser.parse_args(words)
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part is None:
        return gather(given)
    device = torch.device("cuda", 0) if given.device == "cuda" else torch.device("cpu")
    for size in sizes(device, given.out, quick=given.quick):
        print(f"width {size.width}, {size.microbatches} micro-batches:", flush=True)
        for line in PARTS[given.part](size):
            print(f"  {line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
