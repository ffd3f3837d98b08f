"""Compare every schedule with PyTorch's: is the order the one that PyTorch executes, and are the numbers the same?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from itertools import zip_longest

import torch

from pipelab.catalogue import schedules
from pipelab.catalogue.bases import Looped
from pipelab.conformance.recording import NATIVE, NativeRefusalError, executed, executed_by_runtime, lowered_by_pytorch
from pipelab.conformance.steps import (
    Job,
    Outcome,
    fixed_model,
    fixed_task,
    group_of_one,
    one_thread,
    run_in_processes,
    step_of_class,
    step_of_plan,
)
from pipelab.engine.pipeline import Pipeline
from pipelab.plan.actions import Action
from pipelab.plan.fault import ScheduleError
from pipelab.plan.plan import Plan
from pipelab.schedule import Schedule
from pipelab.simulation.wire import lower

# ── What each schedule is compared with ───────────────────────────────────────────────────────────────────────────────

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
        """Return what PyTorch executes at a plan's size."""
        if self.kind == _RUNTIME:
            return executed_by_runtime(plan)
        stages_per_rank = plan.stages // plan.ranks
        if not self.one_at_a_time:
            return executed(self.kind, plan.ranks, plan.microbatches, stages_per_rank)
        once = flat(executed(self.kind, plan.ranks, 1, stages_per_rank))
        rows = [[replace(each, microbatch=m) for m in range(plan.microbatches) for each in row] for row in once]
        return Plan(rows, plan.stages, plan.microbatches)

    def lowered(self, plan: Plan) -> tuple[list[list[str]], list[list[str]]]:
        """Return a plan's rows with transfers, as PyTorch places them and as its runtime runs them."""
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


# ── The comparison ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where pipelab's and PyTorch's order differ.

    Attributes:
        plan: the plan's name.
        rank: the first rank that differs.
        position: the place in its row.
        pytorch: what PyTorch executes on that rank.
        pipelab: what the plan says.
    """

    plan: str
    rank: int
    position: int
    pytorch: tuple[object, ...]
    pipelab: tuple[object, ...]

    def __str__(self) -> str:
        """Return both orders around the place."""
        first = max(0, self.position - 5)
        lead = "… " if first else ""
        rows = [[str(action) for action in row[first : self.position + 6]] for row in (self.pytorch, self.pipelab)]
        width = max(map(len, rows[0] + rows[1]), default=0)
        lines = [lead + " ".join(f"{cell:<{width}}" for cell in row).rstrip() for row in rows]
        mark = " " * (len(lead) + (width + 1) * (self.position - first)) + "^" * width
        return (
            f"{self.plan}: rank {self.rank} differs at position {self.position}\n"
            f"  PyTorch | {lines[0]}\n  pipelab | {lines[1]}\n            {mark}"
        )


@dataclass(frozen=True, slots=True)
class Numbers:
    """One step of pipelab and one of PyTorch on the same model and batch, compared.

    Attributes:
        plan: the plan's name.
        processes: how many processes PyTorch ran in.
        same_gradients: whether all gradients are equal bit for bit.
        difference: the largest relative difference of a parameter's gradient, in the 2-norm.
        same_loss: whether the loss is equal bit for bit.
    """

    plan: str
    processes: int
    same_gradients: bool
    difference: float
    same_loss: bool


@dataclass(frozen=True, slots=True)
class Line:
    """A schedule compared with one reference.

    Attributes:
        schedule: its registered name.
        reference: the reference's name; empty if PyTorch cannot run the schedule.
        sizes: at how many sizes orders were compared.
        refused: how many sizes of the grid PyTorch refuses and pipelab does not.
        refusal: PyTorch's reason for the first of them.
        refused_here: how many sizes pipelab refuses.
        refusal_here: pipelab's reason for the first of them.
        not_ours: how many of these PyTorch accepts.
        differences: the first difference at each size at which orders differ.
        transfers: the first difference at each size at which sends and receives differ.
        numbers: the steps that were compared.
    """

    schedule: str
    reference: str
    sizes: int = 0
    refused: int = 0
    refusal: str = ""
    refused_here: int = 0
    refusal_here: str = ""
    not_ours: int = 0
    differences: tuple[Difference, ...] = ()
    transfers: tuple[Difference, ...] = ()
    numbers: tuple[Numbers, ...] = ()

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.differences or self.transfers) and all(
            each.same_gradients and each.same_loss for each in self.numbers
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The comparison with one version of PyTorch, and its date."""

    torch: str
    date: str
    lines: tuple[Line, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return all(line.same for line in self.lines)

    @property
    def compared(self) -> bool:
        """Whether anything was compared: PyTorch does not have all schedules at all sizes."""
        return any(line.sizes for line in self.lines)


def count(names: Sequence[str], grid: Grid) -> int:
    """Return how often `conformance` calls `advance`."""
    return sum(len(list(grid.of(name))) * len(references(name)) for name in names)


def conformance(
    names: Sequence[str] = tuple(schedules),
    grid: Grid = Grid(),
    processes: Sequence[int] = (),
    advance: Callable[[], object] = lambda: None,
) -> Report:
    """Compare schedules with the installed PyTorch."""
    pairs = [(name, reference) for name in names for reference in references(name)]
    with one_thread(), group_of_one():
        lines = [_line(name, reference, grid, advance) for name, reference in pairs]
    for ranks in processes:
        lines = _with_processes(lines, pairs, ranks)
    return Report(torch.__version__, date.today().isoformat(), tuple(lines))


def first_difference(plan: Plan, theirs: Plan) -> Difference | None:
    """Return where a plan's order first differs from what PyTorch executes; `None` if they are the same.

    An overlapped pair counts as its forward, then its backward, because PyTorch runs it so.
    """
    return _first_difference(plan.name, flat(plan), flat(theirs))


def misplaced_transfer(plan: Plan, reference: Reference) -> Difference | None:
    """Return where a plan's sends and receives first differ from PyTorch's; `None` if nowhere.

    Looks at the rows that PyTorch's `_add_send_recv` makes, and then at those that its runtime runs.
    """
    early, runtime = reference.lowered(plan)
    low = lower(plan)
    return _first_difference(f"{plan.name}, transfers", low.rows, early) or _first_difference(
        f"{plan.name}, as the runtime of torch {torch.__version__} runs it", low.for_runtime(), runtime
    )


def _first_difference(
    name: str, ours: Sequence[Sequence[object]], theirs: Sequence[Sequence[object]]
) -> Difference | None:
    for rank, (row, native) in enumerate(zip(ours, theirs, strict=True)):
        for position, (mine, other) in enumerate(zip_longest(row, native)):
            if mine != other:
                return Difference(name, rank, position, tuple(native), tuple(row))
    return None


def _line(name: str, reference: Reference, grid: Grid, advance: Callable[[], object]) -> Line:
    """Compare one schedule with one reference at every size."""
    differences: list[Difference] = []
    transfers: list[Difference] = []
    numbers: list[Numbers] = []
    refusals: list[str] = []
    refusals_here: list[str] = []
    compared = not_ours = 0
    for schedule in grid.of(name):
        advance()
        plan = _plan(schedule)
        if isinstance(plan, str):
            refusals_here.append(plan)
            not_ours += reference.has(schedule)
            continue
        try:
            theirs = reference.executed(plan)
        except NativeRefusalError as error:
            refusals.append(str(error))
            continue
        compared += 1
        difference = first_difference(plan, theirs)
        if difference:
            differences.append(difference)
        if misplaced := misplaced_transfer(plan, reference):
            transfers.append(misplaced)
        if plan.ranks * plan.microbatches <= grid.most_work:
            numbers.append(_numbers(plan, reference.step(plan, theirs), 1))
    refused, refused_here = ((len(reasons), next(iter(reasons), "")) for reasons in (refusals, refusals_here))
    found = tuple(differences), tuple(transfers)
    return Line(name, reference.name, compared, *refused, *refused_here, not_ours, *found, tuple(numbers))


def _plan(schedule: Schedule) -> Plan | str:
    """Return a schedule's plan; if it refuses its size, the reason."""
    try:
        return schedule.plan()
    except ScheduleError as error:
        (first, *others) = error.faults
        if first.code != "refused" or others:
            raise
        return first.message


def _numbers(plan: Plan, theirs: Outcome, processes: int) -> Numbers:
    """Run the same step with pipelab, and compare."""
    model, task = fixed_model(plan.stages), fixed_task(plan.microbatches)
    with Pipeline(model, plan, task.loss_fn, ["cpu"] * plan.ranks, intra_op_threads=1) as pipe:
        step = pipe.step(task.x, task.y)
    ours = Outcome([parameter.grad for parameter in model.parameters() if parameter.grad is not None], step.loss)
    return Numbers(
        plan.name, processes, ours.same_gradients(theirs), ours.difference(theirs), torch.equal(ours.loss, theirs.loss)
    )


def _with_processes(lines: list[Line], pairs: Sequence[tuple[str, Reference]], ranks: int) -> list[Line]:
    """Add the comparison with PyTorch's classes in several processes, with two micro-batches for each rank."""
    grid = Grid(ranks=(ranks,), microbatches=(2 * ranks,), stages_per_rank=(2,))
    todo: list[tuple[int, Plan]] = []
    for index, (name, reference) in enumerate(pairs):
        plan = _plan(next(iter(grid.of(name))))
        if isinstance(plan, Plan) and reference.runs(plan):
            todo.append((index, plan))
    if not todo:
        return lines
    ran = run_in_processes([pairs[index][1].job(plan) for index, plan in todo], ranks)
    found = list(lines)
    with one_thread():
        for (index, plan), each in zip(todo, ran, strict=True):
            difference = first_difference(plan, each.executed)
            found[index] = replace(
                found[index],
                differences=(*found[index].differences, *([difference] if difference else [])),
                numbers=(*found[index].numbers, _numbers(plan, each.outcome, ranks)),
            )
    return found
