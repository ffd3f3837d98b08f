"""The buffers of stages on several ranks: each process writes into its own, and all shall have the lowest rank's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from pipelab.engine.keeping import overwrite
from pipelab.engine.processes.bringing import spread
from pipelab.engine.replicas import Buffers, versions, written, written_error
from pipelab.engine.stage import Stage

__all__ = ["ReplicatedBuffers"]


class ReplicatedBuffers:
    """The buffers of the stages on this process, whose replicas are on others.

    Args:
        rank: this process's rank.
        runners: the stages on this process, by number.
        replicas: by stage, its ranks, the lowest first.
        group: the processes that hold the same stages.
        carrier: the device on which buffers travel.
        policy: whether writing is refused, or the lowest rank's buffers become everybody's.
    """

    def __init__(
        self,
        rank: int,
        runners: Mapping[int, Stage],
        replicas: Mapping[int, Sequence[int]],
        group: dist.ProcessGroup,
        carrier: torch.device,
        policy: Buffers,
    ) -> None:
        """Note the stages."""
        self._rank = rank
        self._runners = runners
        self._lowest = {stage: replicas[stage][0] for stage in runners}
        self._group = group
        self._carrier = carrier
        self._policy = policy
        self._before: dict[int, dict[str, tuple[torch.Tensor, int]]] = {}

    def begin(self) -> None:
        """Note how often each buffer has been written into."""
        self._before = {stage: versions(runner.module) for stage, runner in self._runners.items()}

    def end(self) -> None:
        """Refuse what was written on other ranks than the lowest, or put the lowest rank's numbers in its place.

        Raises:
            EngineError: with the name of the buffer.
        """
        for stage, runner in self._runners.items():
            if self._policy == "lowest":
                for buffer in runner.module.buffers():
                    self._take(buffer, self._lowest[stage])
            elif self._rank != self._lowest[stage]:
                name = written(self._before[stage], versions(runner.module))
                if name is not None:
                    raise written_error(stage, self._rank, name)

    def _take(self, buffer: torch.Tensor, lowest: int) -> None:
        parcel = buffer.detach().to(self._carrier).contiguous()
        spread(parcel, self._group, dist.get_group_rank(self._group, lowest))
        if self._rank != lowest:
            with torch.no_grad():
                overwrite(buffer, parcel)
