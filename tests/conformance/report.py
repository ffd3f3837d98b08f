"""Compare every schedule with PyTorch's: is the order the one that PyTorch executes, and are the numbers the same?"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import zip_longest
from typing import Any

import torch

from pipelab.catalogue import schedules
from pipelab.catalogue.bases import Looped
from pipelab.engine.pipeline import Pipeline
from pipelab.plan.actions import Action
from pipelab.plan.fault import ScheduleError
from pipelab.plan.plan import Plan
from pipelab.schedule import Schedule
from pipelab.simulation import wire
from pipelab.table import Column, Table

from .recording import NATIVE, RUNTIME, NativeRefusalError, executed, executed_by_runtime, lowered_by_pytorch
from .steps import Job, Outcome, fixed_model, fixed_task, group_of_one, run_in_processes, step_of_class, step_of_plan


@dataclass(frozen=True)
class Grid:
    """The sizes to compare at; numbers only where ranks x micro-batches is at most `most_work`."""

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
                    yield from (kind(ranks, microbatches, count) for count in self.stages_per_rank)
                else:
                    yield kind(ranks, microbatches)


# ── What each schedule is compared with ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Reference:
    """A class of PyTorch's that a schedule is compared with; maybe it gets one micro-batch after the other."""

    name: str
    kind: str
    one_at_a_time: bool = False

    def executed(self, plan: Plan) -> Plan:
        """Return what PyTorch executes at a plan's size."""
        if self.kind == RUNTIME:
            return executed_by_runtime(plan)
        stages_per_rank = plan.stages // plan.ranks
        if not self.one_at_a_time:
            return executed(self.kind, plan.ranks, plan.microbatches, stages_per_rank)
        once = flat(executed(self.kind, plan.ranks, 1, stages_per_rank))
        rows = [[replace(action, microbatch=m) for m in range(plan.microbatches) for action in row] for row in once]
        return Plan(rows, plan.stages, plan.microbatches)

    def step(self, plan: Plan, theirs: Plan) -> Outcome:
        """Let PyTorch run a step on one rank: with its class if the plan has one rank, else with the executed order."""
        modules, task = list(fixed_model(plan.stages)), fixed_task(plan.microbatches)
        if plan.ranks == 1 and self.kind != RUNTIME:
            return step_of_class(self.kind, modules, task, one_at_a_time=self.one_at_a_time)
        return step_of_plan(theirs, modules, task)


def references(name: str) -> tuple[Reference, ...]:
    """Return PyTorch's class for a schedule, or its runtime; naive and ZB-H1 are the same as a class used otherwise."""
    if name in NATIVE:
        return (_class(NATIVE[name]),)
    runtime = Reference("runtime, our plan", RUNTIME)
    others = {
        "naive": Reference("GPipe, 1 at a time", NATIVE["gpipe"], one_at_a_time=True),
        "zb-h1": _class(NATIVE["interleaved-zb"]),
    }
    return (others[name], runtime) if name in others else (runtime,)


def _class(kind: str) -> Reference:
    return Reference(kind.removeprefix("Schedule"), kind)


def flat(plan: Plan) -> list[tuple[Action, ...]]:
    """Return a plan's rows with each overlapped pair as its forward, then its backward, as PyTorch runs it."""
    codes = plan.bound.codes
    return [tuple(map(codes.action, row)) for row in plan.bound.computing]


# ── The comparison ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place of a plan where pipelab's and PyTorch's order differ, and both rows there."""

    plan: str
    rank: int
    position: int
    pytorch: tuple[object, ...]
    pipelab: tuple[object, ...]

    def __str__(self) -> str:
        """Return both orders from a few actions before the place."""
        rows = [
            " ".join(map(str, row[max(0, self.position - 5) : self.position + 6]))
            for row in (self.pytorch, self.pipelab)
        ]
        return (
            f"{self.plan}: rank {self.rank} differs at position {self.position}\n"
            f"  PyTorch | {rows[0]}\n  pipelab | {rows[1]}"
        )


@dataclass(frozen=True, slots=True)
class Numbers:
    """Whether gradients and losses are equal bit for bit; the gradients' largest relative difference, in the 2-norm."""

    processes: int
    same_gradients: bool
    same_loss: bool
    difference: float


@dataclass
class Line:
    """A schedule compared with one reference."""

    schedule: str
    reference: str
    sizes: int = 0
    differences: list[Difference] = field(default_factory=list)
    transfers: list[Difference] = field(default_factory=list)
    numbers: list[Numbers] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """PyTorch's reasons, of each size that pipelab accepts."""
    refused_here: list[str] = field(default_factory=list)
    """pipelab's reasons."""
    not_ours: int = 0
    """How many of the sizes that pipelab refuses PyTorch accepts."""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        exact = all(found.same_gradients and found.same_loss for found in self.numbers)
        return exact and not self.differences and not self.transfers


def conformance(names: Sequence[str] = tuple(schedules), grid: Grid = Grid(), processes: Sequence[int] = ()):
    """Compare schedules with the installed PyTorch: one line for each of their references."""
    pairs = [(name, reference) for name in names for reference in references(name)]
    with group_of_one():
        lines = [_line(name, reference, grid) for name, reference in pairs]
    for ranks in processes:
        _add_processes(lines, pairs, ranks)
    return lines


def _line(name: str, reference: Reference, grid: Grid) -> Line:
    """Compare one schedule with one reference at every size."""
    print(f"{name}: {reference.name}", file=sys.stderr)
    line = Line(name, reference.name)
    for schedule in grid.of(name):
        try:
            plan = schedule.plan()
            theirs = reference.executed(plan)
        except ScheduleError as error:
            (fault,) = error.faults
            if fault.code != "refused":
                raise
            line.refused_here.append(fault.message)
            line.not_ours += _accepts(reference, schedule)
        except NativeRefusalError as error:
            line.refused.append(str(error))
        else:
            line.sizes += 1
            line.differences += first_difference(plan.name, flat(plan), flat(theirs))
            line.transfers += misplaced_transfers(plan, reference)
            if plan.ranks * plan.microbatches <= grid.most_work:
                line.numbers.append(_numbers(plan, reference.step(plan, theirs), 1))
    return line


def _accepts(reference: Reference, schedule: Schedule) -> bool:
    """Return whether PyTorch has an order of its own at a size that pipelab refuses."""
    if reference.kind == RUNTIME:
        return False
    try:
        executed(reference.kind, schedule.ranks, schedule.microbatches, schedule.stages_per_rank)
    except NativeRefusalError:
        return False
    return True


def first_difference(
    name: str, ours: Sequence[Sequence[object]], theirs: Sequence[Sequence[object]]
) -> list[Difference]:
    """Return where a plan's rows first differ from PyTorch's, or nothing."""
    for rank, (row, native) in enumerate(zip(ours, theirs, strict=True)):
        for position, (mine, other) in enumerate(zip_longest(row, native)):
            if mine != other:
                return [Difference(name, rank, position, tuple(native), tuple(row))]
    return []


def misplaced_transfers(plan: Plan, reference: Reference) -> list[Difference]:
    """Return where sends and receives first differ: from PyTorch's `_add_send_recv`, or from what its runtime runs."""
    early, runtime = lowered_by_pytorch(reference.kind, plan)
    low = wire.lower(plan)
    return first_difference(f"{plan.name}, transfers", low.rows, early) or first_difference(
        f"{plan.name}, as the runtime of torch {torch.__version__} runs it", low.for_runtime(), runtime
    )


def _numbers(plan: Plan, theirs: Outcome, processes: int) -> Numbers:
    """Run the same step with pipelab, and compare."""
    model, task = fixed_model(plan.stages), fixed_task(plan.microbatches)
    with Pipeline(model, plan, task.loss_fn, ["cpu"] * plan.ranks, intra_op_threads=1) as pipe:
        step = pipe.step(task.x, task.y)
    ours = Outcome([parameter.grad for parameter in model.parameters()], step.loss)
    same_loss = torch.equal(ours.loss, theirs.loss)
    return Numbers(processes, ours.same_gradients(theirs), same_loss, ours.difference(theirs))


def _add_processes(lines: Sequence[Line], pairs: Sequence[tuple[str, Reference]], ranks: int) -> None:
    """Compare with PyTorch's classes in several processes, too, with two micro-batches for each rank."""
    grid = Grid(ranks=(ranks,), microbatches=(2 * ranks,), stages_per_rank=(2,))
    jobs: dict[int, Job] = {}
    for index, (name, reference) in enumerate(pairs):
        try:
            plan = next(grid.of(name)).plan()
            reference.executed(plan)
        except (ScheduleError, NativeRefusalError):
            continue
        jobs[index] = Job(reference.kind, plan, reference.one_at_a_time)
    ran = run_in_processes(list(jobs.values()), ranks) if jobs else []
    for (index, job), (theirs, outcome) in zip(jobs.items(), ran, strict=True):
        lines[index].differences += first_difference(job.plan.name, flat(job.plan), flat(theirs))
        lines[index].numbers.append(_numbers(job.plan, outcome, ranks))


# ── Its table ─────────────────────────────────────────────────────────────────────────────────────────────────────────

COLUMNS = (
    Column("schedule"),
    Column("reference", "PyTorch's Schedule…", left=True),
    Column("sizes"),
    *(Column(name, left=True) for name in ("orders", "wire")),
    Column("runs"),
    Column("numbers", left=True),
)
LEGEND = (
    "orders: action for action, as PyTorch executes them; an overlapped pair counts as its forward, then its backward. "
    "wire: sends and receives stand where PyTorch's _add_send_recv puts them, and where its runtime runs them. "
    f"runs: steps of both on the same model and batch, where ranks x micro-batches is at most {Grid.most_work}; "
    "their gradients and losses are the numbers. Both weigh each micro-batch's loss by 1/M before its backward "
    "(scale_grads=False); PyTorch's default divides the summed gradients instead, which rounds otherwise unless M is a "
    "power of two."
)


def table(lines: Sequence[Line]) -> Table:
    """Return the table of a comparison, with what its columns mean and what one side refuses."""
    title = f"pipelab beside PyTorch: torch {torch.__version__}, {date.today().isoformat()}"
    return Table([_row(line) for line in lines], COLUMNS, title=title, notes=[LEGEND, *_notes(lines)])


def _row(line: Line) -> dict[str, Any]:
    row: dict[str, Any] = {"schedule": line.schedule, "reference": line.reference, "sizes": line.sizes}
    if not line.sizes:
        return row
    orders, wire = (f"{len(found)} differ" if found else "equal" for found in (line.differences, line.transfers))
    return row | {"orders": orders, "wire": wire, "runs": len(line.numbers), "numbers": _in_words(line.numbers)}


def _in_words(runs: Sequence[Numbers]) -> str:
    if not all(run.same_gradients for run in runs):
        return f"{max(run.difference for run in runs):.1e}"
    return "" if not runs else "bit-equal" if all(run.same_loss for run in runs) else "loss differs"


def _notes(lines: Sequence[Line]) -> list[str]:
    """Return sentences on the sizes that one side refuses, and on the processes that PyTorch ran in."""
    notes = []
    for line in lines:
        if line.refused:
            words = line.refused[0].partition(": ")[2]
            more = f"pipelab accepts {_sizes(len(line.refused))} more"
            notes.append(f"{line.schedule}: {more}, which PyTorch does not run: {words}")
        if line.refused_here:
            notes.append(f"{line.schedule}: pipelab refuses {_sizes(len(line.refused_here))}: {line.refused_here[0]}")
        if line.not_ours:
            notes.append(f"{line.schedule}: PyTorch accepts {_sizes(line.not_ours)} more.")
    processes = sorted({run.processes for line in lines for run in line.numbers} - {1})
    where = f", and in {' and '.join(map(str, processes))} processes with gloo" if processes else ""
    ran = f"PyTorch ran in one process{where}." if any(line.sizes for line in lines) else "Nothing could be compared."
    return [ran, *dict.fromkeys(notes)]  # two references may give the same note


def _sizes(number: int) -> str:
    return f"{number} size{'s' if number != 1 else ''}"
