"""Slices of a sequence on one stage: what earlier slices keep for later ones, and what comes back from those.

    F(0)   k0 ────────────────▶ attention
            └ kept ┐
    F(1)   k1 ──▶ k0 k1 ──────▶ attention
    B(1)   k1 ◀── cut ◀──────── gradient of k0 k1
                   └ kept ┐
    B(0)   k0 ◀──── sum ◀─┴──── gradient of k0

Each slice has a graph of its own: the earlier ones enter it without history, and their gradients wait for their turn.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pipelab.errors import EngineError

_CACHED = -3
"""The key in `kept` of what slices keep, by micro-batch; other keys are micro-batches, or `Stage`'s."""

_local = threading.local()


@dataclass(slots=True)
class _Kept:
    """A tensor of one slice, and the sum of the gradients that later slices have for it."""

    tensor: torch.Tensor
    gradient: torch.Tensor | float = 0.0


@dataclass(slots=True)
class _Running:
    """A slice that runs on this thread: what it keeps, and what the earlier ones kept; `None` in a backward."""

    own: list[_Kept]
    earlier: list[list[_Kept]] | None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, earlier: list[_Kept], own: _Kept, dim: int) -> torch.Tensor:
        ctx.slices, ctx.dim = [*earlier, own], dim
        return torch.cat([*(each.tensor for each in earlier), tensor], dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        *parts, own = gradient.split([each.tensor.shape[ctx.dim] for each in ctx.slices], ctx.dim)
        *earlier, this = ctx.slices
        for each, part in zip(earlier, parts, strict=True):
            each.gradient = each.gradient + part
        return own + this.gradient, None, None, None


def cached(*tensors: torch.Tensor, dim: int = -2) -> Any:
    """Return keys and values of the sequence so far: those of its earlier slices, then these.

    Call it in the forward of an attention layer. In a pipeline whose schedule has `slices`, it puts in front what the
    slices before this one passed to the same call, and sends their gradients back to them. Everywhere else, it returns
    its arguments: so the same module trains on whole sequences.

    Args:
        *tensors: keys and values, `[..., tokens, width]`.
        dim: the dimension of the tokens.

    Returns:
        As many tensors, `[..., tokens so far, width]`; one alone, not in a tuple.

    Example:
        >>> import pipelab, torch
        >>> from torch.nn.attention.bias import causal_lower_right
        >>> class Attention(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.qkv = torch.nn.Linear(4, 12)
        ...     def forward(self, x):  # [rows, tokens, 4]
        ...         q, k, v = self.qkv(x).chunk(3, dim=-1)
        ...         k, v = pipelab.cached(k, v)
        ...         mask = causal_lower_right(q.shape[-2], k.shape[-2])
        ...         return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(3, 8, 4)
        >>> layers, schedule = [Attention(), Attention()], pipelab.Seq1F1B(ranks=2, microbatches=12, slices=4)
        >>> with pipelab.Pipeline(layers, schedule, torch.nn.MSELoss(), sequence_dim=1) as pipe:
        ...     pipe.verify(x, torch.randn(3, 8, 4)).compared
        True

    Raises:
        EngineError: inside an activation checkpoint, which runs its forward again when other slices are there.
    """
    running: _Running | None = getattr(_local, "running", None)
    if running is None:
        return tensors if len(tensors) > 1 else tensors[0]
    joined = []
    for tensor in tensors:
        if running.earlier is None:
            raise EngineError(
                "cached() runs again, under an activation checkpoint: later slices have ended meanwhile\n"
                "  try: checkpoint the parts around it, such as the feed-forward layers"
            )
        earlier, own = [each[len(running.own)] for each in running.earlier], _Kept(tensor.detach())
        running.own.append(own)
        joined.append(_Joined.apply(tensor, earlier, own, dim))  # type: ignore[no-untyped-call]
    return tuple(joined) if len(joined) > 1 else joined[0]


@contextmanager
def forward_of(kept: dict[int, Any], microbatch: int, earlier: Sequence[int]) -> Iterator[None]:
    """Return a context in which a slice runs forward: `cached` finds the earlier ones."""
    caches: dict[int, list[_Kept]] = kept.setdefault(_CACHED, {})
    caches[microbatch] = []
    _local.running = _Running(caches[microbatch], [caches[each] for each in earlier])
    try:
        yield
    finally:
        _local.running = None


@contextmanager
def backward_of(kept: dict[int, Any], microbatch: int) -> Iterator[None]:
    """Return a context in which a slice runs backward, after which nothing needs what it kept."""
    _local.running = _Running([], None)
    try:
        yield
    finally:
        _local.running = None
        kept[_CACHED].pop(microbatch)
