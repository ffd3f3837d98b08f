"""The commands."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import pipelab
from pipelab.checking import as_plan
from pipelab.cli.targets import find, settings
from pipelab.completeness import ranges
from pipelab.draw import text
from pipelab.errors import LoadError, PipelabError
from pipelab.plan import Plan
from pipelab.schedule import Schedule
from pipelab.simulation import Cost, simulate

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Target = Annotated[
    str, typer.Argument(help="a schedule's name, my_file.py:MySchedule, or plan.csv", show_default=False)
]
Targets = Annotated[list[str], typer.Argument(help="schedules, as for the other commands", show_default=False)]
Ranks = Annotated[int, typer.Option("--ranks", "-r", min=1, help="workers of the pipeline")]
Microbatches = Annotated[int, typer.Option("--microbatches", "-m", min=1, help="slices of the batch")]
Replicas = Annotated[int, typer.Option(min=1, help="copies of the pipeline, each with its own ranks and micro-batches")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="name=value, a parameter of the schedule; repeatable")]
Forward = Annotated[float, typer.Option("--forward", "-f", help="time of a forward")]
Backward = Annotated[float, typer.Option("--backward", "-b", help="time of a backward")]
Latency = Annotated[float, typer.Option(help="time of a transfer between ranks")]
Costs = Annotated[
    list[str] | None,
    typer.Option(
        "--cost", help="name=value, any other cost, such as --cost 'forward=[1, 2]' or --cost per=stage; repeatable"
    ),
]
Unit = Annotated[str, typer.Option(help="the unit of these times, for labels")]
Save = Annotated[
    list[Path] | None, typer.Option("--save", "-o", help="write it to this file: html svg png pdf json txt; repeatable")
]
SaveComparison = Annotated[
    list[Path] | None, typer.Option("--save", "-o", help="write it to this file: html svg png pdf txt; repeatable")
]


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    """Pipeline-parallel schedules: written once, then checked, simulated, drawn and executed."""
    if version:
        typer.echo(pipelab.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def schedules() -> None:
    """List the schedules that come with pipelab."""
    table = Table("name", "what it does", "source", box=None, pad_edge=False)
    for name, kind in pipelab.schedules.items():
        table.add_row(name, (kind.__doc__ or "").strip().splitlines()[0], kind.source)
    Console().print(table)


@app.command()
def check(
    target: Target,
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    replicas: Replicas = 1,
    memory_cap: Annotated[int | None, typer.Option(min=1, help="activations that a rank may hold")] = None,
    sets: Sets = None,
) -> None:
    """Find every fault of a schedule and explain it. Exit code 1 if there is one."""
    subject = _find(target, ranks, microbatches, replicas, sets)
    faults = pipelab.check(subject, memory_cap)
    name = subject.name if isinstance(subject, Plan) else repr(subject)
    if faults:
        raise pipelab.ScheduleError(faults, name)
    trace = simulate(subject)
    actions = sum(len(row) for row in trace.plan.program.rows)
    typer.echo(f"{name} is right: {actions} actions, no fault")
    typer.echo(
        f"every micro-batch passes all {trace.plan.stages} stages once forward and once backward; no rank gets stuck"
    )
    replicated = [stage for stage, holders in trace.plan.replicas.items() if len(holders) > 1]
    if replicated:
        typer.echo(f"the gradients of stages {ranges(replicated)}, which are on several ranks, are all-reduced")


@app.command(name="simulate")
def simulate_command(
    target: Target,
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    replicas: Replicas = 1,
    forward: Forward = 1,
    backward: Backward = 2,
    latency: Latency = 0,
    unit: Unit = "",
    costs: Costs = None,
    sets: Sets = None,
    save: Save = None,
) -> None:
    """Show when everything would happen, and the bubble and the memory that follow."""
    cost = _cost(costs, forward=forward, backward=backward, latency=latency, unit=unit)
    trace = simulate(_find(target, ranks, microbatches, replicas, sets), cost)
    typer.echo(text.timeline(trace))
    for path in save or []:
        _wrote(trace.save(path))


@app.command()
def draw(
    target: Target,
    save: Annotated[list[Path], typer.Option("--save", "-o", help="html svg png pdf json txt; dot with --graph")],
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    replicas: Replicas = 1,
    forward: Forward = 1,
    backward: Backward = 2,
    latency: Latency = 0,
    unit: Unit = "",
    costs: Costs = None,
    graph: Annotated[bool, typer.Option("--graph", help="draw the dependency graph instead of the timeline")] = False,
    sets: Sets = None,
) -> None:
    """Draw a schedule's timeline, or its dependency graph, into files."""
    cost = _cost(costs, forward=forward, backward=backward, latency=latency, unit=unit)
    plan = as_plan(_find(target, ranks, microbatches, replicas, sets))
    trace = simulate(plan, cost)
    for path in save:
        _wrote(plan.save_graph(path, cost) if graph else trace.save(path))


@app.command()
def compare(
    targets: Targets,
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    replicas: Replicas = 1,
    forward: Forward = 1,
    backward: Backward = 2,
    latency: Latency = 0,
    unit: Unit = "",
    costs: Costs = None,
    sets: Sets = None,
    save: SaveComparison = None,
) -> None:
    """Lay schedules, simulated with the same costs, side by side."""
    cost = _cost(costs, forward=forward, backward=backward, latency=latency, unit=unit)
    traces = [simulate(_find(target, ranks, microbatches, replicas, sets), cost) for target in targets]
    comparison = pipelab.compare(*traces, names=targets)
    typer.echo(text.comparison(comparison))
    for path in save or []:
        _wrote(comparison.save(path))


@app.command()
def run(
    target: Target,
    ranks: Ranks = 2,
    microbatches: Microbatches = 8,
    replicas: Replicas = 1,
    width: Annotated[int, typer.Option(min=1, help="features of every layer")] = 1024,
    depth: Annotated[int, typer.Option(min=1, help="layers of the model, Linear and ReLU each")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="rows of the batch")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="steps to take; the median one is shown")] = 5,
    emulate: Annotated[
        tuple[float, float] | None,
        typer.Option(help="emulated devices instead: milliseconds forward and backward, such as --emulate 20 40"),
    ] = None,
    sets: Sets = None,
    save: Save = None,
) -> None:
    """Run a schedule on real tensors on this machine, verify its gradients, and show the measured timeline."""
    from pipelab.labs import running

    plan = as_plan(_find(target, ranks, microbatches, replicas, sets))
    model = running.emulated_model(plan, *emulate) if emulate else running.linear_stack(width, depth, plan.stages)
    result = running.run(plan, model, (batch, 1) if emulate else (batch, width), steps)
    names = ["predicted from its own action times", "measured"]
    typer.echo(f"{plan.name} on this machine")
    typer.echo(text.comparison(pipelab.compare(result.predicted, result.measured, names=names)))
    typer.echo(result.proof)
    for path in save or []:
        _wrote(result.measured.save(path))


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--folder", "-o", help="where the pictures go")] = Path("pipelab-demo"),
    steps: Annotated[int, typer.Option(min=2, help="training steps of each kind")] = 12,
) -> None:
    """Train a language model plainly and with three schedules: the main job, in under a minute."""
    from pipelab.cli.showing import show_demo

    show_demo(folder, steps)


def _find(target: str, ranks: int, microbatches: int, replicas: int, sets: list[str] | None) -> Plan | Schedule:
    subject = find(target, ranks, microbatches, settings(sets or []))
    return subject if replicas == 1 else pipelab.replicate(subject, replicas)


def _cost(more: list[str] | None, **given: float | str) -> Cost:
    """Return the cost that the options describe; `--cost` wins."""
    try:
        return Cost(**{**given, **settings(more or [], "--cost")})
    except TypeError as error:
        raise LoadError(f"{error}\n  --cost takes: {', '.join(field.name for field in fields(Cost))}") from error


def _wrote(path: Path) -> None:
    typer.echo(f"wrote {path}")


def main() -> None:
    """Run the command line; pipelab's own errors are told in words, without a traceback."""
    try:
        app()
    except PipelabError as error:
        lead = "" if isinstance(error, LoadError) else f"{type(error).__name__}: "
        typer.echo(f"{lead}{error}", err=True)
        sys.exit(1)
    except OSError as error:
        typer.echo(f"{error.filename or 'a file'}: {error.strerror or error}", err=True)
        sys.exit(1)
