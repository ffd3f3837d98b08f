"""All-reduce a stage's gradients over its replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipelab.engine.stage.replicas import Buffers, versions, written, written_error
from pipelab.engine.stage.snapshot import overwrite
from pipelab.engine.stage.stage import Stage
from pipelab.engine.torchrun.groups import broadcast


class Reducer:
    """The gradients of one stage's parameters, summed over the stage's replicas.

    `.grad` may hold the sums of earlier steps: a step stores them elsewhere, and adds them back at its end.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, transport_device: torch.device) -> None:
        self._module = module
        self._parameters: list[nn.Parameter] = []
        self._group = group
        self._transport_device = transport_device
        self._earlier: list[torch.Tensor | None] = []
        self._known = torch.zeros(0)

    def begin(self) -> None:
        """Store and clear the `.grad` of the parameters that learn now."""
        self._parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        self._earlier = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def meet(self, async_op: bool = False) -> Any:
        """Wait for the other replicas, and exchange which parameters have a gradient on any of them."""
        here = [float(parameter.grad is not None) for parameter in self._parameters]
        self._known = torch.tensor(here, device=self._transport_device)
        return dist.all_reduce(self._known, group=self._group, async_op=async_op)

    def reduce(self) -> None:
        """Sum the gradients over the replicas."""
        known = zip(self._parameters, self._known.tolist(), strict=True)
        for sums in self._sums([parameter for parameter, replicas in known if replicas]):
            _take(*sums)

    def start(self) -> list[dist.Work]:
        """Begin to sum the gradients over the replicas, without waiting for them; `finish` waits."""
        known = self.meet(async_op=True)
        self._begun = list(self._sums(self._parameters, async_op=True))
        return [known, *(work for work, *_ in self._begun)]

    def finish(self, works: list[dist.Work]) -> None:
        """Wait for the sums; a parameter that has no gradient on any replica has none."""
        for work in works:
            work.wait()
        for sums in self._begun:
            _take(*sums)
        for parameter, replicas in zip(self._parameters, self._known.tolist(), strict=True):
            parameter.grad = parameter.grad if replicas else None

    def _sums(self, summed: list[nn.Parameter], async_op: bool = False) -> Iterator[_Sum]:
        """Sum some parameters' gradients, type by type."""
        # In the parameters' order, which is every process's; a set's differs between processes.
        for dtype in dict.fromkeys(parameter.dtype for parameter in summed):
            some = [parameter for parameter in summed if parameter.dtype == dtype]
            for parameter in some:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                elif parameter.grad.is_sparse:  # another replica's may have other rows
                    parameter.grad = parameter.grad.to_dense()
            gradients = [parameter.grad for parameter in some if parameter.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients]).to(self._transport_device)
            yield dist.all_reduce(flat, group=self._group, async_op=async_op), flat, gradients

    def end(self) -> None:
        """Add the earlier gradients."""
        for parameter, before in zip(self._parameters, self._earlier, strict=True):
            if before is not None:
                if before.is_sparse:
                    before = before.to_dense()  # noqa: PLW2901 - a sparse one cannot take a dense one
                if parameter.grad is not None:
                    before.add_(parameter.grad)
                parameter.grad = before
        self._earlier = []


_Sum = tuple[Any, torch.Tensor, list[torch.Tensor]]
"""The operation that sums gradients, the gradients one behind the other, and where their sums go."""


def _take(_: Any, flat: torch.Tensor, gradients: list[torch.Tensor]) -> None:
    """Take the sums into the gradients."""
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))


class ReplicatedBuffers:
    """The buffers of the stages on this process, which other processes replicate.

    The policy says whether to refuse writes, or to copy the lowest rank's buffers to all. `runners` and `groups`
    are, by stage, what runs it here and the processes that hold it, the lowest rank first.
    """

    def __init__(
        self,
        rank: int,
        runners: Mapping[int, Stage],
        groups: Mapping[int, dist.ProcessGroup],
        transport_device: torch.device,
        policy: Buffers,
    ) -> None:
        self._rank = rank
        self._runners = runners
        self._groups = groups
        self._transport_device = transport_device
        self._policy = policy
        self._before: dict[int, dict[str, tuple[torch.Tensor, int]]] = {}

    def begin(self) -> None:
        """Record how often each buffer has been written into."""
        self._before = {stage: versions(runner.module) for stage, runner in self._runners.items()}

    def end(self) -> None:
        """Refuse writes on other ranks than the lowest, or copy the lowest rank's buffers."""
        for stage, runner in self._runners.items():
            if self._policy == "lowest":
                for buffer in runner.module.buffers():
                    self._copy(buffer, self._groups[stage])
            elif dist.get_rank(self._groups[stage]):
                name = written(self._before[stage], versions(runner.module))
                if name is not None:
                    raise written_error(stage, self._rank, name)

    def _copy(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
        message = buffer.detach().to(self._transport_device).contiguous()
        broadcast(message, group, 0)
        if dist.get_rank(group):
            with torch.no_grad():
                overwrite(buffer, message)
