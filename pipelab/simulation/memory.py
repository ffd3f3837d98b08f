"""Memory: how many bytes a stage's parts take, and from them how many every rank holds, and when.

rank 0  ██ weights, gradients, optimizer's state: always
          ░░ activations of 0F0: from its start to the end of 0B0, or to that of 0I0
            ▒▒ what 0I0 leaves for 0W0: to the end of 0W0
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from numbers import Real
from typing import TYPE_CHECKING, Any

from pipelab.checking.checker import ScheduleLike
from pipelab.errors import CostError, UsageError
from pipelab.plan.actions import Action, whole
from pipelab.plan.fault import readable, shorten
from pipelab.plan.plan import Plan
from pipelab.simulation.clock import simulate
from pipelab.trace.trace import Trace

if TYPE_CHECKING:
    from pipelab.draw.table import Table

__all__ = ["Excess", "Held", "Memory", "MemoryUse", "memory_use"]

Bytes = float | Sequence[float]
"""One number for all stages, or one per stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """How many bytes each stage takes: of its own, and for each micro-batch.

    A number holds for every stage; a list has one number per stage. `Pipeline.memory` measures them.

    Attributes:
        weights: bytes of a stage's parameters and buffers, held all the time.
        gradients: bytes of their gradients, held from the stage's first `B` or `W` of the step on, as after
            `optimizer.zero_grad()`.
        optimizer: bytes of the optimizer's state, held all the time: twice the weights for Adam.
        activations: bytes that one micro-batch's forward keeps for its backward: what autograd saves, and the stage's
            output. Held from the start of `F` to the end of `B`, or of `I` if the backward is split.
        for_weight_grad: bytes that `I` leaves for `W` for one micro-batch, held from `I` to the end of `W`; as many as
            `activations` if left out. While `I` runs, the larger of both is held.
        outputs: bytes of the model's output for one micro-batch, which the last stage keeps until the step's end.

    Example:
        >>> Memory(activations=[96, 80], weights=400).activations
        (96, 80)

    Raises:
        CostError: if a number is negative or not finite, or a size is of another type.
    """

    weights: Bytes = 0
    gradients: Bytes = 0
    optimizer: Bytes = 0
    activations: Bytes = 0
    for_weight_grad: Bytes | None = None
    outputs: float = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be a size; make lists immutable, and all numbers whole ones."""
        for each in fields(self):
            value = readable(getattr(self, each.name))
            if value is None and each.default is None:
                continue
            several = isinstance(value, Sequence) and not isinstance(value, str)
            if several and each.name == "outputs":
                raise CostError(f"outputs={shorten(value)}: expected one number, as only the last stage keeps outputs")
            sizes = tuple(map(_size, value if several else (value,)))
            if not sizes or None in sizes:
                raise CostError(f"{each.name}={shorten(value)}: expected finite numbers of bytes, 0 or more")
            object.__setattr__(self, each.name, sizes if several else sizes[0])

    def of(self, name: str, stages: int) -> list[int]:
        """Return one of the sizes, by the attribute's name, for every stage of a plan with so many.

        Raises:
            CostError: if it is a list with another number of stages.
        """
        value = getattr(self, name)
        if value is None:
            value = self.activations
        if isinstance(value, Sequence):
            if len(value) != stages:
                raise CostError(
                    f"{name} has {len(value)} numbers for {stages} stages: give one number, or one per stage"
                )
            return [*map(int, value)]
        return [value] * stages


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds, in bytes, from a time on, until its next change.

    Attributes:
        time: since when, in the trace's unit.
        action: the action that starts or ends then; `None` for what was there before the step.
        weights: of parameters and buffers.
        gradients: of the parameters' gradients.
        optimizer: of the optimizer's state.
        activations: of what forwards keep for backwards, and what `I` leaves for `W`.
        outputs: of the model's outputs.
    """

    time: float
    action: Action | None
    weights: int
    gradients: int
    optimizer: int
    activations: int
    outputs: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.outputs


@dataclass(frozen=True, slots=True)
class Excess:
    """A rank that holds more than its cap for a while.

    Attributes:
        rank: which rank.
        cap: how many bytes it may hold.
        most: how many it holds at most in this while.
        start: when it passes the cap, in the trace's unit.
        end: when it is back at the cap, or the trace's end.
        action: the action with which it passes the cap; `None` if it does before the first.
        unit: the unit of time.
    """

    rank: int
    cap: int
    most: int
    start: float
    end: float
    action: Action | None
    unit: str = ""

    @property
    def bytes_over(self) -> int:
        """How many bytes it holds beyond the cap."""
        return self.most - self.cap

    def __str__(self) -> str:
        """Return it as a sentence."""
        since = "from the start" if self.action is None else f"since {self.action}"
        unit = f" {self.unit}" if self.unit else ""
        return (
            f"rank {self.rank} holds up to {self.most:,} bytes, {self.bytes_over:,} over its cap of {self.cap:,}, "
            f"{since}: from {self.start:g} to {self.end:g}{unit}"
        )


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """How many bytes every rank holds, over the time of a trace: predicted or measured.

    Attributes:
        trace: when the actions ran.
        curves: for each rank, what it holds after each change, in order. Several changes may have one time.
        source: `"predicted"` or `"measured"`.
        allocated: if it was measured on GPUs, the most bytes that PyTorch's allocator gave out during the step, by
            device, with all that was on the device before.
    """

    trace: Trace
    curves: tuple[tuple[Held, ...], ...]
    source: str = "predicted"
    allocated: Mapping[str, int] = field(default_factory=dict)

    @property
    def peaks(self) -> tuple[int, ...]:
        """For each rank, the most bytes that it holds at once."""
        return tuple(held.total for held in self.at_peak)

    @property
    def at_peak(self) -> tuple[Held, ...]:
        """For each rank, what it holds when it first holds the most."""
        return tuple(max(curve, key=lambda held: held.total) for curve in self.curves)

    def over(self, cap: float | Sequence[float]) -> tuple[Excess, ...]:
        """Return each while in which a rank holds more than its cap, rank by rank, in order of time.

        Args:
            cap: bytes: one number, or one per rank.

        Raises:
            UsageError: if it is neither.
        """
        several = isinstance(cap, Sequence) and not isinstance(cap, str)
        caps = [_size(each) for each in cap] if several else [_size(cap)] * len(self.curves)  # type: ignore[union-attr]
        if None in caps or len(caps) != len(self.curves):
            raise UsageError(
                f"cap={shorten(cap)}: expected bytes, one number or one for each of {len(self.curves)} ranks"
            )
        return tuple(
            each
            for rank, (most, curve) in enumerate(zip(caps, self.curves, strict=True))
            for each in self._excesses(rank, most or 0, curve)
        )

    def _excesses(self, rank: int, cap: int, curve: Sequence[Held]) -> Iterator[Excess]:
        begins = 0
        for over, group in groupby(curve, key=lambda held: held.total > cap):
            held = list(group)
            begins += len(held)
            if over:
                most = max(each.total for each in held)
                end = curve[begins].time if begins < len(curve) else self.trace.end
                yield Excess(rank, cap, most, held[0].time, end, held[0].action, self.trace.unit)

    @property
    def table(self) -> Table:
        """What each rank holds at its peak, part by part."""
        from pipelab.draw.table import Column, Table

        parts = [each.name for each in fields(Held) if each.name not in ("time", "action")]
        rows = [
            {"rank": rank, "peak": held.total, **{part: getattr(held, part) for part in parts}}
            for rank, held in enumerate(self.at_peak)
        ]
        show = "{:,}".format
        columns = [Column("rank"), Column("peak", "peak, bytes", show), *(Column(part, show=show) for part in parts)]
        return Table(rows, columns)

    def __str__(self) -> str:
        """Return the table as text."""
        return str(self.table)


def memory_use(subject: Trace | Plan | ScheduleLike, memory: Memory) -> MemoryUse:
    """Return how many bytes every rank holds over time, predicted from the bytes of its stages.

    The peaks depend on the order of a rank's actions only, not on how long they take. What an operation needs while it
    runs, values on their way between ranks, and the batch itself do not count. What two neighbouring stages of one rank
    share, as at the turn of a V, counts twice.

    Args:
        subject: a trace, simulated or measured; or a plan or schedule, which is simulated first.
        memory: the bytes of each stage.

    Example:
        >>> import pipelab
        >>> memory = pipelab.Memory(weights=1000, gradients=1000, optimizer=2000, activations=100)
        >>> pipelab.memory_use(pipelab.GPipe(ranks=4, microbatches=8), memory).peaks
        (4800, 4800, 4800, 4800)
        >>> use = pipelab.memory_use(pipelab.OneFOneB(ranks=4, microbatches=8), memory)
        >>> print(use)
        rank  peak, bytes  weights  gradients  optimizer  activations  outputs
        0           4,400    1,000      1,000      2,000          400        0
        1           4,300    1,000      1,000      2,000          300        0
        2           4,200    1,000      1,000      2,000          200        0
        3           4,100    1,000      1,000      2,000          100        0
        >>> print(use.over(4350)[0])
        rank 0 holds up to 4,400 bytes, 50 over its cap of 4,350, since 0B0: from 10 to 12

    Raises:
        CostError: if a list of the sizes does not have one number per stage.
        ScheduleError: if a plan has faults.
        TypeError: if `memory` is not a `Memory`.
    """
    if not isinstance(memory, Memory):
        raise TypeError(f"memory={shorten(memory)}: expected a Memory, such as pipelab.Memory(activations=2**20)")
    trace = subject if isinstance(subject, Trace) else simulate(subject)
    return MemoryUse(trace, tuple(_curve(trace, rank, memory) for rank in range(trace.ranks)))


def _curve(trace: Trace, rank: int, memory: Memory) -> tuple[Held, ...]:
    """Return what a rank holds after each change."""
    stages, bound = trace.plan.stages, trace.plan.bound
    sizes = {each.name: memory.of(each.name, stages) for each in fields(Memory)}
    activations, left = sizes["activations"], sizes["for_weight_grad"]
    changes: list[tuple[float, Action, dict[str, int]]] = []
    without_gradients = set(bound.stages_of.get(rank, ()))
    codes = bound.codes
    for code, start, end in zip(bound.rows[rank], trace.starts[rank], trace.ends[rank], strict=True):
        kind, stage = codes.kind[code], codes.stage[code]
        adds = dict.fromkeys(("activations", "gradients", "outputs"), 0)
        frees = 0
        if kind == "F":
            adds["activations"] = activations[stage]
            adds["outputs"] = sizes["outputs"][stage] if stage == stages - 1 else 0
        elif kind == "I":
            adds["activations"] = max(0, left[stage] - activations[stage])
            frees = max(0, activations[stage] - left[stage])
        elif kind in "BW":
            frees = activations[stage] if kind == "B" else left[stage]
            if stage in without_gradients:
                adds["gradients"] = sizes["gradients"][stage]
                without_gradients.remove(stage)
        action = codes.action(code)
        changes += [(start, action, adds), (end, action, {"activations": -frees})]
    changes.sort(key=lambda change: change[0])  # stable: at one time, in the row's order
    mine = bound.stages_of.get(rank, ())
    weights, optimizer = (sum(sizes[name][stage] for stage in mine) for name in ("weights", "optimizer"))
    curve = [Held(trace.start, None, weights, 0, optimizer, 0, 0)]
    for time, action, change in changes:
        if any(change.values()):
            before = curve[-1]
            now = {name: getattr(before, name) + more for name, more in change.items()}
            curve.append(replace(before, time=time, action=action, **now))
    return tuple(curve)


def _size(value: Any) -> int | None:
    """Return a number of bytes, NumPy's too, as a whole number; `None` if it is none."""
    number = value if isinstance(value, (int, float)) else whole(value)
    if isinstance(number, bool) or not isinstance(number, (int, Real)):
        return None
    size = number if isinstance(number, int) else float(number)
    return round(size) if math.isfinite(size) and size >= 0 else None
