"""Instructions: a plan's actions as the workers run them, bound to stages and to the values that they need and give."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pipelab.engine.device.streams import RankStream
from pipelab.engine.stage.stage import Stage
from pipelab.engine.step import Act, RankState, StepState
from pipelab.engine.threads.all_reduce import AllReduce, Barrier
from pipelab.plan.actions import Action
from pipelab.plan.bound import BoundPlan

Watch = Callable[[int, Stage, Action, dict[int, Any], Any], None]
"""Called on a rank's thread after each of its actions: with rank, stage, action, what the stage keeps, and output."""


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
        receives: whether another rank gives that value.
        gives: the value it computes, by number; `None` where nobody needs it.
        sends: whether another rank needs it.
        all_reduce: the all-reduce in which it takes part.
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
    all_reduce: AllReduce | None = None


class Row:
    """One rank's instructions, and what a step must know of all of them before it begins.

    Attributes:
        instructions: in order.
        actions: their actions.
        stages: the stages that they run.
        received: the values that come from other ranks, by number.
        all_reduces: the all-reduces in which the rank takes part, each with its ranks.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.instructions = instructions
        self.actions = [each.action for each in instructions]
        self.stages = {each.stage.index for each in instructions}
        self.received = [each.needs for each in instructions if each.receives and each.needs is not None]
        self.all_reduces = {each.action: each.all_reduce.group for each in instructions if each.all_reduce is not None}


@dataclass(slots=True)
class ThreadsStep(StepState):
    """One step of all ranks, and the values between them.

    Attributes:
        rows: every rank's instructions.
        values: by number, the values under way.
        ready: by number, a lock that is released when the value is there; only for values that change ranks.
        barriers: for each all-reduce, where its ranks meet.
        stopped: whether everybody should stop.
    """

    rows: Sequence[Sequence[Instruction]] = ()
    values: dict[int, Any] = field(default_factory=dict)
    ready: dict[int, threading.Lock] = field(default_factory=dict)
    barriers: dict[Action, Barrier] = field(default_factory=dict)
    stopped: bool = False

    def begin(self, rows: Sequence[Row], streams: Sequence[RankStream]) -> None:
        """Lock what has to be waited for."""
        self.rows = [row.instructions for row in rows]
        for row in rows:
            for value in row.received:
                lock = self.ready[value] = threading.Lock()
                lock.acquire()
            for action, group in row.all_reduces.items():
                if action not in self.barriers:
                    self.barriers[action] = Barrier(group)
        self.ranks = [
            RankState(rank, row.actions, stream, {stage: {} for stage in row.stages})
            for rank, (row, stream) in enumerate(zip(rows, streams, strict=True))
        ]

    def stop(self) -> None:
        """Make every worker stop at its next action, and release those that wait."""
        self.stopped = True
        for barrier in self.barriers.values():
            barrier.abort()
        for lock in self.ready.values():
            if lock.locked():
                try:
                    lock.release()
                except RuntimeError:  # its giver released it just now
                    continue


def instructions(
    bound: BoundPlan,
    runners: Mapping[tuple[int, int], Stage],
    first: Mapping[tuple[int, int], object],
    streams: Sequence[RankStream],
    *,
    backward: bool,
) -> list[Row]:
    """Return every rank's instructions for a legal plan; only those of the forwards unless `backward`.

    Args:
        bound: the plan, bound.
        runners: by stage and rank, what runs the stage there.
        first: likewise, what runs its first micro-batch, where that is something else.
        streams: what each rank computes on.
        backward: whether there is more than forwards.
    """
    codes = bound.codes
    rows: list[Row] = []
    for rank, row in enumerate(bound.rows):
        listed: list[Instruction] = []
        for code in row:
            action = codes.action(code)
            assert action.stage is not None
            runner = runners[action.stage, rank]
            if codes.collective[code]:
                if backward:
                    group = bound.replicas[action.stage]
                    part = AllReduce(rank, group, [runners[action.stage, each] for each in group], streams[rank])
                    listed.append(Instruction(action, False, -1, runner, part.act, all_reduce=part))  # noqa: FBT003
            elif backward or codes.forward[code]:
                runs = runner if action.microbatch else first.get((action.stage, rank), runner)
                act = getattr(runs, action.traits.method) if backward else runner.evaluate
                listed.append(_of_a_slot(bound, code, action, rank, runner, act))
        rows.append(Row(listed))
    return rows


def _of_a_slot(bound: BoundPlan, code: int, action: Action, rank: int, stage: Stage, act: Act) -> Instruction:
    """Return what a rank does for one micro-batch.

    A forward takes `out` of the stage before and gives its own; `B` and `I` take `gin` of the stage after, likewise.
    What `W` needs its own `I` has kept, and what it gives stays on the rank.
    """
    codes = bound.codes
    made = Instruction(action, bool(codes.forward[code]), codes.microbatch[code], stage, act)
    need, value = codes.comes[code], codes.gives[code]
    inner = need != codes.always
    onward = [needer for needer in codes.needers(value) if codes.stage[needer] != action.stage]
    return replace(
        made,
        needs=need if inner else None,
        receives=inner and bound.rank_of[bound.giver_of[need]] != rank,
        gives=value if onward else None,
        sends=any(bound.rank_of_slot[codes.slot[needer]] != rank for needer in onward),
    )


def with_watch(rows: Sequence[Row], watch: Watch) -> list[Row]:
    """Return the same instructions, with a call of `watch` at the end of each."""

    def act(rank: int, each: Instruction, microbatch: int, given: Any, kept: dict[int, Any], loss: Any) -> Any:
        made = each.act(microbatch, given, kept, loss)
        watch(rank, each.stage, each.action, kept, made)
        return made

    return [
        Row([replace(each, act=partial(act, rank, each)) for each in row.instructions]) for rank, row in enumerate(rows)
    ]
