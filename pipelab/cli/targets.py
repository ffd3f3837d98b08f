"""Find a command's target: a schedule by name, a student's file, a plan as text, or a plan or a trace in a file."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from glob import has_magic
from pathlib import Path
from types import ModuleType
from typing import Any

from pipelab.catalogue import beside, schedules
from pipelab.errors import PipelabError, UsageError
from pipelab.files import text_of
from pipelab.hub import profiles
from pipelab.plan.csv_notation import is_plan, lines_of, read_rows
from pipelab.plan.fault import in_a_library, line_of_function, students_line
from pipelab.plan.plan import Plan
from pipelab.schedule import Schedule, own_schedules
from pipelab.trace.trace import Trace

_MICROBATCHES = 8
_STDIN = "-"
_CALL = re.compile(r"(.*?\w)\((.*)\)", re.DOTALL)
"""A target with parameters, such as `mine.py:Lagged(lag=3)`."""

_TRACE = re.compile(r"(.+\.json(?:\.gz)?)(?:\(step=([0-9]{1,9})\))?", re.DOTALL)
"""A saved trace, a profile, or a pattern for the profiles of all ranks; maybe with the number of a step."""

_PICTURE = "it is a picture, or text; save the trace as .json, or the plan as .csv, and give that"
_NO_SCHEDULES = dict.fromkeys((".html", ".svg", ".png", ".pdf", ".txt"), _PICTURE) | dict.fromkeys(
    (".pt", ".pth"), "it is a saved state; give the file of the schedule, my_file.py:MySchedule"
)
"""Why files with these suffixes hold no schedule; a Python file of the same name is not tried."""

_CLASSES = {kind.__name__: kind for kind in [*schedules.values(), *beside.values()]}


def find(
    target: str, ranks: int | None = None, microbatches: int | None = None, usual_ranks: int = 4
) -> Schedule | Plan | Trace:
    """Return the schedule, plan or trace that a command line names."""
    if has_sizes(target):
        return _read(target, {"--ranks": ranks, "--microbatches": microbatches})
    name, own = _parameters(target)
    for size, option in (("ranks", ranks), ("microbatches", microbatches)):
        if size in own and option is not None and option != own[size]:
            raise UsageError(f"{target} has its own number of {size}: leave out --{size} {option}")
    ranks, microbatches = own.pop("ranks", ranks or usual_ranks), own.pop("microbatches", microbatches or _MICROBATCHES)
    return _make(_class_of(name), ranks, microbatches, own)


def with_settings(
    targets: Sequence[str], texts: Iterable[str], ranks: int | None, microbatches: int | None, usual_ranks: int = 4
) -> list[str]:
    """Return the targets with the parameters that `--set` gives; of several targets, those that accept a parameter.

    If none does, all that have it get it: making them then explains what is wrong.

    Example:
        >>> with_settings(["1f1b", "interleaved-1f1b"], ["stages_per_rank=4"], ranks=4, microbatches=8)
        ['1f1b', 'interleaved-1f1b(stages_per_rank=4)']
    """
    given = settings(texts)
    calls = [(target, {}) if has_sizes(target) else _parameters(target) for target in targets]
    for name, value in given.items():
        open_to = [(target, own) for target, own in calls if not has_sizes(target) and name not in own]
        if not open_to:
            raise UsageError(f"{' and '.join(map(_title, targets))} has its own parameters: leave out --set {name}")
        reached = [own for _, own in open_to]
        if len(calls) > 1:
            having: list[dict[str, Any]] = []
            accepting: list[dict[str, Any]] = []
            for target, own in open_to:
                taken = inspect.signature(_class_of(target)).parameters
                if name in taken:
                    having.append(own)
                    tried = _title(target, {each: given[each] for each in given if each in taken} | own)
                    if _accepts(tried, ranks, microbatches, usual_ranks):
                        accepting.append(own)
            reached = accepting or having or reached
        for own in reached:
            own[name] = value
    return [_title(target, own) for target, own in calls]


def _accepts(target: str, *sizes: Any) -> bool:
    """Return whether a schedule accepts its parameters: 1F1B has `stages_per_rank`, but it must be 1."""
    try:
        find(target, *sizes)
    except UsageError:
        return False
    return True


def _title(target: str, own: dict[str, Any] | None = None) -> str:
    if is_plan(target):
        return "; ".join(map(str.strip, lines_of(target)))
    return f"{target}({', '.join(f'{name}={value!r}' for name, value in own.items())})" if own else target


def _parameters(target: str) -> tuple[str, dict[str, Any]]:
    """Return a target without its parameters, and the parameters: values are Python literals, or text.

    Example:
        >>> _parameters("mine.py:Lagged(lag=3, policy=eager)")
        ('mine.py:Lagged', {'lag': 3, 'policy': 'eager'})
    """
    match = _CALL.fullmatch(target)
    if match is None:
        return target, {}
    source = f"_({match[2]})"
    try:
        call = ast.parse(source, mode="eval").body
    except SyntaxError:
        call = None
    simple = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args
    if not isinstance(call, ast.Call) or not simple or not all(each.arg for each in call.keywords):
        raise UsageError(
            f"{target}: expected name=value between the parentheses, such as {match[1]}(stages_per_rank=2)"
        )
    return match[1], {str(each.arg): _value(ast.get_source_segment(source, each.value) or "") for each in call.keywords}


def _read(target: str, given: dict[str, Any]) -> Plan | Trace:
    """Return a plan or a trace, which has its own sizes; refuse others."""
    if target == _STDIN:
        if sys.stdin.isatty():
            sys.stderr.write("a plan, one line for each rank; Ctrl-D ends it:\n")
        rows = read_rows(text_of(sys.stdin.buffer, "stdin"), "stdin")
        if not rows:
            raise UsageError("stdin holds no plan: write pipelab check - < plan.csv, or pipe one line for each rank")
        found: Plan | Trace = Plan(rows, name="stdin")
    elif is_plan(target):
        found = Plan.parse(target)
    else:
        trace = _TRACE.fullmatch(target)
        if trace is None:
            found = Plan.from_csv(existing(target))
        else:
            file = trace[1] if has_magic(trace[1]) else existing(trace[1])
            found = profiles.load(file, None if trace[2] is None else int(trace[2]))
    superfluous = [option for option, value in given.items() if value]
    if superfluous:
        plan = found if isinstance(found, Plan) else found.plan
        raise UsageError(
            f"{_title(target)} has its own sizes, {plan.ranks} ranks and {plan.microbatches} micro-batches: "
            f"leave out {' and '.join(superfluous)}"
        )
    return found


def _class_of(target: str) -> type[Schedule]:
    """Return the class that a target names: a registered schedule's, or one in a student's file."""
    kind = {**schedules, **beside}.get(target) or _CLASSES.get(target.removeprefix("pipelab."))
    if kind is not None:
        return kind
    suffix = Path(target).suffix
    if suffix in _NO_SCHEDULES:
        raise UsageError(f"{existing(target)} holds no schedule: {_NO_SCHEDULES[suffix]}")
    named = _student_file(target)
    if named is None:
        raise UsageError(
            f"{target!r} is not a schedule{_guess(target)}\n  registered: {', '.join(schedules)}\n"
            '  or your own file: my_file.py:MySchedule, plan.csv; or a plan: "0F0 0B0; 1F0 1B0"'
        )
    return class_in(*named)


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
        if path.stat().st_size <= MOST_BYTES and f"\nclass {target}(" in path.read_text("utf-8", "replace"):
            return f"; did you mean {path}:{target}?"
    stems = get_close_matches(re.split(r"[.]", word.lower())[0], files, n=1)
    return f"; did you mean {files[stems[0]]}?" if stems else ""


def has_sizes(target: str) -> bool:
    """Return whether a target is a plan or a trace, which has its own numbers of ranks and micro-batches."""
    return target.endswith(".csv") or bool(_TRACE.fullmatch(target)) or target == _STDIN or is_plan(target)


def file_of(target: str) -> Path | None:
    """Return the file that a target names, or `None` if it names a schedule of pipelab or is a plan itself."""
    if has_sizes(target):
        return existing(target) if target.endswith((".csv", ".json")) else None
    named = _student_file(_parameters(target)[0])
    return existing(named[0]) if named else None


def settings(texts: Iterable[str], option: str = "--set", such: str = "stages_per_rank=2") -> dict[str, Any]:
    """Return `name=value` texts as keyword arguments; values are Python literals, or text.

    Example:
        >>> settings(["stages_per_rank=2", "policy=eager"])
        {'stages_per_rank': 2, 'policy': 'eager'}
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"{option} {text}: expected name=value, such as {option} {such}")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


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
        hint = "\n  try: a schedule with its own __init__ calls super().__init__(ranks, microbatches) first"
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
        fixed = any(need.startswith("v ==") for need in kind.needs.values())
        free = [name for name in taken if not (fixed and name == "stages_per_rank")]
        again = "\n  try: pipelab.with_recompute(schedule).to_csv('again.csv') in Python, then again.csv here"
        raise UsageError(
            f"{kind.__name__} takes no {', '.join(strangers)}\n  it takes: {', '.join(free) or 'nothing'}"
            + again * ("recompute" in strangers)
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


# ── A student's Python file: whether it can hold a schedule, its import, and the class in it ──────────────────────────

_LONG_IMPORT = 3.0
"""After so many seconds of importing a student's file, a line says what is happening."""
_STILL_IMPORTING = (
    "{} is still being imported, which runs it from its first line to its last: put training under "
    'if __name__ == "__main__", or the schedule in a file of its own\n'
)
MOST_BYTES = 1 << 20
"""No schedule is a longer file of Python."""


def class_in(path: str, name: str) -> type[Schedule]:
    """Return the schedule with this name in a student's file, or the only one if the name is empty."""
    file = existing(path)
    if (size := file.stat().st_size) > MOST_BYTES:
        raise UsageError(f"{path} has {size:,} bytes, a schedule at most {MOST_BYTES:,}: is it the right file?")
    content = file.read_bytes()
    if b"\0" in content:
        raise UsageError(f"{path} is not text, but a binary file: give a file of Python, my_file.py:MySchedule")
    return _schedule_in(_load(file, file.resolve(), content), name, path)


def existing(path: str) -> Path:
    """Return the path of a file."""
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
    own = own_schedules(module)
    if name in own or (len(own) == 1 and not name):
        return own[name or next(iter(own))]
    raise _not_there(path, name, list(own), vars(module))


def _not_there(path: str, name: str, own: Sequence[str], bound: Mapping[str, Any]) -> UsageError:
    """Return the error of a file without the schedule that was asked for; `bound` has all names in the file."""
    if isinstance(bound.get(name), type) and issubclass(bound[name], Schedule):
        return UsageError(
            f"{name} is imported in {path}, not written there: write class Mine({name}), or name its file"
        )
    if name and name in bound:
        return UsageError(f"{name} in {path} is not a schedule: write class {name}(pipelab.Schedule)")
    there = f"it holds {', '.join(own)}" if own else "it holds no class that derives from pipelab.Schedule"
    close = get_close_matches(name, own, n=1) if name else []
    name_one = f"; name one: {path}:{own[0]}" if own else ""
    move = f"; did you mean {path}:{close[0]}?" if close else name_one
    return UsageError(f"{path} has no schedule {name!r}: {there}{move}" if name else f"{path}: {there}{move}")
