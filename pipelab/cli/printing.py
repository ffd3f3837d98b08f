"""What the commands print."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import typer

from pipelab.cli.sweeping import Table
from pipelab.draw import text, wording
from pipelab.simulation.comparison import Comparison

__all__ = ["folded", "number", "say", "show", "wrote"]


def show(shown: Comparison | Table, save: list[Path] | None) -> None:
    """Print what lies side by side, and write it."""
    if isinstance(shown, Table):
        typer.echo(f"\n{shown.text(_width())}\n")
    else:
        typer.echo(text.comparison(shown))
    for path in save or []:
        wrote(shown.save(path))


def say(sentence: str) -> None:
    """Print prose, lines broken between words."""
    typer.echo("\n".join(textwrap.fill(line, _width()) for line in sentence.splitlines()))


def _width() -> int:
    """Return how many characters a line of the terminal has."""
    return shutil.get_terminal_size((text.PLAIN_WIDTH, 24)).columns if sys.stdout.isatty() else text.PLAIN_WIDTH


def number(value: float | Sequence[float]) -> str:
    """Return a cost in words."""
    return ", ".join(map(wording.number, value)) if isinstance(value, Sequence) else wording.number(value)


def folded(message: str) -> str:
    """Return a message for a terminal: long lines broken between words and indented, rows of actions as they are."""
    if not sys.stderr.isatty():
        return message
    width = shutil.get_terminal_size().columns
    lines: list[str] = []
    for line in message.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        rows = " | " in line or not line.strip(" ^")
        lines.append(line if rows else textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False))
    return "\n".join(lines)


def wrote(path: Path) -> None:
    """Say which file was written."""
    typer.echo(f"wrote {path}")
