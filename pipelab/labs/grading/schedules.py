"""A schedule against its pars: legal, as fast and as frugal as it should be, and legal at other sizes too."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from types import ModuleType

from pipelab.checking.checker import check
from pipelab.draw.wording import number
from pipelab.labs.grading.tasks import Assignment, Mark, Task
from pipelab.schedule import Schedule
from pipelab.simulation.clock import Cost, simulate

__all__ = ["judge"]


def _hidden(assignment: Assignment) -> list[tuple[int, int]]:
    """Return the hidden sizes: fewer micro-batches than ranks, a single one, and more of both."""
    numbers = random.Random(assignment.seed)  # noqa: S311 - hidden from a reader of this file, not from an attacker
    ranks = assignment.ranks
    return [(2, numbers.randint(3, 6)), (ranks, 1), (ranks + 1, numbers.randint(2, ranks + 3)), (2 * ranks, 4 * ranks)]


def judge(module: ModuleType, assignment: Assignment, at: Callable[[str], None]) -> tuple[list[Mark], str]:
    """Check and simulate a submission's schedule; return a mark for each task, and the first fault.

    A quantity above its par earns par / found of the points.

    Args:
        module: the submission, imported.
        assignment: the pars, the size they are for, and the costs.
        at: called with what is about to run.

    Raises:
        LookupError: if the module does not hold the schedule.
    """
    kind = _schedule(module, assignment.schedule or "")
    legal, *pars, others = assignment.tasks()
    at(f"with {assignment.ranks} ranks and {assignment.microbatches} micro-batches")
    fault = _fault(kind, assignment.ranks, assignment.microbatches)
    shown = (
        fault.splitlines()[0] if fault else f"{assignment.ranks} ranks, {assignment.microbatches} micro-batches: legal"
    )
    marks = [Mark(legal, 0 if fault else legal.points, "no fault", shown, "it would not run" if fault else "")]
    if fault:
        marks += [Mark(task, 0, f"at most {number(assignment.pars[task.name])}", "not legal") for task in pars]
    else:
        trace = simulate(kind(assignment.ranks, assignment.microbatches), Cost(**assignment.cost))
        found = {"makespan": trace.makespan, "peak": max(trace.peak_activations), "bubble": trace.bubble}
        marks += [_against_par(task, assignment.pars[task.name], found[task.name]) for task in pars]
    right, tried = 0, 0
    for ranks, microbatches in _hidden(assignment):
        at("with a hidden size")
        at_size = _fault(kind, ranks, microbatches)
        tried += not at_size.startswith("refused")
        right += not at_size
    share = right / tried if tried else 0
    said = f"{right} of {tried}" if tried else "every size was refused"
    marks.append(Mark(others, round(others.points * share, 2), "legal at each hidden size that it accepts", said))
    return marks, fault


def _against_par(task: Task, par: float, found: float) -> Mark:
    over = found > par * (1 + 1e-9)
    effect = f"{found / par - 1:.0%} above par" if over and par else ""
    score = round(task.points * par / found, 2) if over else task.points
    return Mark(task, score, f"at most {number(par)}", number(found), effect)


def _fault(kind: type[Schedule], ranks: int, microbatches: int) -> str:
    """Return the worst fault of a schedule at a size; nothing if it is legal."""
    faults = check(kind(ranks, microbatches))
    return str(faults[0]) if faults else ""


def _schedule(module: ModuleType, name: str) -> type[Schedule]:
    own = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Schedule) and value.__module__ == module.__name__
    }
    if name in own:
        return own[name]
    if not name and len(own) == 1:
        return next(iter(own.values()))
    there = ", ".join(own) or "no class that derives from pipelab.Schedule"
    raise LookupError(
        f"it has no schedule {name}; it holds {there}" if name else f"it must hold one schedule; it holds {there}"
    )
