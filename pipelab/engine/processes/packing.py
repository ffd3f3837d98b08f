"""Values of any type on the way between processes: pickled tensors of the newer types cannot be read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pipelab.engine.trees import map_leaves, map_tensors

__all__ = ["pack", "unpack"]


@dataclass(frozen=True, slots=True)
class _Packed:
    """A tensor's bytes, and what they mean."""

    content: torch.Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """Return the tensor."""
        return self.content.view(self.dtype).as_strided(self.shape, self.strides)


def pack(value: Any) -> Any:
    """Return a value as it can be pickled and sent: its tensors as bytes, on the processor, without history or gaps.

    Example:
        >>> unpack(pack({"small": torch.ones(2, dtype=torch.float8_e4m3fn), "name": "x"}))
        {'small': tensor([1., 1.], dtype=torch.float8_e4m3fn), 'name': 'x'}
    """
    return map_tensors(_packed, value)


def unpack(value: Any) -> Any:
    """Return the value that was packed."""
    return map_leaves(_Packed, _Packed.tensor, value)


def _packed(tensor: torch.Tensor) -> Any:
    plain = tensor.detach().cpu()
    if plain.layout != torch.strided or plain.is_nested or plain.is_quantized:
        return plain  # these are pickled as they are
    dense = torch.empty_like(plain).copy_(plain)
    content = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    return _Packed(content, dense.dtype, tuple(dense.shape), dense.stride())
