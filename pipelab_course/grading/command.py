"""What `pipelab grade` shows and writes."""

from __future__ import annotations

import json as notation
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelab import files
from pipelab.cli.options import Costs, Times
from pipelab.cli.printing import echo, folded, print_and_save, require_writable, wrote
from pipelab.cli.targets import settings
from pipelab.errors import PipelabError, UsageError, clean
from pipelab.simulation.cost import Cost
from pipelab_course.commands import STUDENTS, finished
from pipelab_course.grading import report
from pipelab_course.grading.runner import Limits, Submission, grade, sandbox, submissions
from pipelab_course.grading.tasks import HOMEWORKS, Assignment, Grade

_teachers = partial(typer.Option, hidden=STUDENTS)
"""An option that the help of a students' copy leaves out."""


def grade_command(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar=f"[{'|'.join(HOMEWORKS)}] TARGET",
            help="a homework's file, my_file.py:MySchedule, or a folder of submissions. The function or class "
            "says which homework it is; name it if there is a doubt. With its name alone: the points, with reasons",
            show_default=False,
        ),
    ] = None,
    par: Annotated[
        list[str] | None,
        typer.Option(
            help="name=number: what a good schedule reaches, as par in golf. Up to it, all points; above it, points x "
            "par / found. Names: makespan, peak (micro-batches held by the fullest rank), bubble; repeatable"
        ),
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-r", min=1, help="the schedule's size that the pars are for")] = 4,
    microbatches: Annotated[
        int, typer.Option("--microbatches", "-m", min=1, help="the schedule's size that the pars are for")
    ] = 8,
    costs: Costs = None,
    variant: Annotated[str, typer.Option(help="homework 4's variant of this name, as in lab hw4")] = "",
    variants: Annotated[
        bool, typer.Option("--variants", help="homework 4: each file or folder has the variant of its own name")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="write everything about the grade, or the grades, as JSON")] = None,
    marks: Annotated[Path | None, _teachers(help="a TOML file with other points, as printed without a target")] = None,
    seed: Annotated[int, _teachers(help="of the data and the hidden sizes; keep yours to yourself")] = 0,
    seconds: Annotated[
        float | None, _teachers(min=0.1, help="time for each submission; default 5, for homework 1 30")
    ] = None,
    memory: Annotated[int, _teachers(min=64, help="megabytes for each submission, beside PyTorch's")] = 1024,
    workers: Annotated[int, _teachers(min=1, help="submissions of a folder that run at the same time")] = 2,
    gradescope: Annotated[
        Path | None,
        _teachers(help="write Gradescope's results.json into this folder; without a target, its autograder.zip"),
    ] = None,
    classroom50: Annotated[
        Path | None, _teachers(help="write Classroom 50's result.json to this file; a failed grade exits with 0")
    ] = None,
    save: Annotated[
        list[Path] | None, _teachers("--save", "-o", help="write a table of the grades: csv txt md; repeatable")
    ] = None,
) -> None:
    """Grade a homework, or a schedule against its pars.

    By what it runs, never by what it prints.

    The exit code is 0 if everything passed, 1 if something failed, and 2 if something could not be graded or Ctrl-C
    stopped it. The submission runs in a process with limits; on Linux, in a sandbox if bubblewrap is installed.
    """
    out = _Files(json, gradescope, classroom50, save or [])
    grades: list[Grade] = []
    try:
        out.require_writable()
        pars = settings(par or [], "--par")
        homework, target = _named(targets or [], bool(pars))
        where, name = _split(target)
        schedule, cost = name if par or name else None, asdict(Times(costs=costs).cost())
        points = files.read_data(marks, "a file of points", toml=True).get(homework) if marks else {}
        if not isinstance(points, dict):
            raise UsageError(f"{marks} has no part [{homework}]: pipelab grade {homework} prints one to begin with")
        assignment = Assignment(schedule, pars, ranks, microbatches, cost, seed, variant, homework, points)
        limits = Limits(seconds or HOMEWORKS[homework].seconds, memory)
        if gradescope is not None:
            gradescope.mkdir(parents=True, exist_ok=True)
        if where is None:
            _untargeted(assignment, limits, name, gradescope, bool(targets))
            return
        found, skipped = submissions(where, out.alone, HOMEWORKS[homework].file)
        several = not (out.alone or where.is_file() or (where / HOMEWORKS[homework].file).exists())
        found = _variants(found, variant, variants)
        if several and not sandbox():
            echo(_OPEN, error=True)
        for each, why in skipped.items():
            echo(clean(f"skipped: {each} ({why})"))
        shown = _shown(grade(found, assignment, limits, workers), found if several else [])
        complete = finished(_kept(shown, grades, partial(out.write, grades, several, skipped)), len(found), "graded")[1]
        if several:
            print_and_save(report.failures(grades), None)
        for path in out.write(grades, several, skipped):
            wrote(path)
    except (PipelabError, OSError) as error:
        echo(folded(f"could not grade: {error}"), error=True)
        if not grades:
            out.write_failure(" ".join(targets or ["no file"]), error)
        raise typer.Exit(2) from error
    if not complete or any(made.ambiguous for made in grades):
        raise typer.Exit(2)
    if classroom50 is None and not all(made.passed for made in grades):  # there, 1 says that the grader has failed
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Files:
    """Where grades go: files in several forms, and tables."""

    json: Path | None
    gradescope: Path | None
    classroom50: Path | None
    tables: Sequence[Path]

    @property
    def alone(self) -> bool:
        """Whether a form has room for one submission only."""
        return self.gradescope is not None or self.classroom50 is not None

    @property
    def results(self) -> Path | None:
        """Gradescope's file."""
        return self.gradescope and self.gradescope / "results.json"

    def require_writable(self) -> None:
        """Refuse files that cannot be written."""
        require_writable(self.tables, ("a table of grades", (".csv", ".txt", ".md")))
        for path in filter(None, (self.json, self.classroom50)):
            files.require_writable(path)

    def write(self, grades: Sequence[Grade], several: bool, skipped: Mapping[str, str]) -> list[Path]:
        """Write all files with the grades so far; return their paths."""
        forms = ((self.json, report.as_json), (self.results, report.gradescope), (self.classroom50, report.classroom50))
        written = [
            _write_json(path, [*map(form, grades)] if several else form(grades[0]))
            for path, form in forms
            if path is not None and (grades or several)
        ]
        return written + [report.table(grades, skipped).save(path) for path in self.tables]

    def write_failure(self, target: str, error: Exception) -> None:
        """Write what Gradescope shows instead of its own error."""
        if self.results is not None and self.results.parent.is_dir():
            failed = Grade(target, reason=f"could not grade: {error}")
            wrote(_write_json(self.results, report.gradescope(failed)))


_OPEN = (
    "bubblewrap is missing here, or may not start: submissions can read your files, use the network and end your "
    "processes\n  try: sudo apt install bubblewrap; or grade in a container"
)


def _kept(shown: Iterator[Grade], grades: list[Grade], write: Callable[[], object]) -> Iterator[Grade]:
    """Collect grades, and write all files after each: a disk that is full now may not be so at the end."""
    for made in shown:
        grades.append(made)
        with suppress(OSError):
            write()
        yield made


def _write_json(path: Path, value: Any) -> Path:
    return files.write(path, notation.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _untargeted(assignment: Assignment, limits: Limits, name: str, gradescope: Path | None, named: bool) -> None:
    """Write Gradescope's archive, or print the points of the homework that was named."""
    homework = assignment.homework
    marks = assignment.weighed().marks(homework)
    if gradescope is not None:
        given = marks if assignment.points else ""
        wrote(report.write_bundle(gradescope, homework, name, _options(assignment, limits), given))
    elif named:
        echo(marks)
    else:
        raise UsageError("name a file, such as pipelab grade pipeline_homework.py")


def _named(targets: Sequence[str], schedule: bool = False) -> tuple[str, str | None]:
    """Return the homework and the target that are named; a file's name or what it defines may say which homework it is.

    Example:
        >>> _named(["hw4", "handed_in"]), _named(["my.py:Mine"]), _named(["hw4"])
        (('hw4', 'handed_in'), ('hw4', 'my.py:Mine'), ('hw4', None))
    """
    named = [each for each in targets[:1] if each in HOMEWORKS]
    target, *more = [*targets[len(named) :], None]
    if len(more) > 1:
        raise UsageError(f"{target} and {more[0]}: grade one file or folder at a time")
    path = Path(target or "")
    named += [name for name, each in HOMEWORKS.items() if path.name == each.file or (path / each.file).exists()]
    if named or schedule or target is None or not path.exists():
        return (named or ["hw4"])[0], target
    files = [path] if path.is_file() else [*path.glob("*.py"), *path.glob("*/*.py")]
    found = {name for each in files for name in _defined(each)}
    if len(found) > 1 or (not found and path.suffix == ".py"):
        words = {name: f"{each.defines} ({name})" for name, each in HOMEWORKS.items()}
        what = " and ".join(words[name] for name in words if name in found) or f"none of {', '.join(words.values())}"
        raise UsageError(
            f"{path} defines {what}, so the homework is not clear\n  try: pipelab grade "
            f"{min(found, default='hw3')} {path}, with its name; for a schedule, {path}:MySchedule"
        )
    return found.pop() if len(found) == 1 else "hw4", target


def _variants(found: Sequence[Submission], one: str, own: bool) -> list[Submission]:
    """Return the submissions with the variants of their own names, if asked; one name for several is refused."""
    if one and len(found) > 1:
        raise UsageError(f"--variant {one} is one name for {len(found)} files\n  try: --variants, for their own")
    return [replace(each, variant=own * Path(each.name).name.removesuffix(".py")) for each in found]


def _defined(path: Path) -> list[str]:
    """Return the homeworks whose function or class a file defines, without running it."""
    text = ""
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(1 << 20)
    start = r"^(?:async def|def|class) "
    return [name for name, each in HOMEWORKS.items() if re.search(rf"{start}{each.defines}\b", text, re.MULTILINE)]


def _split(target: str | None) -> tuple[Path | None, str]:
    """Return the path in a target, and the name of a schedule if it has one.

    Example:
        >>> _split("my.py:MySchedule")[1], _split("handed_in/:MySchedule")[1], _split("pipeline_homework.py")[1]
        ('MySchedule', 'MySchedule', '')
    """
    if target is None:
        return None, ""
    path, colon, name = target.rpartition(":")
    return (Path(path), name) if colon and name.isidentifier() and not Path(target).exists() else (Path(target), "")


def _options(assignment: Assignment, limits: Limits) -> list[str]:
    """Return the options that grade in the same way again, on Gradescope."""
    options: dict[str, object] = {"--seed": assignment.seed, "--seconds": limits.seconds, "--memory": limits.memory}
    options |= {"--variant": assignment.variant} if assignment.variant else {}
    if assignment.schedule is not None:
        options |= {"--ranks": assignment.ranks, "--microbatches": assignment.microbatches}
    usual = asdict(Cost())
    repeated = [("--par", each) for each in assignment.pars.items()]
    repeated += [("--cost", (name, value)) for name, value in assignment.cost.items() if value != usual[name]]
    words = [word for option, value in options.items() for word in (option, str(value))]
    return words + [word for option, (name, value) in repeated for word in (option, f"{name}={value}")]


def _shown(grades: Iterator[Grade], several: Sequence[Submission]) -> Iterator[Grade]:
    """Print each grade as soon as it is there: in full, or one of several in one line."""
    width = max((len(submission.name) for submission in several), default=0)
    for made in grades:
        if several:
            echo(clean(f"{made.submission:{width}}  {report.as_line(made)}"))
        elif made.ambiguous:
            echo(folded(f"could not grade: {made.submission}: {made.reason}"), error=True)
        else:
            echo(clean(report.as_text(made), keep="\n"))
        yield made
