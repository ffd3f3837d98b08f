"""Start a script in several processes: torchrun, for those who have never met it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Columns
from rich.text import Text

import pipelab
from pipelab.checking.checker import as_plan
from pipelab.cli.measuring import Work, measure, measure_sweep, proof_of
from pipelab.cli.options import (
    RunSizes,
    Save,
    SaveComparison,
    SaveRun,
    Sizes,
    SweepSizes,
    Target,
    Targets,
    Times,
    grouped,
    untimed,
    whole_numbers,
)
from pipelab.cli.printing import (
    COMPARISON,
    GRAPH,
    RUN,
    TABLE,
    TIMELINE,
    folded,
    number,
    require_folder,
    require_writable,
    save_timeline,
    say,
    show,
    wrote,
)
from pipelab.cli.sweeping import Cell, Table, sweep
from pipelab.draw import text
from pipelab.errors import LoadError, PipelabError
from pipelab.plan.fault import ranges
from pipelab.plan.plan import Plan
from pipelab.simulation.clock import simulate

__all__ = ["app", "launch_script", "main", "torchrun_line"]


def torchrun_line(script: str, ranks: int, arguments: list[str]) -> list[str]:
    """Return the words of the line that starts a script in as many processes on this machine.

    The module runs the script, and records the error that ends it for torchrun.

    Example:
        >>> " ".join(torchrun_line("train.py", 4, ["--steps", "10"]))
        'torchrun --standalone --nproc-per-node 4 -m pipelab.engine.torchrun.launch train.py --steps 10'
    """
    module = "pipelab.engine.torchrun.launch"
    return ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "-m", module, script, *arguments]


def launch_script(script: str, ranks: int, arguments: list[str]) -> bool:
    """Say what is run, and run it, in this process: signals reach torchrun itself. Tell whether all went well.

    If a process failed, the last lines say in few words which one, and why: torchrun's own report is long.

    Raises:
        LoadError: if there is no such script.
    """
    if not Path(script).is_file():
        beside = ", ".join(sorted(found.name for found in Path(script).parent.glob("*.py"))[:8])
        raise LoadError(f"there is no file {script}" + (f"; beside it: {beside}" if beside else ""))
    line = torchrun_line(script, ranks, arguments)
    shown = shlex.join(line)
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
        shown = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} {shown}"
    sys.stdout.write(shown + "\n")
    sys.stdout.flush()
    from pipelab.engine.torchrun.launch import torchrun

    failed = torchrun(line[1:])
    if failed:
        sys.stderr.write(failed + "\n")
    return not failed


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


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
    table = Columns("name", "what it does, and its source", box=None, pad_edge=False)
    for name, kind in pipelab.schedules.items():
        table.add_row(name, (kind.__doc__ or "").strip().splitlines()[0])
        table.add_row("", Padding(Text(kind.source, style="dim"), (0, 0, 0, 2)))
    Console().print(table)


@app.command()
@grouped
def check(
    target: Target,
    sizes: Sizes,
    memory_cap: Annotated[int | None, typer.Option(min=1, help="activations that a rank may hold")] = None,
) -> None:
    """Find every fault of a schedule and explain it. Exit code 1 if there is one."""
    subject = untimed(sizes.find(target))
    faults = pipelab.check(subject, memory_cap)
    name = subject.name if isinstance(subject, Plan) else repr(subject)
    if faults:
        raise pipelab.ScheduleError(faults, name)
    plan = simulate(subject).plan
    actions = sum(len(row) for row in plan.program.rows)
    say(f"{name} is right: {actions} actions, no fault")
    say(f"every micro-batch passes all {plan.stages} stages once forward and once backward; no rank gets stuck")
    replicated = [stage for stage, holders in plan.replicas.items() if len(holders) > 1]
    if replicated:
        say(f"the gradients of stages {ranges(replicated)}, which are on several ranks, are all-reduced")


@app.command(name="simulate")
@grouped
def simulate_command(target: Target, sizes: Sizes, times: Times, save: Save = None) -> None:
    """Show when everything would happen, and the bubble and the memory that follow."""
    require_writable(save, TIMELINE)
    trace = simulate(untimed(sizes.find(target)), times.cost())
    typer.echo(text.timeline(trace))
    for path in save or []:
        wrote(save_timeline(trace, path))


@app.command()
@grouped
def draw(
    target: Target,
    save: Annotated[
        list[Path],
        typer.Option("--save", "-o", help="html svg png pdf json txt; csv: the plan; with --graph: dot svg png pdf"),
    ],
    sizes: Sizes,
    times: Times,
    graph: Annotated[bool, typer.Option("--graph", help="draw the dependency graph instead of the timeline")] = False,
) -> None:
    """Draw a schedule's timeline, a saved trace, or a dependency graph, into files; or write its plan."""
    require_writable(save, GRAPH if graph else TIMELINE)
    subject = sizes.find(target)
    (trace,) = times.traces([subject], [target])
    for path in save:
        wrote(trace.plan.save_graph(path, times.cost()) if graph else save_timeline(trace, path))


@app.command()
@grouped
def compare(targets: Targets, sizes: SweepSizes, times: Times, save: SaveComparison = None) -> None:
    """Lay schedules, simulated with the same costs, side by side.

    With several numbers of micro-batches (`-m 2,4,8`), a table: the times are those of the whole batch, which is the
    same in every column.
    """
    counts = sizes.counts_beside(targets)
    require_writable(save, COMPARISON if len(counts) <= 1 else TABLE)
    if len(counts) <= 1:
        traces = times.traces(sizes.find(targets), targets)
        if uneven := times.uneven([trace.plan for trace in traces]):
            say(uneven)
        show(pipelab.compare(*traces, names=targets), save)
        return
    cost = times.cost()
    made = sweep(targets, counts, lambda name, count: Cell(simulate(sizes.schedule(name, count), cost.shared(count))))
    say(
        f"One batch, the same in every column: for all of it a {cost.per} takes {number(cost.forward)} forward and "
        f"{number(cost.backward)} backward{f' ({cost.unit})' if cost.unit else ''}, for a micro-batch its share."
    )
    show(Table(made.cells, targets, counts, made.refusals), save)


@app.command()
@grouped
def run(targets: Targets, sizes: RunSizes, work: Work, save: SaveRun = None) -> None:
    """Run schedules on real tensors on this machine, verify their gradients, and show what was measured.

    Two ranks by default, so that a laptop has a core for each; with `--emulate`, which needs no cores, four. With
    several numbers of micro-batches (`-m 2,4,8`), a table over one batch.
    """
    counts = sizes.counts_beside(targets)
    require_writable(save, TABLE if len(counts) > 1 else COMPARISON if len(targets) > 1 else RUN)
    if len(counts) <= 1:
        plans = [as_plan(untimed(subject)) for subject in sizes.find(targets, work.usual_ranks)]
        comparison, results = measure(targets, plans, work)
        say(f"{', '.join(plan.name for plan in plans)} on this machine")
        traces = [path for path in save or [] if path.suffix.lower() == ".json"]
        show(comparison, [path for path in save or [] if path not in traces])
        say(proof_of(results))
        for path in traces:
            wrote(results[0].measured.save(path))
        return
    table, results = measure_sweep(
        targets, counts, lambda name, count: sizes.schedule(name, count, work.usual_ranks).plan(), work
    )
    say(f"One batch on this machine, {sizes.ranks or work.usual_ranks} ranks; median of {work.steps} steps")
    show(table, save)
    say(proof_of(results))


@app.command(context_settings={"ignore_unknown_options": True})
def launch(
    script: Annotated[str, typer.Argument(help='your file, with Pipeline(..., engine="torch")', show_default=False)],
    ranks: Annotated[int, typer.Option("--ranks", "-r", min=1, help="processes, one for each rank of the plan")],
    arguments: Annotated[list[str] | None, typer.Argument(help="what your script takes", show_default=False)] = None,
) -> None:
    """Run a script in several processes on this machine, one per rank: torchrun, whose line it prints."""
    from pipelab.cli.app import launch_script

    if not launch_script(script, ranks, arguments or []):
        raise typer.Exit(1)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--folder", "-o", help="where the pictures go")] = Path("pipelab-demo"),
    steps: Annotated[int, typer.Option(min=2, help="training steps of each kind")] = 12,
) -> None:
    """Train a language model plainly and with three schedules: the main job, in about a minute."""
    from pipelab.cli.showing import show_demo

    show_demo(folder, steps)


@app.command()
def conformance(
    schedules: Annotated[
        list[str] | None, typer.Argument(help="schedules' names; by default, all", show_default=False)
    ] = None,
    ranks: Annotated[str | None, typer.Option("--ranks", "-r", help="one number of ranks or several: 2,4")] = None,
    microbatches: Annotated[
        str | None, typer.Option("--microbatches", "-m", help="one number of micro-batches or several: 2,4,8")
    ] = None,
    stages_per_rank: Annotated[
        str | None, typer.Option(help="for schedules that take any number of them: one or several: 2,3")
    ] = None,
    processes: Annotated[
        bool, typer.Option("--processes", help="run PyTorch also in two and in four processes, as it is meant to")
    ] = False,
    save: Annotated[Path | None, typer.Option("--save", "-o", help="write the table to this file, as Markdown")] = None,
) -> None:
    """Compare with the PyTorch that is installed. Exit code 1 if anything differs, or nothing could be compared."""
    from pipelab.cli.conformance import show_conformance
    from pipelab.conformance.references import Grid

    if save is not None:
        require_folder(save)
    sizes: dict[str, Any] = {
        "ranks": whole_numbers("--ranks", ranks),
        "microbatches": SweepSizes(microbatches=microbatches).counts_beside(schedules or []),
        "stages_per_rank": whole_numbers("--stages-per-rank", stages_per_rank),
    }
    grid = Grid(**{name: value for name, value in sizes.items() if value})
    report = show_conformance(schedules or list(pipelab.schedules), grid, (2, 4) if processes else (), save)
    if not (report.same and report.compared):
        raise typer.Exit(1)


def main() -> None:
    """Run the command line; pipelab's own errors are told in words, without a traceback."""
    try:
        app()
    except PipelabError as error:
        lead = "" if isinstance(error, LoadError) else f"{type(error).__name__}: "
        typer.echo(folded(f"{lead}{error}"), err=True)
        sys.exit(1)
    except OSError as error:
        typer.echo(f"{error.filename or 'a file'}: {error.strerror or error}", err=True)
        sys.exit(1)
