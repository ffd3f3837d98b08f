"""Optimizers that were at work before a pipeline moved the parameters: say so, and help."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipelab.errors import DeviceError

__all__ = ["OptimizerGuard"]


class OptimizerGuard:
    """Watches for an optimizer whose state was left behind on another device.

    Moving a stage keeps its parameters the same objects, so an optimizer made before goes on working; but momentum and
    the like, which it made in earlier steps, stay where they were.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note where the parameters are now, before they are moved."""
        self._homes = {parameter: parameter.device for parameter in parameters}
        self._unwatch: Callable[[], object] | None = None

    def watch_if_moved(self) -> None:
        """Look at every optimizer step from now on, if any parameter has moved."""
        if any(parameter.device != home for parameter, home in self._homes.items()):
            watch = weakref.WeakMethod(self._before_step)

            def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001
                if (before_step := watch()) is not None:
                    before_step(optimizer)

            # PyTorch's list of hooks lives as long as the process: it must not keep the pipeline's parameters alive.
            self._unwatch = weakref.finalize(self, register_optimizer_step_pre_hook(hook).remove)

    def close(self) -> None:
        """Stop watching."""
        if self._unwatch is not None:
            self._unwatch()

    def move(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the state of the pipeline's parameters to where the parameters are."""
        for parameter, state in optimizer.state.items():
            if parameter in self._homes:
                for key, value in state.items():
                    if _follows(key, value):
                        state[key] = value.to(parameter.device)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if parameter in self._homes and _follows(key, value) and value.device != parameter.device:
                    raise DeviceError(
                        f"the optimizer's {key!r} for a parameter of shape {tuple(parameter.shape)} is on "
                        f"{value.device}, but the pipeline moved the parameter to {parameter.device}: call "
                        "pipe.move_optimizer_state(optimizer) once, after making the pipeline"
                    )


def _follows(key: str, value: object) -> bool:
    """Tell whether a piece of state lives with its parameter; PyTorch keeps `step` on the CPU."""
    return isinstance(value, torch.Tensor) and key != "step"
