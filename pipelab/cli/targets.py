"""Find what a command is about: a schedule by name, a student's file, a plan in a CSV file."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from pipelab.catalogue import schedules
from pipelab.errors import LoadError, PipelabError
from pipelab.faults import students_line
from pipelab.plan import Plan
from pipelab.schedule import Schedule

__all__ = ["find", "settings"]


def find(target: str, ranks: int, microbatches: int, options: dict[str, Any]) -> Plan | Schedule:
    """Return the schedule or plan that a command line names.

    Args:
        target: a registered name, `file.py:Name`, `file.py` (if it holds one schedule), or `plan.csv`.
        ranks: how many ranks; a plan from a file has its own.
        microbatches: how many micro-batches, likewise.
        options: keyword arguments for the schedule.

    Raises:
        LoadError: if there is no such thing; the message says what there is.
    """
    path, _, name = target.rpartition(":") if ".py:" in target else (target, "", "")
    if path.endswith(".csv"):
        try:
            return Plan.from_csv(_existing(path))
        except UnicodeDecodeError as error:
            raise LoadError(f"{path} is not text: {error}") from error
    if path.endswith(".py"):
        return _make(_schedule_in(_load(_existing(path)), name, path), ranks, microbatches, options)
    if target in schedules:
        return _make(schedules[target], ranks, microbatches, options)
    close = get_close_matches(target.lower(), schedules, n=1)
    guess = f"; did you mean {close[0]}?" if close else ""
    raise LoadError(
        f"{target!r} is no schedule{guess}\n  registered: {', '.join(schedules)}\n"
        "  or a file of your own: my_file.py:MySchedule, plan.csv"
    )


def settings(texts: list[str], option: str = "--set") -> dict[str, Any]:
    """Return `name=value` texts as keyword arguments; values are Python literals, or text.

    Example:
        >>> settings(["stages_per_rank=2", "policy=eager"])
        {'stages_per_rank': 2, 'policy': 'eager'}

    Raises:
        LoadError: if a text has no `=`.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise LoadError(f"{option} {text}: expected name=value, such as {option} stages_per_rank=2")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def _existing(path: str) -> Path:
    if not Path(path).is_file():
        here = ", ".join(sorted(found.name for found in Path(path).parent.glob(f"*{Path(path).suffix}"))[:8])
        raise LoadError(f"there is no file {path}" + (f"; beside it: {here}" if here else ""))
    return Path(path)


def _load(path: Path) -> ModuleType:
    """Import a student's file.

    Raises:
        LoadError: with the file's line, if it cannot be imported.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise LoadError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        line = (error.text or "").rstrip()
        caret = f"\n    {' ' * ((error.offset or 1) - 1)}^" if line else ""
        raise LoadError(f"{error.filename}, line {error.lineno}: {error.msg}\n    {line}{caret}") from error
    except (Exception, SystemExit) as error:
        raise LoadError(
            f"importing {path} raised {type(error).__name__}: {error}\n  at {students_line(error)}"
        ) from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def _schedule_in(module: ModuleType, name: str, path: str) -> type[Schedule]:
    """Return the schedule class with this name, or the only one."""
    own = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Schedule) and value.__module__ == module.__name__
    }
    if name in own:
        return own[name]
    if not name and len(own) == 1:
        return next(iter(own.values()))
    if name and name in vars(module):
        raise LoadError(f"{name} in {path} is no schedule: write class {name}(pipelab.Schedule)")
    there = f"it holds {', '.join(own)}" if own else "it holds no class that derives from pipelab.Schedule"
    close = get_close_matches(name, own, n=1) if name else []
    move = (
        f"; did you mean {path}:{close[0]}?" if close else ("; name one: " + f"{path}:{next(iter(own))}" if own else "")
    )
    raise LoadError(f"{path} has no schedule {name!r}: {there}{move}" if name else f"{path}: {there}{move}")


def _make(kind: type[Schedule], ranks: int, microbatches: int, options: dict[str, Any]) -> Schedule:
    if inspect.isabstract(kind):
        raise LoadError(f"{kind.__name__} has no method actions(self, rank): write one that yields F(m) and B(m)")
    parameters = inspect.signature(kind).parameters
    taken = [name for name in parameters if name not in ("ranks", "microbatches")]
    strangers = [name for name in options if name not in taken]
    if strangers and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        raise LoadError(
            f"{kind.__name__} takes no {', '.join(strangers)}\n  --set takes: {', '.join(taken) or 'nothing'}"
        )
    try:
        schedule = kind(ranks, microbatches, **options)
        repr(schedule)
    except PipelabError:
        raise
    except Exception as error:
        raise LoadError(
            f"making {kind.__name__}(ranks={ranks}, microbatches={microbatches}) raised {type(error).__name__}: "
            f"{error}\n"
            f"  at {students_line(error)}\n"
            "  try: a schedule with an __init__ of its own calls super().__init__(ranks, microbatches) first"
        ) from error
    return schedule
