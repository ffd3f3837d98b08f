"""What is graded, for how many points, and the grade that comes out. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelab.errors import UsageError
from pipelab.plan.fault import students_line

__all__ = [
    "HOMEWORK",
    "HOMEWORK4",
    "PARS",
    "TEMPLATE",
    "Assignment",
    "Grade",
    "Mark",
    "Task",
    "raised",
    "start_homework",
]

HOMEWORK = "pipeline_homework.py"
TEMPLATE = Path(__file__).with_name(f"{HOMEWORK}.txt")
"""What students get. Its solution and the teacher's notes are not in this package."""

PARS = ("makespan", "peak", "bubble")
"""The quantities of a schedule that can have a par; `peak` is the largest of all ranks."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing that a submission must do.

    Attributes:
        name: what it is called in reports.
        points: what it is worth.
        hint: the next move if it failed; it does not give the answer away.
        hidden: whether it is about sizes that students do not see.
    """

    name: str
    points: float
    hint: str
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """What one task came to.

    Attributes:
        task: the task.
        score: the points that it earned. A task has passed if it earned all of them.
        expected: what a right submission does.
        found: what this one did.
        effect: what the mistake does to training, with a number.
    """

    task: Task
    score: float
    expected: str = ""
    found: str = ""
    effect: str = ""

    @property
    def passed(self) -> bool:
        """Whether all points were earned."""
        return self.score > self.task.points - 0.005


@dataclass(frozen=True, slots=True)
class Grade:
    """What a submission came to.

    Attributes:
        submission: its name.
        marks: one for each task.
        reason: why it could not be graded task by task; it then has no points.
        note: what else a reader should know, such as whether the gradients were of a sum or of a mean.
        seconds: how long it ran.
        output: the beginning of what it printed; it is never graded.
    """

    submission: str
    marks: Sequence[Mark] = field(default_factory=list)
    reason: str = ""
    note: str = ""
    seconds: float = 0.0
    output: str = ""

    @property
    def score(self) -> float:
        """The points of all tasks."""
        return round(sum(mark.score for mark in self.marks), 2)

    @property
    def max_score(self) -> float:
        """The points that a right submission earns."""
        return round(sum(mark.task.points for mark in self.marks), 2)

    @property
    def passed(self) -> bool:
        """Whether every task has passed."""
        return bool(self.marks) and not self.reason and all(mark.passed for mark in self.marks)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What to grade.

    Attributes:
        schedule: the name of the schedule's class in the file; empty for the only one; `None` grades homework 4.
        pars: the quantity and its par, such as `{"makespan": 33}`.
        ranks: the schedule's size that the pars are for.
        microbatches: the schedule's size that the pars are for.
        cost: how long actions take, as arguments of `Cost`.
        seed: the hidden sizes and all random numbers follow from it.
    """

    schedule: str | None = None
    pars: dict[str, float] = field(default_factory=dict)
    ranks: int = 4
    microbatches: int = 8
    cost: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse pars of unknown quantities.

        Raises:
            UsageError: if there is one; it lists those that exist.
        """
        for name, par in self.pars.items():
            if name not in PARS or not isinstance(par, int | float) or not par >= 0:
                raise UsageError(f"--par {name}={par}: expected a number for one of {', '.join(PARS)}")

    def tasks(self) -> Sequence[Task]:
        """Return the tasks; their points add up to 100."""
        if self.schedule is None:
            return HOMEWORK4
        legal = Task("legal", 40 if self.pars else 70, "run pipelab check on your file: it explains every fault")
        share = round(40 / len(self.pars), 2) if self.pars else 0.0
        pars = [Task(name, share, _PAR_HINTS[name]) for name in self.pars]
        others = "does the class use self.ranks and self.microbatches everywhere, or a number of its own somewhere?"
        rest = round(100 - legal.points - sum(par.points for par in pars), 2)
        return [legal, *pars, Task("hidden sizes", rest, others, hidden=True)]


_PAR_HINTS = {
    "makespan": "pipelab simulate draws the timeline: which rank waits, when, and for what?",
    "bubble": "pipelab simulate draws the timeline: which rank waits, when, and for what?",
    "peak": "count forwards minus backwards along the fullest rank's row: which backward could come earlier?",
}

HOMEWORK4: Sequence[Task] = (
    Task(
        "forwards",
        10,
        "Which line runs the model on micro_x? How often does it run for each micro-batch, and in which order?",
    ),
    Task(
        "targets",
        15,
        "A loss needs its output and its target on the same device. Where does the last layer leave its output?",
    ),
    Task(
        "order",
        20,
        "When forward i is done, which outputs wait for a backward? Write the first three rounds down by hand.",
    ),
    Task(
        "last backward", 10, "Count on paper: how many forwards and how many backwards has the loop run when it ends?"
    ),
    Task("no second backward", 10, "In the first round i is 0. Which element of a list has the index i - 1 then?"),
    Task(
        "gradients",
        15,
        "Compare the parameters' .grad with those of the whole batch at once: whose part is missing, or counts twice?",
    ),
    Task("training", 10, "Call the function twice in a row. What does the second call find that the first one left?"),
    Task(
        "hidden sizes",
        10,
        "If all else passes: it must work with any number of micro-batches and of rows. Which number is fixed in it?",
        hidden=True,
    ),
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
            f"{path} exists and stays as it is; name another folder: pipelab lab hw4 --start again"
        ) from None
    return path
