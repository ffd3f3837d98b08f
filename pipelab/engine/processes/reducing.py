"""All-reduce a stage's gradients over its replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Reducer"]


class Reducer:
    """The gradients of one stage's parameters, summed over the stage's replicas.

    `.grad` may hold what earlier steps have summed already: it is laid aside for the time of a step, and added back.

    Args:
        module: the stage's. Its parameters may be others from step to step.
        group: the processes that hold the stage.
        carrier: the device on which gradients travel.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, carrier: torch.device) -> None:
        """Note the stage."""
        self._module = module
        self._parameters: list[nn.Parameter] = []
        self._group = group
        self._carrier = carrier
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
        self._known = torch.tensor(here, device=self._carrier)
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
            parcel = torch.cat([gradient.flatten() for gradient in gradients]).to(self._carrier)
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
