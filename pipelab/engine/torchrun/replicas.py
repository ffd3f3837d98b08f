"""All-reduce a stage's gradients over its replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from pipelab.engine.stage.replicas import Buffers, versions, written, written_error
from pipelab.engine.stage.snapshot import overwrite
from pipelab.engine.stage.stage import Stage
from pipelab.engine.torchrun.groups import broadcast

__all__ = ["Reducer", "ReplicatedBuffers"]


class Reducer:
    """The gradients of one stage's parameters, summed over the stage's replicas.

    `.grad` may hold what earlier steps have summed already: it is laid aside for the time of a step, and added back.

    Args:
        module: the stage's. Its parameters may be others from step to step.
        group: the processes that hold the stage.
        transport_device: the device on which gradients travel.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, transport_device: torch.device) -> None:
        self._module = module
        self._parameters: list[nn.Parameter] = []
        self._group = group
        self._transport_device = transport_device
        self._aside: list[torch.Tensor | None] = []
        self._known = torch.zeros(0)

    def begin(self) -> None:
        """Lay aside what `.grad` holds, of the parameters that learn now."""
        self._parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        self._aside = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def meet(self) -> None:
        """Wait for the other replicas, and learn which parameters have a gradient on any of them."""
        here = [float(parameter.grad is not None) for parameter in self._parameters]
        self._known = torch.tensor(here, device=self._transport_device)
        dist.all_reduce(self._known, group=self._group)

    def reduce(self) -> None:
        """Sum the gradients over the replicas."""
        summed = [
            parameter for parameter, replicas in zip(self._parameters, self._known.tolist(), strict=True) if replicas
        ]
        # In the parameters' order, which is every process's; a set's differs between processes.
        for dtype in dict.fromkeys(parameter.dtype for parameter in summed):
            some = [parameter for parameter in summed if parameter.dtype == dtype]
            for parameter in some:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                elif parameter.grad.is_sparse:  # another replica's may have other rows
                    parameter.grad = parameter.grad.to_dense()
            gradients = [parameter.grad for parameter in some if parameter.grad is not None]
            parcel = torch.cat([gradient.flatten() for gradient in gradients]).to(self._transport_device)
            dist.all_reduce(parcel, group=self._group)
            pieces = parcel.split([gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))

    def end(self) -> None:
        """Add back what was laid aside."""
        for parameter, before in zip(self._parameters, self._aside, strict=True):
            if before is not None:
                if before.is_sparse:
                    before = before.to_dense()  # noqa: PLW2901 - a sparse one cannot take a dense one
                if parameter.grad is not None:
                    before.add_(parameter.grad)
                parameter.grad = before
        self._aside = []


class ReplicatedBuffers:
    """The buffers of the stages on this process, whose replicas are on others.

    Args:
        rank: this process's rank.
        runners: the stages on this process, by number.
        replicas: by stage, its ranks, the lowest first.
        group: the processes that hold the same stages.
        transport_device: the device on which buffers travel.
        policy: whether writing is refused, or the lowest rank's buffers become everybody's.
    """

    def __init__(
        self,
        rank: int,
        runners: Mapping[int, Stage],
        replicas: Mapping[int, Sequence[int]],
        group: dist.ProcessGroup,
        transport_device: torch.device,
        policy: Buffers,
    ) -> None:
        self._rank = rank
        self._runners = runners
        self._lowest = {stage: replicas[stage][0] for stage in runners}
        self._group = group
        self._transport_device = transport_device
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
        parcel = buffer.detach().to(self._transport_device).contiguous()
        broadcast(parcel, self._group, dist.get_group_rank(self._group, lowest))
        if self._rank != lowest:
            with torch.no_grad():
                overwrite(buffer, parcel)
