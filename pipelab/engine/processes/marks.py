"""Which gradients come: a stage need not have used all of its input, and then no gradient comes back for the rest.

Whoever receives has made room, so something travels all the same: zeros. Marks tell them from zeros that were computed;
`None` and zeros are not the same to an optimizer that lets weights decay. They go from processor to processor, also
where the gradients go from GPU to GPU: nobody waits for a GPU to read one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["Marks"]

_TAG = 1
"""On the processor, gradients take the same way; those have the tag 0."""


class Marks:
    """The marks that one stage sends and receives in a step.

    One at least travels with every micro-batch, so that the backwards of frozen stages keep their place in the plan.

    Args:
        group: what connects processors.
        ranks: the rank in it of each rank of the pipeline.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        """Begin with nothing under way."""
        self._group = group
        self._ranks = ranks
        self._sent: list[dist.Work] = []
        self._coming: dict[int, tuple[dist.Work, torch.Tensor, int]] = {}

    def send(self, there: Sequence[bool], peer: int) -> None:
        """Begin to send which gradients of a micro-batch there are."""
        marks = torch.tensor(there or [False], dtype=torch.uint8)
        self._sent.append(self._group.send([marks], self._ranks[peer], _TAG))

    def receive(self, microbatch: int, count: int, peer: int) -> None:
        """Begin to receive which of so many gradients of a micro-batch there are."""
        marks = torch.empty(count or 1, dtype=torch.uint8)
        self._coming[microbatch] = self._group.recv([marks], self._ranks[peer], _TAG), marks, count

    def under_way(self, microbatch: int) -> list[dist.Work]:
        """Return what to wait for before a micro-batch's marks are taken."""
        return [self._coming[microbatch][0]] if microbatch in self._coming else []

    def take(self, microbatch: int) -> list[bool]:
        """Return which gradients of a micro-batch came; they have been waited for."""
        _, marks, count = self._coming.pop(microbatch)
        return list(map(bool, marks.tolist()))[:count]

    def finish(self) -> None:
        """Wait until all is sent."""
        for work in self._sent:
            work.wait()

    def clear(self) -> None:
        """Let go of the step."""
        self._sent.clear()
        self._coming.clear()
