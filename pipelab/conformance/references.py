"""The part of PyTorch that each schedule is compared with, and the sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pipelab.catalogue import schedules
from pipelab.catalogue.bases import Looped
from pipelab.conformance.processes import Job
from pipelab.conformance.recording import NATIVE, NativeRefusalError, executed, executed_by_runtime, lowered_by_pytorch
from pipelab.conformance.steps import Outcome, step_of_class, step_of_plan
from pipelab.conformance.workload import fixed_model, fixed_task
from pipelab.plan.actions import Action
from pipelab.plan.plan import Plan
from pipelab.schedule import Schedule

_RUNTIME = "_PipelineScheduleRuntime"


@dataclass(frozen=True, slots=True)
class Grid:
    """The sizes to compare at.

    Attributes:
        ranks: numbers of ranks.
        microbatches: numbers of micro-batches.
        stages_per_rank: numbers of stages per rank, for looped schedules, which take any number.
        most_work: numbers are compared if ranks x micro-batches is at most this; orders are compared at every size.
    """

    ranks: Sequence[int] = (1, 2, 3, 4, 8)
    microbatches: Sequence[int] = (1, 2, 3, 4, 5, 6, 8, 12, 16)
    stages_per_rank: Sequence[int] = (2, 3)
    most_work: int = 16

    def of(self, name: str) -> Iterator[Schedule]:
        """Yield a registered schedule at every size, whether it accepts the size or not."""
        kind = schedules[name]
        for ranks in self.ranks:
            for microbatches in self.microbatches:
                if issubclass(kind, Looped):
                    yield from (kind(ranks, microbatches, each) for each in self.stages_per_rank)
                else:
                    yield kind(ranks, microbatches)


@dataclass(frozen=True, slots=True)
class Reference:
    """The part of PyTorch that a schedule is compared with.

    Attributes:
        name: its name in tables.
        kind: PyTorch's class.
        one_at_a_time: whether the class gets one micro-batch after the other.
    """

    name: str
    kind: str
    one_at_a_time: bool = False

    def has(self, schedule: Schedule) -> bool:
        """Return whether PyTorch has its own order at a schedule's size."""
        with suppress(NativeRefusalError):
            if self.kind != _RUNTIME:
                executed(self.kind, schedule.ranks, schedule.microbatches, schedule.stages_per_rank)
                return True
        return False

    def executed(self, plan: Plan) -> Plan:
        """Return what PyTorch executes at a plan's size.

        Raises:
            NativeRefusalError: if PyTorch refuses the size, or the plan.
        """
        if self.kind == _RUNTIME:
            return executed_by_runtime(plan)
        stages_per_rank = plan.stages // plan.ranks
        if not self.one_at_a_time:
            return executed(self.kind, plan.ranks, plan.microbatches, stages_per_rank)
        once = flat(executed(self.kind, plan.ranks, 1, stages_per_rank))
        rows = [[replace(each, microbatch=m) for m in range(plan.microbatches) for each in row] for row in once]
        return Plan(rows, plan.stages, plan.microbatches)

    def lowered(self, plan: Plan) -> tuple[list[list[str]], list[list[str]]]:
        """Return a plan's rows with transfers, as PyTorch places them and as its runtime runs them.

        Raises:
            NativeRefusalError: if PyTorch refuses the size, or the plan.
        """
        return lowered_by_pytorch(self.kind, plan)

    def runs(self, plan: Plan) -> bool:
        """Return whether PyTorch runs a plan's size, or the plan."""
        with suppress(NativeRefusalError):
            self.executed(plan)
            return True
        return False

    def step(self, plan: Plan, theirs: Plan) -> Outcome:
        """Let PyTorch run a step on one rank: with its class if the plan has one rank, else with the executed order."""
        modules, task = list(fixed_model(plan.stages)), fixed_task(plan.microbatches)
        if plan.ranks == 1 and self.kind != _RUNTIME:
            return step_of_class(self.kind, modules, task, one_at_a_time=self.one_at_a_time)
        return step_of_plan(theirs, modules, task)

    def job(self, plan: Plan) -> Job:
        """Return the same step as a job for several processes."""
        rows = tuple(" ".join(map(str, row)) for row in plan.rows) if self.kind == _RUNTIME else ()
        return Job(self.kind, plan.microbatches, plan.stages // plan.ranks, self.one_at_a_time, rows)


def references(name: str) -> tuple[Reference, ...]:
    """Return the parts of PyTorch that a registered schedule is compared with.

    If PyTorch has a class for it, that class; otherwise PyTorch's runtime, which runs any plan that has each stage on
    one rank. Naive is also compared with GPipe that gets one micro-batch at a time, and ZB-H1 with the interleaved zero
    bubble schedule with one stage per rank.
    """
    if name in NATIVE:
        return (_class(NATIVE[name]),)
    runtime = Reference("runtime, our plan", _RUNTIME)
    if name == "naive":
        return (Reference("GPipe, 1 at a time", NATIVE["gpipe"], one_at_a_time=True), runtime)
    if name == "zb-h1":
        return (_class(NATIVE["interleaved-zb"]), runtime)
    return (runtime,)


def _class(kind: str) -> Reference:
    return Reference(kind.removeprefix("Schedule"), kind)


def flat(plan: Plan) -> list[tuple[Action, ...]]:
    """Return a plan's rows with each overlapped pair as its forward, then its backward."""
    codes = plan.bound.codes
    return [tuple(map(codes.action, row)) for row in plan.bound.rows]
