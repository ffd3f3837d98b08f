"""Traced stages on other devices than the one they were traced on.

A trace bakes in the device that it saw: `torch.arange(n, device=x.device)` becomes an `arange` on the CPU for ever. And
a model whose stages lie on several devices cannot be run as a whole, so it is traced by its *outline*: a copy whose
tensors have shapes and types, but no numbers and no place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx.node import map_aggregate

from pipelab.errors import SplitError

__all__ = ["fill", "move", "outline"]


def move(stage: nn.Module, device: torch.device, model: nn.Module) -> None:
    """Move a traced stage to a device: its tensors, and the devices in its graphs.

    Parameters stay the same objects. Buffers become other ones, which are given to the model as well.
    """
    before = {id(tensor): (part, name) for part, name, tensor in _tensors(stage)}
    stage.to(device)
    for part, name, tensor in list(_tensors(model)):
        if id(tensor) in before:
            stages_part, stages_name = before[id(tensor)]
            setattr(part, name, getattr(stages_part, stages_name))
    for part in stage.modules():
        graph = getattr(part, "graph", None)
        if isinstance(graph, torch.fx.Graph):
            _on(device, graph)
        for compiled in (part, getattr(part, "graph_module", None)):
            if isinstance(compiled, torch.fx.GraphModule):
                compiled.recompile()


def outline(model: nn.Module) -> tuple[nn.Module, dict[int, torch.Tensor]]:
    """Return a copy of a model on no device, and by the `id` of each of its tensors the model's own.

    Its tensors are parameters, buffers and what modules hold as plain attributes. Numbers take no memory.

    Raises:
        SplitError: if the model cannot be copied.
    """
    copies: dict[int, Any] = {}
    originals: dict[int, torch.Tensor] = {}
    loose = [value for part in model.modules() for value in vars(part).values() if isinstance(value, torch.Tensor)]
    for tensor in [*(tensor for _, _, tensor in _tensors(model)), *loose]:
        if id(tensor) not in copies:
            empty = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            copies[id(tensor)] = empty
            originals[id(empty)] = tensor
    try:
        return copy.deepcopy(model, dict(copies)), originals
    except Exception as error:
        raise SplitError(
            f"the model must be traced again, which takes a copy of it as its stages lie on several devices, but "
            f"{type(model).__name__} cannot be copied: {error}; evaluate with all ranks on one device, or give a list "
            "of stage modules"
        ) from error


def fill(stage: nn.Module, originals: dict[int, torch.Tensor]) -> None:
    """Give a stage that was traced by a model's outline the model's own tensors.

    Raises:
        SplitError: if the tracer has made a tensor of its own, whose numbers nobody knows.
    """
    for part, name, tensor in list(_tensors(stage)):
        if id(tensor) in originals:
            setattr(part, name, originals[id(tensor)])
        elif tensor.is_meta:
            raise SplitError(
                f"the model must be traced again, but its stages lie on several devices, and the numbers of {name!r} "
                "are known only where all of it is on one: evaluate with all ranks on one device, or give a list of "
                "stage modules"
            )


def _tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield every parameter and buffer, as often as it stands somewhere, with the module and the name where."""
    for part in model.modules():
        for name, tensor in (
            *part.named_parameters(recurse=False, remove_duplicate=False),
            *part.named_buffers(recurse=False, remove_duplicate=False),
        ):
            yield part, name, tensor


def _on(device: torch.device, graph: torch.fx.Graph) -> None:
    """Put a device in the place of every one that stands in a graph: all of a stage lives on one."""

    def here(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    for node in graph.nodes:
        node.args = map_aggregate(node.args, here)
        node.kwargs = map_aggregate(node.kwargs, here)
