"""Set all processes' clocks to rank 0's: on several machines they count from different moments."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["Clock", "set_clocks"]

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
