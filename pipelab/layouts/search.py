"""A ranker for dense models: every layout on so many devices that fits their memory, the quickest first."""

from __future__ import annotations

import os
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from pipelab.catalogue import schedules as catalogue
from pipelab.catalogue.bases import Looped
from pipelab.draw import wording
from pipelab.errors import UsageError, counted, require_size
from pipelab.layouts.devices import Device
from pipelab.layouts.devices import device as named
from pipelab.layouts.estimate import Estimate, Layout
from pipelab.layouts.published import errors
from pipelab.layouts.transformer import Transformer
from pipelab.table import Column, Table

GB = 10**9
_SHORT = 4096
"""Sequences are cut into no shorter parts."""

_SIZES = ("tensor", "context", "expert", "replicas", "pipeline")
_SEQUENCE = 8192
"""How many tokens a sequence has if nothing is said, and the model allows as many."""

_TOKENS = 4 * 2**20
"""How many tokens a step has if nothing else is said."""


@dataclass(frozen=True)
class Layouts:
    """The quickest layouts of a model, as a table. Made by `layout`.

    Attributes:
        estimates: each layout with its times and bytes, the quickest first.
        tried: how many layouts there are, in any memory.
        full: how many of them do not fit even one micro-batch into the memory.
        memory: the bytes of each device, and the share of them that is left for the runtime.
        longest: the tokens that the model's file allows in a sequence, if 8,192 were taken instead; else 0.
    """

    estimates: tuple[Estimate, ...]
    tried: int
    full: int
    memory: tuple[float, float]
    longest: int = 0

    @property
    def best(self) -> Estimate:
        """The quickest."""
        return self.estimates[0]

    @property
    def question(self) -> str:
        """What was asked and assumed, and how wrong the times may be; doubts come first."""
        best, (memory, margin) = self.best, self.memory
        model, device, layout = best.model, best.device, best.layout
        doubts = ["a mixture of experts"] * bool(model.experts)
        doubts += [f"nothing was fitted to {device.name}"] * (not device.fitted)
        active = f" ({model.active_parameters / GB:.1f} active)" * bool(model.experts)
        assumed = f" (assumed: the model allows {self.longest:,})" * bool(self.longest)
        batch = layout.replicas * layout.microbatches * layout.microbatch
        rows, least, most = errors[best.kind]
        expected = f"{least:+} to {most:+} %, as in 90 % of {rows} published steps" if device.fitted else "unknown"
        return (
            (f"Times not to be believed: {' and '.join(doubts)}. " if doubts else "")
            + f"{model.parameters / GB:.1f} billion parameters{active}; {batch:,} sequences of {model.sequence:,} "
            f"tokens{assumed}; {layout.devices:,} {device.name} of {memory / GB:g} GB, {100 * margin:g} % of it left "
            f"for the runtime. Fitted: {device.fitted or 'nothing'}. Error to expect ({best.kind}): {expected}."
        )

    @property
    def rows(self) -> list[dict[str, object]]:
        """One dict for each layout: its sizes, times in seconds, bytes."""
        return list(map(row, self.estimates))

    @property
    def table(self) -> Table:
        """The rows, as readers see them."""
        columns = [
            *(Column(name, head) for name, head in zip(_SIZES, ("TP", "CP", "EP", "DP", "PP"), strict=True)),
            *(Column(name, head) for name, head in (("zero", "ZeRO"), ("schedule", ""), ("stages_per_rank", "v"))),
            *(Column(name, head) for name, head in (("microbatches", "M"), ("microbatch", "b"), ("recompute", ""))),
            Column("seconds", "step, s", lambda seconds: f"{seconds:.3f}"),
            Column("above_bound", "above bound", wording.percent),
            Column("mfu", "MFU", wording.percent),
            Column("bytes", "GB", lambda count: f"{count / GB:.1f}"),
            Column("inside", "sent inside, GB", lambda count: f"{count / GB:.1f}"),
            Column("between", "between nodes", lambda count: f"{count / GB:.1f}"),
        ]
        what = f"{counted(self.tried, 'layout')} of {self.best.layout.devices} {self.best.device.name}"
        notes = [f"{what}; {self.full} of them cannot hold one micro-batch."]
        return Table(self.rows, columns, notes=notes, title=self.question)

    @property
    def terms(self) -> Table:
        """The quickest layout's step, term by term, on the rank that works most; at the end, how long it waits."""
        found, seconds = self.best.terms, self.best.seconds
        spent = {**found, "waiting": seconds - sum(found.values()), "the step": seconds}
        rows = [{"term": term, "seconds": time, "share": time / seconds} for term, time in spent.items() if time > 0]
        columns = [
            Column("term"),
            Column("seconds", "s", lambda time: f"{time:.3f}"),
            Column("share", "", wording.percent),
        ]
        return Table(rows, columns)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the table; the suffix is the format: see `Table.save`. Return the path."""
        return self.table.save(path)

    def __str__(self) -> str:
        """Return the table as text."""
        return str(self.table)


def row(estimate: Estimate) -> dict[str, object]:
    """Return a layout's sizes, times and bytes as a row of a table."""
    each, seconds = estimate.layout, estimate.seconds
    inside, between = (sum(numbers) for numbers in zip(*estimate.sent.values(), strict=True))
    more = ("zero", "schedule", "stages_per_rank", "microbatches", "microbatch", "recompute")
    return {
        **{name: getattr(each, name) for name in (*_SIZES, *more)},
        "seconds": seconds,
        "above_bound": max(0.0, seconds / estimate.bound - 1),
        "mfu": estimate.mfu,
        "bytes": max(estimate.bytes),
        "inside": inside,
        "between": between,
        **{name: getattr(estimate.model, name) for name in ("parameters", "sequence")},
        "device": estimate.device.name,
    }


def layout(
    model: Transformer | str | os.PathLike[str],
    *,
    gpus: int,
    memory: float | None = None,
    device: Device | str = "h100",
    batch: int | None = None,
    sequence: int | None = None,
    margin: float = 0.06,
    top: int = 10,
    schedules: Sequence[str] = ("1f1b", "interleaved-1f1b", "zb-h1", "zbv", "v-half"),
) -> Layouts:
    """Return the quickest layouts of a model on so many devices that fit their memory: a ranker for dense models.

    All sizes of tensor, context, expert, data and pipeline parallelism are tried that divide the devices, with every
    level of ZeRO, micro-batch, schedule, number of stages and recomputation; sequences are cut into parts of 4,096
    tokens or more. Each layout has a time that it cannot undercut: pipelab simulates layouts in this order, until no
    other can be among the quickest. 64 devices take a few seconds.

    Args:
        model: the model's sizes; or a file with them, TOML or a Hugging Face model's `config.json`.
        gpus: how many devices there are.
        memory: how many GB (10⁹ bytes) each has; by default, the device's own.
        device: the kind of device, by its name in `devices.toml`.
        batch: how many sequences a step has; by default, as many as have four million tokens.
        sequence: how many tokens a sequence has; by default a TOML file's number, and for a `config.json`, which states
            only the most that the model allows, 8,192 or that.
        margin: the share of the memory that is left for the runtime: its context, communication buffers, fragments.
        top: how many layouts to return.
        schedules: the schedules to try, by name.

    Example:
        >>> import pipelab
        >>> from pipelab.layouts.transformer import Transformer
        >>> llama = Transformer(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, sequence=8192)
        >>> found = pipelab.layout(llama, gpus=8, memory=80, batch=8, top=3)
        >>> len(found.rows), found.best.layout.devices
        (3, 8)

    Raises:
        UsageError: if no layout fits, or if a number or name cannot be.
        FormatError: if the file has no model's sizes.
    """
    longest = 0
    if not isinstance(model, Transformer):
        path, model = model, Transformer.load(model, sequence)
        if sequence is None and Path(path).suffix == ".json" and model.sequence > _SEQUENCE:
            model, longest = replace(model, sequence=_SEQUENCE), model.sequence
    kind = named(device) if isinstance(device, str) else device
    held = kind.memory if memory is None else memory * GB
    cap = held * (1 - margin)
    batch = max(1, _TOKENS // model.sequence) if batch is None else require_size("batch", batch)
    tried = [
        Estimate(model, each, kind) for each in _layouts(model, kind, require_size("gpus", gpus), batch, schedules)
    ]
    fitting = [each for each in tried if each.one_microbatch <= cap]
    found: list[tuple[float, int, Estimate]] = []
    for number, each in enumerate(sorted(fitting, key=lambda each: each.at_least)):
        if len(found) >= top and each.at_least > found[top - 1][0]:
            break
        if max(each.bytes) <= cap:
            insort(found, (each.seconds, number, each))
            del found[top:]
    if not found:
        least = min((each.one_microbatch for each in tried), default=0) / GB
        raise UsageError(
            f"none of {counted(len(tried), 'layout')} of {counted(batch, 'sequence')} on {counted(gpus, 'device')} fits"
            f" into {cap / GB:g} GB"
            + f" ({100 * margin:g} % are left for the runtime)" * bool(margin)
            + (f": each needs {least:.1f} GB or more\n  try: more devices" if tried else "")
        )
    return Layouts(tuple(each for *_, each in found), len(tried), len(tried) - len(fitting), (held, margin), longest)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _pipelines(names: Sequence[str], ranks: int, microbatches: int, layers: int) -> Iterator[tuple[str, int]]:
    """Yield the schedules that these sizes allow, each with its numbers of stages on a rank."""
    if ranks == 1:  # one micro-batch after the other
        yield "1f1b", 1
        return
    for name in names:
        kind = catalogue[name]
        if kind.refusal(ranks, microbatches) is not None:
            continue
        if issubclass(kind, Looped):  # in whole rounds, as in Megatron-LM
            counts = [count for count in (2, 3, 4, 6, 8) if microbatches % ranks == 0]
        else:
            counts = [kind(ranks, microbatches).stages_per_rank]
        yield from ((name, count) for count in counts if count * ranks <= layers)


def _layouts(model: Transformer, device: Device, gpus: int, batch: int, names: Sequence[str]) -> Iterator[Layout]:
    """Yield every layout that the model can have, in any memory."""
    for tensor, context in product(_divisors(model.heads), (1, 2, 4, 8, 16, 32)):
        if tensor > device.per_node or gpus % (tensor * context) or model.sequence % (2 * context):
            continue
        if context > 1 and model.sequence < _SHORT * context:
            continue
        for pipeline in _divisors(gpus // (tensor * context)):
            replicas = gpus // (tensor * context * pipeline)
            if pipeline > model.layers or batch % replicas:
                continue
            experts = _divisors(gpus // pipeline) if model.experts else [1]
            alone = replicas * context == 1
            for expert, zero, microbatch in product(experts, (0,) if alone else range(4), (1, 2, 4, 8)):
                microbatches, rest = divmod(batch // replicas, microbatch)
                if rest or (model.experts and model.experts % expert):
                    continue
                again = ("none", "full") if model.flash else ("none", "selective", "full")
                pipelines = _pipelines(names, pipeline, microbatches, model.layers)
                for (schedule, stages), recompute in product(pipelines, again):
                    yield Layout(
                        tensor=tensor,
                        context=context,
                        expert=expert,
                        replicas=replicas,
                        zero=zero,
                        pipeline=pipeline,
                        stages_per_rank=stages,
                        schedule=schedule,
                        microbatches=microbatches,
                        microbatch=microbatch,
                        recompute=recompute,
                    )
