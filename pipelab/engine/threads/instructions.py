"""Instructions: a plan's actions as the workers run them, bound to stages and to the values that they need and give."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipelab.engine.device.clocks import StepClock
from pipelab.engine.device.streams import Lane
from pipelab.engine.stage.caller import PLAIN, CallerContext
from pipelab.engine.stage.checkpoint_rng import watched
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.stage import Stage
from pipelab.engine.threads.all_reduce import AllReduce, Meeting, Seat
from pipelab.plan.actions import Action
from pipelab.plan.bound import Program

__all__ = ["Instruction", "Run", "instructions"]

Act = Callable[[int, Any, dict[int, Any], Any], Any]
"""What a stage does for an action: takes micro-batch, value, what it keeps and the loss; returns what it made."""

_ACTS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
"""The method of a stage that runs an action."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """What a worker does for one action.

    Attributes:
        action: the action.
        forward: whether it is a forward.
        microbatch: which micro-batch; -1 for an all-reduce.
        stage: the stage that runs.
        act: what is done.
        needs: the value it starts from, by number; `None` for the batch's rows, the loss, or what the stage kept.
        receives: whether other ranks give that value.
        gives: the value it makes, by number; `None` where nobody needs it.
        sends: whether another rank needs it.
        meets: the all-reduce in which it takes part; its `needs` is a number below zero, one for each rank.
    """

    action: Action
    forward: bool
    microbatch: int
    stage: Stage
    act: Act
    needs: int | None = None
    receives: bool = False
    gives: int | None = None
    sends: bool = False
    meets: AllReduce | None = None


def instructions(
    program: Program, runners: Mapping[tuple[int, int], Stage], lanes: Sequence[Lane], *, backward: bool
) -> list[list[Instruction]]:
    """Return every rank's instructions for a legal plan; only those of the forwards unless `backward`.

    Args:
        program: the plan, bound.
        runners: by stage and rank, what runs the stage there.
        lanes: what each rank runs on.
        backward: whether there is more than forwards.
    """
    numbering = program.numbering
    first = watched(runners, [lane.runs_on.device for lane in lanes])
    rows: list[list[Instruction]] = []
    for rank, row in enumerate(program.rows):
        listed: list[Instruction] = []
        for code in row:
            action = numbering.action(code)
            assert action.stage is not None
            if action.kind == "R":
                if backward:
                    listed.append(_all_reduce(program, action, action.stage, rank, runners, lanes[rank]))
            elif backward or action.kind == "F":
                runner = runners[action.stage, rank]
                runs = runner if action.microbatch else first.get((action.stage, rank), runner)
                act = getattr(runs, _ACTS[action.kind]) if backward else runner.evaluate
                listed.append(_of_a_slot(program, code, action, rank, runner, act))
        rows.append(listed)
    return rows


def _of_a_slot(program: Program, code: int, action: Action, rank: int, stage: Stage, act: Act) -> Instruction:
    """Return what a rank does for one micro-batch.

    A forward takes `out` of the stage before and gives its own; `B` and `I` take `gin` of the stage after, likewise.
    What `W` needs its own `I` has kept, and what it gives stays on the rank.
    """
    numbering, placed = program.numbering, program.placed
    microbatch, number = divmod(slot := code % numbering.slots, numbering.stages)
    made = Instruction(action, action.kind == "F", microbatch, stage, act)
    if action.kind == "W":
        return made
    step = 1 if made.forward else -1
    value = numbering.gives[code]
    inner, outer = 0 <= number - step < numbering.stages, 0 <= number + step < numbering.stages
    return replace(
        made,
        needs=value - step if inner else None,
        receives=inner and placed[slot - step] != rank,
        gives=value if outer else None,
        sends=outer and placed[slot + step] != rank,
    )


def _all_reduce(
    program: Program, action: Action, stage: int, rank: int, runners: Mapping[tuple[int, int], Stage], lane: Lane
) -> Instruction:
    """Return a rank's part in an all-reduce."""
    group = program.replicas[stage]
    part = AllReduce(rank, group, [runners[stage, each] for each in group], lane)
    needs = -1 - (rank * program.numbering.stages + stage)
    return Instruction(action, False, -1, runners[stage, rank], part.act, needs, receives=True, meets=part)  # noqa: FBT003


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
        caller: the caller's autocast and hooks on saved tensors, which hold in the workers too.
        clocks: per rank, by what the readings of its clock are turned into times.
    """

    rows: list[list[Instruction]]
    inputs: list[Any]
    loss: Loss | None
    watch_nan: bool = False
    caller: CallerContext = PLAIN
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
