"""The all-reduce of a stage's gradients over the ranks that run it (`R`), in one process: a barrier and a sum.

    rank 0 │ … 0B2 ─┐ meets          ┌─ 0R: adds the others' gradients to its own ─┐
    rank 3 │ … 0B3 ──────────┐ meets ┴─ 0R ────────────────────────────────────────┴ goes on

The gradients of the lowest rank are the model's own, `.grad` itself; those of the other ranks are added to it in the
order of the ranks, so that the same step gives the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from pipelab.engine.device.streams import RankStream
from pipelab.engine.emulation import emulate_all_reduce
from pipelab.engine.stage.stage import Stage
from pipelab.engine.stage.tied import accumulate


class Barrier:
    """Where the ranks of one all-reduce meet in one step: before the sum, and after it.

    Attributes:
        absent: the ranks that have not arrived.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.absent = set(ranks)
        self._barrier = threading.Barrier(len(ranks))
        self._launched: list[Any] = []  # events of the ranks' kernels, for which all their streams wait

    def meet(self, rank: int, stream: RankStream) -> None:
        """Wait for all ranks.

        Raises:
            BrokenBarrierError: if the step was stopped.
        """
        if stream.send is not None:
            self._launched.append(stream.send(None))
        self.absent.discard(rank)
        self._barrier.wait()
        if stream.receive is not None:
            for event in list(self._launched):
                stream.receive(event)

    def abort(self) -> None:
        """Release all ranks: the step is stopped."""
        self._barrier.abort()


class AllReduce:
    """One rank's part in the all-reduce of one stage.

    Attributes:
        group: the ranks that run the stage, the lowest first.
    """

    def __init__(self, rank: int, group: Sequence[int], stages: Sequence[Stage], stream: RankStream) -> None:
        """Take the part of `rank`; `stages` are what the ranks of the group run."""
        self.group = group
        self._rank = rank
        self._stages = stages
        self._stream = stream

    def act(self, _microbatch: int, barrier: Barrier, _kept: dict[int, Any], _loss: Any) -> None:
        """Add up the gradients of all ranks, or wait until the lowest rank has done it."""
        if self._rank == self.group[0]:
            self._add_up()
            emulate_all_reduce(self._stages[0].module)
        barrier.meet(self._rank, self._stream)

    def _add_up(self) -> None:
        """Add the gradients of the other ranks to the model's own, in the order of the ranks."""
        own, *copies = (list(stage.module.parameters()) for stage in self._stages)
        for parameter, *others in zip(own, *copies, strict=True):
            for other in others:
                gradient, other.grad = other.grad, None
                if gradient is None:
                    continue
                if self._stream.receive is not None:
                    gradient = self._stream.receive(gradient)
                accumulate(parameter, gradient)
