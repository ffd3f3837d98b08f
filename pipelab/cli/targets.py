"""Find a command's target: a schedule by name, a student's file, a plan as text, or a plan or a trace in a file."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
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
_SIZES = ("ranks", "microbatches")
_STDIN = "-"
_CALL = re.compile(r"(.*?\w)\((.*)\)", re.DOTALL)
"""A target with parameters, such as `mine.py:Lagged(lag=3)`."""

_FILE = re.compile(r"(.*\.py)(?::(\w*))?")
"""A student's file, maybe with the class that is meant."""

_TRACE = re.compile(r"(.+\.json(?:\.gz)?|.*\*)(?:\(step=([0-9]{1,9})\))?", re.DOTALL)
"""A saved trace, a profile, or a pattern for the profiles of all ranks; maybe with the number of a step."""

_CLASSES = {kind.__name__: kind for kind in [*schedules.values(), *beside.values()]}


def find(
    target: str, ranks: int | None = None, microbatches: int | None = None, usual_ranks: int = 4
) -> Schedule | Plan | Trace:
    """Return the schedule, plan or trace that a command line names."""
    if has_sizes(target):
        return _read(target, {"--ranks": ranks, "--microbatches": microbatches})
    name, own = _parameters(target)
    for size, option in zip(_SIZES, (ranks, microbatches), strict=True):
        if size in own and option is not None and option != own[size]:
            raise UsageError(f"{target} has its own number of {size}: leave out --{size} {option}")
    usual = {"ranks": ranks or usual_ranks, "microbatches": microbatches or _MICROBATCHES}
    return _make(_class_of(name), usual | own)


def has_sizes(target: str) -> bool:
    """Return whether a target is a plan or a trace, which has its own numbers of ranks and micro-batches."""
    return target.endswith(".csv") or bool(_TRACE.fullmatch(target)) or target == _STDIN or is_plan(target)


def file_of(target: str) -> Path | None:
    """Return the file that a target names, or `None` if it names a schedule of pipelab or is a plan itself."""
    if has_sizes(target):
        return existing(target) if target.endswith((".csv", ".json")) else None
    named = _FILE.fullmatch(_parameters(target)[0])
    return existing(named[1]) if named else None


# ── Parameters ────────────────────────────────────────────────────────────────────────────────────────────────────────


def with_settings(targets: Sequence[str], texts: Iterable[str]) -> list[str]:
    """Return the targets with the parameters that `--set` gives; of several targets, those that accept a parameter.

    If none does, all get it: making them then explains what is wrong.
    """
    calls = [(target, {}) if has_sizes(target) else _parameters(target) for target in targets]
    for name, value in settings(texts).items():
        open_to = [(target, own) for target, own in calls if not has_sizes(target) and name not in own]
        if not open_to:
            raise UsageError(f"{' and '.join(map(_title, targets))} has its own parameters: leave out --set {name}")
        accepting = [own for target, own in open_to if len(calls) > 1 and name in _settable(_class_of(target))]
        for own in accepting or [own for _, own in open_to]:
            own[name] = value
    return [_title(target, own) for target, own in calls]


def _settable(kind: type[Schedule]) -> list[str]:
    """Return the names of the parameters that may differ: 1F1B has `stages_per_rank`, but it must be 1."""
    fixed = any(need.startswith("v ==") for need in kind.needs.values())
    besides = (*_SIZES, "stages_per_rank") if fixed else _SIZES
    return [name for name in inspect.signature(kind).parameters if name not in besides]


def settings(texts: Iterable[str], option: str = "--set", such: str = "stages_per_rank=2") -> dict[str, Any]:
    """Return `name=value` texts as keyword arguments; values are Python literals, or text."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"{option} {text}: expected name=value, such as {option} {such}")
        if name in found:
            raise UsageError(f"{option} {text}: {name} is {found[name]} already")
        found[name] = _value(value)
    return found


def _parameters(target: str) -> tuple[str, dict[str, Any]]:
    """Return a target without its parameters, and the parameters: values are Python literals, or text."""
    match = _CALL.fullmatch(target)
    if match is None:
        return target, {}
    source = f"_({match[2]})"
    try:
        call = ast.parse(source, mode="eval").body
    except SyntaxError:
        call = None
    simple = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args
    if not isinstance(call, ast.Call) or not simple or not all(keyword.arg for keyword in call.keywords):
        raise UsageError(
            f"{target}: expected name=value between the parentheses, such as {match[1]}(stages_per_rank=2)"
        )
    values = {str(keyword.arg): ast.get_source_segment(source, keyword.value) or "" for keyword in call.keywords}
    return match[1], {name: _value(text) for name, text in values.items()}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _title(target: str, own: Mapping[str, Any] | None = None) -> str:
    if is_plan(target):
        return "; ".join(map(str.strip, lines_of(target)))
    return f"{target}({', '.join(f'{name}={value!r}' for name, value in own.items())})" if own else target


# ── Plans and traces ──────────────────────────────────────────────────────────────────────────────────────────────────


def _read(target: str, given: Mapping[str, int | None]) -> Plan | Trace:
    """Return a plan or a trace, which has its own sizes; refuse others."""
    if target == _STDIN:
        found: Plan | Trace = _from_stdin()
    elif is_plan(target):
        found = Plan.parse(target)
    elif trace := _TRACE.fullmatch(target):
        file = trace[1] if has_magic(trace[1]) else existing(trace[1])
        found = profiles.load(file, None if trace[2] is None else int(trace[2]))
    else:
        found = Plan.from_csv(existing(target))
    superfluous = [option for option, value in given.items() if value]
    if superfluous:
        plan = found if isinstance(found, Plan) else found.plan
        raise UsageError(
            f"{_title(target)} has ranks={plan.ranks} and microbatches={plan.microbatches} already: "
            f"leave out {' and '.join(superfluous)}"
        )
    return found


def _from_stdin() -> Plan:
    if sys.stdin.isatty():
        sys.stderr.write("a plan, one line for each rank; Ctrl-D ends it:\n")
    rows = read_rows(text_of(sys.stdin.buffer, "stdin"), "stdin")
    if not rows:
        raise UsageError("stdin holds no plan: write pipelab check - < plan.csv, or pipe one line for each rank")
    return Plan.of_words(rows, "stdin")


def existing(path: str) -> Path:
    """Return the path of a file."""
    file = Path(path)
    if file.is_file():
        return file
    if file.exists():
        raise UsageError(f"{path} is not a file: name one, such as my_file.py, plan.csv or trace.json")
    beside = [other.name for other in file.parent.glob(f"*{file.suffix}") if other.is_file()]
    close = get_close_matches(file.name, beside, n=1)
    raise UsageError(f"there is no file {path}{f'; did you mean {file.with_name(close[0])}?' if close else ''}")


# ── Schedules ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _class_of(target: str) -> type[Schedule]:
    """Return the class that a target names: a registered schedule's, or one in a student's file."""
    kind = {**schedules, **beside}.get(target) or _CLASSES.get(target.removeprefix("pipelab."))
    if kind is not None:
        return kind
    named = _FILE.fullmatch(target)
    if named is None:
        close = schedules.nearest(target)
        raise UsageError(
            f"{target!r} is not a schedule{f'; did you mean {close}?' if close else ''}\n"
            f"  registered: {', '.join(schedules)}\n"
            '  or your own file: my_file.py:MySchedule, plan.csv; or a plan: "0F0 0B0; 1F0 1B0"'
        )
    file = existing(named[1])
    module = _imported(file, file.resolve(), file.read_bytes())
    own, name = own_schedules(module), named[2] or ""
    if name in own or (len(own) == 1 and not name):
        return own[name or next(iter(own))]
    raise _not_there(named[1], name, list(own), vars(module))


@cache
def _imported(path: Path, absolute: Path, content: bytes) -> ModuleType:  # noqa: ARG001 - both tell apart what is cached
    """Import a student's file, once for each place and content; report its line if it cannot be imported."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(absolute.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(_unimported(path, error)) from error
    finally:
        sys.path.remove(str(absolute.parent))
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


def _not_there(path: str, name: str, own: Sequence[str], bound: Mapping[str, Any]) -> UsageError:
    """Return the error of a file without the schedule that was asked for; `bound` has all names in the file."""
    if isinstance(bound.get(name), type) and issubclass(bound[name], Schedule):
        return UsageError(
            f"{name} is imported in {path}, not written there: write class Mine({name}), or name its file"
        )
    if name in bound:
        return UsageError(f"{name} in {path} is not a schedule: write class {name}(pipelab.Schedule)")
    if not own:
        return UsageError(f"{path} holds no class that derives from pipelab.Schedule")
    close = get_close_matches(name, own, n=1)
    move = f"did you mean {path}:{close[0]}?" if close else f"name one: {path}:{own[0]}"
    return UsageError(f"{path} has no schedule {name!r}: it holds {', '.join(own)}; {move}")


def _make(kind: type[Schedule], given: Mapping[str, Any]) -> Schedule:
    if inspect.isabstract(kind):
        raise UsageError(f"{kind.__name__} has no method actions(self, rank): write one that yields F(m) and B(m)")
    arguments = _arguments(kind, given)
    try:
        schedule = kind(*arguments.args, **arguments.kwargs)
        repr(schedule)
    except PipelabError:
        raise
    except Exception as error:
        unmade = isinstance(error, AttributeError) and isinstance(error.obj, kind)
        hint = "\n  try: a schedule with its own __init__ calls super().__init__(ranks, microbatches) first"
        raise UsageError(
            f"making {kind.__name__}(ranks={given['ranks']}, microbatches={given['microbatches']}) raised "
            f"{type(error).__name__}: {error}\n  at {students_line(error, kind.__init__)}{hint * unmade}"
        ) from error
    return schedule


def _arguments(kind: type[Schedule], given: Mapping[str, Any]) -> inspect.BoundArguments:
    """Return the arguments for a schedule's class: the sizes by name if it names them, otherwise in order."""
    signature = inspect.signature(kind)
    _refuse_strangers(kind, signature, given)
    by_name = signature.parameters.keys() >= {*_SIZES}
    in_order = [] if by_name else [given[size] for size in _SIZES]
    named = {name: value for name, value in given.items() if by_name or name not in _SIZES}
    try:
        return signature.bind(*in_order, **named)
    except TypeError as error:
        name = kind.__name__
        raise UsageError(
            f"pipelab calls {name}(ranks, microbatches), but it is written {name}{signature}: {error}\n"
            f"  at {line_of_function(kind.__init__)}\n"
            "  try: write def __init__(self, ranks, microbatches); other parameters need a default, or --set name=value"
        ) from error


def _refuse_strangers(kind: type[Schedule], signature: inspect.Signature, given: Mapping[str, Any]) -> None:
    strangers = [name for name in given if name not in (*_SIZES, *signature.parameters)]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    if strangers and not takes_any:
        again = "\n  try: pipelab.with_recompute(schedule).to_csv('again.csv') in Python, then again.csv here"
        raise UsageError(
            f"{kind.__name__} takes no {', '.join(strangers)}\n  it takes: {', '.join(_settable(kind)) or 'nothing'}"
            + again * ("recompute" in strangers)
        )
