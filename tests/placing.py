"""Interleaved 1F1B with its all-reduces placed by hand, and what its traces show."""

from __future__ import annotations

import pipelab
from pipelab import R


class ReducesEarly(pipelab.Interleaved1F1B):
    """Every stage is reduced right after its last backward on the rank."""

    def actions(self, rank):
        row = list(super().actions(rank))
        last = {action.stage: index for index, action in enumerate(row)}
        for index, action in enumerate(row):
            yield action
            if last[action.stage] == index:
                yield R(action.stage)


class ReducesLate(pipelab.Interleaved1F1B):
    """All stages are reduced at the end of the row."""

    def actions(self, rank):
        yield from super().actions(rank)
        yield from (R(stage) for stage in reversed(self.stages_of(rank)))


def beside(trace, reduced):
    """Return the ranks that run a backward between the start and the end of a stage's all-reduce."""
    (first, *_) = (event for event in trace.events if str(event.action) == f"{reduced}R")
    return {
        event.rank
        for event in trace.events
        if event.action.kind == "B" and event.start < first.end and event.end > first.start
    }
