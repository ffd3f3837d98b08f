"""What `pipelab lab` shows: the course's experiments, row by row."""

from __future__ import annotations

import sys
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.resources import files as resources
from itertools import pairwise
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from pipelab.catalogue import schedules
from pipelab.cli.measuring import Work, cores, too_few_cores, why_slow
from pipelab.cli.options import grouped, whole_numbers
from pipelab.cli.printing import TABLE, echo, folded, print_and_save, require_writable, say, wrote
from pipelab.draw import wording
from pipelab.errors import PipelabError, UsageError, counted
from pipelab.simulation.clock import simulate
from pipelab.simulation.cost import Cost
from pipelab.table import Column, Table
from pipelab_course import hybrid as hybrids
from pipelab_course import report as claims
from pipelab_course.grading.tasks import HOMEWORKS, Variant, ruled, start_homework, variant

Row = TypeVar("Row")

Folder = Annotated[Path, typer.Argument(help="where --start writes; it is made if need be", show_default=False)]
Start = Annotated[bool, typer.Option("--start", help="write the homework's file with its holes")]
Own = Annotated[str, typer.Option("--variant", help="a student's own variant, which follows from this name")]
SaveTable = Annotated[
    list[Path] | None,
    typer.Option("--save", "-o", help="a file to write: csv txt md html; png svg pdf: the plot; repeatable"),
]
Numbers = Sequence[Mapping[str, str]]
"""What fills answers: the numbers of a run by name, once or, where several models were measured, for each."""
_WORDS = ("a table without a plot", (".csv", ".txt", ".md", ".html"))


def _questions(lab: str) -> dict[str, dict[str, str]]:
    """Return what an assignment asks: each question with its part, and which number answers it."""
    text = resources("pipelab_course").joinpath("questions.toml").read_text(encoding="utf-8")
    return dict(tomllib.loads(text)[lab])


def _key(lab: str) -> dict[str, Any]:
    return claims.answers(f"keys/{lab}.toml")


STUDENTS = not _key("hw4")
"""Whether this is a students' copy."""


def _ask(context: typer.Context, wanted: bool) -> None:
    if not wanted:
        return
    part = ""
    for number, question in enumerate(_questions(str(context.info_name)).values(), start=1):
        if part != (part := question["part"]):
            echo(f"\n{part}")
        echo(folded(f"{number:2}. {question['ask']}\n    from: {question['number']}"))
    raise typer.Exit


@dataclass(frozen=True)
class Asked:
    """Whether questions are shown instead, and whether a teacher's copy leaves out the answers."""

    questions: Annotated[
        bool,
        typer.Option(
            "--questions", callback=_ask, is_eager=True, help="only say what is asked, and which numbers answer it"
        ),
    ] = False
    no_answers: Annotated[
        bool, typer.Option("--no-answers", hidden=STUDENTS, help="leave out the answers of a teacher's copy")
    ] = False

    def notes(self, lab: str, numbers: Numbers) -> list[str]:
        """Return the answers of the teacher's key, filled with numbers; without a key, the questions."""
        key, part, notes = _key(lab), "", list[str]()
        for number, (name, each) in enumerate(_questions(lab).items(), start=1):
            if said := _filled(key[name]["answer"], numbers) if key else f"\n    from: {each['number']}":
                lead = "" if part == (part := each["part"]) else f"{part}: "
                notes.append(f"{number}. {lead}{each['ask']}{' ' * bool(key)}{said}")
        return [] if key and self.no_answers else notes

    def below(self, table: Table, lab: str, numbers: Numbers) -> Table:
        """Return a table with the answers as its last notes."""
        return replace(table, notes=[*table.notes, *self.notes(lab, numbers)])


def _filled(sentences: Sequence[str], numbers: Numbers) -> str:
    """Return sentences with their numbers, for each model; one whose number was not measured is left out."""
    said = dict[str, None]()
    for sentence in sentences:
        for each in filter(None, numbers):
            with suppress(KeyError):
                said[sentence.format_map(each)] = None
    return " ".join(said)


lab = typer.Typer(help="Run an experiment of the course, and make its table.", no_args_is_help=True)


def finished(rows: Iterator[Row], total: int, what: str) -> tuple[list[Row], bool]:
    """Collect rows as they are made, with progress and an estimate on stderr; Ctrl-C or an error keeps those done."""
    console = Console(stderr=True)
    found: list[Row] = []
    began = time.monotonic()
    columns = "{task.description}", BarColumn(), "{task.completed} of {task.total}, left", TimeRemainingColumn()
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    try:
        with warnings.catch_warnings(), bar as progress:
            warnings.filterwarnings("ignore", "timings vary")  # the table marks such figures
            task = progress.add_task(what, total=total)
            for row in rows:
                found.append(row)
                progress.advance(task)
                if not console.is_terminal and len(found) == 1:
                    left = (time.monotonic() - began) / len(found) * (total - len(found))
                    sys.stderr.write(f"{what}: {len(found)} of {total}, about {left:.0f} s left\n")
                    sys.stderr.flush()
    except (KeyboardInterrupt, PipelabError) as error:
        if not found and isinstance(error, PipelabError):
            raise
        sys.stderr.write(f"{folded(str(error) or 'stopped')}\n{what}: {len(found)} of {total} rows are done\n")
        return found, False
    return found, True


def _end(rows: list[Row], whole: bool, table: Callable[[list[Row]], Table], save: list[Path] | None) -> None:
    """Show and save the table of the rows that are done, if there are any; the exit code is 1 if not all are."""
    if rows:
        print_and_save(table(rows), save)
    if not whole:
        raise typer.Exit(1)


def _start(name: str, folder: Path, own: str = "") -> None:
    """Write a homework's file into a folder, or a student's variant of it, and say what to do with it."""
    path = start_homework(name, folder, own)
    graded = f"pipelab grade {path}{f' --variant {quote(own)}' if own else ''}"
    run = f"torchrun --nproc-per-node 2 {path}" if name == "hw1" else f"python {path}"
    width = max(len(run), len(graded))
    echo(f"wrote {path}\n\n  {run:{width}}  runs it\n  {graded:{width}}  grades what it runs")


@lab.command()
@grouped
def practical9(
    work: Work,
    asked: Asked,
    ranks: Annotated[int, typer.Option("--ranks", "-r", min=2, help="workers of the pipeline")] = 2,
    microbatches: Annotated[
        str, typer.Option("--microbatches", "-m", help="the numbers of micro-batches to compare")
    ] = "2,4,8",
    real: Annotated[bool, typer.Option("--real", help="real layers, even without a core for each rank")] = False,
    own: Own = "",
    save: SaveTable = None,
) -> None:
    """Compare naive, GPipe, the single loop and true 1F1B.

    The table that its questions are answered from.

    Emulated times are for the whole batch. Without a core for each rank and one for other programs, the default is
    `--emulate 20 40`.
    """
    counts = whole_numbers("--microbatches", microbatches)
    require_writable(save, TABLE)
    if sum(map(bool, (real, own, work.emulate))) > 1:
        raise UsageError("--real, --emulate and --variant: choose one, real layers or emulated devices")
    if own:
        work = replace(work, emulate=(variant(own).forward, variant(own).backward))
    from pipelab_course import practical9 as course

    command = f"pipelab lab practical9 -r {ranks} -m {microbatches}"
    warning = "" if work.emulate else too_few_cores(ranks, command, others=1)
    if warning and not real:
        work = replace(work, emulate=(20.0, 40.0))
        say(
            f"The devices are emulated, as with --emulate 20 40: {ranks} ranks and other programs need {ranks + 1} "
            f"cores, and this machine has {cores()}. For real layers all the same: {command} --real"
        )
    elif warning:
        say(warning)
    sizes = {"width": work.width, "depth": work.depth, "batch": work.batch}
    made = course.measurements(ranks, counts, **sizes, emulate=work.emulate, steps=work.measured_steps)
    rows, whole = finished(made, len(course.METHODS) * len(counts), "measuring")
    remarks = [warning] if warning and real else []
    if whole:
        share = 1.0 if work.emulate else median(row["core_share"] for row in rows)
        remarks += [] if warning else [why_slow(ranks, share, command)]
        remarks.append(course.surprise(rows))
    below = list(filter(None, remarks))
    _end(rows, whole, lambda rows: asked.below(course.table(rows, below), "practical9", [course.numbers(rows)]), save)


@lab.command()
@grouped
def hw3(
    asked: Asked,
    folder: Folder = Path(),
    start: Start = False,
    depth: Annotated[str, typer.Option(help="one number of layers or several")] = "6,12,24",
    devices: Annotated[
        str | None, typer.Option(help="one number of devices or several; by default all GPUs, without GPUs 2,3,5")
    ] = None,
    width: Annotated[int, typer.Option(min=1, help="features of every layer")] = 1024,
    batch: Annotated[int, typer.Option(min=1, help="rows of the batch")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="steps to measure; the median is shown")] = 5,
    save: SaveTable = None,
) -> None:
    """Split a stack of linear layers by hand.

    Which layer lands where, what `.to()` moves, time and memory.

    Each depth runs in two halves (`i < depth // 2`), and spread evenly over each number of devices. Where there are no
    GPUs, each device is a thread of the processor. With --start, the homework's file: yours to fill.
    """
    if start:
        _start("hw3", folder)
        return
    depths, counts = whole_numbers("--depth", depth), whole_numbers("--devices", devices)
    require_writable(save, TABLE)
    from pipelab_course import hw3 as course

    counts = counts or course.usual_devices()
    made = course.measurements(depths, counts, width=width, batch=batch, steps=steps)
    rows, whole = finished(made, len(depths) * (1 + len(counts)), "measuring")
    _end(rows, whole, lambda rows: asked.below(course.table(rows), "hw3", [course.numbers(rows)]), save)


SaveWords = Annotated[
    list[Path] | None, typer.Option("--save", "-o", help="a file with the table: csv md html txt; repeatable")
]
SaveFigures = Annotated[
    list[Path] | None,
    typer.Option("--save-figures", help="a file with the figures by stages and replicas, or png svg pdf: their plot"),
]
Measure = Annotated[bool, typer.Option("--measure", help="also run it, on emulated devices whose actions take as long")]


@lab.command()
@grouped
def report(
    asked: Asked,
    measure: Measure = False,
    steps: Annotated[int, typer.Option(min=1, help="mini-batches to measure; the median is shown")] = 3,
    save: SaveWords = None,
    save_figures: SaveFigures = None,
) -> None:
    """Check the report on a hybrid-parallel simulator.

    Claim by claim: the simulated value in each reading; in a teacher's copy, the verdict and how it follows.
    """
    answered = bool(_key("report")) and not asked.no_answers
    require_writable(save, _WORDS)
    require_writable(save_figures, TABLE)
    say(claims.SETTING)
    for number, each in enumerate(claims.CLAIMS, start=1):
        say(f"\n{number}. {each.about}: the report says {each.says}" + f": {claims.verdict(each)}" * answered)
        if each.readings:
            echo(claims.text(each, answered))
        if answered and each.remark:
            say(each.remark)
    for note in [claims.summary(claims.CLAIMS)] * answered + asked.notes("report", [{"report": ""}]):
        say(f"\n{note}")
    if save:
        table = claims.table(claims.CLAIMS, answered)
        for path in save:
            wrote(table.save(path))
    say(f"\nThe right figures, {claims.READINGS[0]}, for more devices that do the same work:")
    _figures(claims.figures(), "units", save_figures, [claims.READINGS[0].job()] if measure else [], steps)


@lab.command()
@grouped
def hybrid(
    asked: Asked,
    folder: Folder = Path(),
    start: Start = False,
    stages: Annotated[int, typer.Option("--stages", "-k", min=1, help="stages of the model")] = 3,
    replicas: Annotated[int, typer.Option("--replicas", "-d", min=1, help="pipelines that share the batch")] = 4,
    microbatches: Annotated[int, typer.Option("--microbatches", "-m", min=1, help="of each replica")] = 6,
    forward: Annotated[float, typer.Option("--forward", "-f", min=0, help="ms of a stage's forward")] = 50,
    backward: Annotated[float, typer.Option("--backward", "-b", min=0, help="ms of a stage's backward")] = 80,
    ring_step: Annotated[float, typer.Option(min=0, help="ms of one of the 2 (D - 1) steps of the all-reduce")] = 20,
    schedule: Annotated[str, typer.Option(help="of each pipeline, with one stage on each rank")] = "1f1b",
    codecs: Annotated[str, typer.Option(help="how gradients travel: none fp16 bf16 int8 int8-ef")] = "none,fp16,int8",
    training_steps: Annotated[int, typer.Option(min=1, help="steps of SGD")] = 50,
    measure: Measure = False,
    steps: Annotated[int, typer.Option(min=1, help="mini-batches to measure; the median is shown")] = 3,
    save: SaveWords = None,
    save_figures: SaveFigures = None,
) -> None:
    """Run pipelines times replicas.

    The timeline of each device, gradients around a ring, training, and the figures.

    Each stage has 120 parameters, and really trains; the times are simulated. With --start, a file in which the ring
    is yours to write.
    """
    if start:
        _start("hybrid", folder)
        return
    require_writable(save, _WORDS)
    require_writable(save_figures, TABLE)
    from pipelab_course import compressed

    job = hybrids.Hybrid(
        stages=stages,
        replicas=replicas,
        microbatches=microbatches,
        forward=forward,
        backward=backward,
        ring_step=ring_step,
        schedule=schedules[schedule],
    )
    say(f"Stages x replicas: {stages} x {replicas}; device (s, d) runs stage s of replica d. {job.work}.\n")
    echo(hybrids.timeline(job))
    names = codecs.split(",")
    made = compressed.trainings(stages, replicas, microbatches, names, training_steps, job.schedule)
    rows, whole = finished(made, 1 + len(names), "training")
    below = [compressed.numbers(rows, job)] if whole else []
    _end(rows, whole, lambda rows: asked.below(compressed.table(rows), "hybrid", below), save)
    _figures(compressed.layouts(job), "bytes", save_figures, [job] if measure else [], steps)


def _figures(
    jobs: Sequence[hybrids.Hybrid], memory_unit: str, save: list[Path] | None, run: Sequence[hybrids.Hybrid], steps: int
) -> None:
    """Show the figures of jobs, and run some of them for real."""
    print_and_save(hybrids.table(jobs, memory_unit), save)
    if not run:
        return
    rows, whole = finished(hybrids.measured(run, steps), 2 * len(run), "measuring")
    if rows:
        say(f"On emulated devices, median of {counted(steps, 'mini-batch')}; the gradients match plain training:")
    _end(rows, whole, hybrids.measured_table, None)


def _of_homework(own: Variant) -> dict[str, str]:
    """Return the numbers of homework 4's answers: what its loop prints and runs, and how long two ranks take."""
    order = ruled("orders", own.order, own.microbatches)
    rounds = " ".join([f"F{order[0]}", *(f"F{m} B{before}" for before, m in pairwise(order))])
    found = {"microbatches": str(own.microbatches), "printed": rounds, "ran": f"{rounds} B{order[-1]}"}
    if own.order:
        found |= {"order": HOMEWORKS["hw4"].orders[own.order], "weights": HOMEWORKS["hw4"].weights[own.weights]}
    late = simulate(schedules["1f1b"](3, own.microbatches), Cost(latency=0.5)).makespan
    found["late"] = wording.number(late - 3 * (own.microbatches + 2))
    for name in ("naive", "gpipe", "delayed"):
        found[f"{name}_units"] = f"{wording.number(simulate(schedules[name](2, own.microbatches)).makespan)} units"
    return found


@lab.command()
@grouped
def hw4(asked: Asked, folder: Folder = Path(), start: Start = False, own: Own = "") -> None:
    """Homework 4: write 1F1B yourself.

    Without --start, what it asks for, with the points. With it, the file; it never overwrites yours.
    """
    if start:
        _start("hw4", folder, own)
        return
    rows, mine = [{"task": each.name, "points": each.points} for each in HOMEWORKS["hw4"].tasks], variant(own)
    table = Table(rows, [Column("task"), Column("points")])
    print_and_save(asked.below(table, "hw4", [_of_homework(mine)]), None)
    file, option = HOMEWORKS["hw4"].file, f" --variant {quote(own)}" if own else ""
    if own:
        sizes = f"{mine.microbatches} micro-batches of {counted(mine.rows, 'row')}"
        say(f"{own}'s variant: {sizes}, in this order: {mine.order}. In the gradients, {mine.weights}.\n")
    say(f"pipelab lab hw4 --start{option} writes {file} with its holes, and pipelab grade {file}{option} grades it.")


@lab.command()
@grouped
def hw1(
    asked: Asked,
    folder: Folder = Path(),
    start: Start = False,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="small (1024 x 2), laptop (2048 x 4), large (8192 x 8, 2 GB of parameters), or width x depth, such as "
            "512x4; repeatable; by default small and laptop"
        ),
    ] = None,
    processes: Annotated[str, typer.Option("--processes", "-p", help="the numbers of processes to compare")] = "1,2,4",
    experiment: Annotated[
        str | None,
        typer.Option(
            help="instead: delay (10 ms more in each step), batch (32 to 256 rows), or straggler (20 ms on rank 0)"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="rows of the global batch, which the processes share")] = 64,
    steps: Annotated[int, typer.Option(min=7, help="steps of each run; the first 5 are dropped")] = 35,
    seed: Annotated[int, typer.Option(help="of the weights and the data")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="threads of each process: cores that it may use")] = 1,
    timeout: Annotated[float, typer.Option(min=1, help="seconds that each run may take")] = 600,
    save: SaveTable = None,
) -> None:
    """Measure data parallelism.

    DDP over 1, 2 and 4 processes, Amdahl's law, and DataParallel against DDP.

    All processes share one batch. Times are rank 0's.
    """
    if start:
        _start("hw1", folder)
        return
    counts = whole_numbers("--processes", processes)
    require_writable(save, TABLE)
    from pipelab_course import hw1 as course
    from pipelab_course.ddp import DROPPED

    models = model or ("small", "laptop")
    planned = course.runs(models, counts, experiment=experiment, batch=batch, steps=steps, seed=seed, threads=threads)
    most, each = max(counts), counted(threads, "thread")
    if most * threads > cores() and not planned[0].job.gpus:
        fitting = [str(count) for count in counts if count * threads <= cores()]
        say(
            f"{most} processes of {each} take turns on {counted(cores(), 'core')}: with more processes than cores, "
            f"times show the turns, not data parallelism. With a core for each: --processes {','.join(fitting) or 1}"
        )
    rows, whole = finished(course.measurements(planned, timeout), len(planned), "measuring")
    say(
        f"{'Batches' if experiment == 'batch' else f'One batch of {batch} rows'} shared by all processes, seed {seed}, "
        f"{'a GPU' if planned[0].job.gpus else each} for each process, also for a single one. Median, quantiles and "
        f"standard deviation of {steps - DROPPED} steps by rank 0's clock, after {DROPPED} dropped ones."
    )
    _end(
        rows,
        whole,
        lambda rows: asked.below(course.table(rows, experiment), "hw1", course.numbers(rows, experiment)),
        save,
    )
