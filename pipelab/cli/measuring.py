"""What `pipelab run` does: run schedules on real tensors, in turns. And tables over numbers of micro-batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress

from pipelab.draw import wording
from pipelab.errors import counted
from pipelab.plan.fault import ScheduleError
from pipelab.plan.plan import Plan
from pipelab.simulation.comparison import Comparison, compare
from pipelab.table import Column, Table
from pipelab.trace.trace import Trace

if TYPE_CHECKING:
    from pipelab.cli.running import Job, Result

_SEVERAL_RANKS, _TWO_RANKS = 4, 2
_STEPS, _EMULATED_STEPS = 5, 3
_CROWDED = 0.8
"""If the ranks have a core for a smaller fraction of their working time than this, they hold each other up."""


@dataclass(frozen=True)
class Work:
    """The model, the batch and the number of steps."""

    width: Annotated[int, typer.Option(min=1, help="features of every layer")] = 1024
    depth: Annotated[int, typer.Option(min=1, help="layers of the model, Linear and ReLU each")] = 8
    batch: Annotated[int, typer.Option(min=1, help="rows of the batch")] = 256
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="steps to measure; the one of median length is shown; by default 5, with --emulate 3"),
    ] = None
    emulate: Annotated[
        tuple[float, float] | None,
        typer.Option(
            metavar="<ms> <ms>",
            help="emulated devices instead: milliseconds of a micro-batch's forward and backward (in a table: of the "
            "whole batch's), such as --emulate 20 40",
        ),
    ] = None

    @property
    def usual_ranks(self) -> int:
        """The default number of ranks: two on real tensors, so that a laptop has a core for each."""
        return _SEVERAL_RANKS if self.emulate else _TWO_RANKS

    @property
    def measured_steps(self) -> int:
        """How many steps of each schedule are measured: emulated ones differ little."""
        return self.steps or (_EMULATED_STEPS if self.emulate else _STEPS)

    def jobs(self, plans: Sequence[Plan], shares: Sequence[int]) -> list[Job]:
        """Return what runs; `shares` says into how many micro-batches each plan divides the emulated times."""
        from pipelab.cli.running import make_jobs

        return make_jobs(plans, shares, self.width, self.depth, self.batch, self.emulate)


def measure(names: Sequence[str], plans: Sequence[Plan], work: Work) -> tuple[Comparison, list[Result]]:
    """Run plans and return their steps side by side; a single plan's step is beside its prediction."""
    results = _run(work.jobs(plans, [1] * len(plans)), work.measured_steps)
    if len(results) == 1:
        (only,) = results
        names = ["predicted from its own action times", "measured"]
        return compare(only.predicted, only.measured, names=names), results
    return compare(*(each.measured for each in results), names=[f"{name}, measured" for name in names]), results


def measure_sweep(
    names: Sequence[str], counts: Sequence[int], plan_of: Callable[[str, int], Plan], work: Work
) -> tuple[Table, list[Result]]:
    """Run every schedule with every number of micro-batches, always on the same batch."""
    plans, refusals = sweep(names, counts, plan_of)
    results = _run(work.jobs(list(plans.values()), [count for _, count in plans]), work.measured_steps)
    cells = dict(zip(plans, (Cell(result.measured, result.loss) for result in results), strict=True))
    return table_of(cells, refusals), results


def proof_of(results: Sequence[Result]) -> str:
    """Return the verification of all runs in one sentence, or in one line for each different result."""
    proofs = [result.proof for result in results]
    if len(proofs) == 1 or not all(proof.exact and not proof.unproven for proof in proofs):
        return "\n".join(dict.fromkeys(map(str, proofs)))
    whole = max((proof.whole_batch_difference or 0.0 for proof in proofs), default=0.0)
    return (
        f"The gradients of all {len(proofs)} runs match plain training with the same micro-batches bit for bit. "
        f"Against the whole batch at once they differ by at most {whole:.1e}."
    )


def too_few_cores(ranks: int, command: str, others: int = 0) -> str:
    """Return a warning that ranks which share cores can turn the order of schedules around; "" if each has a core.

    Other programs need so many cores besides. The warning adds to the command what needs no cores.
    """
    from pipelab.cli.running import has_gpu

    if ranks + others <= cores() or has_gpu():
        return ""
    return (
        f"{counted(ranks, 'rank')} and other programs take turns on {counted(cores(), 'core')}: the order of the "
        f"schedules measured here can be the opposite of the order on devices. Emulated devices need no cores: "
        f"{command} --emulate 20 40"
    )


def why_slow(ranks: int, core_share: float, command: str, slower: bool = False) -> str:
    """Say in one line why ranks on this processor held each other up, and what to do; empty if they did not.

    `core_share` is for which fraction of their working time they had a core. If a pipelined step was `slower` than
    plain training's, there is a reason in any case.
    """
    if core_share >= _CROWDED and not slower:
        return ""
    why = "all cores busy together slow each other down here"
    if ranks > cores():
        why = f"{ranks} ranks take turns on {counted(cores(), 'core')}"
    elif core_share < _CROWDED:
        why = f"the ranks had a core for only {100 * core_share:.0f} % of their work (other programs, or short actions)"
    return f"Slow because {why}. Emulated devices need no cores: {command} --emulate 20 40"


def cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(jobs: Sequence[Job], steps: int) -> list[Result]:
    """Run jobs, with a progress bar on a terminal."""
    from pipelab.cli.running import run_all

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("running", total=1)

        def advance(now: str, share: float) -> None:
            progress.update(task, description=now, completed=share, refresh=True)

        results = run_all(jobs, steps, advance)
        progress.update(task, completed=1)
        return results


Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of one schedule with one number of micro-batches.

    Attributes:
        trace: the step.
        loss: the loss of the batch, if it ran on tensors.
    """

    trace: Trace
    loss: float | None = None


def table_of(cells: Mapping[tuple[str, int], Cell], refusals: Sequence[str]) -> Table:
    """Return a table of the cells of a sweep, the numbers of micro-batches side by side."""
    rows = [
        {
            "schedule": name,
            "microbatches": count,
            "step_time": cell.trace.makespan,
            "unit": cell.trace.unit,
            "bubble": cell.trace.bubble,
            "peak_share": max(compare(cell.trace).rows[0].peak_share, default=0.0),
            "loss": cell.loss,
        }
        for (name, count), cell in cells.items()
    ]
    unit = next((wording.unit(cell.trace) for cell in cells.values()), "units")
    columns = [
        Column("schedule"),
        Column("microbatches", "M"),
        Column("step_time", f"time of a step, {unit}", wording.number),
        Column("bubble", show=wording.percent),
        Column("peak_share", "peak, share of the batch", lambda share: wording.percents([share])),
    ]
    if all(cell.loss is not None for cell in cells.values()):
        columns.append(Column("loss", show="{:.6f}".format))
    plots = ("step_time", "bubble", "peak_share")
    return Table(rows, columns, "microbatches", ("microbatches", plots), refusals)


def sweep(
    names: Sequence[str], counts: Sequence[int], make: Callable[[str, int], Made]
) -> tuple[dict[tuple[str, int], Made], list[str]]:
    """Call `make` for every schedule and number of micro-batches; return what it returns, and what is refused."""
    made: dict[tuple[str, int], Made] = {}
    refusals: list[str] = []
    for name, count in product(names, counts):
        try:
            made[name, count] = make(name, count)
        except ScheduleError as error:
            if any(fault.code != "refused" for fault in error.faults):
                raise
            refusals.extend(f"{name} with {count}: {fault.message}" for fault in error.faults)
    return made, refusals
