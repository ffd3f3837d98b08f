"""A student's Python file: whether it can hold a schedule, its import, and the class in it."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import ModuleType

from pipelab.errors import UsageError
from pipelab.labs.grading.schedules import own_schedules
from pipelab.plan.fault import in_a_library, students_line
from pipelab.schedule import Schedule

_LONG_IMPORT = 3.0
"""After so many seconds of importing a student's file, a line says what is happening."""
_STILL_IMPORTING = (
    "{} is still being imported, which runs it from its first line to its last: put training under "
    'if __name__ == "__main__", or the schedule in a file of its own\n'
)
MOST_BYTES = 1 << 20
"""No schedule is a longer file of Python."""


def class_in(path: str, name: str) -> type[Schedule]:
    """Return the schedule with this name in a student's file, or the only one if the name is empty.

    Raises:
        UsageError: if there is no such file or schedule, or if the file cannot be imported.
    """
    file = existing(path)
    if (size := file.stat().st_size) > MOST_BYTES:
        raise UsageError(f"{path} has {size:,} bytes, a schedule at most {MOST_BYTES:,}: is it the right file?")
    content = file.read_bytes()
    if b"\0" in content:
        raise UsageError(f"{path} is not text, but a binary file: give a file of Python, my_file.py:MySchedule")
    return _schedule_in(_load(file, file.resolve(), content), name, path)


def existing(path: str) -> Path:
    """Return the path of a file.

    Raises:
        UsageError: if there is none; the message names those beside it.
    """
    file = Path(path)
    if file.exists() and not file.is_file():
        what = "a folder" if file.is_dir() else "a pipe or a device"
        raise UsageError(f"{path} is {what}, not a file: name a file, such as my_file.py, plan.csv or trace.json")
    if not file.is_file():
        found = [each.name for each in sorted(file.parent.glob(f"*{file.suffix}")) if each.is_file()]
        here = {name.lower(): name for name in found}
        close = [here[name] for name in get_close_matches(file.name.lower(), here, n=1)]
        beside = f"; beside it: {', '.join([*here.values()][:8])}" if here else ""
        link = f": it is a link to {file.readlink()}" if file.is_symlink() else ""
        move = f"; did you mean {file.with_name(close[0])}?" if close else beside
        raise UsageError(f"there is no file {path}{link}{move}")
    return file


@cache
def _load(path: Path, absolute: Path, content: bytes) -> ModuleType:  # noqa: ARG001 - both tell apart what is cached
    """Import a student's file, once for each place and content; report its line if it cannot be imported."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    slow = threading.Timer(_LONG_IMPORT, sys.stderr.write, [_STILL_IMPORTING.format(path)])
    slow.daemon = True
    slow.start()
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(_unimported(path, error)) from error
    finally:
        slow.cancel()
        sys.path.remove(str(path.parent.resolve()))
    return module


def _unimported(path: Path, error: BaseException) -> str:
    """Return what a student's file raised when it was imported, at which of the student's own lines."""
    file = error.filename or "" if isinstance(error, SyntaxError) else ""
    if isinstance(error, SyntaxError) and Path(file).is_file() and not in_a_library(file):
        line = (error.text or "").rstrip()
        caret = f"\n    {' ' * ((error.offset or 1) - 1)}^" if line else ""
        return f"{file}, line {error.lineno}: {error.msg}\n    {line}{caret}"
    words = f": {error}" if str(error) else ""
    return (
        f"importing {path} raised {type(error).__name__}{words}\n  at {students_line(error)}\n"
        '  try: fix that line; if the schedule does not need it, put it under if __name__ == "__main__"'
    )


def _schedule_in(module: ModuleType, name: str, path: str) -> type[Schedule]:
    """Return the schedule class with this name, or the only one."""
    own = own_schedules(module)
    if name in own or (len(own) == 1 and not name):
        return own[name or next(iter(own))]
    raise _not_there(path, name, list(own), vars(module))


def _not_there(path: str, name: str, own: Sequence[str], bound: Collection[str]) -> UsageError:
    """Return the error of a file without the schedule that was asked for.

    Args:
        path: the file.
        name: the name that was asked for, if any.
        own: the schedules in the file.
        bound: all names in the file.
    """
    if name and name in bound:
        return UsageError(f"{name} in {path} is not a schedule: write class {name}(pipelab.Schedule)")
    there = f"it holds {', '.join(own)}" if own else "it holds no class that derives from pipelab.Schedule"
    close = get_close_matches(name, own, n=1) if name else []
    name_one = f"; name one: {path}:{own[0]}" if own else ""
    move = f"; did you mean {path}:{close[0]}?" if close else name_one
    return UsageError(f"{path} has no schedule {name!r}: {there}{move}" if name else f"{path}: {there}{move}")
