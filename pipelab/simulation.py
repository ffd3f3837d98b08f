"""Simulate a plan: when everything would happen, if actions and transfers took so long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Literal

from pipelab.checking import Draftable, as_plan, require_legal
from pipelab.deadlocks import deadlocks
from pipelab.errors import CostError, ScheduleError
from pipelab.plan import Plan
from pipelab.program import Program
from pipelab.trace import Trace
from pipelab.traversal import traverse

__all__ = ["Cost", "simulate"]

Number = float | Sequence[float]
"""One number for all stages, or one per stage."""

_PER_STAGE = ("forward", "backward", "input_grad", "weight_grad", "pair", "all_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """How long each action takes, and how long a value travels from rank to rank.

    Every time is in one unit of your choice (name it with `unit`). A number holds for all stages; a list always has
    one number per stage.

    Attributes:
        forward: time of `F`.
        backward: time of `B`.
        input_grad: time of `I`; half of `backward` if left out.
        weight_grad: time of `W`; half of `backward` if left out.
        pair: time of an overlapped pair as one slot, as the DualPipe paper counts it; if left out, a pair takes as
            long as its forward and its backward, one after the other.
        all_reduce: time of `R`.
        latency: time that any transfer takes, however small. It delays whoever needs the value; no rank is busy.
        bandwidth: bytes per unit of time; if left out, size does not matter.
        activation_bytes: size of what a stage's forward sends on.
        boundary_gradient_bytes: size of what a stage's backward sends back.
        parameter_bytes: size of a stage's parameters.
        per: what a single number stands for. `"rank"`: one rank's share of the model, so that a stage takes
            `number * ranks / stages` and schedules with several stages per rank can be compared (`ranks` are those
            that one micro-batch visits). `"stage"`: one stage.
        first_stage: `"uniform"`, as papers count, or `"as-run"`, as PyTorch runs it: on stage 0 there is no input
            gradient to give, so `I` takes no time there and `W` is the whole backward.
        unit: the unit of time, such as `"ms"`; for labels only.

    Example:
        >>> Cost(forward=50, backward=[80, 90], unit="ms").backward
        (80, 90)

    Raises:
        CostError: if a number is negative or not finite.
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

    def __post_init__(self) -> None:
        """Refuse what cannot be a time or a size; make lists immutable."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("per", "first_stage", "unit") or (value is None and field.default is None):
                continue
            if isinstance(value, Sequence):
                object.__setattr__(self, field.name, tuple(value))
                if field.name in ("latency", "bandwidth"):
                    raise CostError(f"{field.name}={value!r}: expected one number, not a list")
            for number in value or (None,) if isinstance(value, Sequence) else (value,):
                if not isinstance(number, (int, float)) or not math.isfinite(number) or number < 0:
                    raise CostError(f"{field.name}={value!r}: expected finite numbers, 0 or more")
        if self.bandwidth == 0:
            raise CostError("bandwidth=0: nothing would ever arrive; leave it out where size does not matter")
        if self.per not in ("rank", "stage"):
            raise CostError(f"per={self.per!r}: expected 'rank' or 'stage'")
        if self.first_stage not in ("uniform", "as-run"):
            raise CostError(f"first_stage={self.first_stage!r}: expected 'uniform' or 'as-run'")

    @classmethod
    def fit(cls, trace: Trace) -> Cost:
        """Return the costs that a trace shows: the median time of each kind of action on each stage.

        The median leaves out what disturbed a few actions. Transfers are not fitted: their times are not in the
        actions'.

        Example:
            >>> import pipelab
            >>> trace = pipelab.simulate(pipelab.GPipe(2, 4), Cost(forward=[3, 4], backward=6, per="stage"))
            >>> Cost.fit(trace).forward
            (3.0, 4.0)
        """
        stages = trace.plan.stages
        slots = trace.plan.program.numbering.slots
        spans: dict[str, list[list[float]]] = {kind: [[] for _ in range(stages)] for kind in "FBIW"}
        for row, starts, ends in zip(trace.plan.program.rows, trace.starts, trace.ends, strict=True):
            for code, start, end in zip(row, starts, ends, strict=True):
                if code < 4 * slots:
                    spans["FBIW"[code // slots]][code % stages].append(end - start)
        typical = {
            kind: [median(times) if times else 0.0 for times in each] for kind, each in spans.items() if any(each)
        }
        return cls(
            forward=typical.get("F", 0),
            backward=typical.get("B", 0),
            input_grad=typical.get("I"),
            weight_grad=typical.get("W"),
            per="stage",
            unit=trace.unit,
        )

    def times(self, plan: Plan) -> dict[str, list[float]]:
        """Return, for each kind of action, the time on every stage of a plan.

        Example:
            >>> import pipelab
            >>> Cost(forward=1, backward=2).times(pipelab.GPipe(2, 2).plan())["B"]
            [2.0, 2.0]

        Raises:
            CostError: if a list does not have one number per stage.
        """
        share = 1.0
        if self.per == "rank":
            visited = {rank for rank in plan.program.placed[: plan.stages] if rank >= 0}
            share = len(visited) / plan.stages
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
        sizes = (
            self._each("activation_bytes", plan.stages, 1.0),
            self._each("boundary_gradient_bytes", plan.stages, 1.0),
        )
        slow = 0.0 if self.bandwidth is None else 1.0 / self.bandwidth
        outputs, gradients = ([self.latency + size * slow for size in each] for each in sizes)
        return outputs, gradients

    def pair_times(self, plan: Plan) -> list[float] | None:
        """Return the time of an overlapped pair, by the stage of its forward; `None` where it is not one slot."""
        if self.pair is None:
            return None
        share = self.times(plan)["F"]
        scale = [1.0] * plan.stages
        if self.per == "rank" and not isinstance(self.pair, Sequence):
            visited = {rank for rank in plan.program.placed[: plan.stages] if rank >= 0}
            scale = [len(visited) / plan.stages] * len(share)
        numbers = self._each("pair", plan.stages, 1.0)
        return [number * factor for number, factor in zip(numbers, scale, strict=True)]

    def _each(self, name: str, stages: int, share: float) -> list[float]:
        """Return one number per stage; a single number is scaled by `share`."""
        value = getattr(self, name)
        if isinstance(value, Sequence):
            if len(value) != stages:
                raise CostError(
                    f"{name} has {len(value)} numbers for {stages} stages: give one number, or one per stage"
                )
            return [float(number) for number in value]
        return [value * share] * stages


def simulate(plan_or_schedule: Plan | Draftable, cost: Cost | None = None) -> Trace:
    """Return when every action would start and end if the plan ran as soon as it could.

    Each rank runs its row in order and waits where it must; time is linear in the number of actions.

    Args:
        plan_or_schedule: what to run.
        cost: how long things take; by default forward 1, backward 2, transfers nothing.

    Example:
        >>> import pipelab
        >>> trace = pipelab.simulate(pipelab.OneFOneB(ranks=4, microbatches=8), Cost(forward=1, backward=2))
        >>> trace.makespan, round(trace.bubble, 3), trace.peak_activations
        (33.0, 0.273, (4, 3, 2, 1))

    Raises:
        ScheduleError: if the plan has faults.
        CostError: if a list of the cost does not have one number per stage.
    """
    plan = as_plan(plan_or_schedule)
    cost = cost or Cost()
    order = require_legal(plan).order
    program = plan.program
    paired = cost.pair_times(plan) if program.pairs else None
    if paired is not None:
        walk = traverse(program, atomic_pairs=True)
        if walk.stuck:
            faults = deadlocks(program, walk, atomic_pairs=True)
            raise ScheduleError(faults, f"{plan.name} with each overlapped pair as one slot")
        order = walk.order
    begun, ended, delay = _clock(plan, program, order, cost, paired)
    return Trace(
        plan,
        [[begun[code] for code in row] for row in program.rows],
        [[ended[code] for code in row] for row in program.rows],
        cost.unit,
        delay=delay.__getitem__,
    )


def _clock(
    plan: Plan, program: Program, order: list[int], cost: Cost, paired: list[float] | None
) -> tuple[list[float], list[float], list[float]]:
    """Return the start and end of every code, and the travel time of every value."""
    numbering, rank_of = program.numbering, program.rank_of
    slots, stages, microbatches = numbering.slots, numbering.stages, numbering.microbatches
    first_need, second_need, gives = numbering.first_need, numbering.second_need, numbering.gives
    reduces = 4 * slots

    times = cost.times(plan)
    lasts = [time for kind in "FBIW" for time in times[kind] * microbatches]  # by code: a slot is m * stages + s
    outputs, gradients = cost.transfer_times(plan)
    delay = outputs * microbatches + gradients * microbatches + [0.0] * (slots + 1)  # by value
    first_lag, second_lag = _lags(program, delay)

    ready = [0.0] * (numbering.always + 1)  # by value: when it leaves its giver
    free = [0.0] * len(program.rows)  # by rank
    begun = [0.0] * (reduces + stages)
    ended = [0.0] * (reduces + stages)
    slot_of: dict[int, float] = {}  # backward of a pair -> start of the slot it shares
    for at, code in enumerate(order):
        if code >= reduces:
            group = [rank for rank, row in enumerate(program.rows) if code in row]
            start = max(free[rank] for rank in group)
            end = start + times["R"][code - reduces]
            begun[code], ended[code] = start, end
            for rank in group:
                free[rank] = end
            continue
        rank = rank_of[code]
        if code in slot_of:
            start = slot_of.pop(code)
            end = free[rank]
        else:
            start = free[rank]
            arrives = ready[first_need[code]] + first_lag[code]
            start = max(start, arrives)
            arrives = ready[second_need[code]] + second_lag[code]
            start = max(start, arrives)
            end = start + lasts[code]
            if paired is not None and code in program.pairs:
                backward = order[at + 1]
                for need, lag in ((first_need, first_lag), (second_need, second_lag)):
                    start = max(start, ready[need[backward]] + lag[backward])
                end = start + paired[code % stages]
                slot_of[backward] = start
        ready[gives[code]] = end
        begun[code] = start
        ended[code] = end
        free[rank] = end
    return begun, ended, delay


def _lags(program: Program, delay: list[float]) -> tuple[list[float], list[float]]:
    """Return, by code, how long its two inputs travel: nothing, where giver and needer are on one rank."""
    numbering, rank_of = program.numbering, program.rank_of
    slots = numbering.slots
    none = [0.0] * (4 * slots)
    if not any(delay):
        return none, none
    first, second = list(none), list(none)
    for row in program.rows:
        for code in row:
            if code >= 3 * slots:  # W and R need nothing from another stage
                continue
            lags, need = (first, numbering.first_need) if code < slots else (second, numbering.second_need)
            value = need[code]
            if value != numbering.always:
                giver = next(giver for giver in numbering.givers(value) if rank_of[giver] >= 0)
                if rank_of[giver] != rank_of[code]:
                    lags[code] = delay[value]
    return first, second
