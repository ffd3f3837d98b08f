"""Homework 3: a stack of linear layers over several devices: where layers land, what moves, time and memory.

Examples:
    >>> evenly(20, 3), halves(7)
    ([7, 7, 6], [3, 4])
    >>> count_transfers([7, 7, 6])
    Transfers(calls=20, input=1, between=2)
    >>> rows = list(measurements([4], [2], width=8, batch=4, steps=1))
    >>> [(row["split"], row["layers"], row["calls"], row["moves"]) for row in rows]
    [('halves', (2, 2), 4, (1, 1)), ('even', (2, 2), 4, (1, 1))]
    >>> print(landing([7, 7, 6]))
    layers 0 to 6 on device 0, 7 to 13 on device 1, 14 to 19 on device 2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from pipelab.catalogue import Naive
from pipelab.cli.believing import Watch, believable
from pipelab.cli.running import Job, linear_stack
from pipelab.draw import wording
from pipelab.engine.pipeline import Pipeline
from pipelab.engine.stage.batch import row_counts
from pipelab.errors import counted
from pipelab.table import Column, Table
from pipelab_course.figures import DOUBTED, quoted
from pipelab_course.grading.emulated import Calls, emulated

Row = Mapping[str, Any]
_MEGABYTE = 1e6


def halves(depth: int) -> list[int]:
    """Return how many layers each of two devices holds if layer `i` is on the first one for `i < depth // 2`."""
    return [depth // 2, depth - depth // 2]


def evenly(depth: int, devices: int) -> list[int]:
    """Return how many layers each device holds if they are spread evenly, the first devices one more."""
    return row_counts(depth, devices)


def usual_devices() -> list[int]:
    """Return the numbers of devices to measure by default: all GPUs if there are several, else 2, 3 and 5."""
    gpus = torch.cuda.device_count()
    return [gpus] if gpus > 1 else [2, 3, 5]


def landing(sizes: Sequence[int]) -> str:
    """Return in words which layers are on which device."""
    ends = list(accumulate(sizes))
    spans = (f"{end - size} to {end - 1}" if size > 1 else str(end - 1) for size, end in zip(sizes, ends, strict=True))
    return "layers " + ", ".join(f"{span} on device {device}" for device, span in enumerate(spans))


class LinearStack(nn.Module):
    """The homework's model: equal layers, of which each first brings its input to its own device with `.to()`."""

    def __init__(self, width: int, devices: Sequence[torch.device | str]) -> None:
        super().__init__()
        self.devices = list(devices)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in devices)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output, `[rows, width]`, on the last layer's device."""
        for layer, device in zip(self.layers, self.devices, strict=True):
            x = layer(x.to(device))  # called for every layer; most calls find x there already
        return x


class Transfers(NamedTuple):
    """What a forward pass did to bring tensors to devices.

    Attributes:
        calls: how often `Tensor.to` was called.
        input: how many tensors were copied from the processor to a device.
        between: how many tensors were copied from one device to another.
    """

    calls: int
    input: int
    between: int


def transfers_of(forward: Callable[[], object]) -> Transfers:
    """Count what one forward pass moves: a transfer is a copy that PyTorch makes on another device.

    Example:
        >>> transfers_of(lambda: torch.ones(2).to("cpu"))  # called, but it is there already
        Transfers(calls=1, input=0, between=0)

        A model of your own for GPUs that this machine does not have:

        >>> with emulated(3):
        ...     model = nn.Sequential(nn.Linear(8, 8).to("cuda:0"), nn.Linear(8, 8).to("cuda:2"))
        ...     transfers_of(lambda: model[1](model[0](torch.ones(2, 8).to("cuda:0")).to("cuda:2")))
        Transfers(calls=2, input=1, between=1)
    """
    with Calls() as calls:
        forward()
    input_copies = sum(source.type == "cpu" for source, _ in calls.moves)
    return Transfers(calls.count, input_copies, len(calls.moves) - input_copies)


def count_transfers(sizes: Sequence[int], width: int = 8, batch: int = 4) -> Transfers:
    """Count what one forward pass of the homework's model moves, on any machine.

    The devices are emulated: `cuda:0`, `cuda:1` and so on, whether or not this machine has them.
    """
    devices = [torch.device("cuda", device) for device, size in enumerate(sizes) for _ in range(size)]
    with torch.no_grad(), emulated(len(sizes)), torch.random.fork_rng([]):
        model = LinearStack(width, devices)
        for layer, device in zip(model.layers, devices, strict=True):
            layer.to(device)
        return transfers_of(lambda: model(torch.empty(batch, width)))


def measurements(
    depths: Sequence[int] = (6, 12, 24),
    devices: Sequence[int] = (2, 3, 5),
    *,
    width: int = 1024,
    batch: int = 256,
    steps: int = 5,
) -> Iterator[dict[str, Any]]:
    """Measure the stack for every depth: in two halves, then spread evenly over each number of devices.

    The devices are this machine's GPUs; where there are none, each is a thread of the processor.
    """
    for depth in depths:
        linear_stack(1, depth, max(2, *devices))  # refuses too few layers
    for depth in depths:
        for split, sizes in [("halves", halves(depth)), *(("even", evenly(depth, count)) for count in devices)]:
            moved = count_transfers(sizes)
            yield {
                "split": split,
                "depth": depth,
                "devices": len(sizes),
                "layers": tuple(sizes),
                "calls": moved.calls,
                "moves": (moved.input, moved.between),
                **_measured(sizes, width, batch, steps),
            }


def _measured(sizes: Sequence[int], width: int, batch: int, steps: int) -> dict[str, Any]:
    """Return the step time, and the megabytes of each device."""
    layers = linear_stack(width, sum(sizes), len(sizes))
    ends = list(accumulate(sizes))
    stages = [layers[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    plan = Naive(len(sizes), 1).plan()
    x, y = Job(plan, layers, (batch, width)).batch()
    with Pipeline(stages, plan, nn.functional.mse_loss, intra_op_threads=1) as pipe:
        devices = [rank.device for rank in pipe.devices]
        gpus = {device for device in devices if device.type == "cuda"}
        for gpu in gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        pipe.step(x, y)  # the first step warms up
        with (watch := Watch()):
            times = [pipe.step(x, y).trace.makespan for _ in range(steps)]
        peaks = _megabytes_of(map(torch.cuda.max_memory_allocated, devices)) if len(gpus) == len(sizes) else None
        memory: Any = pipe.memory(x, y)
    batch_bytes = 0 if gpus else x.nbytes  # each device holds its input; where it is the batch, `memory` leaves it out
    activations = [memory.activations[0] + batch_bytes, *memory.activations[1:]]
    parts = {"parameters_mb": memory.weights, "gradients_mb": memory.gradients, "activations_mb": activations}
    totals = _megabytes_of(map(sum, zip(*parts.values(), strict=True)))
    return {
        "step_time_ms": median(times),
        "others": watch.others(),
        "memory_mb": totals,
        "most_mb": max(totals),
        **{name: _megabytes_of(values) for name, values in parts.items()},
        "allocator_peak_mb": peaks,
    }


def _megabytes_of(values: Iterable[int]) -> tuple[float, ...]:
    return tuple(value / _MEGABYTE for value in values)


_NOTES = (
    "Counted in one forward pass on emulated GPUs: a call of Tensor.to counts as a call, and one that names another "
    "device than the tensor's as a transfer. Without GPUs, each device is a thread "
    "of the processor, and nothing really moves.",
    "MB: parameters, gradients, and what a forward of the whole batch saves for its backward, counted from the "
    "tensors. An optimizer would add its own state.",
)


def _judged(rows: Sequence[Row]) -> list[Row]:
    """Return rows, with times marked if other programs ran, or if more devices made a step shorter: they cannot."""
    judged: list[Row] = []
    for row in rows:
        alike = (each for each in rows if each["depth"] == row["depth"])
        least = min(alike, key=itemgetter("devices"))["step_time_ms"]
        believed = believable(min(row["step_time_ms"], least), least, row["others"])
        judged.append({**row, "marked": () if believed else ("step_time_ms",)})
    return judged


def table(rows: Sequence[Row]) -> Table:
    """Return the table of measured rows. Its plot is over the depths if there are several, else over the devices."""
    rows = _judged(rows)
    several = len({row["depth"] for row in rows}) > 1
    names = {"halves": "i < depth // 2", "even": "even, {}" if several else "even"}
    columns = [
        Column("model", "layers placed"),
        Column("depth"),
        Column("devices"),
        Column("layers", "layers on each device", wording.elided),
        Column("calls", "calls of .to()"),
        Column("moves", "that copy: input + between", lambda moves: " + ".join(map(str, moves))),
        Column("step_time_ms", "time of a step, ms", wording.number),
        Column("memory_mb", "MB on each device", _megabytes),
        Column("most_mb", "most on one, MB", lambda value: _megabytes([value])),
    ]
    if any(row["allocator_peak_mb"] for row in rows):
        columns.append(Column("allocator_peak_mb", "allocator's peak, MB", _megabytes))
    axes = ("depth" if several else "devices", ("step_time_ms", "most_mb"))
    why = "other programs used over 10 % of the processor, or other rows of the same depth contradict it"
    notes = [DOUBTED.format(why)] * any(row["marked"] for row in rows) + [*_NOTES]
    return Table(
        [{"model": names[row["split"]].format(_devices(row)), **row} for row in rows], columns, axes=axes, notes=notes
    )


def _devices(row: Row) -> str:
    return counted(row["devices"], "device")


def _megabytes(values: Sequence[float]) -> str:
    return wording.elided(f"{value:.1f}" for value in values)


def numbers(rows: Sequence[Row]) -> dict[str, str]:
    """Return what the homework's questions are answered with, by name: of the largest depth, and along all depths."""
    if not rows:
        return {}
    rows = _judged(rows)
    ones = sorted((row for row in rows if row["depth"] == rows[-1]["depth"]), key=itemgetter("devices"))
    few, many, step = ones[0], ones[-1], Column("step_time_ms", show=wording.number)
    both = [few, many] if few["devices"] < many["devices"] else [many]
    found = {
        "depth": str(many["depth"]),
        "many": _devices(many),
        "half": str(many["depth"] // 2),
        "times": "; ".join(f"{_devices(row)}: {step.cell(row)} ms" for row in both),
        "most": " and ".join(f"{_megabytes([row['most_mb']])} MB on one of {_devices(row)}" for row in both),
        "copies": " and ".join(f"{sum(row['moves'])} of {row['calls']} calls on {_devices(row)}" for row in both),
    }
    found |= {row["split"]: landing(row["layers"]) for row in ones}
    if many["step_time_ms"] < both[0]["step_time_ms"]:
        found["shorter"] = found["many"]
    first = next(row for row in rows if (row["split"], row["devices"]) == (many["split"], many["devices"]))
    if first is not many:
        found |= {"flattest": str(first["depth"]), "deepest": f"{many['depth']} layers"}
        ratio, layers = many["step_time_ms"] / first["step_time_ms"], many["depth"] / first["depth"]
        found["ratio"] = quoted(f"{ratio:.1f}", f"{layers:.3g}", not many["marked"] and believable(ratio, layers, 0))
    return found
