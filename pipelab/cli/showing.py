"""What `pipelab demo` and `pipelab conformance` show: progress, tables, pictures, both orders if they differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress

from pipelab.catalogue import schedules
from pipelab.cli.measuring import why_slow
from pipelab.cli.printing import wrote
from pipelab.conformance.report import Grid, Line, Numbers, Report, conformance, count
from pipelab.draw.table import Column, Table
from pipelab.draw.wording import columns
from pipelab.files import require_writable
from pipelab.labs.believing import LEGEND, believable
from pipelab.labs.demo import Emulation, Plain, Setting, Trained, emulate, train_plainly, train_with
from pipelab.simulation.clock import simulate
from pipelab.simulation.comparison import compare
from pipelab.simulation.cost import Cost
from pipelab.trace.trace import Trace

_TRAINED = ("naive", "gpipe", "1f1b")
_EMULATED = ("naive", "gpipe", "1f1b", "delayed")


def show_demo(folder: Path, steps: int) -> None:
    """Train, print the tables, and write the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    require_writable(folder / "training.html")
    console = Console()
    setting = Setting(steps=steps)
    model = setting.model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"A byte-level language model ({setting.blocks} blocks, {parameters:,} parameters) learns the source text of "
        f"Python's standard library: {setting.steps} steps of {setting.rows} x {setting.length} bytes, "
        f"{setting.microbatches} micro-batches, {setting.ranks} ranks on this machine's processor.\n"
    )
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("plain training", total=steps * (1 + len(_TRAINED)) + 4 * len(_EMULATED))
        plain = train_plainly(setting, lambda: progress.advance(task))
        trained: list[Trained] = []
        for name in _TRAINED:
            progress.update(task, description=f"training with {name}")
            trained.append(train_with(name, setting, plain, lambda: progress.advance(task)))
        emulations: list[Emulation] = []
        for name in _EMULATED:
            progress.update(task, description=f"four emulated devices, {name}")
            emulations.append(emulate(name))
            progress.advance(task, 4)
    console.print("[bold]Real training on this machine[/]")
    console.print("\n".join(columns(_training_table(setting, plain, trained), 80)), highlight=False, markup=False)
    console.print(
        f"\n[dim]{LEGEND}\n\nplain: one thread runs the same micro-batches in turn. speed-up: plain's step time "
        "divided by the schedule's; naive has one rank at work at a time, so it gains nothing. pred.: predicted from "
        "plain's step time and naive's action times. peak: micro-batches whose activations a rank holds at any "
        "time.[/]\n"
    )
    slower = any(each.speed_up < 1 for each in trained[1:])
    command = f"pipelab run {' '.join(_TRAINED)}"
    if why := why_slow(setting.ranks, median(each.core_share for each in trained), command, slower):
        console.print(f"{why}\n", markup=False, highlight=False)
    console.print(
        f"Every schedule learns exactly what plain training learns: all losses and all {parameters:,} parameters are "
        f"the same after {steps} steps, bit for bit.\n"
        if all(each.same for each in trained)
        else "[bold]The losses or parameters differ from plain training's: a bug in pipelab, please report it.[/]\n"
    )
    console.print(
        f"[dim]Without a pipeline, the whole batch at once takes {plain.whole_batch_ms:.0f} ms a step on "
        f"{plain.cores} processor thread{'s' if plain.cores > 1 else ''}, which the ranks above share. Pipelines pay "
        "off when each rank has its own device, as in the next table: four emulated devices, 20 ms forward and 40 ms "
        "backward.[/]\n"
    )
    console.print("[bold]Four emulated devices, 8 micro-batches[/]")
    console.print("\n".join(columns(_emulation_table(emulations), 80)), highlight=False, markup=False)
    console.print(f"\n[dim]{LEGEND}[/]\n")
    console.print(
        "GPipe and 1F1B have the same bubble; 1F1B saves memory. `delayed`, the single loop often taught as 1F1B, is "
        "nearly as slow as naive.\n"
    )
    for path in _save(folder, trained, emulations):
        wrote(path)
    console.print(
        f"\nOpen {folder / 'four-devices.html'} first. Then write your own schedule: README.md shows how, and "
        "`pipelab check my_file.py` explains what is wrong with it."
    )


def _training_table(setting: Setting, plain: Plain, trained: list[Trained]) -> list[tuple[str, ...]]:
    """Return the rows of real training, heads first."""
    took = _cell(f"{plain.step_ms:.0f}", plain.step_ms, None, plain.others)
    heads = ("schedule", "step ms", "pred.", "speed-up", "bubble", "pred.", "peak", "loss", "plain?")
    rows: list[tuple[str, ...]] = [heads, ("plain", took, "", "1.00", "", "", "", f"{plain.losses[-1]:.6f}", "")]
    cost = Cost.fit(trained[0].traces)  # naive's: no other rank was computing at the same time
    made = [simulate(schedules[each.schedule](setting.ranks, setting.microbatches), cost) for each in trained]
    for each, predicted in zip(trained, made, strict=True):
        step_ms, others = plain.step_ms * predicted.makespan / made[0].makespan, max(each.others, plain.others)
        took = _cell(f"{each.step_ms:.0f}", each.step_ms, step_ms, each.others)
        speed_up = _cell(f"{each.speed_up:.2f}", each.speed_up, plain.step_ms / step_ms, others)
        learned = (f"{each.losses[-1]:.6f}", "exactly" if each.same else "NO")
        rows.append((each.schedule, took, f"{step_ms:.0f}", speed_up, *_held(each, each.trace, predicted), *learned))
    return rows


def _emulation_table(emulations: list[Emulation]) -> list[tuple[str, ...]]:
    """Return the rows of emulated devices, heads first."""
    rows: list[tuple[str, ...]] = [("schedule", "step ms", "predicted", "bubble", "predicted", "peak")]
    for each in emulations:
        measured, predicted = each.measured.makespan, each.predicted.makespan
        took = _cell(f"{measured:.0f}", measured, predicted, each.others)
        rows.append((each.schedule, took, f"{predicted:.0f}", *_held(each, each.measured, each.predicted)))
    return rows


def _held(each: Trained | Emulation, measured: Trace, predicted: Trace) -> tuple[str, str, str]:
    """Return the cells of both bubbles, and of what ranks hold."""
    bubble = _cell(f"{measured.bubble:.1%}", measured.bubble, predicted.bubble, each.others)
    return bubble, f"{predicted.bubble:.1%}", " ".join(map(str, measured.peak_activations))


def _cell(shown: str, measured: float, predicted: float | None, others: float) -> str:
    return shown + "*" * (not believable(measured, predicted, others))


def _save(folder: Path, trained: list[Trained], emulations: list[Emulation]) -> list[Path]:
    """Write the pictures; return their paths."""
    real = compare(*(each.trace for each in trained), names=[f"{each.schedule}, measured" for each in trained])
    four = compare(
        *(trace for each in emulations for trace in (each.predicted, each.measured)),
        names=[f"{each.schedule}, {kind}" for each in emulations for kind in ("predicted", "measured")],
    )
    return [
        comparison.save(folder / f"{name}.{suffix}")
        for name, comparison in (("training", real), ("four-devices", four))
        for suffix in ("html", "svg")
    ]


_COLUMNS = (
    Column("schedule"),
    Column("reference", "PyTorch's Schedule…", left=True),
    Column("sizes"),
    *(Column(name, left=True) for name in ("orders", "wire")),
    Column("runs"),
    Column("numbers", left=True),
)
_LEGEND = (
    "orders: action for action, as PyTorch executes them; an overlapped pair counts as its forward, then its backward. "
    "wire: sends and receives stand where PyTorch's _add_send_recv puts them, and where its runtime runs them. "
    f"runs: steps of both on the same model and batch, where ranks x micro-batches is at most {Grid().most_work}; "
    "their gradients and losses are the numbers. Both weigh each micro-batch's loss by 1/M before its backward "
    "(scale_grads=False); PyTorch's default divides the summed gradients instead, which rounds otherwise unless M is a "
    "power of two."
)
_MOST_SHOWN = 3


def show_conformance(
    names: Sequence[str], grid: Grid, processes: Sequence[int] = (), save: Path | None = None
) -> Report:
    """Compare, print the table and the differences, and write the table to `save` if given."""
    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("comparing with PyTorch", total=count(names, grid))
        report = conformance(names, grid, processes, lambda: progress.advance(task))
    console.print(table(report).text(), highlight=False, markup=False, soft_wrap=True)
    for line in report.lines:
        differences = line.differences + line.transfers
        for difference in differences[:_MOST_SHOWN]:
            console.print(f"\n{difference}", soft_wrap=True, highlight=False, markup=False)
        more = len(differences) - _MOST_SHOWN
        if more > 0:
            console.print(f"… and {more} more sizes of {line.schedule}")
    if save is not None:
        wrote(table(report).save(save))
    return report


def table(report: Report) -> Table:
    """Return the table of a comparison, with what its columns mean and what one side refuses."""
    title = f"pipelab beside PyTorch: torch {report.torch}, {report.date}"
    return Table([*map(_row, report.lines)], _COLUMNS, title=title, notes=[_LEGEND, *_notes(report)])


def _row(line: Line) -> dict[str, Any]:
    row: dict[str, Any] = {"schedule": line.schedule, "reference": line.reference, "sizes": line.sizes}
    if not line.sizes:
        return row
    orders, wire = (f"{len(each)} differ" if each else "equal" for each in (line.differences, line.transfers))
    return row | {"orders": orders, "wire": wire, "runs": len(line.numbers), "numbers": _numbers(line.numbers)}


def _numbers(runs: Sequence[Numbers]) -> str:
    if not all(each.same_gradients for each in runs):
        return f"{max(each.difference for each in runs):.1e}"
    return "" if not runs else "bit-equal" if all(each.same_loss for each in runs) else "loss differs"


def _notes(report: Report) -> list[str]:
    """Return sentences on the sizes that one side refuses, and on the processes that PyTorch ran in."""
    notes = []
    for line in report.lines:
        if line.refused:
            words = line.refusal.partition(": ")[2]
            more = f"pipelab accepts {_sizes(line.refused)} more"
            notes.append(f"{line.schedule}: {more}, which PyTorch does not run: {words}")
        if line.refused_here:
            notes.append(f"{line.schedule}: pipelab refuses {_sizes(line.refused_here)}: {line.refusal_here}")
        if line.not_ours:
            notes.append(f"{line.schedule}: PyTorch accepts {_sizes(line.not_ours)} more.")
    processes = sorted({each.processes for line in report.lines for each in line.numbers} - {1})
    where = f", and in {' and '.join(map(str, processes))} processes with gloo" if processes else ""
    ran = f"PyTorch ran in one process{where}." if report.compared else "Nothing could be compared: exit code 1."
    return [ran, *dict.fromkeys(notes)]  # two references may give the same note


def _sizes(number: int) -> str:
    return f"{number} size{'s' if number != 1 else ''}"
