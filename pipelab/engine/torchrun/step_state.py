"""One step on this process: what its actions need, how far it is, and when each action ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelab.engine.device.clocks import StepClock, here
from pipelab.engine.device.streams import Lane
from pipelab.engine.stage.caller import PLAIN, CallerContext
from pipelab.engine.stage.loss import Loss
from pipelab.engine.torchrun.messages import Form
from pipelab.plan.actions import Action

__all__ = ["Passage"]


@dataclass(slots=True)
class Passage:
    """One step, or one evaluation, on this process.

    Attributes:
        row: this rank's actions, in order; only the forwards of an evaluation.
        lane: what this rank runs on.
        clock: by what this rank's readings of its clock are turned into times.
        loss: the loss; `None` for an evaluation.
        counts: per micro-batch, how many rows it has.
        forms: by number of rows, the form of what each stage gives.
        watch_nan: whether to look for NaN and infinity after every action.
        caller: the caller's autocast, which holds in forwards.
        kept: per stage, what forwards keep for their backwards.
        outputs: per micro-batch, the model's output, on the last stage's process.
        begun: the clock at the start of each action.
        ended: the clock at the end of each action.
        waited: per action, nanoseconds spent waiting for a value from another rank.
        position: how many actions are done.
        computing: whether one is running, rather than waited for.
        waiting: whether what the next one needs from another rank is being waited for.
        peer: the rank to which a value was last about to be sent, or from which one was about to be received, since the
            last action.
    """

    row: Sequence[Action]
    lane: Lane
    clock: StepClock
    loss: Loss | None
    counts: Sequence[int]
    forms: dict[int, list[Form]]
    watch_nan: bool = False
    caller: CallerContext = PLAIN
    kept: dict[int, dict[int, Any]] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    begun: list[Any] = field(default_factory=list)
    ended: list[Any] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    position: int = 0
    computing: bool = False
    waiting: bool = False
    peer: int | None = None

    def __post_init__(self) -> None:
        """Make room for the outputs and the waits."""
        self.outputs = [None] * len(self.counts)
        self.waited = [0] * len(self.row)

    def form(self, stage: int, microbatch: int) -> Form:
        """Return the form of what a stage gives for a micro-batch."""
        return self.forms[self.counts[microbatch]][stage]

    def wait(self, works: Sequence[Any], marks: Sequence[Any]) -> None:
        """Wait for what the next action needs from another rank; note how long its value took.

        Args:
            works: what brings the value.
            marks: what brings its marks, later or earlier: where a device waits for the value, this process does not,
                but it waits until the other process has launched what makes the value.
        """
        asked = time.perf_counter_ns()
        self.waiting = True
        timed, rest = (works, marks) if works else (marks, works)
        for work in timed:
            work.wait()
        self.waited[self.position] = time.perf_counter_ns() - asked
        for work in rest:
            work.wait()
        self.waiting = False

    def timed(self, work: Callable[[], Any]) -> Any:
        """Run the next action between two readings of the clock."""
        self.computing, self.peer = True, None
        here.began = self.lane.mark()
        self.begun.append(here.began)
        made = work()
        self.ended.append(self.lane.mark())
        self.computing = False
        self.position += 1
        return made
