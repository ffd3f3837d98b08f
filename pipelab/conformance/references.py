"""What of PyTorch each schedule is compared with, and at which sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipelab.catalogue import schedules
from pipelab.catalogue.bases import Looped
from pipelab.conformance.processes import Job
from pipelab.conformance.recording import NATIVE, NativeRefusalError, executed, executed_by_runtime
from pipelab.conformance.same_work import same_model, same_task
from pipelab.conformance.steps import Outcome, step_of_class, step_of_plan
from pipelab.plan.actions import Action
from pipelab.plan.plan import Plan
from pipelab.schedule import Schedule

__all__ = ["Grid", "Reference", "flat", "references"]

_RUNTIME = "_PipelineScheduleRuntime"


@dataclass(frozen=True, slots=True)
class Grid:
    """The sizes to compare at.

    Attributes:
        ranks: numbers of ranks.
        microbatches: numbers of micro-batches.
        stages_per_rank: numbers of stages per rank, for looping schedules, which take any.
        most_work: numbers are compared where ranks x micro-batches is at most this; orders everywhere.
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
    """What of PyTorch a schedule is compared with.

    Attributes:
        name: what a table calls it.
        kind: PyTorch's class.
        one_at_a_time: whether the class is given one micro-batch after the other.
    """

    name: str
    kind: str
    one_at_a_time: bool = False

    def has(self, schedule: Schedule) -> bool:
        """Return whether PyTorch has an order of its own at a schedule's size."""
        if self.kind == _RUNTIME:
            return False
        try:
            executed(self.kind, schedule.ranks, schedule.microbatches, schedule.stages_per_rank)
        except NativeRefusalError:
            return False
        return True

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
        once = executed(self.kind, plan.ranks, 1, stages_per_rank)
        return Plan(
            [[replace(each, microbatch=m) for m in range(plan.microbatches) for each in row] for row in flat(once)],
            plan.stages,
            plan.microbatches,
        )

    def runs(self, plan: Plan) -> bool:
        """Return whether PyTorch runs a plan's size, or the plan."""
        try:
            self.executed(plan)
        except NativeRefusalError:
            return False
        return True

    def step(self, plan: Plan, theirs: Plan) -> Outcome:
        """Let PyTorch run a step on one rank: its class where the plan has one rank, else the order it executes."""
        modules, task = list(same_model(plan.stages)), same_task(plan.microbatches)
        if plan.ranks == 1 and self.kind != _RUNTIME:
            return step_of_class(self.kind, modules, task, one_at_a_time=self.one_at_a_time)
        return step_of_plan(theirs, modules, task)

    def job(self, plan: Plan) -> Job:
        """Return the same step for processes of its own."""
        rows = tuple(" ".join(map(str, row)) for row in plan.rows) if self.kind == _RUNTIME else ()
        return Job(self.kind, plan.microbatches, plan.stages // plan.ranks, self.one_at_a_time, rows)


def references(name: str) -> tuple[Reference, ...]:
    """Return what of PyTorch a registered schedule is compared with.

    Its class, where there is one; otherwise PyTorch's runtime, which runs any plan that has each stage on one rank.
    Naive is also GPipe given one micro-batch at a time, and ZB-H1 the interleaved zero bubble of one stage per rank.
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
    """Return a plan's rows with each overlapped pair as what it runs: the forward, then the backward."""
    codes = plan.bound.codes
    return [tuple(map(codes.action, row)) for row in plan.bound.rows]
