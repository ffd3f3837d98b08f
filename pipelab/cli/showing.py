"""What `pipelab demo` shows: progress, tables, pictures."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import Progress

from pipelab.catalogue import schedules
from pipelab.cli.believing import BUSY, LEGEND, believable
from pipelab.cli.demo import Plain, Setting, Trained, emulate, train_plainly, train_with
from pipelab.cli.measuring import why_slow
from pipelab.cli.printing import wrote
from pipelab.draw.wording import columns
from pipelab.errors import counted
from pipelab.files import require_writable
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
    parameters = sum(parameter.numel() for parameter in setting.model().parameters())
    console.print(
        f"A byte-level language model ({setting.blocks} blocks, {parameters:,} parameters) learns the source text of "
        f"Python's standard library: {setting.steps} steps of {setting.rows} x {setting.length} bytes, "
        f"{setting.microbatches} micro-batches, {setting.ranks} ranks on this machine's processor.\n"
    )
    quiet = warnings.catch_warnings(action="ignore", category=UserWarning)  # of a busy machine: said below
    with quiet, Progress(console=console, transient=True) as progress:
        task = progress.add_task("plain training", total=steps * (1 + len(_TRAINED)) + 4 * len(_EMULATED))
        plain = train_plainly(setting, lambda: progress.advance(task))
        if not believable(1, None, plain.others):
            progress.console.print(
                f"Other programs use {plain.others:.0%} of the processor, so the demo takes longer than a minute.\n"
            )
        trained: list[Trained] = []
        for name in _TRAINED:
            progress.update(task, description=f"training with {name}")
            trained.append(train_with(name, setting, plain, lambda: progress.advance(task)))
        emulations: dict[str, tuple[Trace, Trace]] = {}
        for name in _EMULATED:
            progress.update(task, description=f"four emulated devices, {name}")
            emulations[name] = emulate(name)
            progress.advance(task, 4)
        training = _training_table(setting, plain, trained)
        tables = [columns(training, 80), columns(_emulation_table(emulations), 80)]
    learned = "[bold]The losses or parameters differ from plain training's: a bug in pipelab, please report it.[/]"
    if all(each.same for each in trained):
        learned = (
            f"Every schedule learns exactly what plain training learns: all losses and all {parameters:,} parameters "
            f"are the same after {steps} steps, bit for bit."
        )
    (real, four), whole = map("\n".join, tables), plain.whole_batch_ms
    takes = _cell(f"{whole:.0f}", whole, min(whole, plain.step_ms), plain.others)  # its threads cannot make it slower
    parts = [
        f"[bold]Real training on this machine[/]\n{real}\n\n[dim]plain: one thread runs the same micro-batches in "
        "turn. speed-up: plain's step time divided by the schedule's; naive has one rank at work at a time: it gains "
        "nothing. pred.: predicted from plain's step time and naive's action times. peak: micro-batches whose "
        f"activations a rank holds at any time.[/]\n\n{learned}\n\n[dim]Without a pipeline, the whole batch at once "
        f"takes {takes} ms a step on {counted(plain.cores, 'processor thread')}, which the ranks "
        "share. Pipelines pay off when each rank has its own device, as on the four emulated devices.[/]\n",
        f"[bold]Four emulated devices, 20 ms forward and 40 ms backward, 8 micro-batches[/]\n{four}\n\nGPipe and 1F1B "
        "have the same predicted bubble; 1F1B saves memory. `delayed`, often taught as 1F1B, hardly beats naive.\n",
    ]
    busy = all("*" in row[1] for row in training[1:])
    for part in reversed(parts) if busy else parts:  # what can be trusted comes first
        console.print(part, highlight=False)
    share, slower = median(each.core_share for each in trained), any(each.speed_up < 1 for each in trained[1:])
    if "*" in "".join(parts):
        console.print(f"{BUSY if busy else LEGEND}\n", markup=False, highlight=False)
    if not busy and (why := why_slow(setting.ranks, share, f"pipelab run {' '.join(_TRAINED)}", slower)):
        console.print(f"Real training: {why}\n", markup=False, highlight=False)
    for path in _save(folder, trained, emulations, tables):
        wrote(path)
    console.print(
        f"Open {folder / 'four-devices.html'} first. Then write your own schedule: README.md shows how, and "
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
        end = (f"{each.losses[-1]:.6f}", "exactly" if each.same else "NO")
        rows += [(each.schedule, took, f"{step_ms:.0f}", speed_up, *_held(each.others, each.trace, predicted), *end)]
    return rows


def _emulation_table(emulations: Mapping[str, tuple[Trace, Trace]]) -> list[tuple[str, ...]]:
    """Return the rows of emulated devices, heads first; other programs hardly disturb them."""
    rows: list[tuple[str, ...]] = [("schedule", "step ms", "predicted", "bubble", "predicted", "peak")]
    for name, (measured, predicted) in emulations.items():
        took = _cell(f"{measured.makespan:.0f}", measured.makespan, predicted.makespan, 0)
        rows.append((name, took, f"{predicted.makespan:.0f}", *_held(0, measured, predicted)))
    return rows


def _held(others: float, measured: Trace, predicted: Trace) -> tuple[str, str, str]:
    """Return the cells of both bubbles, and of what ranks hold."""
    bubble = _cell(f"{measured.bubble:.1%}", measured.bubble, predicted.bubble, others)
    return bubble, f"{predicted.bubble:.1%}", " ".join(map(str, measured.peak_activations))


def _cell(shown: str, measured: float, predicted: float | None, others: float) -> str:
    return shown + "*" * (not believable(measured, predicted, others))


def _save(
    folder: Path, trained: list[Trained], emulations: Mapping[str, tuple[Trace, Trace]], tables: Sequence[list[str]]
) -> list[Path]:
    """Write the pictures, with the marks of the tables' times; return their paths."""
    groups = {
        "training": [(f"{each.schedule}, measured", each.trace) for each in trained],
        "four-devices": [
            (f"{name}, {kind}", trace)
            for name, both in emulations.items()
            for kind, trace in zip(("measured", "predicted"), both, strict=True)
        ],
    }
    paths: list[Path] = []
    for (file, group), table in zip(groups.items(), tables, strict=True):
        stars = {f"{words[0]}, measured" for words in map(str.split, table) if words and "*" in words[1]}
        names = [f"{name} {LEGEND}" if name in stars else name for name, _ in group]
        shown = compare(*(trace for _, trace in group), names=names)
        paths += [shown.save(folder / f"{file}.{suffix}") for suffix in ("html", "svg")]
    return paths
