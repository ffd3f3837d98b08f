"""After a step: every process's times, on one clock, and the losses, to all processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.device_clock import HOST, StepClock
from pipelab.engine.loss import Loss
from pipelab.engine.processes.agreement import gathered
from pipelab.engine.processes.clocks import Clock
from pipelab.engine.processes.packing import pack, unpack
from pipelab.engine.processes.parts import Part
from pipelab.engine.processes.passage import Passage
from pipelab.plan.plan import Plan

__all__ = ["ProcessRun", "share"]

_ARRIVED_NS = 20_000
"""A wait shorter than this found its value there."""

_LOSS_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class _Aligned:
    """Another process's clock, whose readings have been set to rank 0's.

    Attributes:
        error_ns: how far they may be from it.
    """

    error_ns: int

    def nanoseconds(self, marks: list[Any]) -> list[int]:
        return marks


@dataclass(slots=True)
class ProcessRun:
    """What all processes made of a step, as this one knows it.

    Attributes:
        outputs: per micro-batch, the model's output; after a step, only on the last stage's process.
        begun: per rank, when each action started, in nanoseconds on rank 0's clock.
        ended: per rank, when each ended.
        waited: per rank, how long each waited for a value from another rank.
        outputs_on: the ranks whose processes have outputs; `None` where all have all.
        clock_error_ns: how far the clocks of two processes may be apart.
    """

    plan: Plan
    outputs: list[Any]
    begun: list[list[int]]
    ended: list[list[int]]
    waited: list[list[int]]
    outputs_on: Sequence[int] | None
    clock_error_ns: int

    @property
    def clocks(self) -> list[StepClock]:
        """By what readings are turned into times: rank 0's clock, and those that have been set to it."""
        return [HOST, *(_Aligned(self.clock_error_ns) for _ in range(1, self.plan.ranks))]

    @property
    def note(self) -> str:
        """What a reader of the trace should know."""
        many = "es" if self.plan.ranks > 1 else ""
        return f"{self.plan.ranks} process{many}, clocks within {self.clock_error_ns / 1e6:.2g} ms of rank 0's"

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


def share(
    group: dist.ProcessGroup, plan: Plan, part: Part, passage: Passage, loss: Loss | None, clock: Clock
) -> ProcessRun:
    """Exchange times and losses; of an evaluation, the outputs. All processes must call it.

    The exchange is one collective operation of `3 * longest row + micro-batches + 1` whole numbers from each.

    Args:
        group: all processes.
        plan: the plan.
        part: the pipeline that this process belongs to.
        passage: what happened on this process.
        loss: the loss of the whole batch, which gets the values of all micro-batches; `None` for an evaluation.
        clock: how this process's clock is to be read.
    """
    homes = plan.program.placed[plan.stages - 1 :: plan.stages]  # where each micro-batch's output is
    if loss is None:
        return ProcessRun(plan, _outputs(group, homes, passage), [], [], [], None, 0)
    longest = max(map(len, plan.program.rows))
    begun, ended = (_readings(passage, marks, clock) for marks in (passage.begun, passage.ended))
    mine = torch.zeros(3 * longest + plan.microbatches + 1, dtype=torch.int64)
    for number, numbers in enumerate((begun, ended, passage.waited)):
        mine[number * longest : number * longest + len(numbers)] = torch.tensor(numbers)
    mine[3 * longest :] = _losses(plan, part, passage)
    every = gathered(mine, group)
    _take_losses(loss, every[:, 3 * longest :], homes, passage.lane.runs_on.device)
    rows = every.tolist()
    begun_by, ended_by, waited_by = (
        [
            row[number * longest : number * longest + len(codes)]
            for row, codes in zip(rows, plan.program.rows, strict=True)
        ]
        for number in range(3)
    )
    outputs: list[Any] = [None] * plan.microbatches
    for microbatch, output in zip(part.microbatches, passage.outputs, strict=True):
        outputs[microbatch] = output
    return ProcessRun(plan, outputs, begun_by, ended_by, waited_by, sorted(set(homes)), clock.error_ns)


def _outputs(group: dist.ProcessGroup, homes: Sequence[int], passage: Passage) -> list[Any]:
    """Return the outputs of all micro-batches, from the processes that hold the last stage."""
    outputs: list[Any] = [None] * len(homes)
    for home in sorted(set(homes)):
        box: list[Any] = [pack(passage.outputs)]
        dist.broadcast_object_list(box, group=group, group_src=home)
        turns = [microbatch for microbatch, rank in enumerate(homes) if rank == home]
        for microbatch, output in zip(turns, unpack(box[0]), strict=True):
            outputs[microbatch] = output
    return outputs


def _readings(passage: Passage, marks: list[Any], clock: Clock) -> list[int]:
    return [reading - clock.ahead_ns for reading in passage.clock.nanoseconds(marks)]


def _losses(plan: Plan, part: Part, passage: Passage) -> torch.Tensor:
    """Return this process's losses as the bits of 64-bit numbers, zeros where it knows none; their type comes first."""
    assert passage.loss is not None
    found = torch.zeros(plan.microbatches + 1, dtype=torch.int64)
    for microbatch, value in zip(part.microbatches, passage.loss.values, strict=True):
        if value is not None:
            found[0] = _LOSS_TYPES.index(value.dtype)
            found[microbatch + 1] = value.detach().reshape(()).cpu().double().view(torch.int64)
    return found


def _take_losses(loss: Loss, numbers: torch.Tensor, homes: Sequence[int], device: torch.device) -> None:
    """Take over the losses from the processes that found them."""
    for microbatch, home in enumerate(homes):
        kind = _LOSS_TYPES[int(numbers[home, 0])]
        loss.values[microbatch] = numbers[home, microbatch + 1].view(torch.float64).to(device, kind)
