"""One step of a pipeline: the values under way, who waits for what, and how it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelab.engine.all_reduce import Meeting, Seat
from pipelab.engine.device_clock import StepClock
from pipelab.engine.instructions import Instruction
from pipelab.engine.loss import Loss
from pipelab.engine.surroundings import PLAIN, Surroundings
from pipelab.plan.actions import Action

__all__ = ["Run"]


@dataclass(slots=True)
class Run:
    """The state of one step. A new one for every step, so that a step that failed leaves nothing behind.

    Attributes:
        rows: every rank's instructions.
        inputs: the batch, per micro-batch.
        loss: the loss; `None` for a run of forwards only.
        watch_nan: whether to look for NaN and infinity after every action.
        values: by number, the values under way.
        doors: by number, a lock that is opened when the value is there; only for values that change ranks.
        meetings: for each all-reduce, where its ranks meet.
        outputs: per micro-batch, the model's output.
        kept: per rank and stage, what forwards keep for their backwards.
        begun: per rank, the clock at the start of each action.
        ended: per rank, the clock at the end of each action.
        phase: per rank, `2 * position` while it waits, `2 * position + 1` while it computes.
        stopped: whether everybody should stop.
        around: what surrounds the caller, and so the workers.
        clocks: per rank, by what the readings of its clock are turned into times.
    """

    rows: list[list[Instruction]]
    inputs: list[Any]
    loss: Loss | None
    watch_nan: bool = False
    around: Surroundings = PLAIN
    values: dict[int, Any] = field(default_factory=dict)
    doors: dict[int, threading.Lock | Seat] = field(default_factory=dict)
    meetings: dict[Action, Meeting] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    kept: list[dict[int, dict[int, Any]]] = field(default_factory=list)
    begun: list[list[Any]] = field(default_factory=list)
    ended: list[list[Any]] = field(default_factory=list)
    phase: list[int] = field(default_factory=list)
    stopped: bool = False
    clocks: Sequence[StepClock] = ()

    def __post_init__(self) -> None:
        """Close a door for every value that changes ranks."""
        for row in self.rows:
            for instruction in row:
                if instruction.needs is None or not instruction.receives:
                    continue
                if instruction.meets is None:
                    door = self.doors[instruction.needs] = threading.Lock()
                    door.acquire()
                else:
                    meeting = self.meetings.setdefault(instruction.action, Meeting(instruction.meets.group))
                    self.doors[instruction.needs] = instruction.meets.seat(meeting)
                    self.values[instruction.needs] = meeting
            self.kept.append({instruction.stage.index: {} for instruction in row})
            self.begun.append([])
            self.ended.append([])
            self.phase.append(0)
        self.outputs = [None] * len(self.inputs)

    @property
    def outputs_on(self) -> Sequence[int] | None:
        """The ranks whose processes have outputs: no matter, all ranks are in this one."""
        return None

    @property
    def note(self) -> str:
        """What a reader of the trace should know: nothing."""
        return ""

    def travel(self) -> dict[int, float]:
        """Return how long values travelled: in no time."""
        return {}

    def stop(self) -> None:
        """Make every worker stop at its next action, and open all doors so that none waits."""
        self.stopped = True
        for door in self.doors.values():
            if door.locked():
                try:
                    door.release()
                except RuntimeError:  # its giver opened it just now
                    continue
