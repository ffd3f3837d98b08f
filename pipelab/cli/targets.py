"""Find a command's target: a schedule by name, a student's file, or a plan or a trace in a file."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from pipelab.catalogue import schedules
from pipelab.errors import PipelabError, UsageError
from pipelab.plan.fault import line_of_function, students_line
from pipelab.plan.plan import Plan
from pipelab.schedule import Schedule
from pipelab.trace.trace import Trace

__all__ = ["find", "has_sizes", "settings"]

_MICROBATCHES = 8

_MOST_BYTES = 1 << 20
"""No schedule is a longer file of Python."""

_PICTURE = "it is a picture, or text; save the trace as .json, or the plan as .csv, and give that"
_NO_SCHEDULES = dict.fromkeys((".html", ".svg", ".png", ".pdf", ".txt"), _PICTURE) | dict.fromkeys(
    (".pt", ".pth"), "it is a saved state; give the file of the schedule, my_file.py:MySchedule"
)
"""Why files with these suffixes hold no schedule; a Python file of the same name is not tried."""

_CLASSES = {kind.__name__: kind for kind in schedules.values()}


def find(
    target: str, ranks: int | None, microbatches: int | None, options: dict[str, Any], usual_ranks: int = 4
) -> Schedule | Plan | Trace:
    """Return the schedule, plan or trace that a command line names.

    Args:
        target: a registered name, `file.py:Name`, `file.py` (if it holds one schedule), `plan.csv` or `trace.json`;
            also a schedule's class (`GPipe`) and a module (`file:Name`, `file.Name`).
        ranks: how many ranks; `None` for the default. A file's plan has its own number.
        microbatches: how many micro-batches; `None` for the default. A file's plan has its own number.
        options: keyword arguments for the schedule.
        usual_ranks: the default number of ranks.

    Raises:
        UsageError: if the target does not exist; the message lists what does.
    """
    if has_sizes(target):
        return _read(target, {"--ranks": ranks, "--microbatches": microbatches, "--set": options})
    sizes = (ranks or usual_ranks, microbatches or _MICROBATCHES, options)
    kind = schedules.get(target) or _CLASSES.get(target.removeprefix("pipelab."))
    if kind is not None:
        return _make(kind, *sizes)
    suffix = Path(target).suffix
    if suffix in _NO_SCHEDULES:
        raise UsageError(f"{_existing(target)} holds no schedule: {_NO_SCHEDULES[suffix]}")
    file = _student_file(target)
    if file is not None:
        path, name = file
        return _make(_schedule_in(_load(_existing(path)), name, path), *sizes)
    raise UsageError(
        f"{target!r} is not a schedule{_guess(target)}\n  registered: {', '.join(schedules)}\n"
        "  or your own file: my_file.py:MySchedule, plan.csv"
    )


def _read(path: str, given: dict[str, Any]) -> Plan | Trace:
    """Return the plan or the trace of a file, which has its own sizes; refuse others."""
    file = _existing(path)
    found = Plan.from_csv(file) if path.endswith(".csv") else Trace.load(file)
    superfluous = [option for option, value in given.items() if value]
    if superfluous:
        plan = found if isinstance(found, Plan) else found.plan
        raise UsageError(
            f"{path} has its own sizes, {plan.ranks} ranks and {plan.microbatches} micro-batches: "
            f"leave out {' and '.join(superfluous)}"
        )
    return found


def _student_file(target: str) -> tuple[str, str] | None:
    """Return the file and name in `mine.py`, `mine.py:X`, `mine:X` or `mine.X`; `None` if no file is meant."""
    if match := re.fullmatch(r"(.*\.py)(?:[:.]+(\w*))?", target):
        return match[1], match[2] or ""
    module, separator, name = target.rpartition(":") if ":" in target else target.rpartition(".")
    for stem, rest in ((target, ""), (module.rstrip(":"), name if separator else "")):
        for path in (f"{stem}.py", f"{stem.replace('.', '/')}.py"):
            if stem and Path(path).is_file():
                return path, rest
    return None


def _guess(target: str) -> str:
    """Guess what was meant: a registered schedule, a file in this folder, or a class in one."""
    word = target.replace("::", ":").split(":")[0].removesuffix(".py")
    files = {path.stem.lower(): path for path in sorted(Path().glob("*.py")) if path.is_file()}
    if close := schedules.nearest(target):
        return f"; did you mean {close}?"
    for path in files.values():
        if path.stat().st_size <= _MOST_BYTES and f"\nclass {target}(" in path.read_text("utf-8", "replace"):
            return f"; did you mean {path}:{target}?"
    stems = get_close_matches(re.split(r"[.]", word.lower())[0], files, n=1)
    return f"; did you mean {files[stems[0]]}?" if stems else ""


def has_sizes(target: str) -> bool:
    """Return whether a target is a file that has its own numbers of ranks and micro-batches."""
    return target.endswith((".csv", ".json"))


def settings(texts: list[str], option: str = "--set") -> dict[str, Any]:
    """Return `name=value` texts as keyword arguments; values are Python literals, or text.

    Example:
        >>> settings(["stages_per_rank=2", "policy=eager"])
        {'stages_per_rank': 2, 'policy': 'eager'}

    Raises:
        UsageError: if a text has no `=`.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"{option} {text}: expected name=value, such as {option} stages_per_rank=2")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def _existing(path: str) -> Path:
    file = Path(path)
    if file.exists() and not file.is_file():
        what = "a folder" if file.is_dir() else "a pipe or a device"
        raise UsageError(f"{path} is {what}, not a file: name a file, my_file.py:MySchedule, plan.csv or trace.json")
    if not file.is_file():
        here = {found.name.lower(): found.name for found in sorted(file.parent.glob(f"*{file.suffix}"))}
        close = [here[name] for name in get_close_matches(file.name.lower(), here, n=1)]
        beside = f"; beside it: {', '.join([*here.values()][:8])}" if here else ""
        raise UsageError(
            f"there is no file {path}" + (f"; did you mean {file.with_name(close[0])}?" if close else beside)
        )
    return file


def _load(path: Path) -> ModuleType:
    """Import a student's file; report its line if it cannot be imported."""
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise UsageError(f"{path} has {size:,} bytes, a schedule at most {_MOST_BYTES:,}: is it the right file?")
    with path.open("rb") as file:
        if b"\0" in file.read():
            raise UsageError(f"{path} is not text, but a binary file: give a file of Python, my_file.py:MySchedule")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        line = (error.text or "").rstrip()
        caret = f"\n    {' ' * ((error.offset or 1) - 1)}^" if line else ""
        raise UsageError(f"{error.filename}, line {error.lineno}: {error.msg}\n    {line}{caret}") from error
    except (Exception, SystemExit) as error:
        where = f"\n  at {students_line(error)}"
        raise UsageError(f"importing {path} raised {type(error).__name__}: {error}{where}") from error
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
        raise UsageError(f"{name} in {path} is not a schedule: write class {name}(pipelab.Schedule)")
    there = f"it holds {', '.join(own)}" if own else "it holds no class that derives from pipelab.Schedule"
    close = get_close_matches(name, own, n=1) if name else []
    name_one = f"; name one: {path}:{next(iter(own))}" if own else ""
    move = f"; did you mean {path}:{close[0]}?" if close else name_one
    raise UsageError(f"{path} has no schedule {name!r}: {there}{move}" if name else f"{path}: {there}{move}")


def _make(kind: type[Schedule], ranks: int, microbatches: int, options: dict[str, Any]) -> Schedule:
    if inspect.isabstract(kind):
        raise UsageError(f"{kind.__name__} has no method actions(self, rank): write one that yields F(m) and B(m)")
    arguments = _arguments(kind, ranks, microbatches, options)
    try:
        schedule = kind(*arguments.args, **arguments.kwargs)
        repr(schedule)
    except PipelabError:
        raise
    except Exception as error:
        unmade = isinstance(error, AttributeError) and isinstance(error.obj, kind)
        hint = "\n  try: a schedule with an __init__ of its own calls super().__init__(ranks, microbatches) first"
        raise UsageError(
            f"making {kind.__name__}(ranks={ranks}, microbatches={microbatches}) raised {type(error).__name__}: "
            f"{error}\n  at {students_line(error, kind.__init__)}{hint * unmade}"
        ) from error
    return schedule


def _arguments(kind: type[Schedule], ranks: int, microbatches: int, options: dict[str, Any]) -> inspect.BoundArguments:
    """Return the arguments for a schedule's class: the sizes by name if it names them, otherwise in order."""
    signature = inspect.signature(kind)
    parameters = signature.parameters.values()
    sizes = {"ranks": ranks, "microbatches": microbatches}
    taken = [each.name for each in parameters if each.name not in sizes]
    strangers = [name for name in options if name not in taken]
    if strangers and not any(each.kind is each.VAR_KEYWORD for each in parameters):
        raise UsageError(
            f"{kind.__name__} takes no {', '.join(strangers)}\n  --set takes: {', '.join(taken) or 'nothing'}"
        )
    place = line_of_function(kind.__init__)
    try:
        if sizes.keys() <= signature.parameters.keys():
            given = signature.bind_partial(**sizes, **options)
        else:
            given = signature.bind_partial(*sizes.values(), **options)
    except TypeError as error:
        raise UsageError(
            f"pipelab calls {kind.__name__}(ranks, microbatches), but it is written {kind.__name__}{signature}\n"
            f"  at {place}\n"
            "  try: write def __init__(self, ranks, microbatches), and in it super().__init__(ranks, microbatches)"
        ) from error
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [
        each.name
        for each in parameters
        if each.name not in given.arguments and each.default is each.empty and each.kind not in optional
    ]
    if missing:
        raise UsageError(
            f"{kind.__name__} needs a value for {' and '.join(missing)}: its __init__ has no default\n  at {place}\n"
            f"  try: {' '.join(f'--set {name}=...' for name in missing)}"
        )
    return given
