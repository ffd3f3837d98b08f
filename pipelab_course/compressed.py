"""Train pipelines times replicas whose gradients travel around a ring, in several codecs: bytes, replicas, the loss.

Each replica is a separate pipeline, with its own copy of the model and its own micro-batches. After every mini-batch
each stage's gradients go around the ring of its replicas, and each replica takes its own SGD step. So that replicas are
equal bit for bit is not built in: it is looked at after every step.

Examples:
    >>> rows = list(trainings(stages=2, replicas=2, microbatches=2, codecs=("none", "int8"), steps=3))
    >>> for row in rows:
    ...     print(row["gradients"], row.get("replicas_equal"), row.get("payload_bytes"), row.get("scale_bytes"))
    R, one model None None None
    ring, none True 480.0 0.0
    ring, int8 True 120.0 8.0
    >>> all(row["last_loss"] < row["first_loss"] for row in rows)
    True
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss as mse

from pipelab.catalogue import OneFOneB
from pipelab.draw import wording
from pipelab.engine.pipeline import Pipeline
from pipelab.errors import counted
from pipelab.schedule import Schedule, replicate
from pipelab.table import Column, Table
from pipelab_course.hybrid import Hybrid, same_work
from pipelab_course.ring.codecs import codec_of
from pipelab_course.ring.ring import RingResult, ring_all_reduce

NUMBERS = 120
"""Parameters of each stage, and so numbers of its gradient."""
_WIDTH, _ROWS, _RATE = 10, 4, 0.1
"""Features of a row, rows of a micro-batch, and SGD's learning rate."""


def model(stages: int) -> nn.Sequential:
    """Return a model whose stages have 120 parameters each, the same every time.

    Example:
        >>> [sum(each.numel() for each in stage.parameters()) for stage in model(3)]
        [120, 120, 120]
    """
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.PReLU(_WIDTH)) for _ in range(stages)))


def layouts(job: Hybrid) -> list[Hybrid]:
    """Return jobs that do the same work as this one: on one device, as one pipeline, as replicas alone, and as both.

    Their memory is in bytes: of the weights, and of what PyTorch keeps of a micro-batch.
    """
    kept = 2 * _ROWS * _WIDTH  # the inputs of each Linear and of each PReLU
    return same_work(
        list(dict.fromkeys([(1, 1), (job.stages, 1), (1, job.replicas), (job.stages, job.replicas)])),
        job.all_microbatches,
        job.forward * job.stages,
        job.backward * job.stages,
        ring_step=job.ring_step,
        schedule=job.schedule,
        rows=_ROWS,
        weights=4 * NUMBERS * job.stages,
        activation=4 * kept * job.stages,
    )


def trainings(
    stages: int = 3,
    replicas: int = 4,
    microbatches: int = 6,
    codecs: Sequence[str] = ("none", "fp16", "int8"),
    steps: int = 50,
    schedule: type[Schedule] = OneFOneB,
) -> Iterator[dict[str, Any]]:
    """Train from the same weights on the same batch with each codec; yield a row for each.

    The first row is the threads engine's own all-reduce: one pipeline of all devices, whose replicas share one model.
    One device that trains on the whole batch is what all are compared with.
    """
    for name in codecs:
        codec_of(name)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(replicas * microbatches * _ROWS, _WIDTH, generator=generator)
    y = x.roll(1, dims=1).abs()
    alone = model(stages)
    _descend([alone], lambda: mse(alone(x), y).backward(), steps)
    pipeline = schedule(stages, microbatches)
    hybrid = replicate(pipeline, replicas)
    shared, falling = model(stages), list[float]()
    with Pipeline(shared, hybrid, mse, ["cpu"] * hybrid.ranks) as pipe:
        _descend([shared], lambda: falling.append(float(pipe.step(x, y).loss)), steps)

    def results(copy: nn.Module, losses: list[float]) -> dict[str, Any]:
        losses = [*losses, _loss(copy, x, y)]
        ends = {"first_loss": losses[0], "last_loss": losses[-1], "alone_loss": _loss(alone, x, y), "losses": losses}
        return {**ends, "weights_off": _difference(copy, alone), "steps": steps, "replicas": replicas, "stages": stages}

    yield {"gradients": "R, one model", **results(shared, falling)}
    for codec in codecs:
        copy, equal, rings, falling = _around_a_ring(pipeline, replicas, x, y, codec, steps)
        yield {
            "gradients": f"ring, {codec}",
            "payload_bytes": sum(each.payload_bytes for each in rings) / hybrid.ranks,
            "scale_bytes": sum(each.scale_bytes for each in rings) / hybrid.ranks,
            "replicas_equal": equal,
            **results(copy, falling),
        }


def _descend(copies: Sequence[nn.Module], backward: Callable[[], object], steps: int) -> None:
    """Take steps of SGD with each copy, after a function has computed all gradients."""
    optimizers = [torch.optim.SGD(copy.parameters(), lr=_RATE) for copy in copies]
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward()
        for optimizer in optimizers:
            optimizer.step()


def _around_a_ring(
    schedule: Schedule, replicas: int, x: torch.Tensor, y: torch.Tensor, codec: str, steps: int
) -> tuple[nn.Sequential, bool, list[RingResult], list[float]]:
    """Train copies; return the first, whether all were equal bit for bit after every step, rings and losses.

    There is a ring for each stage, and for each step the loss of the whole batch before it.
    """
    copies = [model(schedule.ranks) for _ in range(replicas)]
    rings: dict[int, RingResult] = {}
    equal: list[bool] = []
    losses: list[float] = []

    def gradients() -> None:
        equal.append(all(torch.equal(_vector(copies[0]), _vector(copy)) for copy in copies))
        shares = zip(pipes, x.chunk(replicas), y.chunk(replicas), strict=True)
        losses.append(fmean(float(pipe.step(rows, targets).loss) for pipe, rows, targets in shares))
        for stage in range(schedule.ranks):
            rings[stage] = _reduced([copy[stage] for copy in copies], codec, rings.get(stage))

    with ExitStack() as stack:
        devices = ["cpu"] * schedule.ranks
        pipes = [stack.enter_context(Pipeline(copy, schedule, mse, devices)) for copy in copies]
        _descend(copies, gradients, steps)
    equal.append(all(torch.equal(_vector(copies[0]), _vector(copy)) for copy in copies))
    return copies[0], all(equal), list(rings.values()), losses


def _reduced(copies: Sequence[nn.Module], codec: str, before: RingResult | None) -> RingResult:
    """Replace the gradients of all copies of a stage by their mean."""
    gradients = [
        torch.cat([each.grad.flatten() for each in copy.parameters() if each.grad is not None]) for copy in copies
    ]
    ring = ring_all_reduce(gradients, codec, feedback=None if before is None else before.feedback)
    for copy, mean in zip(copies, ring.tensors, strict=True):
        parameters = list(copy.parameters())
        for each, part in zip(parameters, mean.split([each.numel() for each in parameters]), strict=True):
            each.grad = part.view_as(each)
    return ring


def _vector(copy: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(copy.parameters()).detach()


@torch.no_grad()
def _loss(copy: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return mse(copy(x), y).item()


def _difference(ours: nn.Module, alone: nn.Module) -> float:
    """Return how far weights are from one device's, in the 2-norm, divided by the norm of these."""
    one, other = _vector(ours), _vector(alone)
    return float((one - other).norm() / other.norm())


def _fall(losses: Sequence[float]) -> str:
    """Return the first loss, the last, and up to three between, equally far apart."""
    most = min(4, len(losses) - 1)
    return " ".join(f"{losses[place * (len(losses) - 1) // most]:.4f}" for place in range(most + 1))


def _total(row: Mapping[str, Any]) -> str:
    devices, scales = row["stages"] * row["replicas"], row["scale_bytes"]
    payload = row["payload_bytes"] * devices
    more = f", {wording.number(payload + scales * devices)} with scales" if scales else ""
    return f"{row['gradients'].partition(', ')[2]} {wording.number(payload)} bytes{more}"


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of trainings, one row for each codec."""
    columns = [
        Column("gradients"),
        Column("payload_bytes", "bytes sent by a device", wording.number),
        Column("scale_bytes", "of scales", wording.number),
        Column("replicas_equal", "replicas equal", lambda equal: "bit for bit" if equal else "no"),
        Column("losses", "loss before SGD, on the way, after", _fall),
        Column("alone_loss", "one device", "{:.4f}".format),
        Column("weights_off", "weights off by", "{:.1e}".format),
    ]
    notes = []
    if rows:
        first = rows[0]
        devices = counted(first["stages"] * first["replicas"], "device")
        notes = [
            f"Each stage's gradient has {NUMBERS} numbers, {4 * NUMBERS} bytes.",
            f"{devices} together send: {'; '.join(map(_total, rows[1:]))}.",
            f"The losses are of the whole batch, before, during and after {counted(first['steps'], 'step')} of "
            "SGD; one device trains on the same batch. Replicas are compared after every step.",
        ]
    return Table(rows, columns, notes=notes)


def numbers(rows: Sequence[Mapping[str, Any]], job: Hybrid) -> dict[str, str]:
    """Return what the assignment's questions are answered with, by name, of all trainings of a job."""
    device = job.trace.events_of(min(1, job.stages - 1))
    found = {
        "begins": f"{wording.number(device[0].start)} ms",
        "ends": f"{wording.number(max(each.end for each in device if not each.action.traits.collective))} ms",
        "done": f"{wording.number(device[-1].end)} ms",
        "gradient": f"{4 * NUMBERS} bytes",
        "messages": counted(2 * (job.replicas - 1), "message"),
        "replicas": str(job.replicas),
        "share": f"{2 * (job.replicas - 1) / job.replicas:g}",
        "speed_up": f"{job.speed_up:.2f}",
        "devices": counted(job.devices, "device"),
        "efficiency": wording.percent(job.efficiency),
        "alone": f"{wording.number(job.alone.makespan)} ms",
        "work": job.work,
        "bubble": wording.percent(job.pipeline.bubble),
        "communication": wording.percent(job.communication_cost),
    }
    if all(row.get("replicas_equal", True) for row in rows):
        found["agree"] = f"in each of {counted(rows[0]['steps'], 'step')}, bit for bit"
    for row in rows[1:]:
        codec = row["gradients"].partition(", ")[2]
        found |= {codec: f"{wording.number(row['payload_bytes'])} bytes", f"{codec}_off": f"{row['weights_off']:.1e}"}
    return found
