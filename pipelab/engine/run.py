"""One step of a pipeline: the values under way, who waits for what, and how it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelab.engine.device_clock import StepClock
from pipelab.engine.stage import Loss, Stage
from pipelab.program import Program

__all__ = ["Instruction", "Run", "instructions"]


@dataclass(frozen=True, slots=True)
class Instruction:
    """What a worker does for one action.

    Attributes:
        code: the action.
        forward: whether it is a forward.
        microbatch: which micro-batch.
        stage: the stage that runs.
        needs: the value it starts from; `None` for the batch's rows, or the loss.
        receives: whether another rank gives that value.
        gives: the value it makes; `None` where nobody needs it.
        sends: whether another rank needs it.
    """

    code: int
    forward: bool
    microbatch: int
    stage: Stage
    needs: int | None
    receives: bool
    gives: int | None
    sends: bool


def instructions(program: Program, stages: Sequence[Stage], *, backward: bool) -> list[list[Instruction]]:
    """Return every rank's instructions for a legal plan of `F` and `B`; only the forwards unless `backward`."""
    numbering, rank_of = program.numbering, program.rank_of
    slots, count = numbering.slots, numbering.stages
    rows: list[list[Instruction]] = []
    for rank, row in enumerate(program.rows):
        listed: list[Instruction] = []
        for code in row:
            forward = code < slots
            if not (forward or backward):
                continue
            microbatch, stage = divmod(code % slots, count)
            source, target = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            step = target - stage
            inner, outer = 0 <= source < count, 0 <= target < count
            listed.append(
                Instruction(
                    code=code,
                    forward=forward,
                    microbatch=microbatch,
                    stage=stages[stage],
                    needs=code - step if inner else None,
                    receives=inner and rank_of[code - step] != rank,
                    gives=code if outer else None,
                    sends=outer and rank_of[code + step] != rank,
                )
            )
        rows.append(listed)
    return rows


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
        outputs: per micro-batch, the model's output.
        kept: per rank and stage, what forwards keep for their backwards.
        begun: per rank, the clock at the start of each action.
        ended: per rank, the clock at the end of each action.
        phase: per rank, `2 * position` while it waits, `2 * position + 1` while it computes.
        stopped: whether everybody should stop.
        contexts: the caller's autocast, which the workers enter for forwards.
        clocks: per rank, by what the readings of its clock are turned into times.
    """

    rows: list[list[Instruction]]
    inputs: list[Any]
    loss: Loss | None
    watch_nan: bool = False
    contexts: Sequence[Any] = ()
    values: dict[int, Any] = field(default_factory=dict)
    doors: dict[int, threading.Lock] = field(default_factory=dict)
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
                if instruction.receives and instruction.needs is not None:
                    door = self.doors[instruction.needs] = threading.Lock()
                    door.acquire()
            self.kept.append({instruction.stage.index: {} for instruction in row})
            self.begun.append([])
            self.ended.append([])
            self.phase.append(0)
        self.outputs = [None] * len(self.inputs)

    def stop(self) -> None:
        """Make every worker stop at its next action, and open all doors so that none waits."""
        self.stopped = True
        for door in self.doors.values():
            if door.locked():
                try:
                    door.release()
                except RuntimeError:  # its giver opened it just now
                    continue
