"""Emulated stages: models that take time without using the processor.

A laptop with two cores can then show eight ranks truly side by side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from pipelab.engine.device import here, since
from pipelab.engine.stage.autograd import will_run
from pipelab.errors import CostError, require_size

_LATE_NANOSECONDS = 200_000
"""How much earlier than wanted a sleep is set to end."""


@dataclass(slots=True)
class _Backward:
    """The backward of one micro-batch through a layer, in two parts: together (`B`) or apart (`I`, `W`)."""

    trunk: int  # nanoseconds that the input's gradient takes
    branch: int  # nanoseconds that the weight's gradient takes
    weight: Node | None = None  # the node that stands for it; `None` if the weight is frozen
    owed: int = 0  # what the trunk left to the branch to sleep


class _Trunk(torch.autograd.Function):
    """Pass a tensor on after so many nanoseconds, and its gradient after the nanoseconds of the backward's trunk."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, nanoseconds: int, backward: _Backward) -> torch.Tensor:
        began, made = since(), value.view_as(value)
        ctx.backward = backward
        _sleep_until(began + nanoseconds)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        backward = ctx.backward
        if backward.weight is not None and will_run(backward.weight):
            backward.owed = backward.trunk  # one sleep for both: each one ends late, and disturbs the other ranks
        else:
            _sleep_until(since() + backward.trunk)
        return gradients[0], None, None


class _Branch(torch.autograd.Function):
    """Pass a weight on immediately, and its gradient after the nanoseconds of the backward's branch."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, backward: _Backward) -> torch.Tensor:
        ctx.backward = backward
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        backward = ctx.backward
        owed, backward.owed = backward.owed, 0
        _sleep_until(since() + owed + backward.branch)
        return gradients[0], None


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

    Its gradients are real, so a pipeline of such stages can be verified like any other. A full backward (`B`) takes
    `backward_ms`; of a split one, `I` takes one part and `W` the other. On stage 0, where `I` does nothing, `W` takes
    all of it.
    """

    def __init__(
        self, forward_ms: float, backward_ms: float, input_grad_ms: float | None = None, all_reduce_ms: float = 0
    ) -> None:
        super().__init__()
        self.forward_ms = forward_ms
        self.backward_ms = backward_ms
        self.input_grad_ms = backward_ms / 2 if input_grad_ms is None else input_grad_ms
        self.all_reduce_ms = all_reduce_ms
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value times the weight, `forward_ms` later. Any shape."""
        branch: Callable[..., torch.Tensor] = _Branch.apply
        trunk: Callable[..., torch.Tensor] = _Trunk.apply
        backward = _Backward(round(1e6 * self.input_grad_ms), round(1e6 * (self.backward_ms - self.input_grad_ms)))
        weight = branch(self.weight, backward)
        backward.weight = weight.grad_fn if self.weight.requires_grad else None
        return trunk(value * weight, round(1e6 * self.forward_ms), backward)

    def extra_repr(self) -> str:
        """Return the times."""
        reduce = f", all_reduce_ms={self.all_reduce_ms:g}" if self.all_reduce_ms else ""
        return f"forward_ms={self.forward_ms:g}, backward_ms={self.backward_ms:g}{reduce}"


def emulate_all_reduce(module: nn.Module) -> None:
    """Sleep as long as the all-reduce of a module's emulated stages takes."""
    for each in module.modules():
        if isinstance(each, EmulatedStage) and each.all_reduce_ms:
            _sleep_until(since() + round(1e6 * each.all_reduce_ms))


def emulated(
    stages: int,
    forward_ms: float | Sequence[float] = 20,
    backward_ms: float | Sequence[float] = 40,
    input_grad_ms: float | Sequence[float] | None = None,
    all_reduce_ms: float | Sequence[float] = 0,
) -> nn.Sequential:
    """Return a model of `stages` layers, each of which sleeps for the given times forward and backward.

    Args:
        stages: how many.
        forward_ms: milliseconds of each forward: one number, or one per stage.
        backward_ms: milliseconds of each backward, likewise.
        input_grad_ms: the part of `backward_ms` that `I` takes where the backward is split, likewise; `W` takes the
            rest. By default, half each.
        all_reduce_ms: milliseconds of each all-reduce (`R`), likewise: what several ranks wait to add up the stage's
            gradients.

    Example:
        >>> emulated(2, forward_ms=20, backward_ms=[40, 50])
        Sequential(
          (0): EmulatedStage(forward_ms=20, backward_ms=40)
          (1): EmulatedStage(forward_ms=20, backward_ms=50)
        )

    Raises:
        UsageError: if `stages` is not a positive whole number.
        CostError: if a time is negative, there is not one per stage, or a part is longer than the whole.
    """
    stages = require_size("stages", stages)
    forward, backward = _each("forward_ms", forward_ms, stages), _each("backward_ms", backward_ms, stages)
    half = [time / 2 for time in backward]
    inputs = half if input_grad_ms is None else _each("input_grad_ms", input_grad_ms, stages)
    for part, whole in zip(inputs, backward, strict=True):
        if part > whole:
            raise CostError(f"input_grad_ms={part:g} is more than backward_ms={whole:g}, of which it is a part")
    reduce = _each("all_reduce_ms", all_reduce_ms, stages)
    return nn.Sequential(*(EmulatedStage(*times) for times in zip(forward, backward, inputs, reduce, strict=True)))


@contextmanager
def instantly(model: nn.Module) -> Iterator[None]:
    """Let a model's emulated stages take no time: a warm-up or a verification then costs only its real work."""
    stages = [each for each in model.modules() if isinstance(each, EmulatedStage)]
    times = [(each.forward_ms, each.backward_ms, each.input_grad_ms, each.all_reduce_ms) for each in stages]
    for each in stages:
        each.forward_ms = each.backward_ms = each.input_grad_ms = each.all_reduce_ms = 0.0
    try:
        yield
    finally:
        for each, of_each in zip(stages, times, strict=True):
            each.forward_ms, each.backward_ms, each.input_grad_ms, each.all_reduce_ms = of_each


def _each(name: str, value: float | Sequence[float], stages: int) -> list[float]:
    """Return one time per stage."""
    each = [value] * stages if isinstance(value, (int, float)) else list(value)
    if len(each) != stages:
        raise CostError(f"{name} has {len(each)} numbers for {stages} stages: give one number, or one per stage")
    if min(each) < 0:
        raise CostError(f"{name}={value!r}: a time is 0 or more")
    return each
