"""Keep a module's buffers, and put them back: what a run in between wrote shall leave no trace."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

__all__ = ["Kept", "kept_buffers", "overwrite", "put_back"]

Kept = list[tuple[nn.Module, str, torch.Tensor | None, torch.Tensor | None]]
"""Each buffer with its place and a copy of it; `None` where a module has named a buffer and not made it yet."""


def kept_buffers(modules: Iterable[nn.Module]) -> Kept:
    """Return what `put_back` puts back."""
    return [
        (part, name, buffer, None if buffer is None else buffer.clone())
        for module in modules
        for part in module.modules()
        for name, buffer in part._buffers.items()  # noqa: SLF001 - named_buffers leaves out what is None
    ]


def put_back(kept: Kept) -> None:
    """Put the numbers back into the buffers, and the buffers into their places: a module may have put others there."""
    with torch.no_grad():
        for part, name, buffer, before in kept:
            if buffer is not None and before is not None:
                overwrite(buffer, before)
            setattr(part, name, buffer)


def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor, also into one that shows the same memory several times, as `expand` makes it.

    Example:
        >>> mask = torch.zeros(1, 2).expand(3, 2)
        >>> overwrite(mask, torch.ones(3, 2))
        >>> mask.sum()
        tensor(6.)
    """
    if tensor.layout == torch.strided:
        for dimension, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dimension] > 1:
                tensor, values = tensor.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    tensor.copy_(values)
