"""What `pipelab lab` shows: the course's experiments, row by row."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pipelab.errors import UsageError
from pipelab.labs.grading.tasks import HOMEWORK, start_homework

__all__ = ["finished", "lab"]

Row = TypeVar("Row", bound=Mapping[str, Any])

lab = typer.Typer(help="Run an experiment of the course, and make its table.", no_args_is_help=True)


def finished(rows: Iterator[Row], total: int, what: str) -> tuple[list[Row], bool]:
    """Collect rows as they are made, with progress and an estimate on stderr; Ctrl-C keeps those that are done.

    Args:
        rows: makes one row after the other.
        total: how many rows there will be.
        what: what is being made, for the progress.

    Returns:
        The rows, and whether all of them were made.
    """
    console = Console(stderr=True)
    found: list[Row] = []
    began = time.monotonic()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} of {task.total}, left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    try:
        with bar as progress:
            task = progress.add_task(what, total=total)
            for row in rows:
                found.append(row)
                progress.advance(task)
                if not console.is_terminal and len(found) < total:
                    left = (time.monotonic() - began) / len(found) * (total - len(found))
                    sys.stderr.write(f"{what}: {len(found)} of {total}, about {left:.0f} s left\n")
                    sys.stderr.flush()
    except KeyboardInterrupt:
        sys.stderr.write(f"{what}: stopped; {len(found)} of {total} rows are done\n")
        return found, False
    return found, True


@lab.command()
def hw4(
    folder: Annotated[Path, typer.Argument(help="where to; it is made if need be", show_default=False)] = Path(),
    start: Annotated[bool, typer.Option("--start", help="write the file with its three holes")] = False,
) -> None:
    """Homework 4, write 1F1B yourself: `--start` writes pipeline_homework.py. It never overwrites yours."""
    if not start:
        raise UsageError(f"pipelab lab hw4 --start writes {HOMEWORK}; pipelab grade {HOMEWORK} grades it")
    path = start_homework(folder)
    typer.echo(f"wrote {path}\n\n  python {path}         runs it\n  pipelab grade {path}  grades what it runs")
