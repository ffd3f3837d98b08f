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
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import IO, NamedTuple

import torch
from prediction import fine
from timing import in_turns, timed
from torch import nn
from torch.profiler import ProfilerActivity, profile

import pipelab
from pipelab import Trace

ROOT = Path(__file__).parent.parent
RANKS = 4
SCHEDULES = ("gpipe", "naive", "1f1b", "delayed", "interleaved-1f1b", "zb-h1")
TESTS = ("tests/engine/test_gpu.py", "tests/engine/torchrun/test_process_gpu.py", "tests/engine/model/test_traced.py")
COMMANDS = {
    "practical9": ["practical9", "--real", "--width", "1024", "--batch", "1024"],
    "hw3": ["hw3", "--width", "1024", "--batch", "1024"],
}
"""Experiments of the course: once on the GPU, once on the processor."""

_COURSE = "from pipelab_course.commands import lab; lab()"

_SECONDS = 110.0
"""How long each of them may take."""

_LONG_MS = 1.0
"""From which length on an action's span is held against its kernels'."""

_SLACK_MS = 0.02
"""How much earlier than its span a kernel may seem to begin: the profiler's clock is set against the GPU's."""

mse = nn.functional.mse_loss


@dataclass(frozen=True)
class Size:
    """A model and its batch, where it runs, and how often a thing is measured.

    The model is a stack of transformer blocks; for rows without a sequence, of linear layers; without a width, of
    layers that occupy one multiprocessor of the GPU for a millisecond forward, and two backward.
    """

    device: torch.device
    out: Path
    layers: int
    width: int | None
    sequence: int | None
    rows: int
    microbatches: int
    dtype: torch.dtype
    rounds: int

    def model(self) -> nn.Sequential:
        """Return the model, the same every time."""
        torch.manual_seed(0)
        if self.width is None:
            return nn.Sequential(*(Occupies().to(self.device) for _ in range(self.layers)))
        if self.sequence is None:
            where = {"device": self.device, "dtype": self.dtype}
            layers = (nn.Sequential(nn.Linear(self.width, self.width, **where), nn.ReLU()) for _ in range(self.layers))
            return nn.Sequential(*layers)
        like = {"dropout": 0.0, "batch_first": True, "norm_first": True, "device": self.device, "dtype": self.dtype}
        heads = max(2, self.width // 128)
        blocks = (nn.TransformerEncoderLayer(self.width, heads, 4 * self.width, **like) for _ in range(self.layers))
        return nn.Sequential(*blocks)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, `[rows, sequence, width]` or `[rows, width]` each."""
        shape = (self.rows * self.microbatches, *filter(None, [self.sequence]), self.width or 4)
        x, y = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(2))
        return x, y

    def pipeline(self, model: nn.Module, schedule: str | pipelab.Plan) -> pipelab.Pipeline:
        """Return a pipeline of four ranks on one device, with ordinary streams."""
        made = pipelab.schedules[schedule](RANKS, self.microbatches) if isinstance(schedule, str) else schedule
        return pipelab.Pipeline(model, made, mse, devices=[str(self.device)] * RANKS)

    def wait(self) -> None:
        """Wait until the device has done all that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class _Busy(torch.autograd.Function):
    """Pass a tensor on when the device has been busy for some milliseconds, and its gradient after a millisecond."""

    @staticmethod
    def forward(_: object, value: torch.Tensor, milliseconds: int) -> torch.Tensor:
        occupy(value, milliseconds)
        return value.view_as(value)

    @staticmethod
    def backward(_: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        occupy(gradient, 1)
        return gradient, None


class Occupies(nn.Linear):
    """A layer of four numbers that takes a millisecond for its output, its input's gradient and its weight's."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what a linear layer does."""
        return nn.functional.linear(_Busy.apply(x, 1), _Busy.apply(self.weight, 0), self.bias)


def occupy(tensor: torch.Tensor, milliseconds: int) -> None:
    """Keep one multiprocessor of a tensor's GPU busy: the clock of an H100 has 1.98 GHz at most."""
    if tensor.is_cuda:
        torch.cuda._sleep(1_980_000 * milliseconds)  # noqa: SLF001 - PyTorch's own tests use it
    else:
        time.sleep(1e-3 * milliseconds)


def sizes(device: torch.device, out: Path, *, quick: bool) -> list[Size]:
    """Return a size that fills a GPU, two whose kernels leave room for other ranks', and one of short kernels."""
    large = Size(device, out, 8, 2048, 512, 8, 16, torch.bfloat16, rounds=5)
    beside = replace(large, layers=16, sequence=None, rows=128, dtype=torch.float32)
    alone = replace(beside, layers=8, width=None, rows=2)
    small = replace(large, width=64, sequence=16, rows=2, dtype=torch.float32)
    tiny = replace(small, width=8, sequence=4, rows=1, microbatches=4, rounds=1)
    return [tiny, replace(tiny, sequence=None)] if quick else [large, beside, small, alone]


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
    if size.device.type == "cpu":
        yield "no allocator that counts: this is no GPU"
        return
    model, (x, y) = size.model(), size.batch()
    for name in SCHEDULES:
        with size.pipeline(model, name) as pipe:
            of_stages = pipe.memory(x, y)
            pipe.step(x, y)
            peak = _peak(size, lambda pipe=pipe: pipe.step(x, y))
            trace = pipe.step(x, y).trace
        predicted = _at_once(pipelab.memory_use(trace, of_stages))
        yield (
            f"{name}: predicted {predicted / 1e6:.1f} MB, the allocator's peak {peak / 1e6:.1f} MB, "
            f"{predicted / peak - 1:+.1%}"
        )


def _at_once(use: pipelab.MemoryUse) -> int:
    """Return the most activations and outputs that all ranks hold at one moment, in bytes."""
    changes = sorted(
        (held.time, held.activations + held.outputs - before.activations - before.outputs)
        for curve in use.curves
        for before, held in pairwise(curve)
    )
    return max(accumulate(change for _, change in changes))


def _peak(size: Size, step: Callable[[], object]) -> int:
    """Return how far a step's peak is above what was held before it, in bytes."""
    size.wait()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    size.wait()
    return torch.cuda.max_memory_allocated() - before


def prediction(size: Size) -> Iterator[str]:
    """Compare each schedule's measured steps with what costs predict that were fitted in GPipe's order."""
    model, (x, y) = size.model(), size.batch()
    plans = [fine(split, RANKS, size.microbatches) for split in (False, True)]
    fitted = [_traces(size, model, plan, x, y) for plan in plans]
    cost = pipelab.Cost.fit(*(traces[len(traces) // 2] for traces in fitted))
    for name in SCHEDULES:
        traces = _traces(size, model, name, x, y)
        measured = traces[len(traces) // 2]
        stages = measured.plan.stages
        predicted = pipelab.simulate(measured.plan, cost if stages == 2 * RANKS else cost.merged(stages))
        pipelab.compare(predicted, measured).save(size.out / f"{name}-{size.width}.svg")
        error = predicted.makespan / measured.makespan - 1
        yield f"{name}: measured {measured.makespan:.2f} ms, predicted {predicted.makespan:.2f} ms, {error:+.1%}"


def _traces(
    size: Size, model: nn.Module, schedule: str | pipelab.Plan, x: torch.Tensor, y: torch.Tensor
) -> list[Trace]:
    """Return the traces of some steps, by makespan; the first two, which warm up, are left out."""
    with size.pipeline(model, schedule) as pipe:
        traces = [pipe.step(x, y).trace for _ in range(size.rounds + 2)][2:]
    return sorted(traces, key=lambda trace: trace.makespan)


def kernels(size: Size) -> Iterator[str]:
    """Hold the spans of a traced step against the kernels that PyTorch's profiler saw in it."""
    if size.device.type == "cpu":
        yield "no kernels: this is no GPU"
        return
    model, (x, y) = size.model(), size.batch()
    for name in ("naive", "1f1b"):
        with size.pipeline(model, name) as pipe:
            for _ in range(2):  # the first profile of a process is slow, and may miss things
                with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                    step = pipe.step(x, y)
                    size.wait()
        trace = step.trace
        trace.save(size.out / f"profiled-{name}-{size.width}-{size.rows}.json")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        kept = [
            [each["args"]["stream"], each["ts"], each["dur"], each["name"][:20]]
            for each in events
            if "stream" in each.get("args", ())
        ]
        (size.out / f"kernels-{name}-{size.width}-{size.rows}.json").write_text(json.dumps(kept))
        for rank, (inside, off, median_off) in enumerate(agreement(events, trace)):
            yield (
                f"{name}, rank {rank}: {inside:.1%} of its kernels' time inside spans; "
                f"spans over 1 ms differ by {median_off:.1%}, at most {off:.1%}"
            )


class Kernel(NamedTuple):
    """What ran on a stream, in milliseconds."""

    start: float
    end: float


def agreement(events: list[dict[str, object]], trace: Trace) -> list[tuple[float, float, float]]:
    """Return, by rank, the share of the profiler's kernels inside the trace's spans, and how far long spans are off.

    How far is said of the worst and of the middle one.
    """
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


def _of_rank(seen: list[Kernel], row: list[Kernel]) -> tuple[float, float, float]:
    """Return the share of a rank's kernels inside its spans, and how far long spans are off: the worst, the middle."""
    starts = [span.start - _SLACK_MS for span in row]
    of: list[list[Kernel]] = [[] for _ in row]
    for kernel in seen:
        of[max(0, bisect_right(starts, kernel.start) - 1)].append(kernel)
    inside, off = 0.0, list[float]()
    for span, some in zip(row, of, strict=True):
        inside += sum(max(0.0, min(end, span.end) - max(start, span.start)) for start, end in some)
        if some and span.end - span.start >= _LONG_MS:  # from its first kernel's start to its last one's end
            off.append(abs((some[-1].end - some[0].start) / (span.end - span.start) - 1))
    return inside / sum(end - start for start, end in seen), max(off, default=0.0), median(off or [0.0])


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
        **{name: [sys.executable, "-c", _COURSE, *words] for name, words in COMMANDS.items()},
        **{f"{name} on the processor": [sys.executable, "-c", _COURSE, *words] for name, words in COMMANDS.items()},
    }


def gather(given: argparse.Namespace) -> int:
    """Run everything, with a summary that is whole after each task; return how many failed."""
    until = time.monotonic() + given.seconds
    summary, failed = [f"torch {torch.__version__}, device {given.device}"], 0
    with _clocks(given.out / "clocks.txt"):
        for name, command in tasks(given).items():
            if given.only and name not in given.only:
                continue
            path = given.out / f"{name}.txt"
            with path.open("w") as log:
                device = "cpu" if name.endswith("processor") else given.device
                error = run_for(command, min(_SECONDS, until - time.monotonic()), log, device)
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
    parser.add_argument("--only", nargs="+", help="only these tasks, by the names in summary.txt")
    parser.add_argument("--seconds", type=float, default=570.0, help="how long it may take at most")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only to see that everything runs")
    given = parser.parse_args(words)
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part is None:
        return gather(given)
    device = torch.device("cuda", 0) if given.device == "cuda" else torch.device("cpu")
    many = sizes(device, given.out, quick=given.quick)
    for size in many[:1] if given.part == "homework4" else many:
        print(f"width {size.width}, {size.rows} rows, {size.microbatches} micro-batches:", flush=True)
        for line in PARTS[given.part](size):
            print(f"  {line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
