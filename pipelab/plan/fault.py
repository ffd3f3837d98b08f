"""A mistake in a plan, as reported: a fact, the cause with numbers, the next move, and the columns around the place."""

from __future__ import annotations

import inspect
import re
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipelab.errors import PipelabError, clean

if TYPE_CHECKING:
    from pipelab.plan.actions import Action
    from pipelab.plan.plan import Plan

Code = Literal[
    "refused",
    "exception",
    "endless",
    "not-an-action",
    "out-of-range",
    "ambiguous-stage",
    "wrong-rank",
    "duplicate",
    "missing",
    "unordered",
    "deadlock",
    "transfer-deadlock",
    "residency",
    "memory-cap",
]
"""The kinds of mistakes, worst first: the order in which `check` reports them."""

OWN = [Path(__file__).parents[1]]
"""pipelab's folder; a package that stands on pipelab adds its own."""
LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
"""Where, besides, no student's files are."""

_MOST_ALIKE = 4
"""How many faults with the same code a message shows in full."""


@dataclass(frozen=True, slots=True)
class Link:
    """One step of a cycle: it waits for the next link, the last one for the first.

    Attributes:
        rank: the rank in whose row it is.
        name: the action, pair, send or receive, in PyTorch's notation.
        words: what it waits for, as a sentence.
    """

    rank: int
    name: str
    words: str


@dataclass(frozen=True, slots=True)
class Fault:
    """One mistake in a plan, and what to do about it.

    Attributes:
        code: the kind of mistake, such as `"missing"` or `"deadlock"`.
        rank: the rank whose row shows it; `None` if it does not belong to a single rank.
        position: the place in the rank's row, from 0; `None` if it does not belong to a single place.
        action: the action concerned, in the form in which it was written.
        message: the fact, with its cause; the first line is the summary.
        hint: the next move.
        excerpt: the columns around the place; empty after the first ten thousand faults with the same code.
        cycle: the steps that wait for each other in a circle, if they do.
        lacking: the missing actions, each with the rank that should list it, or `None` if that is not known; at most
            those of the first thousand micro-batches.
        tried: the plan with the change in `hint`, if pipelab has run it and it has at most 20,000 actions.

    Example:
        >>> import pipelab
        >>> fault, = pipelab.check(pipelab.Plan.parse(["0F0 0B0 0F0"]))
        >>> fault.code, fault.rank, fault.position
        ('duplicate', 0, 2)
    """

    code: Code
    rank: int | None
    position: int | None
    action: object
    message: str
    hint: str = ""
    excerpt: str = ""
    cycle: tuple[Link, ...] = field(default=(), repr=False, compare=False)
    lacking: tuple[tuple[int | None, Action], ...] = field(default=(), repr=False, compare=False)
    tried: Plan | None = field(default=None, repr=False, compare=False)

    @property
    def alike(self) -> str:
        """What it says without its numbers: faults that say the same mostly have one cause."""
        return self.code + re.sub(r"\d+", "0", self.message.partition("\n")[0])

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle all but the plan that was tried, which may hold a student's function."""
        where = (self.code, self.rank, self.position, self.action)
        return Fault, (*where, self.message, self.hint, self.excerpt, self.cycle, self.lacking)

    def __str__(self) -> str:
        """Return the whole explanation, its details indented."""
        lines = [f"{self.code}: {self.message}"]
        if self.hint:
            lines.append(f"  try: {self.hint}")
        lines.extend(f"    {line}" for line in self.excerpt.splitlines())
        return "\n".join(lines)


class ScheduleError(PipelabError):
    """A schedule or plan has faults; `faults` holds all of them.

    Example:
        >>> import pipelab
        >>> try:
        ...     pipelab.simulate(pipelab.Plan.parse(["0F0"]))
        ... except pipelab.ScheduleError as error:
        ...     [fault.code for fault in error.faults]
        ['missing']
    """

    def __init__(self, faults: Sequence[Fault], subject: str = "the plan") -> None:
        """Keep the faults, and the name of the schedule or plan for the first line of the message."""
        self.faults = list(faults)
        self.subject = subject
        super().__init__(faults, subject)

    def __str__(self) -> str:
        """Return the number of faults, then the faults, numbered.

        Of many that say the same about other numbers, which mostly have one cause, the first is shown and counted.
        """
        count = len(self.faults)
        lines = [f"{count} fault{'s' if count != 1 else ''} in {clean(self.subject)}"]
        alike: dict[str, list[int]] = {}
        for number, fault in enumerate(self.faults, 1):
            alike.setdefault(fault.alike, []).append(number)
        few = {each: 0 for numbers in alike.values() if len(numbers) <= _MOST_ALIKE for each in numbers}
        more = few | {numbers[0]: len(numbers) - 1 for numbers in alike.values() if len(numbers) > _MOST_ALIKE}
        left = Counter(fault.code for fault in self.faults)
        shown: Counter[str] = Counter()
        for number, others in sorted(more.items()):
            fault = self.faults[number - 1]
            shown[fault.code] += 1
            if shown[fault.code] > _MOST_ALIKE:
                continue
            left[fault.code] -= 1 + others
            first, *rest = str(fault).splitlines()
            lines += [f"{number:2d}. {first}", *(f"    {line}" for line in rest)]
            lines += [f"    … and {others} more like it: error.faults holds all"] if others else []
            if shown[fault.code] == _MOST_ALIKE and left[fault.code]:
                lines.append(f"    … and {left[fault.code]} more {fault.code}: error.faults holds all")
        return "\n".join(lines)


def shorten(thing: object, width: int = 60) -> str:
    """Return `repr(thing)` on one line, cut to `width` characters."""
    try:
        text = " ".join(repr(thing).split())
    except Exception as error:  # noqa: BLE001 - a student's __repr__ may raise; the fault must still be reported
        text = f"<{type(thing).__name__} whose repr raises {type(error).__name__}>"
    if " at 0x" in text:
        text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return text if len(text) <= width else text[: width - 1] + "…"


class Unreadable:
    """Stands for a thing that raises when it is looked at, so that reports can name, compare and print it.

    Attributes:
        text: the thing as `shorten` returns it.
        kind: the name of its class.
    """

    def __init__(self, thing: object) -> None:
        """Keep what can be said of the thing."""
        self.text = shorten(thing)
        self.kind = type(thing).__name__

    def __repr__(self) -> str:
        return self.text


def readable(thing: Any) -> Any:
    """Return a thing that a student wrote; if looking at it raises, what stands for it.

    Example:
        >>> class Shy:
        ...     def __eq__(self, other):
        ...         raise RuntimeError("do not compare me")
        >>> readable("F0"), readable(Shy()).kind
        ('F0', 'Shy')
    """
    try:
        _look(thing)
    except Exception:  # noqa: BLE001 - a student's code: whatever it raises
        return Unreadable(thing)
    return thing


def _look(thing: Any) -> None:
    """Do with a thing what checking does with what is not an action."""
    isinstance(thing, Iterator)
    callable(getattr(thing, "__wrapped__", thing))
    "".join([getattr(thing, "__name__", ""), getattr(thing, "__module__", None) or "", str(thing)])
    bool(thing == thing)  # noqa: PLR0124 - raises for a tensor
    if isinstance(thing, (list, tuple)):
        for each in thing:
            _look(each)


def excerpt(rank: int, row: Sequence[object], position: int, width: int = 72) -> str:
    """Return the columns around a place in a rank's row, with the place marked."""
    line = mark = ""
    start = max(0, position - 4)
    near = [getattr(item, "__name__", "") or shorten(item, 28) for item in row[start : position + 5]]
    for around in (4, 2, 1, 0):
        first = max(0, position - around)
        words = near[first - start : position + around + 1 - start]
        marked = position - first
        lead = f"rank {rank} | {'… ' if first else ''}"
        line = lead + " ".join(words) + (" …" if position + around + 1 < len(row) else "")
        mark = " " * (len(lead) + sum(len(word) + 1 for word in words[:marked])) + "^" * len(words[marked])
        if len(line) <= width:
            break
    return f"{line}\n{mark}"


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text, consecutive ones as first…last, cut after six parts."""
    runs: list[str] = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.extend([f"{run[0]}…{run[-1]}"] if len(run) > 2 else map(str, run))
    return ", ".join(runs) if len(runs) <= 6 else f"{', '.join(runs[:6])}, … ({len(numbers)} in all)"


def students_line(error: BaseException, otherwise: Callable[..., object] | None = None) -> str:
    """Return where a student's code raised: file, line number and text of the line."""
    frames = traceback.extract_tb(error.__traceback__)
    if otherwise is not None and all(in_a_library(frame.filename) for frame in frames):
        return line_of_function(otherwise) or line_of(frames)
    return line_of(frames)


def students_fault(message: str, where: str | Callable[..., object] | None, hint: str) -> Fault:
    """Return the fault of a student's function, at a line or where the function is written."""
    line = where if isinstance(where, str) else line_of_function(where)
    return Fault("exception", None, None, None, message + (f"\n  at {line}" if line else ""), hint)


def raised(what: str, error: Exception, function: Callable[..., object] | None, hint: str) -> Fault:
    """Return the fault of a student's function that raised an error."""
    return students_fault(f"{what} raised {type(error).__name__}: {error}", students_line(error, function), hint)


def misfit(name: str, function: object, *given: str) -> Fault | None:
    """Return the fault of a function that cannot be called with these arguments, or `None`."""
    if not callable(function):
        return students_fault(f"{name} is {shorten(function)}, not a method", None, _write(name, ("self", *given)))
    try:
        inspect.signature(function).bind(*given)
    except TypeError:
        pass
    except ValueError:  # of a function written in C, which has none
        return None
    else:
        return None
    plain = getattr(function, "__func__", function)
    owner = getattr(function, "__self__", None)
    expected = given if owner is None else ("cls" if isinstance(owner, type) else "self", *given)
    qualified = getattr(plain, "__qualname__", name).rpartition("<locals>.")[2]
    message = f"pipelab calls {name}({', '.join(expected)}), but it is written {qualified}{inspect.signature(plain)}"
    return students_fault(message, plain, _write(name, expected))


def _write(name: str, parameters: tuple[str, ...]) -> str:
    return f"write def {name}({', '.join(parameters)})"


def line_of_function(function: object) -> str | None:
    """Return where a student's function is written; `None` if it is not a function or belongs to a library."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None or in_a_library(code.co_filename):
        return None
    return line_of([traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)])


def line_of(every: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line of a stack in a student's file, or else the innermost of all."""
    frames = [frame for frame in every if not in_a_library(frame.filename)] or every
    if not frames:
        return "an unknown line"
    frame = frames[-1]
    code = f": {frame.line}" if frame.line else ""
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}{code}"


def in_a_library(file: str) -> bool:
    """Return whether a file is pipelab's, Python's or an installed package's, or code that is in no file."""
    path = Path(file)
    return (
        file == "<string>"
        or file.startswith("<frozen ")
        or "site-packages" in path.parts
        or any(map(path.is_relative_to, (*OWN, *LIBRARIES)))
    )
