"""What `pipelab run` does: schedules on real tensors, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from pipelab.analysis import Comparison, compare
from pipelab.cli.sweeping import Cell, Table, sweep
from pipelab.plan import Plan

if TYPE_CHECKING:
    from pipelab.labs.running import Result

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

    def run(self, plan: Plan, share: int = 1) -> Result:
        """Run a plan; where emulated times are a whole batch's, each micro-batch takes its share."""
        from pipelab.labs import running

        if self.emulate is None:
            model = running.linear_stack(self.width, self.depth, plan.stages)
            return running.run(plan, model, (self.batch, self.width), self.steps)
        forward, backward = (time / share for time in self.emulate)
        return running.run(plan, running.emulated_model(plan, forward, backward), (self.batch, 1), self.steps)


def measure(names: Sequence[str], plans: Sequence[Plan], work: Work) -> tuple[Comparison, list[Result]]:
    """Run plans; return their steps side by side, the step of a single one beside what it should have taken."""
    with _progress(len(plans)) as tell:
        results: list[Result] = []
        for name, plan in zip(names, plans, strict=True):
            tell(name)
            results.append(work.run(plan))
    if len(results) == 1:
        (only,) = results
        names = ["predicted from its own action times", "measured"]
        return compare(only.predicted, only.measured, names=names), results
    return compare(*(each.measured for each in results), names=[f"{name}, measured" for name in names]), results


def measure_sweep(
    names: Sequence[str], counts: Sequence[int], plan_of: Callable[[str, int], Plan], work: Work
) -> tuple[Table, list[Result]]:
    """Run every schedule with every number of micro-batches; the batch is always the same."""
    results: list[Result] = []
    with _progress(len(names) * len(counts)) as tell:

        def make(name: str, count: int) -> Cell:
            tell(f"{name}, {count} micro-batches")
            results.append(work.run(plan_of(name, count), count))
            return Cell(results[-1].measured, results[-1].loss)

        table = sweep(names, counts, make)
    return table, results


def proof_of(results: Sequence[Result]) -> str:
    """Return in few words that all gradients are right."""
    proofs = [result.proof for result in results]
    if len(proofs) == 1 or not all(proof.exact and not proof.unproven for proof in proofs):
        return "\n".join(dict.fromkeys(map(str, proofs)))
    whole = max((proof.whole_batch_difference or 0.0 for proof in proofs), default=0.0)
    return (
        f"gradients of all {len(proofs)} runs equal to the same micro-batches one after another, bit for bit; "
        f"to the whole batch within {whole:.1e}"
    )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is running; yield what tells the next."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        begun: list[str] = []

        def tell(what: str) -> None:
            progress.update(task, description=what, completed=len(begun))
            begun.append(what)

        yield tell
