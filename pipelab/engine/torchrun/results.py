"""Set all processes' clocks to rank 0's: on several machines they count from different moments."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.device.clocks import HOST, StepClock
from pipelab.engine.stage.loss import Loss
from pipelab.engine.torchrun.agreement import gathered
from pipelab.engine.torchrun.groups import PipelineReplica
from pipelab.engine.torchrun.messages import pack, unpack
from pipelab.engine.torchrun.step_state import Passage
from pipelab.plan.plan import Plan

__all__ = ["Clock", "ProcessRun", "set_clocks", "share"]

_ROUNDS = 16
_BUDGET_NS = 20_000_000
"""How long a comparison of two clocks may go on, if `_ROUNDS` rounds take less: a short round may still come."""

_STOP = -1


@dataclass(frozen=True, slots=True)
class Clock:
    """How this process's clock is to be read.

    Attributes:
        ahead_ns: how far it is ahead of rank 0's.
        error_ns: how wrong that may be, on the process where it is worst.
        set_at: when it was set, on this process's clock.
    """

    ahead_ns: int = 0
    error_ns: int = 0
    set_at: int = 0


def set_clocks(group: dist.ProcessGroup) -> Clock:
    """Compare every process's clock with rank 0's; all processes must call it.

    Rank 0 asks each other process for its time, at least 16 times, and takes the shortest round: the answer was read
    somewhere between question and answer, so in the middle, give or take half of the round. A clock that is ahead by
    less than that is taken for the same clock, as it is on one machine.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    found = torch.zeros(size, 2, dtype=torch.int64)
    word = torch.zeros(1, dtype=torch.int64)
    for other in range(1, size):
        if rank == 0:
            length, ahead = min(_rounds(other, word, group))
            found[other] = torch.tensor([ahead if abs(ahead) > length // 2 else 0, length // 2])
        elif rank == other:
            _answer(word, group)
    dist.broadcast(found, group=group, group_src=0)
    return Clock(int(found[rank, 0]), int(found[:, 1].max()), time.perf_counter_ns())


def _rounds(other: int, word: torch.Tensor, group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Return of some rounds how long each took, and how far the other clock is ahead of this one."""
    rounds: list[tuple[int, int]] = []
    began = time.perf_counter_ns()
    while len(rounds) < _ROUNDS or time.perf_counter_ns() - began < _BUDGET_NS:
        asked = time.perf_counter_ns()
        word[0] = asked
        dist.send(word, group=group, group_dst=other)
        dist.recv(word, group=group, group_src=other)
        answered = time.perf_counter_ns()
        rounds.append((answered - asked, int(word) - (asked + answered) // 2))
    word[0] = _STOP
    dist.send(word, group=group, group_dst=other)
    return rounds


def _answer(word: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Tell rank 0 this process's time, until it has enough."""
    while True:
        dist.recv(word, group=group, group_src=0)
        if int(word) == _STOP:
            return
        word[0] = time.perf_counter_ns()
        dist.send(word, group=group, group_dst=0)


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
    group: dist.ProcessGroup, plan: Plan, part: PipelineReplica, passage: Passage, loss: Loss | None, clock: Clock
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


def _losses(plan: Plan, part: PipelineReplica, passage: Passage) -> torch.Tensor:
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
