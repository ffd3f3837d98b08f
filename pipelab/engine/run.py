"""One step of a pipeline: the values under way, who waits for what, and how it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelab.actions import Action
from pipelab.engine.stage import Loss, Stage
from pipelab.program import Program

__all__ = ["Instruction", "Run", "instructions"]


Act = Callable[[int, Any, dict[int, Any], Any], Any]
"""What a stage does for an action: takes micro-batch, value, what it keeps and the loss; returns what it made."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """What a worker does for one action.

    Attributes:
        action: the action.
        forward: whether it is a forward.
        microbatch: which micro-batch.
        stage: the stage that runs.
        act: what the stage does.
        needs: the value it starts from, by number; `None` for the batch's rows, the loss, or what the stage kept.
        receives: whether another rank gives that value.
        gives: the value it makes, by number; `None` where nobody needs it.
        sends: whether another rank needs it.
    """

    action: Action
    forward: bool
    microbatch: int
    stage: Stage
    act: Act
    needs: int | None
    receives: bool
    gives: int | None
    sends: bool


def instructions(program: Program, stages: Sequence[Stage], *, backward: bool) -> list[list[Instruction]]:
    """Return every rank's instructions for a legal plan; only those of the forwards unless `backward`."""
    numbering = program.numbering
    return [
        [
            _instruction(program, numbering.action(code), rank, stages, backward=backward)
            for code in row
            if backward or code < numbering.slots
        ]
        for rank, row in enumerate(program.rows)
    ]


def _instruction(
    program: Program, action: Action, rank: int, stages: Sequence[Stage], *, backward: bool
) -> Instruction:
    """Return what a rank does for one action.

    A forward takes `out` of the stage before and gives its own; `B` and `I` take `gin` of the stage after, likewise.
    """
    numbering, placed = program.numbering, program.placed
    assert action.microbatch is not None
    assert action.stage is not None
    microbatch, number = action.microbatch, action.stage
    stage = stages[number]
    acts: dict[str, Act] = {
        "F": stage.forward if backward else stage.evaluate,
        "B": stage.backward,
        "I": stage.backward_input,
        "W": stage.backward_weight,
    }
    needs = gives = None
    receives = sends = False
    if action.kind != "W":  # W needs what its own I kept, and what it gives stays on the rank
        step = 1 if action.kind == "F" else -1
        slot = microbatch * numbering.stages + number
        value = slot if action.kind == "F" else numbering.slots + slot
        if 0 <= number - step < numbering.stages:
            needs, receives = value - step, placed[slot - step] != rank
        if 0 <= number + step < numbering.stages:
            gives, sends = value, placed[slot + step] != rank
    return Instruction(action, action.kind == "F", microbatch, stage, acts[action.kind], needs, receives, gives, sends)


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
