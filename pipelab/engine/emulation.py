"""Emulated stages: models that take time without using the processor.

A laptop with two cores can then show eight ranks truly side by side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pipelab.engine.clock import here, since
from pipelab.errors import CostError, require_size

__all__ = ["EmulatedStage", "emulated"]


_LATE_NANOSECONDS = 200_000
"""How much earlier than wanted a sleep is set to end."""


class _Sleep(torch.autograd.Function):
    """Pass a tensor on after `forward` seconds, and its gradient after `backward` seconds."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        began = since()
        ctx.seconds = backward
        made = value * weight
        ctx.save_for_backward(value, weight)
        _sleep_until(began + round(1e9 * forward))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        began = since()
        (gradient,) = gradients
        value, weight = ctx.saved_tensors
        made = gradient * weight, (gradient * value).sum().reshape(weight.shape)
        _sleep_until(began + round(1e9 * ctx.seconds))
        return *made, None, None


def _sleep_until(moment: int) -> None:
    """Sleep to a moment of `time.perf_counter_ns`: nothing is made up for across actions.

    A sleep ends about a tenth of a millisecond late, so the last bit is spent yielding the processor instead.
    """
    if (left := moment - time.perf_counter_ns() - _LATE_NANOSECONDS) > 0:
        time.sleep(left / 1e9)
    while time.perf_counter_ns() < moment:
        time.sleep(0)
    here.began = moment  # an emulated layer that follows in the same action counts from here


class EmulatedStage(nn.Module):
    """A stage that multiplies by one number and takes exactly so long, forward and backward.

    Its gradients are real, so a pipeline of such stages can be verified like any other.

    Args:
        forward_ms: milliseconds that a forward takes.
        backward_ms: milliseconds that a backward takes.
    """

    def __init__(self, forward_ms: float, backward_ms: float) -> None:
        """Make the stage; its weight begins at one."""
        super().__init__()
        self.forward_ms = forward_ms
        self.backward_ms = backward_ms
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value times the weight, `forward_ms` later. Any shape."""
        apply: Callable[..., torch.Tensor] = _Sleep.apply
        return apply(value, self.weight, self.forward_ms / 1e3, self.backward_ms / 1e3)

    def extra_repr(self) -> str:
        """Return the two times."""
        return f"forward_ms={self.forward_ms:g}, backward_ms={self.backward_ms:g}"


def emulated(
    stages: int, forward_ms: float | Sequence[float] = 20, backward_ms: float | Sequence[float] = 40
) -> nn.Sequential:
    """Return a model of `stages` layers, each of which sleeps for so long forward and backward.

    Args:
        stages: how many.
        forward_ms: milliseconds of each forward: one number, or one per stage.
        backward_ms: milliseconds of each backward, likewise.

    Example:
        >>> emulated(2, forward_ms=20, backward_ms=[40, 50])
        Sequential(
          (0): EmulatedStage(forward_ms=20, backward_ms=40)
          (1): EmulatedStage(forward_ms=20, backward_ms=50)
        )

    Raises:
        SizeError: if `stages` is not a positive whole number.
        CostError: if a time is negative, or there is not one per stage.
    """
    require_size("stages", stages)
    times: list[Sequence[float]] = []
    for name, value in (("forward_ms", forward_ms), ("backward_ms", backward_ms)):
        each = [value] * stages if isinstance(value, (int, float)) else list(value)
        if len(each) != stages:
            raise CostError(f"{name} has {len(each)} numbers for {stages} stages: give one number, or one per stage")
        if min(each) < 0:
            raise CostError(f"{name}={value!r}: a time is 0 or more")
        times.append(each)
    return nn.Sequential(*(EmulatedStage(forward, backward) for forward, backward in zip(*times, strict=True)))
