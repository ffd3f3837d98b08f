"""A ranker for dense models: every layout on so many devices that fits their memory, the quickest first."""

from __future__ import annotations

import math
import os
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

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

_NAMES = {
    "TP": "tensor", "CP": "context", "EP": "expert", "DP": "replicas", "PP": "pipeline", "ZeRO": "zero",
    "schedule": "schedule", "v": "stages_per_rank", "M": "microbatches", "b": "microbatch", "recompute": "recompute",
}  # fmt: skip
"""What readers call the values of a layout."""

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
        memory: the bytes of each device, and the share of them that is left for the runtime.
        longest: the tokens that the model's file allows in a sequence, if 8,192 were taken instead; else 0.
    """

    estimates: tuple[Estimate, ...]
    tried: int
    memory: tuple[float, float]
    longest: int = 0

    @property
    def best(self) -> Estimate:
        """The quickest."""
        return self.estimates[0]

    @property
    def doubts(self) -> str:
        """Why neither times nor order are reliable; empty for a dense model on a device that was fitted."""
        model, device = self.best.model, self.best.device
        doubts = ["a mixture of experts"] * bool(model.experts)
        return ", and ".join(doubts + [f"nothing was fitted to {device.name}"] * (not device.fitted))

    @property
    def question(self) -> str:
        """What was asked and assumed, and how wrong the times may be; doubts come first."""
        best, (memory, margin) = self.best, self.memory
        model, device, layout = best.model, best.device, best.layout
        active = f" ({model.active_parameters / GB:.1f} active)" * bool(model.experts)
        assumed = f" (assumed: the model allows {self.longest:,})" * bool(self.longest)
        batch = layout.replicas * layout.microbatches * layout.microbatch
        rows, least, most = errors[best.kind]
        expected = f"{least:+} to {most:+} %, as in 90 % of {rows} published steps" if device.fitted else "unknown"
        return (
            f"Neither the times nor the order of these layouts is reliable: {self.doubts}. "
            * bool(self.doubts)
            + f"{model.parameters / GB:.1f} billion parameters{active}; {batch:,} sequences of {model.sequence:,} "
            f"tokens{assumed}; {layout.devices:,} {device.name} of {memory / GB:g} GB, {100 * margin:g} % of it left "
            f"for the runtime. Fitted: {device.fitted or 'nothing'}. Error to expect ({best.kind}): {expected}."
        )

    @property
    def rows(self) -> list[dict[str, object]]:
        """One dict for each layout: its sizes, times in seconds, bytes; the model's sizes, the device, doubts."""
        return [
            {name: getattr(each.layout, name) for name in _NAMES.values()}
            | {
                "seconds": each.seconds,
                "above_bound": max(0.0, each.seconds / each.bound - 1),
                "mfu": each.mfu,
                "bytes": max(each.bytes),
                "inside": sum(inside for inside, _ in each.sent.values()),
                "between": sum(between for _, between in each.sent.values()),
                "parameters": each.model.parameters,
                "sequence": each.model.sequence,
                "device": each.device.name,
                "doubts": self.doubts,
            }
            for each in self.estimates
        ]

    @property
    def table(self) -> Table:
        """The rows, as readers see them, and below them the terms, and what each rank holds."""
        columns = [
            *(Column(name, head) for head, name in _NAMES.items()),
            Column("seconds", "step, s", "{:.3f}".format),
            Column("above_bound", "above bound", wording.percent),
            Column("mfu", "MFU", wording.percent),
            Column("bytes", "GB", lambda count: f"{count / GB:.1f}"),
            Column("inside", "sent inside nodes, GB", lambda count: f"{count / GB:.1f}"),
            Column("between", "sent between nodes, GB", lambda count: f"{count / GB:.1f}"),
        ]
        what = f"{counted(self.tried, 'layout')} of {self.best.layout.devices:,} {self.best.device.name} tried"
        zero = "Levels of ZeRO that take the same time are one row: the lowest that fits."
        notes = [f"{what}: these are the quickest that fit. {zero}"]
        return Table(self.rows, columns, notes=notes, title=self.question, below=[self.terms, self.held])

    @property
    def terms(self) -> Table:
        """The quickest layout's step, term by term, on the rank that works longest; at the end, how long it waits."""
        found, seconds, ranks = self.best.terms, self.best.seconds, self.best.by_rank
        spent = {**found, "waiting": seconds - sum(found.values()), "the step": seconds}
        rows = [{"term": term, "seconds": time, "share": time / seconds} for term, time in spent.items() if time > 0]
        columns = [Column("term"), Column("seconds", "s", "{:.3f}".format), Column("share", "", wording.percent)]
        waits = 1 - sum(sum(terms.values()) for terms in ranks) / len(ranks) / seconds
        whose = (
            f" on rank {ranks.index(found)}, which works longest. All ranks wait {wording.percent(waits)} of the step"
        )
        return Table(rows, columns, title="The step of the quickest" + f"{whose} on average." * (len(ranks) > 1))

    @property
    def held(self) -> Table:
        """What each rank of the quickest layout's pipeline holds when it holds the most."""
        best, parts = self.best, ("weights", "gradients", "optimizer", "activations")
        layers = Counter(rank for rank, stage in zip(best.ranks, best.stages, strict=True) for _ in stage.elements())
        rows = [
            {"rank": rank, "layers": layers[rank], "all": most}
            | {part: getattr(held, part) for part in parts}
            | {"one backward": best.working}
            for rank, (most, held) in enumerate(zip(best.bytes, best.use.at_peak, strict=True))
        ]
        sizes = [Column(key, "", lambda count: f"{count / GB:.1f}") for key in list(rows[0])[2:]]
        even = "Layers are divided evenly between the stages: pipelab does not try fewer layers beside the head."
        notes, title = [even] * (len(rows) > 1), "What each rank of the quickest holds, GB"
        return Table(rows, [Column("rank"), Column("layers"), *sizes], notes=notes, title=title)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the tables as `txt`, `md` or `html`, or the rows as `csv`. Return the path."""
        return self.table.save(path)

    def __str__(self) -> str:
        """Return the table as text."""
        return str(self.table)


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
    schedules: Sequence[str] | str = ("1f1b", "interleaved-1f1b", "zb-h1", "zbv", "v-half"),
    **fixed: int | str,
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
        fixed: values that every layout shall have, by their names in `Layout` or in the table: `pp=4`.

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
    model = replace(model, sequence=model.sequence if sequence is None else sequence)
    kind = named(device) if isinstance(device, str) else device
    limits: dict[str, tuple[Any, float]] = {"margin": (margin, 1), "memory": (memory or 0, math.inf)}
    for name, (share, most) in limits.items():
        if not isinstance(share, int | float) or not 0 <= share < most:
            raise UsageError(f"{name}={share!r}: expected a number, at least 0 and below {most:g}")
    held = kind.memory if memory is None else memory * GB
    cap = held * (1 - margin)
    batch = max(1, _TOKENS // model.sequence) if batch is None else require_size("batch", batch)
    wanted = full_names(fixed)
    own = replace(Layout(**wanted), pipeline=1, stages_per_rank=1, replicas=wanted.get("expert", 1))
    Estimate(model, own, kind)  # refuses what the model cannot have with any other values
    names = schedules.replace(",", " ").split() if isinstance(schedules, str) else schedules
    asked = (model, kind, require_size("gpus", gpus), batch, [Layout(schedule=name).schedule for name in names])
    tried = [Estimate(model, each, kind) for each in _layouts(*asked, wanted)]
    if not tried:
        raise UsageError(_why_none(*asked, wanted))
    fitting = [each for each in tried if each.bytes_at_least <= cap]
    found: list[tuple[float, int, Estimate]] = []
    for number, each in enumerate(sorted(fitting, key=lambda each: (float(f"{each.at_least:.9e}"), each.layout.zero))):
        if len(found) >= require_size("top", top) and each.at_least > found[top - 1][0]:
            break
        twins = (other.layout for seconds, _, other in found if math.isclose(seconds, each.seconds))
        if max(each.bytes) <= cap and not any(replace(twin, zero=each.layout.zero) == each.layout for twin in twins):
            insort(found, (each.seconds, number, each))
            del found[top:]
    if not found:
        low = min(each.bytes_at_least for each in tried)
        near = sorted(tried, key=lambda each: each.bytes_at_least + each.layout.pipeline * each.kept)
        least = min(near[:5], key=lambda each: max(each.bytes))  # of all layouts, the bytes would take half a minute
        move = "other values than yours; or " * bool(wanted) + "more devices"
        said = " ".join(f"{name}={getattr(least.layout, name)}" for name in _NAMES.values())
        raise UsageError(
            f"none of {counted(len(tried), 'layout')} of {counted(batch, 'sequence')} on {counted(gpus, 'device')} fits"
            f" into {cap / GB:g} GB ({100 * margin:g} % are left for the runtime): each needs "
            f"{math.floor(low / GB * 10) / 10:.1f} GB or more; the smallest that was found needs "
            f"{math.ceil(max(least.bytes) / GB * 10) / 10:.1f} GB\n  {said}\n  try: {move}"
        )
    return Layouts(tuple(each for *_, each in found), len(tried), (held, margin), longest)


def full_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layout's values by their names in `Layout`, given by these or by the table's; refuse all other names."""
    short = {head.lower(): name for head, name in _NAMES.items()} | {each.name: each.name for each in fields(Layout)}
    if unknown := [name for name in given if name.lower() not in short]:
        raise UsageError(f"{unknown[0]}: a layout has {', '.join(short)}")
    found = {short[name.lower()]: value for name, value in given.items()}
    if len(found) < len(given):
        raise UsageError(f"{' '.join(f'{name}={value}' for name, value in given.items())}: one of them is given twice")
    return found


def _why_none(
    model: Transformer, device: Device, gpus: int, batch: int, names: Sequence[str], fixed: Mapping[str, Any]
) -> str:
    """Say why no layout has these values, and which other value or batch it can have."""
    moves, unit = [], fixed.get("microbatches", 1) * fixed.get("microbatch", 1)
    for name in fixed:
        fewer = {other: fixed[other] for other in fixed if other != name}
        others = {getattr(each, name) for each in _layouts(model, device, gpus, batch, names, fewer)}
        moves += [f"{name}={', '.join(map(str, sorted(others)[:6]))}"] * bool(others)
    sizes = {size * many for each in _divisors(gpus) for size in [unit * each] for many in (1, max(1, batch // size))}
    near = sorted(sizes, key=lambda size: abs(size - batch))
    moves += [f"a batch of {each}" for each in near if any(_layouts(model, device, gpus, each, names, fixed))][:1]
    return (
        f"no layout of {counted(gpus, 'device')} and {counted(batch, 'sequence')}"
        + f" has {' '.join(f'{name}={value}' for name, value in fixed.items())}" * bool(fixed)
        + f"\n  tensor x context x replicas x pipeline must be {gpus:,}, replicas x microbatches x microbatch {batch:,}"
        f"; tensor divides {model.heads} heads, and is at most {device.per_node} unless you set it; pipeline x"
        f" stages_per_rank is at most {model.layers + 2}\n  try: {'; or '.join(moves or ['fewer values'])}"
    )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _layouts(
    model: Transformer, device: Device, gpus: int, batch: int, names: Sequence[str], fixed: Mapping[str, Any]
) -> Iterator[Layout]:
    """Yield every layout with these values that the model can have, in any memory."""

    def values(name: str, usual: Iterable[Any]) -> Iterable[Any]:
        return [fixed[name]] if name in fixed else usual

    heads = [each for each in _divisors(model.heads) if each <= device.per_node]
    parts = [each for each in (2, 4, 8, 16, 32) if model.sequence % (2 * each) == 0 and model.sequence >= _SHORT * each]
    again = values("recompute", ("none", "full") if model.flash else ("none", "selective", "full"))
    for tensor, context in product(values("tensor", heads), values("context", [1, *parts])):
        for pipeline in values("pipeline", range(1, model.layers + 1)):
            replicas, rest = divmod(gpus, tensor * context * pipeline)
            if rest or batch % replicas:
                continue
            share, sharing = batch // replicas, gpus // pipeline
            experts = values("expert", _divisors(math.gcd(sharing, model.experts or 1)))
            zeros = values("zero", (0,) if replicas * context == 1 else range(4))
            usual = (max(1, share // fixed["microbatches"]),) if "microbatches" in fixed else (1, 2, 4, 8)
            for expert, zero, microbatch in product(experts, zeros, values("microbatch", usual)):
                microbatches, rest = divmod(share, microbatch)
                if rest or sharing % expert:
                    continue
                rounds = (2, 3, 4, 6, 8) if microbatches % pipeline == 0 else ()  # as in Megatron-LM
                kinds = values("schedule", names) if pipeline > 1 else ["1f1b"]  # one micro-batch after the other
                for schedule in (each for each in kinds if catalogue[each].refusal(pipeline, microbatches) is None):
                    kind = catalogue[schedule]
                    own = [] if issubclass(kind, Looped) else [kind(pipeline, microbatches).stages_per_rank]
                    for stages, recompute in product(own or values("stages_per_rank", rounds), again):
                        sizes: tuple[Any, ...] = (tensor, context, expert, replicas, pipeline, zero)
                        sizes += (schedule, stages, microbatches, microbatch, recompute)
                        found = dict(zip(_NAMES.values(), sizes, strict=True)) | {"overlap": fixed.get("overlap", True)}
                        if stages * pipeline <= model.layers + 2 and all(found[name] == fixed[name] for name in fixed):
                            yield Layout(**found)
