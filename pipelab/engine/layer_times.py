"""How long each layer takes: what `split(by="time")` makes even."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from pipelab.engine.keeping import unchanged
from pipelab.engine.trees import map_tensors, tensors_of

__all__ = ["layer_times"]


def layer_times(layers: Sequence[nn.Module], example: Any, repeats: int = 5) -> list[float]:
    """Return the median seconds that each layer takes forward and backward, one after the other on the example.

    Gradients, buffers and random state are left as they were.
    """
    times: list[float] = []
    value = example
    with unchanged(layers):
        for layer in layers:
            measured = []
            for _ in range(repeats + 1):
                began = _now()
                made = _forward_and_backward(layer, value)
                measured.append(_now() - began)
            times.append(median(measured[1:]))  # the first warms up
            value = map_tensors(torch.Tensor.detach, made)
    return times


def _now() -> float:
    """Return the time at which all that was launched is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _forward_and_backward(layer: nn.Module, value: Any) -> Any:
    """Run a layer forward, and backward without touching any `.grad`."""
    entry = map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()), value)
    made = layer(map_tensors(torch.clone, entry))
    wanted = [tensor for tensor in [*tensors_of(entry), *layer.parameters()] if tensor.requires_grad]
    outputs = [tensor for tensor in tensors_of(made) if tensor.requires_grad]
    if wanted and outputs:
        torch.autograd.grad(outputs, wanted, [torch.ones_like(tensor) for tensor in outputs], allow_unused=True)
    return made
