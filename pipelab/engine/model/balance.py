"""Even cuts: by the numbers of layers, their parameters, or their measured time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipelab.engine.stage.pytree import map_tensors, tensors_of
from pipelab.engine.stage.snapshot import unchanged


def count_parameters(module: nn.Module) -> int:
    """Return how many numbers the module's parameters have; a lazy one counts as zero."""
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))


def short(count: int) -> str:
    """Return a number in few characters.

    Example:
        >>> short(1632), short(12_345), short(999_900), short(1_050_000)
        ('1632', '12.3k', '1M', '1.05M')
    """
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= max(0.9995 * unit, 10_000):  # three digits of less would be rounded up to four
            return f"{count / unit:.3g}{name}"
    return str(count)


def cut(weights: Sequence[float], into: int) -> list[tuple[int, int]]:
    """Return `(first, past the last)` for each of `into` contiguous parts, none empty.

    The heaviest part is as light as possible. Ties go to the more even cut, then to the one whose first parts are
    longer: with equal layers, lengths differ by at most one.

    Example:
        >>> cut([1] * 20, 3)
        [(0, 7), (7, 14), (14, 20)]
        >>> cut([5, 1, 1, 1, 1, 1], 2)
        [(0, 1), (1, 6)]
    """
    count = len(weights)
    total = [0.0, *accumulate(weights)]
    # best[start]: the (heaviest, sum of squares) of the best cut of layers start... into the parts that are left, and
    # where its first part ends. Filled from the last part to the first.
    best: list[tuple[float, float, int] | None] = [
        (total[count] - total[start], (total[count] - total[start]) ** 2, count) if start < count else None
        for start in range(count + 1)
    ]
    ends = [[entry[2] if entry else count for entry in best]]
    for parts in range(2, into + 1):
        following = best
        best = [None] * (count + 1)
        for start in range(count - parts + 1):
            for end in range(count - parts + 1, start, -1):
                rest = following[end]
                if rest is None:
                    continue
                load = total[end] - total[start]
                candidate = (max(load, rest[0]), load**2 + rest[1], end)
                known = best[start]
                if known is None or candidate[:2] < known[:2]:
                    best[start] = candidate
        ends.append([entry[2] if entry else count for entry in best])
    bounds: list[tuple[int, int]] = []
    start = 0
    for parts in range(into, 0, -1):
        end = ends[parts - 1][start]
        bounds.append((start, end))
        start = end
    return bounds


def layer_times(layers: Sequence[nn.Module], example: Any, repeats: int = 5) -> list[float]:
    """Return each layer's median seconds forward and backward on the example; restore all that it changes."""
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
