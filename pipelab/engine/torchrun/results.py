"""Gather losses, outputs and times of all processes, with their clocks set to rank 0's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipelab.engine.device.clocks import HOST, HostClock
from pipelab.engine.stage.loss import Loss
from pipelab.engine.step import RankState, StepState
from pipelab.engine.torchrun.agreement import gathered
from pipelab.engine.torchrun.messages import from_bytes, to_bytes
from pipelab.engine.torchrun.stage import ProcessStep
from pipelab.plan.plan import Plan
from pipelab.trace.waits import travelled

_ROUNDS = 16
_BUDGET_NS = 20_000_000
"""How long a comparison of two clocks lasts if `_ROUNDS` rounds take less: a shorter round may follow."""

_STOP = -1


@dataclass(frozen=True, slots=True)
class Clock:
    """The difference between this process's clock and rank 0's.

    Attributes:
        ahead_ns: how far it is ahead of rank 0's; on several machines clocks count from different moments.
        error_ns: the largest error of `ahead_ns` on any process.
        set_at: when it was measured, on this process's clock.
    """

    ahead_ns: int = 0
    error_ns: int = 0
    set_at: int = 0


def set_clocks(group: dist.ProcessGroup) -> Clock:
    """Compare every process's clock with rank 0's; all processes must call it.

    Rank 0 asks each other process for its time, at least 16 times, and uses the shortest round: the clock was read
    between question and answer, so in the middle of the round, with an error of half its length. A smaller difference
    counts as none: processes on one machine share a clock.
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
    """Return the length of each round, and how far the other clock was ahead of this one."""
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
    """Send this process's time to rank 0, until it sends `_STOP`."""
    while True:
        dist.recv(word, group=group, group_src=0)
        if int(word) == _STOP:
            return
        word[0] = time.perf_counter_ns()
        dist.send(word, group=group, group_dst=0)


_ARRIVED_NS = 20_000
"""If a wait is shorter than this, the value had arrived before it."""

_LOSS_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def share(group: dist.ProcessGroup, plan: Plan, step: ProcessStep, loss: Loss | None, clock: Clock) -> StepState:
    """Exchange times and losses; of an evaluation, the outputs. All processes must call it.

    The exchange is one collective operation of `3 * longest row + micro-batches + 1` whole numbers from each.

    The loss gets the values of all micro-batches; it is `None` for an evaluation.
    """
    holders = plan.bound.rank_of_slot[plan.stages - 1 :: plan.stages]  # per micro-batch, the rank of its output
    state = StepState([None] * plan.microbatches, loss, step.watch_nan, step.caller)
    if loss is None:
        state.outputs = _outputs(group, holders, step)
        return state
    longest = max(map(len, plan.bound.rows))
    read = step.clocks[0].nanoseconds
    begun, ended = ([each - clock.ahead_ns for each in read(marks)] for marks in (step.mine.begun, step.mine.ended))
    own = torch.zeros(3 * longest + plan.microbatches + 1, dtype=torch.int64)
    for number, numbers in enumerate((begun, ended, step.waited)):
        own[number * longest : number * longest + len(numbers)] = torch.tensor(numbers)
    own[3 * longest :] = _losses(plan, step)
    every = gathered(own, group)
    stream = step.mine.stream
    _set_losses(loss, every[:, 3 * longest :], holders, stream.runs_on.device)
    begun_by, ended_by, waited_by = (
        [row[: len(codes)].tolist() for row, codes in zip(numbers, plan.bound.rows, strict=True)]
        for numbers in every[:, : 3 * longest].unflatten(1, (3, longest)).unbind(1)
    )
    state.outputs = step.outputs
    state.outputs_on = sorted(set(holders))
    ranks = [RankState(rank, (), stream, {}, *times) for rank, times in enumerate(zip(begun_by, ended_by, strict=True))]
    state.ranks = ranks
    state.travel = lambda: _travel_ms(plan, begun_by, ended_by, waited_by)
    state.clocks = [HOST, *(HostClock(clock.error_ns) for _ in range(1, plan.ranks))]
    many = "es" if plan.ranks > 1 else ""
    state.note = f"{plan.ranks} process{many}, clocks within {clock.error_ns / 1e6:.2g} ms of rank 0's"
    return state


def _travel_ms(
    plan: Plan, begun: Sequence[Sequence[int]], ended: Sequence[Sequence[int]], waited: Sequence[Sequence[int]]
) -> dict[int, float]:
    """Return, by number of the value, how long it travelled; of a wait, until its end."""
    rows = zip(begun, waited, strict=True)
    arrived = [[start if wait > _ARRIVED_NS else None for start, wait in zip(*row, strict=True)] for row in rows]
    return {value: time / 1e6 for value, time in travelled(plan.bound, begun, ended, arrived).items()}


def _outputs(group: dist.ProcessGroup, holders: Sequence[int], step: ProcessStep) -> list[Any]:
    outputs: list[Any] = [None] * len(holders)
    for holder in sorted(set(holders)):
        turns = [microbatch for microbatch, rank in enumerate(holders) if rank == holder]
        box: list[Any] = [to_bytes([step.outputs[microbatch] for microbatch in turns])]
        dist.broadcast_object_list(box, group=group, group_src=holder)
        for microbatch, output in zip(turns, from_bytes(box[0]), strict=True):
            outputs[microbatch] = output
    return outputs


def _losses(plan: Plan, step: ProcessStep) -> torch.Tensor:
    """Return the type of this process's losses, then the bits of each as a 64-bit number; 0 for unknown ones."""
    assert step.loss is not None
    found = torch.zeros(plan.microbatches + 1, dtype=torch.int64)
    for microbatch, value in enumerate(step.loss.values):
        if value is not None:
            found[0] = _LOSS_TYPES.index(value.dtype)
            found[microbatch + 1] = value.detach().reshape(()).cpu().double().view(torch.int64)
    return found


def _set_losses(loss: Loss, numbers: torch.Tensor, holders: Sequence[int], device: torch.device) -> None:
    for microbatch, holder in enumerate(holders):
        kind = _LOSS_TYPES[int(numbers[holder, 0])]
        loss.values[microbatch] = numbers[holder, microbatch + 1].view(torch.float64).to(device, kind)
