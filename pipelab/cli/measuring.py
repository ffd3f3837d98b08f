"""What `pipelab run` does: schedules on real tensors, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from pipelab.cli.sweeping import Cell, Table, sweep
from pipelab.plan.plan import Plan
from pipelab.simulation.comparison import Comparison, compare

if TYPE_CHECKING:
    from pipelab.labs.running import Job, Result

__all__ = ["Work", "measure", "measure_sweep", "proof_of"]

_SEVERAL_RANKS, _TWO_RANKS = 4, 2


@dataclass(frozen=True)
class Work:
    """What a schedule is run on, and how often."""

    width: Annotated[int, typer.Option(min=1, help="features of every layer")] = 1024
    depth: Annotated[int, typer.Option(min=1, help="layers of the model, Linear and ReLU each")] = 8
    batch: Annotated[int, typer.Option(min=1, help="rows of the batch")] = 256
    steps: Annotated[int, typer.Option(min=1, help="steps to take; the median one is shown")] = 5
    emulate: Annotated[
        tuple[float, float] | None,
        typer.Option(
            help="emulated devices instead: milliseconds forward and backward of a micro-batch (in a table: of the "
            "batch), such as --emulate 20 40"
        ),
    ] = None

    @property
    def usual_ranks(self) -> int:
        """How many ranks there are if nobody says: on real tensors two, so that a laptop has a core for each."""
        return _SEVERAL_RANKS if self.emulate else _TWO_RANKS

    def jobs(self, plans: Sequence[Plan], shares: Sequence[int]) -> list[Job]:
        """Return what runs; where emulated times are a whole batch's, a micro-batch takes its share of them."""
        from pipelab.engine.emulation import emulated
        from pipelab.labs.running import Job, linear_stack

        if self.emulate is None:
            models = {
                stages: linear_stack(self.width, self.depth, stages) for stages in {plan.stages for plan in plans}
            }
            return [Job(plan, models[plan.stages], (self.batch, self.width)) for plan in plans]
        forward, backward = self.emulate
        return [
            Job(plan, emulated(plan.stages, forward / share, backward / share), (self.batch, 1))
            for plan, share in zip(plans, shares, strict=True)
        ]


def measure(names: Sequence[str], plans: Sequence[Plan], work: Work) -> tuple[Comparison, list[Result]]:
    """Run plans; return their steps side by side, the step of a single one beside what it should have taken."""
    results = _run(work.jobs(plans, [1] * len(plans)), work.steps)
    if len(results) == 1:
        (only,) = results
        names = ["predicted from its own action times", "measured"]
        return compare(only.predicted, only.measured, names=names), results
    return compare(*(each.measured for each in results), names=[f"{name}, measured" for name in names]), results


def measure_sweep(
    names: Sequence[str], counts: Sequence[int], plan_of: Callable[[str, int], Plan], work: Work
) -> tuple[Table, list[Result]]:
    """Run every schedule with every number of micro-batches; the batch is always the same."""
    plans = sweep(names, counts, plan_of)
    jobs = work.jobs(list(plans.cells.values()), [count for _, count in plans.cells])
    results = _run(jobs, work.steps)
    cells = dict(zip(plans.cells, (Cell(result.measured, result.loss) for result in results), strict=True))
    return Table(cells, names, counts, plans.refusals), results


def proof_of(results: Sequence[Result]) -> str:
    """Return in few words that all gradients are right."""
    proofs = [result.proof for result in results]
    if len(proofs) == 1 or not all(proof.exact and not proof.unproven for proof in proofs):
        return "\n".join(dict.fromkeys(map(str, proofs)))
    whole = max((proof.whole_batch_difference or 0.0 for proof in proofs), default=0.0)
    return (
        f"All gradients of {len(proofs)} runs match plain training with the same micro-batches bit for bit. Against "
        f"the whole batch at once they differ by at most {whole:.1e}."
    )


def _run(jobs: Sequence[Job], steps: int) -> list[Result]:
    """Run jobs, and show on a terminal how far it is."""
    from pipelab.labs.running import run_all

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("running", total=1)

        def advance(now: str, share: float) -> None:
            progress.update(task, description=now, completed=share, refresh=True)

        results = run_all(jobs, steps, advance)
        progress.update(task, completed=1)
        return results
