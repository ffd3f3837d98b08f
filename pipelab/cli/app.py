"""The commands of `pipelab`."""

from __future__ import annotations

import shlex
import sys
import warnings
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import entry_points
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

import pipelab
from pipelab.checking.checker import as_plan
from pipelab.cli.answers import frontier, layout, megatron, optimum, schedules, why
from pipelab.cli.challenge import challenge
from pipelab.cli.measuring import (
    Cell,
    Work,
    cores,
    measure,
    measure_sweep,
    proof_of,
    sweep,
    table_of,
    too_few_cores,
    why_slow,
)
from pipelab.cli.options import (
    PostingOrder,
    Save,
    SaveComparison,
    SaveFaults,
    SaveRun,
    Sizes,
    Target,
    Targets,
    Times,
    TransportWord,
    Width,
    WiredTimes,
    grouped,
    untimed,
)
from pipelab.cli.play import play
from pipelab.cli.printing import (
    COMPARISON,
    DIFF,
    FAULTS,
    GRAPH,
    RUN,
    TABLE,
    TIMELINE,
    echo,
    faults_saved,
    folded,
    number,
    print_and_save,
    require_writable,
    save_timeline,
    say,
    write_any_letter,
    wrote,
)
from pipelab.cli.targets import existing
from pipelab.draw import differences, text
from pipelab.errors import NO_TORCH, PipelabError, UsageError, clean, counted
from pipelab.hub import chakra, profiles, torchtitan
from pipelab.plan.fault import ranges
from pipelab.plan.plan import Plan
from pipelab.simulation.clock import simulate
from pipelab.table import Table
from pipelab.trace.diff import in_unit_of
from pipelab.trace.trace import Trace

if TYPE_CHECKING:
    from pipelab.cli.running import Result

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
_BESIDE = "Of packages beside pipelab"


def add_commands(to: typer.Typer) -> None:
    """Add what other packages have in their entry points `pipelab.commands`: functions, and apps of typer.

    They come first, so that no other package takes the place of a command of pipelab.
    """
    for entry in entry_points(group="pipelab.commands"):
        try:
            command = entry.load()
            _add(command, entry.name, alone := typer.Typer())
            typer.main.get_command(alone)  # which refuses what is no command
        except Exception as error:  # noqa: BLE001 - of another package, whatever it is
            words = f"the command {entry.name} is left out: {entry.value} raised {type(error).__name__}: {error}"
            echo(folded(words), error=True)
        else:
            _add(command, entry.name, to)


def _add(command: Callable[..., None] | typer.Typer, name: str, to: typer.Typer) -> None:
    if isinstance(command, typer.Typer):
        to.add_typer(command, name=name, rich_help_panel=_BESIDE)
    else:
        to.command(name, rich_help_panel=_BESIDE)(command)


add_commands(app)
export = typer.Typer(rich_markup_mode="markdown", help="Write a plan for another program.", no_args_is_help=True)
app.add_typer(export, name="export")
app.command()(schedules)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    """Pipeline-parallel schedules, written once, then checked, simulated, drawn and executed."""
    if version:
        typer.echo(pipelab.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
@grouped
def check(
    target: Target,
    sizes: Sizes,
    memory_cap: Annotated[int | None, typer.Option(min=1, help="how many activations a rank may hold")] = None,
    order: PostingOrder = "pytorch",
    transport: TransportWord = "buffered",
    save: SaveFaults = None,
) -> None:
    """Find and explain every fault of a schedule.

    The exit code is 1 if there is one.
    """
    require_writable(save, FAULTS)
    subject = untimed(sizes.find(target))
    faults = pipelab.check(subject, memory_cap=memory_cap, order=order, transport=transport)
    for path in save or []:
        wrote(faults.save(path))
    name = subject.name if isinstance(subject, Plan) else repr(subject)
    if faults:
        raise pipelab.ScheduleError(faults, name)
    plan = simulate(subject).plan
    say(f"{name} is right: {sum(map(len, plan.bound.lists))} actions, no fault")
    stages = f"all {plan.stages} stages" if plan.stages > 1 else "its only stage"
    backward = " and once backward" * (not plan.forwards_only)
    say(f"every micro-batch goes through {stages} once forward{backward}; no rank gets stuck")
    if faults.transports:
        say(faults.transports)
    elif transport != "buffered":
        say(f"with order {order} and transport {transport}, no send or receive gets stuck either")
    if replicated := [stage for stage, holders in plan.replicas.items() if len(holders) > 1]:
        say(f"stages on several ranks, whose gradients are all-reduced: {ranges(replicated)}")


@app.command(name="simulate")
@grouped
def simulate_command(target: Target, sizes: Sizes, times: WiredTimes, save: Save = None) -> None:
    """Print a schedule's timeline, its bubble and its memory."""
    require_writable(save, TIMELINE)
    trace = times.simulated(untimed(sizes.find(target)))
    echo(text.timeline(trace))
    for path in save or []:
        wrote(save_timeline(trace, path, times))


@app.command()
@grouped
def draw(
    target: Target,
    sizes: Sizes,
    times: WiredTimes,
    save: Annotated[
        list[Path] | None,
        typer.Option(
            "--save",
            "-o",
            help="html svg png pdf json txt; csv: the plan, with --order its transfers; with --graph: dot svg png pdf",
        ),
    ] = None,
    width: Width = None,
    graph: Annotated[bool, typer.Option("--graph", help="draw the dependency graph instead of the timeline")] = False,
) -> None:
    """Draw a schedule, or write its plan.

    The timeline of a schedule or of a saved trace, or the dependency graph, to files; or the plan as CSV.

    Without --save, the timeline is printed. Of a schedule with faults, the files show how far it runs and why no
    further, and the exit code is 1.
    """
    if graph and not save:
        raise UsageError(f"--graph needs a file: pipelab draw {target} --graph --save graph.svg")
    if width is not None and (graph or not save or any(path.suffix.lower() == ".csv" for path in save)):
        raise UsageError(f"--width {width}: only figures have one: pipelab draw {target} --width {width} --save x.svg")
    require_writable(save, GRAPH if graph else TIMELINE)
    subject = sizes.find(target)
    with faults_saved(untimed(subject), times.order, times.transport, [] if graph else save or []):
        (trace,) = times.traces([subject], [target])
    if not save:
        echo(text.timeline(trace))
        say("add --save timeline.html for a page that says why each rank waits")
    for path in save or []:
        wrote(trace.plan.save_graph(path, times.cost()) if graph else save_timeline(trace, path, times, width))


@export.command(name="torchtitan")
@grouped
def export_torchtitan(
    target: Target,
    sizes: Sizes,
    save: Annotated[Path, typer.Option("--save", "-o", help="the file to write")] = Path("torchtitan.csv"),
) -> None:
    """Write the CSV file that torchtitan loads, and print the options that it needs beside it."""
    require_writable([save], ("a plan for torchtitan", [".csv"]))
    options = torchtitan.export(untimed(sizes.find(target)), save)
    wrote(save)
    echo(clean(options, keep="\n"))


@export.command(name="chakra")
@grouped
def export_chakra(
    target: Target,
    sizes: Sizes,
    times: Times,
    folder: Annotated[Path, typer.Option("--folder", "-o", help="where the files go")] = Path("chakra"),
) -> None:
    """Write a Chakra execution trace for each rank, for simulators of clusters such as ASTRA-sim.

    Sizes of transfers, in bytes: --cost activation_bytes=1e6 --cost boundary_gradient_bytes=1e6

    The files have whole microseconds: with --unit s, ms, us or ns the times are read so, otherwise as milliseconds.
    """
    for path in chakra.export(sizes.find(target), folder, times.cost()):
        wrote(path)


@app.command()
@grouped
def compare(
    targets: Targets,
    sizes: Sizes,
    times: WiredTimes,
    save: SaveComparison = None,
    bound: Annotated[bool, typer.Option("--bound", help="how far each is above any order of its actions")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="of two: why the second takes longer, action by action")] = False,
    other: Annotated[
        Path | None, typer.Option("--with", help="another simulator's .json of the same plan: what differs first")
    ] = None,
    width: Width = None,
) -> None:
    """Show schedules side by side, or why one takes longer.

    All are simulated with the same costs.

    Several numbers of micro-batches (`-m 2,4,8`) make a table. Its times are for the whole batch, the same in every
    column.
    """
    counts = sizes.counts_beside(targets)
    targets = sizes.with_settings(targets)
    several = len(counts) > 1
    if diff and (len(targets) + bool(other) != 2 or several or bound):
        raise UsageError("--diff needs two schedules or traces, one number of micro-batches, and no --bound")
    if other and (len(targets) != 1 or several or bound):
        raise UsageError(f"--with needs one plan, and one number of micro-batches: pipelab compare PLAN --with {other}")
    if bound and several:
        raise UsageError("--bound needs one number of micro-batches: leave out --bound, or all numbers but one")
    if width is not None and (diff or several or not save):
        raise UsageError(f"--width {width}: only figures have one: pipelab compare … --width {width} --save x.pdf")
    require_writable(save, TABLE if several else DIFF if diff else COMPARISON)
    if several:
        print_and_save(_over_counts(targets, counts, sizes, times), save)
        return
    subjects = sizes.find_all(targets)
    traces = times.traces(subjects, targets)
    if uneven := times.uneven([trace.plan for trace in traces]):
        say(uneven)
    if other:
        traces.append(_theirs(other, traces[0], scaled=traces[0] is not subjects[0]))
        targets.append(str(other))
    if diff:
        print_and_save(pipelab.diff(traces[0], traces[1], names=targets), save)
    else:
        print_and_save(pipelab.compare(*traces, bound=bound, names=targets), save, width)


def _theirs(path: Path, ours: Trace, *, scaled: bool) -> Trace:
    """Return another simulator's trace in our unit, and say what differs first."""
    loaded = profiles.load(path)
    theirs = in_unit_of(loaded, ours)
    if loaded.unit and not ours.unit and scaled:
        say(f"Your times have no unit, so all of {path} are scaled to as much work: try --unit {loaded.unit}")
    first = differences.first(pipelab.diff(ours, theirs))
    say(f"{first} ({path}: {theirs.note})" if theirs.note else first)
    return theirs


def _over_counts(targets: Sequence[str], counts: Sequence[int], sizes: Sizes, times: Times) -> Table:
    """Return the table of one batch in several numbers of micro-batches."""
    cost = times.cost()
    assert not callable(cost.forward)  # no option's text is a function
    assert not callable(cost.backward)
    made = sweep(
        targets, counts, lambda name, count: Cell(times.simulated(sizes.schedule(name, count), cost.shared(count)))
    )
    say(
        f"Every column is the same batch: a {cost.per} takes {number(cost.forward)} forward and "
        f"{number(cost.backward)} backward{f' ({cost.unit})' if cost.unit else ''} for all of it."
    )
    return table_of(*made)


@app.command()
@grouped
def run(targets: Targets, sizes: Sizes, work: Work, save: SaveRun = None) -> None:
    """Run schedules on real tensors, and measure them.

    On this machine; their gradients are verified.

    There are two ranks by default, so that a laptop has a core for each, and four with `--emulate`, which needs no
    cores. Several numbers of micro-batches (`-m 2,4,8`) make a table over one batch.
    """
    counts = sizes.counts_beside(targets)
    targets = sizes.with_settings(targets)
    if len(counts) > 1:
        _run_over_counts(targets, counts, sizes, work, save)
        return
    require_writable(save, COMPARISON if len(targets) > 1 else RUN)
    plans = [as_plan(untimed(subject)) for subject in sizes.find_all(targets, work.usual_ranks)]
    ranks = max(plan.ranks for plan in plans)
    command = _warned(ranks, targets, sizes, work)
    comparison, results = measure(targets, plans, work)
    say(f"{', '.join(plan.name for plan in plans)} on this machine")
    traces = [path for path in save or [] if path.suffix.lower() == ".json"]
    print_and_save(comparison, [path for path in save or [] if path not in traces])
    _conclude(results, ranks, command, work)
    for path in traces:
        wrote(results[0].measured.save(path))


def _run_over_counts(
    targets: Sequence[str], counts: Sequence[int], sizes: Sizes, work: Work, save: list[Path] | None
) -> None:
    require_writable(save, TABLE)
    ranks = (sizes.ranks or work.usual_ranks) * sizes.replicas
    command = _warned(ranks, targets, sizes, work)
    table, results = measure_sweep(
        targets, counts, lambda name, count: sizes.schedule(name, count, work.usual_ranks).plan(), work
    )
    ranks = max((result.measured.plan.ranks for result in results), default=0)
    say(f"One batch on this machine, {counted(ranks, 'rank')}; median of {counted(work.measured_steps, 'step')}")
    print_and_save(table, save)
    _conclude(results, ranks, command, work)


def _warned(ranks: int, targets: Sequence[str], sizes: Sizes, work: Work) -> str:
    """Warn before the work if there are too few cores for it; return the command without its options for the model."""
    own = {"-r": sizes.ranks, "-m": sizes.microbatches, "--replicas": sizes.replicas if sizes.replicas > 1 else None}
    words = [word for name, value in own.items() if value for word in (name, str(value))]
    command = shlex.join(["pipelab", "run", *targets, *words, *(f"--set={each}" for each in sizes.sets or [])])
    if not work.emulate and (warning := too_few_cores(ranks, command)):
        say(warning)
    return command


def _conclude(results: Sequence[Result], ranks: int, command: str, work: Work) -> None:
    """Say what the verification found, and why the ranks were slow if that was not clear before."""
    say(proof_of(results))
    share = 1.0 if work.emulate or not results else median(result.core_share for result in results)
    if ranks <= cores() and (why := why_slow(ranks, share, command)):
        say(why)


for command in (why, optimum, frontier, layout, megatron, play, challenge):
    app.command()(command)


@app.command(context_settings={"ignore_unknown_options": True})
def launch(
    script: Annotated[str, typer.Argument(help='your file, with Pipeline(..., engine="torch")', show_default=False)],
    ranks: Annotated[int, typer.Option("--ranks", "-r", min=1, help="processes, one for each rank of the plan")],
    arguments: Annotated[list[str] | None, typer.Argument(help="arguments for your script", show_default=False)] = None,
) -> None:
    """Run your script in one process per rank.

    On this machine, as torchrun does, but open to no other machine.
    """
    existing(script)
    from pipelab.engine.torchrun.launch import run_processes

    if failed := run_processes(script, ranks, arguments or []):
        sys.stderr.write(failed + "\n")
        raise typer.Exit(1)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--folder", "-o", help="where the pictures go")] = Path("pipelab-demo"),
    steps: Annotated[int, typer.Option(min=2, help="training steps of each kind")] = 12,
) -> None:
    """Train a language model with three schedules.

    And plainly, in about a minute on a machine that does nothing else.
    """
    from pipelab.cli.showing import show_demo

    show_demo(folder, steps)


@app.command()
def docs(
    port: Annotated[int, typer.Option(min=0, max=65535, help="where to listen; 0: any free port")] = 8484,
    browser: Annotated[bool, typer.Option(help="open it in the web browser")] = True,
) -> None:
    """Show the documentation.

    It came with pipelab, and is shown at an address of this machine alone. Ctrl-C ends it.
    """
    package = Path(pipelab.__file__).parent
    built = [folder for folder in (package / "site", package.parent / "site") if (folder / "index.html").is_file()]
    if not built:
        raise UsageError(
            "the site is not built\n  try: make site in pipelab's folder, then pipelab docs; or read README.md"
        )
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Quiet, directory=str(built[0])))
    except OSError as error:
        raise UsageError(f"port {port} is not free ({error.strerror})\n  try: pipelab docs --port 0") from error
    with server, suppress(KeyboardInterrupt):
        address = f"http://127.0.0.1:{server.server_port}/"
        say(f"{address} shows {built[0]}; Ctrl-C ends it")
        if browser:
            webbrowser.open(address)
        server.serve_forever()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Leave the terminal alone."""


def main() -> None:
    """Run the command line. Print pipelab's own errors without a traceback, and warnings without a line of code."""
    write_any_letter()
    formatted = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: folded(f"warning: {message}") + "\n"
    try:
        app()
    except (PipelabError, OSError, ModuleNotFoundError) as error:
        echo(_in_words(error), error=True)
        sys.exit(1)
    finally:
        warnings.formatwarning = formatted


def _in_words(error: Exception) -> str:
    """Return an error for the terminal; raise what is a bug."""
    if isinstance(error, PipelabError):
        return folded(str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}")
    if isinstance(error, OSError):
        return folded(f"{error.filename or 'a file'}: {error.strerror or error}")
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return f"{shlex.join(['pipelab', *sys.argv[1:]])}: {NO_TORCH}"
    raise error
