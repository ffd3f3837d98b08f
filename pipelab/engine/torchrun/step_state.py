"""One step on this process: what its rank has done, what travels, and how long it waited for that."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelab.engine.step import RankState, StepState, awaited_action
from pipelab.engine.torchrun.messages import ValueMeta
from pipelab.plan.plan import Plan

__all__ = ["ProcessStep"]


@dataclass(slots=True)
class ProcessStep(StepState):
    """One step, or one evaluation, of the one rank that this process runs.

    Attributes:
        counts: per micro-batch, how many rows it has.
        metas: by number of rows, what is known of what each stage gives.
        waited: per action, nanoseconds spent waiting for a value from another rank.
        waiting: whether what the next action needs from another rank is being waited for.
        peer: the rank to which a value was last about to be sent, or from which one was about to be received, since the
            last action.
    """

    counts: Sequence[int] = ()
    metas: dict[int, list[ValueMeta]] = field(default_factory=dict)
    waited: list[int] = field(default_factory=list)
    waiting: bool = False
    peer: int | None = None

    @property
    def mine(self) -> RankState:
        """What this process's rank has done."""
        return self.ranks[0]

    def meta(self, stage: int, microbatch: int) -> ValueMeta:
        """Return what is known of what a stage gives for a micro-batch."""
        return self.metas[self.counts[microbatch]][stage]

    def wait(self, works: Sequence[Any], flags: Sequence[Any]) -> None:
        """Wait for what the next action needs from another rank; note how long its value took.

        Args:
            works: what brings the value.
            flags: what says which gradients are present. It may come later or earlier. Where a device waits for the
                value, this process does not, but it waits until the other process has launched what makes the value.
        """
        asked = time.perf_counter_ns()
        self.waiting = True
        timed, rest = (works, flags) if works else (flags, works)
        for work in timed:
            work.wait()
        self.waited[self.mine.position] = time.perf_counter_ns() - asked
        for work in rest:
            work.wait()
        self.waiting = False

    def peer_of(self, plan: Plan) -> int | None:
        """Return the rank with which this process exchanges a value now: one it waits for, or else sends to.

        At the end of the row it waits for all that it has sent, to whichever rank: then it is nobody in particular.
        """
        if self.mine.computing or self.mine.position >= len(self.mine.actions):
            return None
        if not self.waiting:
            return self.peer
        awaited = awaited_action(plan, self.mine)
        return None if awaited is None else awaited[2]
