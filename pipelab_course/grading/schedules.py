"""A schedule against its pars: legal, as fast and as frugal as it should be, and legal at other sizes too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from pipelab.catalogue import schedules as catalogue
from pipelab.checking.checker import as_plan, check
from pipelab.draw.wording import number
from pipelab.errors import PipelabError
from pipelab.plan.plan import Plan
from pipelab.schedule import Schedule, own_schedules
from pipelab.simulation.clock import simulate
from pipelab.simulation.cost import Cost
from pipelab.trace.reading import plan_of
from pipelab_course.grading.tasks import AmbiguousError, Assignment, Mark, Task


def _sizes(assignment: Assignment) -> list[tuple[int, int]]:
    """Return the given size, and the hidden ones: fewer micro-batches than ranks, a single one, and more of both."""
    numbers = random.Random(assignment.seed)  # noqa: S311 - hidden from a reader of this file, not from an attacker
    ranks, few = assignment.ranks, numbers.randint(3, 6)
    hidden = [(2, few), (ranks, 1), (ranks + 1, numbers.randint(2, ranks + 3)), (2 * ranks, 4 * ranks)]
    return [(ranks, assignment.microbatches), *hidden]


@contextmanager
def _watched() -> Iterator[set[str]]:
    """Collect the names of the catalogue's schedules that are asked for their actions."""
    asked = set[str]()

    def watched(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            asked.add(name)
            return method(*args)

        return noted

    with ExitStack() as patches:
        for name, kind in catalogue.items():
            for method in {"actions"} | ({"draft"} & vars(kind).keys()):
                patches.enter_context(patch.object(kind, method, watched(getattr(kind, method), name)))
        yield asked


def record(load: Callable[[], ModuleType], assignment: Assignment, at: Callable[[str], None]) -> dict[str, Any]:
    """Import a submission with `load`; return the plan that its schedule writes at each size, or its worst fault.

    `at` is called with what is about to run. A LookupError says that the module does not hold the schedule.
    """
    found: list[dict[str, Any]] = []
    kind = _schedule(load(), assignment.schedule or "")
    with _watched() as asked:  # not from the import on: to compare with the catalogue is fine
        for ranks, microbatches in _sizes(assignment):
            at("with a hidden size" if found else f"with {ranks} ranks and {microbatches} micro-batches")
            if faults := check(kind(ranks, microbatches)):
                found.append({"fault": str(faults[0])})
            else:
                plan = as_plan(kind(ranks, microbatches))
                found.append({"rows": [" ".join(map(str, row)) for row in plan.rows], "stages": plan.stages})
            if "fault" in found[0]:
                break
    return {"found": found, "asked": sorted(asked)}


def judge(data: dict[str, Any], assignment: Assignment) -> tuple[list[Mark], str]:
    """Check and simulate what `record` returned; return a mark for each task, and the first fault.

    A quantity above its par earns par / found of the points, rounded down. Nothing else counts for an illegal schedule.
    """
    legal, *pars, others = assignment.tasks()
    (first, fault), *hidden = [
        _plan(each, *size) for each, size in zip(data["found"], _sizes(assignment), strict=False)
    ]
    if first is None:
        marks = [Mark(legal, 0, "no fault", fault.splitlines()[0], "it would not run", legal.hint)]
        return [*marks, *(Mark(task, 0, reached=False) for task in (*pars, others))], fault
    size = f"{assignment.ranks} ranks and {assignment.microbatches} micro-batches"
    marks = [Mark(legal, legal.points, "no fault", f"legal with {size}")]
    if copied := next((name for name in data["asked"] if _same(first, name)), ""):
        said = f"it is pipelab's own {copied}, which it asks for its actions and changes nowhere"
        hint = "write actions(self, rank) yourself: which forwards and backwards does a rank run, and in which order?"
        task = pars[0] if pars else others
        looked_up = Mark(task, 0, "a schedule of your own", said, "nothing here is your own work", hint)
        rest = [Mark(each, 0, reached=False) for each in (*pars, others) if each is not task]
        return [*marks, looked_up, *rest], f"looked up: {said}"
    trace = simulate(first, Cost(**assignment.cost))
    found = {"makespan": trace.makespan, "peak": max(trace.peak_activations), "bubble": trace.bubble}
    marks += [_against_par(task, assignment.pars[task.name], found[task.name]) for task in pars]
    tried = [plan for plan, fault in hidden if not fault.startswith("refused")]
    right = sum(plan is not None for plan in tried)
    said = f"{right} of {len(tried)}" if tried else "every size was refused"
    score = others.points * right // max(len(tried), 1)
    marks.append(Mark(others, score, "legal at each hidden size that it accepts", said, hint=others.hint))
    return marks, ""


def _same(plan: Plan, name: str) -> bool:
    """Whether a schedule of the catalogue writes this plan."""
    with suppress(PipelabError):
        return catalogue[name](plan.ranks, plan.microbatches, plan.stages // plan.ranks).plan().rows == plan.rows
    return False


def _plan(data: dict[str, Any], ranks: int, microbatches: int) -> tuple[Plan | None, str]:
    """Return the legal plan of one size, or the fault."""
    if fault := str(data.get("fault", "")):
        return None, fault
    plan = plan_of(Plan.parse(data["rows"]).written, data["stages"], microbatches, "the plan")
    if plan.ranks != ranks or plan.stages < ranks:
        raise ValueError(f"a plan of {plan.ranks} ranks and {plan.stages} stages for {ranks} ranks")
    return plan, ""


def _against_par(task: Task, par: float, found: float) -> Mark:
    over = found > par * (1 + 1e-9)
    effect = f"{found / par - 1:.0%} above par" if over and par else ""
    score = int(task.points * par / found + 1e-9) if over else task.points
    return Mark(task, score, f"at most {number(par)}", number(found), effect, task.hint)


def _schedule(module: ModuleType, name: str) -> type[Schedule]:
    own = own_schedules(module)
    if name in own or (len(own) == 1 and not name):
        return own[name or next(iter(own))]
    if not name and own:
        raise AmbiguousError(
            f"it holds {len(own)} schedules, {', '.join(own)}; name the one to grade, as in "
            f"pipelab grade {Path(str(module.__file__)).name}:{next(iter(own))}"
        )
    there = ", ".join(own) or "no class that derives from pipelab.Schedule"
    raise LookupError(f"it has no schedule{' ' * bool(name)}{name}; it holds {there}")
