"""Schedules: a plan for every size, written by a student in ten lines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

from pipelab.actions import Item
from pipelab.checking import require_legal
from pipelab.errors import ScheduleError, require_size
from pipelab.faults import Fault, shorten, students_line
from pipelab.plan import Plan
from pipelab.program import endless_limit

__all__ = ["Schedule"]


class Schedule(ABC):
    """In which order every rank runs its actions, for any number of ranks and micro-batches.

    Subclass it and write `actions`. The default placement puts stage `s` on rank `s % ranks`; override `place` for
    another one. A schedule that needs several stages on every rank says so in its class.

    Args:
        ranks: how many workers the pipeline has.
        microbatches: how many slices the batch is cut into.
        stages_per_rank: how many stages each rank holds; by default, what the class says.

    Example:
        >>> import pipelab
        >>> from pipelab import B, F
        >>> class AllThenAll(pipelab.Schedule):
        ...     def actions(self, rank):
        ...         for m in range(self.microbatches):
        ...             yield F(m)
        ...         for m in range(self.microbatches):
        ...             yield B(m)
        >>> AllThenAll(ranks=2, microbatches=2).plan().rows
        ((0F0, 0F1, 0B0, 0B1), (1F0, 1F1, 1B0, 1B1))

        Two stages on every rank, down the ranks and back up:

        >>> class Valley(pipelab.Schedule):
        ...     stages_per_rank = 2
        ...     def place(self, microbatch, stage):
        ...         return min(stage, self.stages - 1 - stage)
        ...     def actions(self, rank):
        ...         down, up = rank, self.stages - 1 - rank
        ...         for m in range(self.microbatches):
        ...             yield from (F(m, down), F(m, up), B(m, up), B(m, down))
        >>> Valley(ranks=2, microbatches=1).plan().rows
        ((0F0, 3F0, 3B0, 0B0), (1F0, 2F0, 2B0, 1B0))

    Raises:
        SizeError: if a number is not a positive whole number.
    """

    source: ClassVar[str] = ""
    """Where the schedule comes from: paper and section."""

    stages_per_rank: int = 1
    """How many stages each rank holds, unless told otherwise."""

    def __init__(self, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> None:
        """Keep the sizes."""
        require_size("ranks", ranks)
        require_size("microbatches", microbatches)
        if stages_per_rank is None:
            stages_per_rank = self.stages_per_rank
        require_size("stages_per_rank", stages_per_rank)
        self.ranks = ranks
        self.microbatches = microbatches
        self.stages_per_rank = stages_per_rank

    @abstractmethod
    def actions(self, rank: int) -> Iterable[Item]:
        """Yield what one rank does, in order."""

    @property
    def stages(self) -> int:
        """How many stages the model is split into."""
        return self.ranks * self.stages_per_rank

    def place(self, microbatch: int, stage: int) -> int:  # noqa: ARG002 - schedules that override it use both
        """Return the rank that runs a stage for a micro-batch."""
        return stage % self.ranks

    @classmethod
    def refusal(cls, ranks: int, microbatches: int) -> str | None:  # noqa: ARG003 - schedules that override it use both
        """Return why the schedule cannot exist at this size, with the nearest sizes that can; `None` if it can."""
        return None

    def draft(self) -> Plan:
        """Return the plan without checking it: `pipelab.check` then explains what is wrong.

        Raises:
            ScheduleError: if the size is refused, or if `actions` raises.
        """
        name = self._name()
        try:
            reason = self.refusal(self.ranks, self.microbatches)
            stages = self.stages
            require_size("stages", stages)
        except Exception as error:
            hint = "a schedule with an __init__ of its own calls super().__init__(ranks, microbatches) first"
            message = f"asking for its sizes raised {type(error).__name__}: {error}\n  at {students_line(error)}"
            raise ScheduleError([Fault("exception", None, None, None, message, hint)], name) from error
        if reason is not None:
            raise ScheduleError([Fault("refused", None, None, None, reason)], name)
        limit = endless_limit(stages, self.microbatches) + 1
        rows: list[list[object]] = []
        faults: list[Fault] = []
        for rank in range(self.ranks):
            row: list[object] = []
            try:
                # Extended, not built at once: what was listed before an error shows where it happened.
                row.extend(islice(_iterable(self.actions(rank)), limit))
            except Exception as error:  # noqa: BLE001 - a student's code: whatever it raises is told with its line
                faults.append(_raised(self, rank, row, error))
                cause = error
            rows.append(row)
        if faults:
            raise ScheduleError(_told_once(faults), name) from cause
        return Plan(rows, stages, self.microbatches, self.place, name=name)

    def plan(self) -> Plan:
        """Return the plan, checked.

        Raises:
            ScheduleError: if the size is refused, if `actions` raises, or if the plan has faults: all of them.
        """
        plan = self.draft()
        require_legal(plan)
        return plan

    def _name(self) -> str:
        """Return `repr`, or the class's name where a student's `__repr__` cannot be asked yet."""
        try:
            return repr(self)
        except Exception:  # noqa: BLE001 - a student's code, or one that has not set its sizes
            return type(self).__name__

    def __repr__(self) -> str:
        """Return the schedule's name and sizes."""
        per_rank = f", stages_per_rank={self.stages_per_rank}" if self.stages_per_rank != 1 else ""
        return f"{type(self).__name__}(ranks={self.ranks}, microbatches={self.microbatches}{per_rank})"


def _iterable(returned: Any) -> Iterable[object]:
    """Return what `actions` returned, if it can be iterated over.

    Raises:
        TypeError: otherwise, saying what to do.
    """
    if isinstance(returned, Iterable) and not isinstance(returned, str):
        return returned
    guess = returned is None or isinstance(returned, str)
    hint = ": did you mean to yield the actions, or to return a list of them?" if guess else ""
    raise TypeError(f"actions(rank) returned {shorten(returned)}, which is not a sequence of actions{hint}")


def _raised(schedule: Schedule, rank: int, row: list[object], error: Exception) -> Fault:
    after = f" after {len(row)} action{'s' if len(row) > 1 else ''}, the last one {shorten(row[-1])}" if row else ""
    return Fault(
        "exception",
        rank,
        len(row),
        None,
        f"actions({rank}) raised {type(error).__name__}{after}: {error}\n  at {students_line(error, schedule.actions)}",
        "mend that line; the schedule itself was not checked yet",
    )


def _told_once(faults: list[Fault]) -> list[Fault]:
    """Return one fault where every rank ran into the same line."""
    first, *others = faults
    tail = first.message.partition(" raised ")[2]
    if others and all(other.message.partition(" raised ")[2] == tail for other in others):
        ranks = ", ".join(str(other.rank) for other in others)
        summary, line, rest = first.message.partition("\n")
        return [replace(first, message=f"{summary} (and so on rank {ranks}){line}{rest}")]
    return faults
