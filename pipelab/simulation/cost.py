"""Costs: how long each action takes, and how long a value travels."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from statistics import median
from typing import Any, Literal

from pipelab.errors import CostError, require_size
from pipelab.plan.actions import KINDS, Kind, whole
from pipelab.plan.binding import NO_RANK
from pipelab.plan.fault import readable, shorten
from pipelab.plan.plan import Plan
from pipelab.plan.transfers import SEMANTICS, Semantics
from pipelab.trace.trace import Trace

__all__ = ["Cost"]

Number = float | Sequence[float]
"""One number for all stages, or one per stage."""

_PER_ROW = ("forward", "backward", "input_grad", "weight_grad", "pair", "activation_bytes", "boundary_gradient_bytes")
"""The costs that grow with the rows of a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """How long each action takes, and how long a value travels from rank to rank.

    Every time is in one unit of your choice (name it with `unit`). A number holds for all stages; a list always has
    one number per stage.

    Attributes:
        forward: time of `F`.
        backward: time of `B`.
        input_grad: time of `I`; half of `backward` if left out.
        weight_grad: time of `W`; half of `backward` if left out. If `I` and `W` together take longer or shorter than
            `backward`, comparing schedules that split it with schedules that do not is unfair.
        pair: time of an overlapped pair as one slot, as the DualPipe paper counts it; if left out, a pair takes as
            long as its forward and its backward, one after the other.
        all_reduce: time of `R`.
        latency: time that any transfer takes, however small. It delays the action that needs the value; no rank is
            busy with it.
        bandwidth: bytes per unit of time; if left out, size does not matter.
        activation_bytes: bytes that a stage's forward sends on for one micro-batch; they take time if there is a
            bandwidth.
        boundary_gradient_bytes: bytes that a stage's backward sends back for one micro-batch; they take time if there
            is a bandwidth.
        parameter_bytes: size of a stage's parameters; it does not change any time and is there for your own use.
        per: what a single number stands for. `"rank"`: one rank's share of the model, so that a stage takes
            `number * ranks / stages` and schedules with several stages per rank can be compared (`ranks` are those
            that one micro-batch visits). `"stage"`: one stage.
        first_stage: `"uniform"`, as papers count, or `"as-run"`, as PyTorch runs it: stage 0 needs no input gradient,
            so `I` takes no time there and `W` is the whole backward.
        unit: the unit of time, such as `"ms"`; for labels only.
        transfers: how sends and receives are ordered and queued. `"arrive"`: not at all, a value arrives when it
            arrives. In all others the two ends of a transfer meet: it starts when it is first in the queues of both
            its ranks, and holds both for as long as it travels. `"pytorch"`: one queue per rank, in the order in which
            PyTorch lowers a plan (`torch.distributed.pipelining.schedules._add_send_recv`). `"pytorch-runtime"`: the
            same with the turns that PyTorch's runtime gives to `UNSHARD` and `REDUCE_GRAD`. `"deferred"`: one queue,
            each receive right before its use. `"two-way"`: PyTorch's order, sends and receives in a queue each.
            `"per-peer"`: PyTorch's order, one queue for each other rank. `"by-time"`: one queue, in an order that
            pipelab chooses for these costs; it cannot hang.

    Example:
        >>> Cost(forward=50, backward=[80, 90], unit="ms").backward
        (80, 90)

    Raises:
        CostError: if a number is negative or not finite, or a cost is of another type.
    """

    forward: Number = 1
    backward: Number = 2
    input_grad: Number | None = None
    weight_grad: Number | None = None
    pair: Number | None = None
    all_reduce: Number = 0
    latency: float = 0
    bandwidth: float | None = None
    activation_bytes: Number = 0
    boundary_gradient_bytes: Number = 0
    parameter_bytes: Number = 0
    per: Literal["rank", "stage"] = "rank"
    first_stage: Literal["uniform", "as-run"] = "uniform"
    unit: str = ""
    transfers: Semantics = "arrive"

    def __post_init__(self) -> None:
        """Refuse values that cannot be a time or a size; make lists immutable."""
        for field in fields(self):
            value = readable(getattr(self, field.name))
            if field.name in ("per", "first_stage", "unit", "transfers") or (value is None and field.default is None):
                continue
            several = isinstance(value, Sequence)
            if several and field.name in ("latency", "bandwidth"):
                raise CostError(f"{field.name}={shorten(value)}: expected one number, not a list")
            numbers = tuple(map(_number, value if several else (value,)))
            if not numbers or None in numbers:
                raise CostError(f"{field.name}={shorten(value)}: expected finite numbers, 0 or more")
            object.__setattr__(self, field.name, numbers if several else numbers[0])
        if not isinstance(self.unit, str):
            raise CostError(f"unit={shorten(self.unit)}: expected a text, such as 'ms'")
        if self.bandwidth == 0:
            raise CostError("bandwidth=0: nothing would ever arrive; leave it out if size does not matter")
        if self.per not in ("rank", "stage"):
            raise CostError(f"per={self.per!r}: expected 'rank' or 'stage'")
        if self.first_stage not in ("uniform", "as-run"):
            raise CostError(f"first_stage={self.first_stage!r}: expected 'uniform' or 'as-run'")
        if self.transfers not in SEMANTICS:
            raise CostError(f"transfers={shorten(self.transfers)}: expected one of {', '.join(map(repr, SEMANTICS))}")

    @classmethod
    def fit(cls, trace: Trace) -> Cost:
        """Return the costs that a trace shows: the median time of each kind of action on each stage.

        The median is not affected by a few disturbed actions. If the trace splits the backward, a full backward is
        assumed to last as long as its two parts.

        Transfers are left out, because the actions' times do not include them: if they matter, add `latency` or
        `bandwidth` with `dataclasses.replace`. The costs have one number for each stage that ran, so they predict other
        orders of the same stages; a plan with another number of stages is refused.

        Example:
            >>> import pipelab
            >>> trace = pipelab.simulate(pipelab.GPipe(2, 4), Cost(forward=[3, 4], backward=6, per="stage"))
            >>> Cost.fit(trace).forward
            (3.0, 4.0)
            >>> pipelab.simulate(pipelab.OneFOneB(2, 4), Cost.fit(trace)).makespan
            49.0

        Raises:
            TypeError: if `trace` is not a trace.
        """
        if not isinstance(trace, Trace):
            raise TypeError(f"Cost.fit takes a trace, from step.trace or simulate, got {shorten(trace)}")
        spans = {kind: each for kind, each in _spans(trace).items() if any(each)}
        typical = {kind: [median(times) if times else 0.0 for times in each] for kind, each in spans.items()}
        inputs, weights, backward = typical.get("I"), typical.get("W"), typical.get("B")
        if backward is None and inputs and weights:
            backward = [sum(both) for both in zip(inputs, weights, strict=True)]
        return cls(
            forward=typical.get("F", 0),
            backward=backward or 0,
            input_grad=inputs,
            weight_grad=weights,
            pair=typical.get("pair"),
            all_reduce=typical.get("R", 0),
            per="stage",
            unit=trace.unit,
        )

    def shared(self, microbatches: int) -> Cost:
        """Return the costs of one micro-batch, if these are the costs of a whole batch.

        Times of work and sizes of activations are divided. Latency, bandwidth, parameters and their all-reduce do not
        depend on the number of rows and stay the same.

        Example:
            >>> Cost(forward=80, backward=160, latency=5).shared(8).forward
            10.0

        Raises:
            UsageError: if `microbatches` is not a positive whole number.
        """
        microbatches = require_size("microbatches", microbatches)

        def share(value: Number | None) -> Number | None:
            if isinstance(value, Sequence):
                return tuple(number / microbatches for number in value)
            return None if value is None else value / microbatches

        shares: dict[str, Any] = {name: share(getattr(self, name)) for name in _PER_ROW}
        return replace(self, **shares)

    def times(self, plan: Plan) -> dict[Kind, list[float]]:
        """Return, for each kind of action, the time on every stage of a plan.

        Example:
            >>> import pipelab
            >>> Cost(forward=1, backward=2).times(pipelab.GPipe(2, 2).plan())["B"]
            [2.0, 2.0]

        Raises:
            CostError: if a list does not have one number per stage.
        """
        share = self._share(plan)
        forward = self._each("forward", plan.stages, share)
        backward = self._each("backward", plan.stages, share)
        half = [time / 2 for time in backward]
        inputs = half if self.input_grad is None else self._each("input_grad", plan.stages, share)
        weights = half if self.weight_grad is None else self._each("weight_grad", plan.stages, share)
        if self.first_stage == "as-run":
            inputs, weights = [0.0, *inputs[1:]], [backward[0], *weights[1:]]
        reduce = self._each("all_reduce", plan.stages, share)
        return {"F": forward, "B": backward, "I": inputs, "W": weights, "R": reduce}

    def transfer_times(self, plan: Plan) -> tuple[list[float], list[float]]:
        """Return, for every stage, how long its output and its input gradient travel to another rank."""
        slow = 0.0 if self.bandwidth is None else 1.0 / self.bandwidth
        sizes = (self._each(f"{what}_bytes", plan.stages, 1.0) for what in ("activation", "boundary_gradient"))
        outputs, gradients = ([self.latency + size * slow for size in each] for each in sizes)
        return outputs, gradients

    def pair_times(self, plan: Plan) -> list[float] | None:
        """Return the time of an overlapped pair, by the stage of its forward; `None` if it is not one slot."""
        return None if self.pair is None else self._each("pair", plan.stages, self._share(plan))

    def _share(self, plan: Plan) -> float:
        """Return the fraction of a single number that one stage takes."""
        if self.per == "stage":
            return 1.0
        return len(set(plan.bound.route(0)) - {NO_RANK}) / plan.stages

    def _each(self, name: str, stages: int, share: float) -> list[float]:
        """Return one number per stage; a single number is scaled by `share`."""
        value = getattr(self, name)
        if isinstance(value, Sequence):
            if len(value) != stages:
                raise CostError(
                    f"{name} has {len(value)} numbers for {stages} stages: give one number, or one per stage; costs "
                    f"from Cost.fit hold for the {len(value)} stages of its trace only: for {stages} stages, run the "
                    "model with so many and fit that trace"
                )
            return [float(number) for number in value]
        return [value * share] * stages


def _number(value: Any) -> float | None:
    """Return a finite number, 0 or more, as Python's, if it is NumPy's; `None` if it is none."""
    if not isinstance(value, (int, float)):
        value = whole(value)
    if not isinstance(value, int):
        value = float(value) if isinstance(value, Real) else -1.0
    return value if 0 <= value <= sys.float_info.max else None


def _spans(trace: Trace) -> dict[str, list[list[float]]]:
    """Return, by kind and stage, how long each action took; a pair in one slot counts as a pair."""
    bound = trace.plan.bound
    kind, stage = bound.codes.kind, bound.codes.stage
    spans: dict[str, list[list[float]]] = {name: [[] for _ in range(trace.plan.stages)] for name in (*KINDS, "pair")}
    for row, starts, ends in zip(bound.rows, trace.starts, trace.ends, strict=True):
        before = -1
        for index, (code, start, end) in enumerate(zip(row, starts, ends, strict=True)):
            if before in bound.pairs and starts[index - 1] == start and end > start:
                spans["F"][stage[before]].pop()
                spans["pair"][stage[before]].append(end - start)
            else:
                spans[kind[code]][stage[code]].append(end - start)
            before = code
    return spans
