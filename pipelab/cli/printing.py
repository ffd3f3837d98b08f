"""Print and save a command's result, and refuse files that cannot be written before any work."""

from __future__ import annotations

import codecs
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipelab import draw, files
from pipelab.checking.checker import Faults, as_plan, check
from pipelab.draw import differences, graph, table, text, wording
from pipelab.errors import clean, require_suffix
from pipelab.plan.fault import ScheduleError
from pipelab.plan.plan import Plan
from pipelab.plan.transfers import Order, Transport
from pipelab.schedule import Schedule
from pipelab.simulation.comparison import Comparison
from pipelab.simulation.wire import lower
from pipelab.table import Table
from pipelab.trace.diff import Diff
from pipelab.trace.trace import Trace

if TYPE_CHECKING:
    from pipelab.cli.options import WiredTimes

_LAYOUT = "\n\t"
"""The control characters that messages and tables are laid out with."""
_PLAIN = dict(zip("│┆▏─┄┬┴┐└┘┤┌▲·…", "|||--+++++++^..", strict=True))
"""What stands for a letter of drawings and messages where the encoding lacks it."""

TIMELINE = ("a timeline", (*draw.FORMATS[draw.TRACE], ".csv"))
RUN = ("a run", (*draw.FORMATS[draw.COMPARISON], ".json"))
COMPARISON, DIFF, FAULTS = ((what, list(draw.FORMATS[what])) for what in (draw.COMPARISON, draw.DIFF, draw.FAULTS))
TABLE, ROWS = ("a table", table.SUFFIXES), ("this table", table.SUFFIXES[:4])
GRAPH = ("a dependency graph", graph.SUFFIXES)


def require_writable(paths: Sequence[Path] | None, kind: tuple[str, Sequence[str]]) -> None:
    """Refuse files that cannot be written; `kind` is the name of the result, and its possible suffixes."""
    for path in paths or []:
        require_suffix(path, *kind)
        files.require_writable(path)


def write_any_letter() -> None:
    """Let the terminal's encoding not end a command: letters that it lacks are replaced, lines and dots by their like.

    A timeline can so be read in ASCII, in Latin-1 and on a Windows code page.
    """
    codecs.register_error("pipelab", _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="pipelab")


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """Return what is written instead of letters that an encoding lacks, one for one, so that columns stay."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(letter, "?") for letter in lacking), error.end


def echo(shown: str, error: bool = False) -> None:
    """Print a text as it is. A reader that has gone, as in `| head -1`, ends the output and not the work."""
    stream = sys.stderr if error else sys.stdout
    try:
        stream.write(f"{shown}\n")
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def save_timeline(trace: Trace, path: Path, times: WiredTimes | None = None, width: str | None = None) -> Path:
    """Write a trace; or as `csv` its plan in PyTorch's notation, with sends and receives if the options order them."""
    if path.suffix.lower() != ".csv" or path.name.lower().endswith(".events.csv"):
        return draw.save(draw.TRACE, trace, path, width)
    if times is None or (times.order, times.transport) == ("pytorch", "buffered"):
        return trace.plan.to_csv(path)
    return lower(trace.plan, times.cost(), order=times.order, transport=times.transport).to_csv(path)


@contextmanager
def faults_saved(subject: Schedule | Plan, order: Order, transport: Transport, save: Sequence[Path]) -> Iterator[None]:
    """If a schedule cannot be simulated, draw its faults instead, to the files that can show them."""
    try:
        yield
    except ScheduleError as error:
        faults = check(subject, order=order, transport=transport)
        if not faults:  # a cost asks for more than the order: overlapped pairs as one slot
            faults = Faults(error.faults, error.subject, as_plan(subject))
        for path in save:
            if path.suffix.lower() in draw.FORMATS[draw.FAULTS]:
                wrote(faults.save(path))
        raise


def print_and_save(shown: Comparison | Diff | Table, save: list[Path] | None, width: str | None = None) -> None:
    """Print a comparison or a table, and write it to files."""
    if isinstance(shown, (Diff, Table)):
        lines = shown.text(_width()) if isinstance(shown, Table) else differences.text(shown, _width())
        echo(f"\n{clean(lines, keep=_LAYOUT)}\n")
    else:
        echo(text.comparison(shown))
    for path in save or []:
        wrote(draw.save(draw.COMPARISON, shown, path, width) if width else shown.save(path))


def say(sentence: str) -> None:
    """Print prose with lines broken between words."""
    lines = clean(sentence, keep=_LAYOUT).splitlines()
    echo("\n".join(textwrap.fill(line, _width(), break_on_hyphens=False) for line in lines))


def _width() -> int:
    return shutil.get_terminal_size((text.PLAIN_WIDTH, 24)).columns if sys.stdout.isatty() else text.PLAIN_WIDTH


def number(value: float | Sequence[float]) -> str:
    """Return a cost in words."""
    return ", ".join(map(wording.number, value)) if isinstance(value, Sequence) else wording.number(value)


def folded(message: str) -> str:
    """Return a message for a terminal: long lines are wrapped and indented, rows of actions are not.

    It may quote a file, so control characters are spelled out.
    """
    message = clean(message, keep=_LAYOUT)
    if not sys.stderr.isatty():
        return message
    width = shutil.get_terminal_size().columns
    lines: list[str] = []
    for line in message.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        lines.append(
            line if is_row(line) else textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)
        )
    return "\n".join(lines)


def is_row(line: str) -> bool:
    """Return whether a message's line holds actions, or marks under them, which are in columns."""
    return " | " in line or not line.strip(" ^")


def wrote(path: Path) -> None:
    """Print which file was written."""
    echo(clean(f"wrote {path}"))
