"""What is graded, for how many points, and the grade that comes out. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelab.errors import PipelabError, UsageError
from pipelab.plan.fault import students_line
from pipelab.plan.transfers import Order, Transport

HOMEWORK = "pipeline_homework.py"
TEMPLATE = Path(__file__).with_name(f"{HOMEWORK}.txt")
"""What students get. Its solution and the teacher's notes are not in this package."""


class AmbiguousError(PipelabError):
    """The grader cannot know what in a submission is to be graded; whoever grades must say."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing that a submission must do, for a whole number of points."""

    name: str
    points: int
    hint: str  # the next move if it failed; it does not give the answer away
    hidden: bool = False  # about sizes that students do not see


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
class Grade:
    """What a submission came to: a mark for each task, or the reason why it has no points."""

    submission: str
    marks: Sequence[Mark] = ()
    reason: str = ""
    note: str = ""  # what else a reader should know, such as whether the gradients were of a sum or of a mean
    seconds: float = 0.0
    output: str = ""  # the beginning of what it printed; it is never graded
    ambiguous: bool = False  # whoever grades must first say what to grade; the reason is what

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
    """What to grade: homework 4, or a schedule."""

    schedule: str | None = None  # the name of its class; empty for the only one in the file; None for homework 4
    pars: dict[str, float] = field(default_factory=dict)  # such as {"makespan": 33}
    ranks: int = 4  # the size that the pars are for
    microbatches: int = 8
    cost: dict[str, Any] = field(default_factory=dict)  # arguments of `Cost`
    order: Order = "pytorch"
    transport: Transport = "buffered"
    seed: int = 0  # the hidden sizes and all random numbers follow from it

    def __post_init__(self) -> None:
        """Refuse pars of unknown quantities.

        Raises:
            UsageError: if there is one; it lists those that exist.
        """
        for name, par in self.pars.items():
            if name not in _PAR_HINTS or not isinstance(par, int | float) or not par >= 0:
                raise UsageError(f"--par {name}={par}: expected a number for one of {', '.join(_PAR_HINTS)}")
            if name == "bubble" and par > 1:
                raise UsageError(f"--par bubble={par:g}: the bubble is a share, at most 1: write bubble={par / 100:g}")

    def tasks(self) -> Sequence[Task]:
        """Return the tasks; their points add up to 100."""
        if self.schedule is None:
            return HOMEWORK4
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

HOMEWORK4: Sequence[Task] = (
    Task("forwards", 10, "Which line runs the model on micro_x, how often for each micro-batch, in which order?"),
    Task("targets", 15, "A loss needs output and target on one device. Where does the last layer leave its output?"),
    Task("order", 20, "When forward i is done, which outputs wait for a backward? Write three rounds down by hand."),
    Task("last backward", 10, "Count on paper: how many forwards and backwards has the loop run when it ends?"),
    Task("no second backward", 10, "Which line runs a backward that another line, or round, has run before?"),
    Task("gradients", 15, "Compare .grad with that of the whole batch: does each output meet its own target?"),
    Task("training", 10, "Call the function twice. What does the second call find that the first one left?"),
    Task("hidden sizes", 10, "Any number of micro-batches and of rows must work. Which number is fixed?", hidden=True),
)
"""The tasks of homework 4; `homework4` has a check for each."""


def raised(error: BaseException, function: Callable[..., object] | None = None) -> str:
    """Return what a submission raised, and at which of its lines, on one line."""
    said = " ".join(str(error).split())
    file, line, code = students_line(error, function).partition(", line ")
    where = f"{Path(file).name}{line}{code}"
    return f"{type(error).__name__}: {said if len(said) <= 120 else said[:119] + '…'} ({where})"


def start_homework(folder: Path) -> Path:
    """Write homework 4's file with its three holes into a folder, which is made if need be; return its path.

    Example:
        >>> import tempfile
        >>> start_homework(Path(tempfile.mkdtemp())).name
        'pipeline_homework.py'

    Raises:
        UsageError: if the file exists: nobody's work is overwritten.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / HOMEWORK
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.read_text(encoding="utf-8"))
    except FileExistsError:
        raise UsageError(
            f"{path} exists, and stays as it is. To grade it: pipelab grade {path}. "
            f"For a fresh file, name another folder: pipelab lab hw4 --start {folder / 'again'}"
        ) from None
    return path
