"""What is graded, for how many points, and the grade that comes out. Needs no PyTorch."""

from __future__ import annotations

import inspect
import json
import random
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import Any

from pipelab.errors import PipelabError, UsageError, counted
from pipelab.plan.fault import students_line


class AmbiguousError(PipelabError):
    """The grader cannot know what in a submission is to be graded; the teacher must say."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing that a submission must do, for a whole number of points."""

    name: str
    points: int
    hint: str  # the next move if it failed; it does not give the answer away
    hidden: bool = False  # about sizes that students do not see
    why: str = ""  # it has so many points
    expected: str = ""  # sentences of a `Mark`, with places for the facts that a check found
    found: str = ""
    effect: str = ""


@dataclass(frozen=True, slots=True)
class Homework:
    """A homework: what students get, and what is graded. The solution and the teacher's notes are not in this package.

    Example:
        >>> HOMEWORKS["hw4"].file, HOMEWORKS["hw4"].tasks[0].name, HOMEWORKS["hw4"].tasks[0].points
        ('pipeline_homework.py', 'forwards', 10)
    """

    title: str
    file: str
    defines: str  # the function or class that is graded
    tasks: Sequence[Task]
    seconds: float = 5.0  # for each submission, if the teacher does not say
    not_reached: int = 0  # percent of its points that a task has if it was not reached
    not_reached_why: str = ""
    variant: Mapping[str, str] = field(default_factory=dict)  # what its file says instead for a student's name
    orders: Mapping[str, str] = field(default_factory=dict)  # rules for n micro-batches, in words and in Python
    weights: Mapping[str, str] = field(default_factory=dict)  # rules for their losses

    @property
    def template(self) -> Path:
        """What students get."""
        return Path(__file__).with_name(f"{self.file}.txt")

    def weighed(self, points: Mapping[str, int]) -> Homework:
        """Return it with other points, by the names of its tasks; `not_reached` is a name too. No points, no task."""
        named = {task.name: task.points for task in self.tasks} | {"not_reached": self.not_reached}
        for name, number in points.items():
            most = 99 if name == "not_reached" else 1000
            if name not in named or type(number) is not int or not 0 <= number <= most:
                raise UsageError(f"{name} = {number}: expected whole points of one of {', '.join(named)}")
        named |= points
        tasks = [replace(task, points=named[task.name]) for task in self.tasks if named[task.name]]
        return replace(self, tasks=tasks, not_reached=named["not_reached"])

    def marks(self, name: str) -> str:
        """Return the points as a file that `--marks` reads, each with its reason."""
        lines = [(task.name, task.points, task.why) for task in self.tasks]
        lines.append(
            (
                "not_reached",
                self.not_reached,
                f"percent of its points for a task that was not reached: {self.not_reached_why}",
            )
        )
        shown = (f"{f'{json.dumps(each)} = {points}':27} # {why}" for each, points, why in lines)
        return "\n".join([f"# {self.title}: {sum(task.points for task in self.tasks)} points", f"[{name}]", *shown])


HOMEWORKS = {
    name: Homework(**(told | {"tasks": [Task(task, **known) for task, known in told["tasks"].items()]}))
    for name, told in tomllib.loads(Path(__file__).with_name("homework.toml").read_text(encoding="utf-8")).items()
}
"""What can be graded, by the name that the command line uses; for each task, a module has a check."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What one task came to. It has passed if it earned all its points."""

    task: Task
    score: int
    expected: str = ""  # what a right submission does
    found: str = ""  # what this one did
    effect: str = ""  # what the mistake does to training, with a number
    hint: str = ""
    reached: bool = True  # otherwise an earlier fault stood in the way

    @property
    def passed(self) -> bool:
        """Whether all points were earned."""
        return self.score >= self.task.points

    @property
    def status(self) -> str:
        """Passed, failed or not reached."""
        return "passed" if self.passed else "failed" if self.reached else "not reached"


@dataclass(frozen=True, slots=True)
class Found:
    """What a check found; `reached` is whether the fault is its own, and not a consequence of another one.

    It says it in sentences of its own, or its facts fill the task's.
    """

    right: bool
    expected: str = ""
    found: str = ""
    effect: str = ""
    hint: str = ""
    reached: bool = True
    facts: Mapping[str, object] = field(default_factory=dict)


def of_hidden(found: Mapping[str, Found], hidden: Sequence[Mapping[str, Found]], hint: str = "") -> Found:
    """Return what was found at the hidden sizes: they are reached if the shown ones, `found`, are right."""
    wrong = dict.fromkeys(name for each in hidden for name, seen in each.items() if not seen.right)
    right = sum(all(seen.right for seen in each.values()) for each in hidden)
    return Found(
        not wrong,
        "everything above, at sizes that are not shown",
        f"wrong there: {', '.join(wrong)}" if wrong else "right there too",
        f"right at {right} of {counted(len(hidden), 'size')}",
        hint,
        reached=all(each.right for each in found.values()),
    )


def marks_of(found: Mapping[str, Found], homework: Homework) -> list[Mark]:
    """Return a mark for each task of a homework; if it was not reached, it has a share of its points at most."""
    marks = []
    for task in homework.tasks:
        seen = found[task.name]
        score = task.points if seen.right else 0 if seen.reached else task.points * homework.not_reached // 100
        expected, said, effect = (
            getattr(seen, each) or getattr(task, each).format_map(seen.facts)
            for each in ("expected", "found", "effect")
        )
        hint = (seen.hint or task.hint) if seen.reached else ""
        why = {} if seen.right else {"effect": effect, "hint": hint}
        marks.append(Mark(task, score, expected, said, reached=seen.reached, **why))
    return marks


@dataclass(frozen=True, slots=True)
class Grade:
    """What a submission came to: a mark for each task, or the reason why it has no points."""

    submission: str
    marks: Sequence[Mark] = ()
    reason: str = ""
    note: str = ""  # what else a reader should know, such as whether the gradients were of a sum or of a mean
    seconds: float = 0.0
    output: str = ""  # the beginning of what it printed; it is never graded
    to_read: str = ""  # what it reaches beyond the start file
    ambiguous: bool = False  # the teacher must first say what to grade; the reason is what

    @property
    def score(self) -> int:
        """The points of all tasks."""
        return sum(mark.score for mark in self.marks)

    @property
    def max_score(self) -> int:
        """The points that a right submission earns."""
        return sum(mark.task.points for mark in self.marks)

    @property
    def passed(self) -> bool:
        """Whether every task has passed."""
        return bool(self.marks) and not self.reason and all(mark.passed for mark in self.marks)

    def named(self, status: str) -> str:
        """Return the names of the tasks that have passed, have failed or were not reached."""
        return ", ".join(mark.task.name for mark in self.marks if mark.status == status and not self.reason)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What to grade: a homework, or a schedule."""

    schedule: str | None = None  # the name of its class; empty for the only one in the file; None for a homework
    pars: dict[str, float] = field(default_factory=dict)  # such as {"makespan": 33}
    ranks: int = 4  # the size that the pars are for
    microbatches: int = 8
    cost: dict[str, Any] = field(default_factory=dict)  # arguments of `Cost`
    seed: int = 0  # the hidden sizes and all random numbers follow from it
    variant: str = ""  # whose numbers homework 4 has
    homework: str = "hw4"  # one of `HOMEWORKS`
    points: dict[str, int] = field(default_factory=dict)  # of the homework's tasks, where a teacher changes them

    def __post_init__(self) -> None:
        """Refuse pars of unknown quantities, and a variant of what has none."""
        if self.variant and (self.homework != "hw4" or self.schedule is not None):
            raise UsageError(f"variant {self.variant}: only homework 4 has variants: leave out --variant, --variants")
        for name, par in self.pars.items():
            if name not in _PAR_HINTS or not isinstance(par, int | float) or not par >= 0:
                raise UsageError(f"--par {name}={par}: expected a number for one of {', '.join(_PAR_HINTS)}")
            if name == "bubble" and par > 1:
                raise UsageError(f"--par bubble={par:g}: the bubble is a share, at most 1: write bubble={par / 100:g}")

    @property
    def own(self) -> Sequence[str]:
        """What the homework's module is given besides: whose numbers it has, if it has any."""
        return [self.variant] if self.variant else []

    def weighed(self) -> Homework:
        """Return the homework with its points."""
        return HOMEWORKS[self.homework].weighed(self.points)

    def tasks(self) -> Sequence[Task]:
        """Return the tasks; unless a teacher has changed them, their points add up to 100."""
        if self.schedule is None:
            return self.weighed().tasks
        legal = Task("legal", 40 if self.pars else 70, "run pipelab check on your file: it explains every fault")
        pars = [Task(name, 40 // len(self.pars), _PAR_HINTS[name]) for name in self.pars]
        others = "does the class use self.ranks and self.microbatches everywhere, or a number of its own somewhere?"
        rest = 100 - legal.points - sum(par.points for par in pars)
        return [legal, *pars, Task("hidden sizes", rest, others, hidden=True)]


_WAITING = "pipelab simulate draws the timeline: which rank waits, when, and for what?"
_PAR_HINTS = {
    "makespan": _WAITING,
    "peak": "count forwards minus backwards along the fullest rank's row: which backward could come earlier?",
    "bubble": _WAITING,
}
"""The quantities of a schedule that can have a par; `peak` is the largest of all ranks."""


def raised(error: BaseException, function: Callable[..., object] | None = None) -> str:
    """Return what a submission raised, and at which of its lines, on one line."""
    said = " ".join(str(error).split())
    file, line, code = students_line(error, function).partition(", line ")
    where = f"{Path(file).name}{line}{code}"
    return f"{type(error).__name__}: {said if len(said) <= 120 else said[:119] + '…'} ({where})"


def function_of(module: ModuleType, name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Return a submission's function or class; a LookupError says that none can be called as it should."""
    function: Any = vars(module).get(name)
    if not callable(function):
        own = {key.lower(): key for key, each in vars(module).items() if inspect.isfunction(each)}
        close = [own[key] for key in get_close_matches(name.lower(), own, n=1)]
        guess = f"; did you mean {close[0]}?" if close else ""
        raise LookupError(  # noqa: TRY004 - the server reports LookupErrors
            f"it defines no function {name}; it defines {', '.join(own.values()) or 'no function'}{guess}"
        )
    try:
        inspect.signature(function).bind(*parameters)
    except (TypeError, ValueError):
        written = f"{name}{inspect.signature(function)}"
        raise LookupError(f"it defines {written}; it is called as {name}({', '.join(parameters)})") from None
    found: Callable[..., Any] = function
    return found


def start_homework(name: str, folder: Path, own: str = "") -> Path:
    """Write a homework's file with its holes, or its variant of a name, into a folder, which is made; return its path.

    Example:
        >>> import tempfile
        >>> start_homework("hw4", Path(tempfile.mkdtemp())).name
        'pipeline_homework.py'
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, mine = folder / HOMEWORKS[name].file, variant(own)
    text = HOMEWORKS[name].template.read_text(encoding="utf-8")
    for old, new in HOMEWORKS[name].variant.items() if mine.order else ():
        weights = [round(each, 4) for each in ruled("weights", mine.weights, mine.microbatches)]
        text = text.replace(old, new.format(name=quote(own), mine=mine, weights=weights))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(
            f"{path} exists, and stays as it is. To grade it: pipelab grade {path}. "
            f"For a fresh file, name another folder: pipelab lab {name} --start {folder / 'again'}"
        ) from None
    return path


@dataclass(frozen=True)
class Variant:
    """The numbers of one student; those without a name are the assignments' own.

    Attributes:
        microbatches: how many micro-batches homework 4 runs.
        rows: rows of each of them.
        forward, backward: milliseconds of a stage of Practical 9 for the whole batch.
        order, weights: the rules by which homework 4 orders them, and weighs their losses; empty for the course's.
    """

    microbatches: int = 4
    rows: int = 4
    forward: float = 20.0
    backward: float = 40.0
    order: str = ""
    weights: str = ""


def variant(name: str) -> Variant:
    """Return a student's variant; capital letters and spaces around the name make no difference.

    Example:
        >>> variant("ada") == variant(" Ada"), variant("ada") == variant("bob"), variant("")
        (True, False, Variant(microbatches=4, rows=4, forward=20.0, backward=40.0, order='', weights=''))
    """
    if not (name := name.strip().casefold()):
        return Variant()
    choose = random.Random(f"pipelab {name}")  # noqa: S311 - other numbers, not secret ones
    forward = float(choose.randint(12, 30))
    backward = float(round(forward * choose.choice((1.5, 1.75, 2.25, 2.5))))
    sizes = choose.randint(5, 9), choose.randint(3, 9)
    rules = (choose.choice([*each][1:]) for each in (HOMEWORKS["hw4"].orders, HOMEWORKS["hw4"].weights))
    return Variant(*sizes, forward, backward, *rules)


def ruled(kind: str, rule: str, n: int) -> list[Any]:
    """Return the numbers of `n` micro-batches in the order of a rule, or the weights of their losses."""
    return [*eval(getattr(HOMEWORKS["hw4"], kind)[rule], {"n": n})]  # noqa: S307 - our own file
