"""The demo: one model, trained plainly and with three schedules, learns exactly the same.

The model is a language model of bytes; its text comes with every Python: the standard library.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median

import torch
from torch import nn

from pipelab.catalogue import schedules
from pipelab.cli.believing import Watch
from pipelab.cli.running import core_share, make_jobs, run_all
from pipelab.engine.pipeline import Pipeline
from pipelab.engine.stage.batch import row_counts, split_batch
from pipelab.errors import UsageError
from pipelab.simulation.clock import simulate
from pipelab.simulation.cost import Cost
from pipelab.trace.trace import Trace

_BYTES = 256
_Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.TransformerEncoderLayer):
    """A transformer block: causal self-attention, then a perceptron, each on a normalised residual stream.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3; layer norm first as in Radford et al. 2019, GPT-2.
    """

    def __init__(self, width: int, heads: int) -> None:
        """Make a block of `width` features and `heads` attention heads."""
        super().__init__(width, heads, 4 * width, dropout=0, activation="gelu", batch_first=True, norm_first=True)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # it needs no mask
        """Return the residual stream, `[rows, length, width]`."""
        later = nn.Transformer.generate_square_subsequent_mask(stream.shape[1], stream.device)
        return super().forward(stream, src_mask=later, is_causal=True)


class _Embedding(nn.Module):
    """Bytes and their positions, as vectors."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(_BYTES, width)
        self.positions = nn.Embedding(length, width)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        return vectors


def language_model(blocks: int = 6, width: int = 128, heads: int = 4, length: int = 64) -> nn.Sequential:
    """Return a language model over bytes: an embedding, a stack of equal blocks, and a head.

    The input is `[rows, length]` bytes as integers, the output `[rows, length, 256]` scores of the next byte.
    """
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, _BYTES))
    return nn.Sequential(_Embedding(width, length), *(Block(width, heads) for _ in range(blocks)), head)


def next_byte_loss(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, in nats per byte, of scores `[rows, length, 256]` for bytes `[rows, length]`."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def standard_library(limit: int = 4_000_000) -> torch.Tensor:
    """Return the source text of Python's standard library, in order of file names, as bytes `[at most limit]`."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if len(text) < 100_000:
        raise UsageError(f"{folder} holds {len(text)} bytes of Python source, too few to train on")
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batches(text: torch.Tensor, rows: int, length: int, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random pieces of a text, `[rows, length]`, and the byte that follows each of their bytes."""
    random = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - length, (rows,), generator=random)
        pieces = torch.stack([text[start : start + length + 1] for start in starts]).long()
        yield pieces[:, :-1], pieces[:, 1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The model and the data."""

    ranks: int = 2
    microbatches: int = 8
    steps: int = 12
    rows: int = 32
    blocks: int = 6
    width: int = 128
    length: int = 64
    seed: int = 0

    def model(self) -> nn.Sequential:
        """Return the model, the same weights every time."""
        torch.manual_seed(self.seed)
        return language_model(self.blocks, self.width, heads=4, length=self.length)

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return the stream of batches, the same every time."""
        return batches(standard_library(), self.rows, self.length, self.seed)


@dataclass(frozen=True, slots=True)
class Plain:
    """Plain training: one thread, the same micro-batches one after another. Times are medians in milliseconds."""

    step_ms: float
    losses: list[float]
    weights: list[torch.Tensor]
    whole_batch_ms: float
    cores: int  # on which the whole batch ran
    others: float  # the share of the processor that other programs used


@dataclass(frozen=True, slots=True)
class Trained:
    """Training with a schedule, beside plain training."""

    schedule: str
    step_ms: float
    speed_up: float  # against plain training
    core_share: float  # for which fraction of their working time the ranks had a processor core
    traces: list[Trace]  # of the steps without the first, by their length
    losses: list[float]
    same: bool  # as plain training, every loss and every parameter, bit for bit
    proof: str  # what `verify` found
    others: float

    @property
    def trace(self) -> Trace:
        """A step of median length."""
        return self.traces[len(self.traces) // 2]


@contextmanager
def _one_thread() -> Iterator[int]:
    """Let operations of this thread use one core, as those of each rank do; yield how many cores they used before."""
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield cores
    finally:
        torch.set_num_threads(cores)


@dataclass(slots=True)
class _Training:
    """The steps of a training: their losses, their times in seconds, and the processor's use."""

    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)

    def run(self, setting: Setting, model: nn.Module, step: _Step, advance: Callable[[], object]) -> None:
        """Train a model; `step` returns the loss of a batch and leaves the gradients."""
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for x, y in islice(setting.batches(), setting.steps):
            began = time.perf_counter()
            optimizer.zero_grad()
            with self.watch:
                loss = step(x, y)
            self.times.append(time.perf_counter() - began)
            optimizer.step()
            self.losses.append(float(loss))
            advance()


def train_plainly(setting: Setting, advance: Callable[[], object] = lambda: None) -> Plain:
    """Train the model plainly; `advance` is called after every step."""
    training, model = _Training(), setting.model()
    counts = row_counts(setting.rows, setting.microbatches)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parts = []
        for micro_x, micro_y in zip(split_batch(x, counts), split_batch(y, counts), strict=True):
            loss = next_byte_loss(model(micro_x), micro_y) * (len(micro_x) / setting.rows)
            loss.backward()
            parts.append(loss.detach())
        return torch.stack(parts).sum()

    with _one_thread() as cores:
        training.run(setting, model, step, advance)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with training.watch:
        whole = _whole_batch_ms(setting)
    return Plain(_typical(training.times), training.losses, weights, whole, cores, training.watch.others())


def train_with(name: str, setting: Setting, plain: Plain, advance: Callable[[], object] = lambda: None) -> Trained:
    """Train the same model from the same seed on the same batches with a schedule."""
    training, model, traces = _Training(), setting.model(), list[Trace]()
    schedule = schedules[name](setting.ranks, setting.microbatches)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = pipe.step(x, y)
        traces.append(made.trace)
        return made.loss

    with _one_thread(), Pipeline(model, schedule, next_byte_loss, ["cpu"] * setting.ranks, intra_op_threads=1) as pipe:
        training.run(setting, model, step, advance)
        same = training.losses == plain.losses and all(map(torch.equal, model.parameters(), plain.weights))
        proof = str(pipe.verify(*next(setting.batches())))
    return Trained(
        schedule=name,
        step_ms=_typical(training.times),
        speed_up=plain.step_ms / _typical(training.times),
        core_share=core_share(training.watch.own, traces),
        traces=sorted(traces[1:] or traces, key=lambda trace: trace.makespan),
        losses=training.losses,
        same=same,
        proof=proof,
        others=training.watch.others(),
    )


def emulate(
    name: str, ranks: int = 4, microbatches: int = 8, forward_ms: float = 20, backward_ms: float = 40
) -> tuple[Trace, Trace]:
    """Run a schedule on emulated devices, and simulate it with the same times."""
    plan = schedules[name](ranks, microbatches).plan()
    (result,) = run_all(make_jobs([plan], [1], batch=microbatches, emulate=(forward_ms, backward_ms)), steps=1)
    return result.measured, simulate(plan, Cost(forward=forward_ms, backward=backward_ms, unit="ms"))


def _whole_batch_ms(setting: Setting, steps: int = 4) -> float:
    """Return the median milliseconds of a step on the whole batch, on all cores."""
    model, times = setting.model(), []
    for x, y in islice(setting.batches(), steps):
        began = time.perf_counter()
        model.zero_grad()
        next_byte_loss(model(x), y).backward()
        times.append(time.perf_counter() - began)
    return _typical(times)


def _typical(times: list[float]) -> float:
    """Return the median in milliseconds, without the first, which warms up."""
    return 1e3 * median(times[1:] or times)
