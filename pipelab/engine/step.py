"""What one step of a pipeline gave."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from pipelab.engine.batches import join
from pipelab.engine.lanes import Lane
from pipelab.engine.run import Run
from pipelab.plan import Plan
from pipelab.trace import Trace

__all__ = ["Step"]


class Step:
    """What one step gave.

    Attributes:
        loss: the loss of the whole batch, a tensor without dimensions or history.
    """

    def __init__(self, loss: torch.Tensor, run: Run, plan: Plan, lanes: Sequence[Lane], labels: Sequence[str]) -> None:
        """Keep what was measured; the trace and the outputs are put together when they are asked for."""
        self.loss = loss
        self._pieces = run.outputs
        self._marks = [
            [mark for both in zip(begun, ended, strict=True) for mark in both]
            for begun, ended in zip(run.begun, run.ended, strict=True)
        ]
        self._plan = plan
        self._lanes = lanes
        self._labels = labels

    @cached_property
    def outputs(self) -> Any:
        """The model's outputs for the whole batch, rows in the batch's order, without history."""
        return join(self._pieces)

    @cached_property
    def trace(self) -> Trace:
        """When each action started and ended, in milliseconds since the step began; measured in the workers."""
        readings = [lane.nanoseconds(marks) for lane, marks in zip(self._lanes, self._marks, strict=True)]
        origin = min((marks[0] for marks in readings if marks), default=0)
        times = [[(mark - origin) / 1e6 for mark in marks] for marks in readings]
        starts, ends = ([each[half::2] for each in times] for half in (0, 1))
        return Trace(self._plan, starts, ends, "ms", "measured", lanes=self._labels)

    def __repr__(self) -> str:
        """Return the loss."""
        return f"Step(loss={float(self.loss):g})"
