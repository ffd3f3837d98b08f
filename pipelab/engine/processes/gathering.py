"""After a step: every process's times, on one clock, and the losses, to all processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.processes.agreement import gathered
from pipelab.engine.processes.clocks import Clock
from pipelab.engine.processes.passage import Passage
from pipelab.engine.trees import map_tensors
from pipelab.plan import Plan

__all__ = ["ProcessRun", "share"]

_ARRIVED_NS = 20_000
"""A wait shorter than this found its value there."""

_LOSS_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class ProcessRun:
    """What all processes made of a step, as this one knows it.

    Attributes:
        outputs: per micro-batch, the model's output; after a step, only on the last stage's process.
        begun: per rank, when each action started, in nanoseconds on rank 0's clock.
        ended: per rank, when each ended.
        waited: per rank, how long each waited for a value from another rank.
        outputs_on: the rank whose process has the outputs; `None` where all have.
        clock_error_ns: how far the clocks of two processes may be apart.
    """

    plan: Plan
    outputs: list[Any]
    begun: list[list[int]]
    ended: list[list[int]]
    waited: list[list[int]]
    outputs_on: int | None
    clock_error_ns: int

    @property
    def note(self) -> str:
        """What a reader of the trace should know."""
        return f"{self.plan.ranks} processes, clocks within {self.clock_error_ns / 1e6:.2g} ms of rank 0's"

    def travel(self) -> dict[int, float]:
        """Return, by number of the value, how many milliseconds each value travelled between ranks.

        A rank that was free when a value left started on it the moment it came. A rank that was busy found it there
        afterwards, or waited for it: then it came at the end of the wait, else at the latest when the rank was free.
        """
        program = self.plan.program
        numbering, rank_of = program.numbering, program.rank_of
        ended = {
            code: end
            for row, ends in zip(program.rows, self.ended, strict=True)
            for code, end in zip(row, ends, strict=True)
        }
        found: dict[int, float] = {}
        for rank, row in enumerate(program.rows):
            free = 0
            for index, code in enumerate(row):
                for value in numbering.needs(code):
                    giver = program.giver(value)
                    if rank_of[giver] != rank:
                        waited = ended[giver] >= free or self.waited[rank][index] > _ARRIVED_NS
                        there = self.begun[rank][index] if waited else free
                        found[value] = max(0.0, (there - ended[giver]) / 1e6)
                free = self.ended[rank][index]
        return found


def share(group: dist.ProcessGroup, plan: Plan, passage: Passage, clock: Clock) -> ProcessRun:
    """Exchange times and losses; of an evaluation, the outputs. All processes must call it.

    The exchange is one collective operation of `3 * longest row + micro-batches` whole numbers per process.
    """
    last = plan.replicas[plan.stages - 1][0]
    begun, ended = (_readings(passage, marks, clock) for marks in (passage.begun, passage.ended))
    if passage.loss is None:
        box: list[Any] = [[map_tensors(_plain, each) for each in passage.outputs]]
        dist.broadcast_object_list(box, group=group, group_src=last)
        return ProcessRun(plan, box[0], [], [], [], None, 0)
    losses, kind = _losses(passage)
    longest = max(map(len, plan.program.rows))
    mine = torch.zeros(3 * longest + len(losses) + 1, dtype=torch.int64)
    for number, numbers in enumerate((begun, ended, passage.waited)):
        mine[number * longest : number * longest + len(numbers)] = torch.tensor(numbers)
    mine[3 * longest :] = torch.cat([torch.tensor([kind]), losses])
    every = gathered(mine, group)
    _take_losses(passage, every[last, 3 * longest :])
    rows = every.tolist()
    begun_by, ended_by, waited_by = (
        [
            row[number * longest : number * longest + len(codes)]
            for row, codes in zip(rows, plan.program.rows, strict=True)
        ]
        for number in range(3)
    )
    return ProcessRun(plan, passage.outputs, begun_by, ended_by, waited_by, last, clock.error_ns)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _readings(passage: Passage, marks: list[Any], clock: Clock) -> list[int]:
    return [reading - clock.ahead_ns for reading in passage.lane.nanoseconds(marks)]


def _losses(passage: Passage) -> tuple[torch.Tensor, int]:
    """Return the losses as the bits of 64-bit numbers, and which type they are of; zeros where they are not known."""
    assert passage.loss is not None
    values = passage.loss.values
    if any(value is None for value in values):
        return torch.zeros(len(values), dtype=torch.int64), 0
    known = torch.stack([value.detach().reshape(()).cpu() for value in values if value is not None])
    return known.double().view(torch.int64), _LOSS_TYPES.index(known.dtype)


def _take_losses(passage: Passage, numbers: torch.Tensor) -> None:
    """Take over the losses that the last stage's process found."""
    assert passage.loss is not None
    values = numbers[1:].view(torch.float64).to(_LOSS_TYPES[int(numbers[0])])
    device = passage.lane.runs_on.device
    passage.loss.values = list(values.to(device).unbind())
