"""Instructions: a plan's actions as the workers run them, bound to stages and to the values that they need and give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipelab.engine.all_reduce import AllReduce
from pipelab.engine.draws import watched
from pipelab.engine.lanes import Lane
from pipelab.engine.stage import Stage
from pipelab.plan.actions import Action
from pipelab.plan.bound import Program

__all__ = ["Instruction", "instructions"]

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
