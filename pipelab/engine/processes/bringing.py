"""Bring what a stage holds from the process that holds it to all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from pipelab.engine.keeping import overwrite
from pipelab.engine.trees import map_tensors

__all__ = ["Courier", "spread"]


def spread(tensor: torch.Tensor, group: dist.ProcessGroup, source: int) -> None:
    """Broadcast a contiguous tensor of any type, whatever the backend can count with."""
    line = tensor.as_strided((tensor.numel(),), (1,))  # of a single number, the stride may be any
    dist.broadcast(line.view(torch.uint8), group=group, group_src=source)


@dataclass(frozen=True, slots=True)
class Courier:
    """Brings a stage's tensors to this process, or from it; all processes must ask for the same.

    Attributes:
        group: all processes.
        source: the process that holds the stage.
        takes: whether this process takes what is brought; it does not if it holds the stage itself.
    """

    group: dist.ProcessGroup
    source: int
    takes: bool

    def bring(self, tensor: torch.Tensor) -> None:
        """Bring the source's numbers into this process's tensor."""
        brought = self._brought(tensor, tuple(tensor.shape), tensor.dtype)
        if self.takes:
            overwrite(tensor, brought)

    def bring_state(self, module: nn.Module) -> None:
        """Bring parameters, buffers and extra state; a buffer may have come or grown since the module was made."""
        for parameter in module.parameters():
            self.bring(parameter)
        own = dict(module.named_buffers())
        box: list[Any] = [_facts(module) if self._is_source else None]
        dist.broadcast_object_list(box, group=self.group, group_src=self.source)
        facts, extra = box[0]
        for name, (shape, dtype, persistent) in facts.items():
            buffer = own.pop(name, None)
            brought = self._brought(buffer, shape, dtype)
            if not self.takes:
                continue
            if buffer is not None and (tuple(buffer.shape), buffer.dtype) == (shape, dtype):
                overwrite(buffer, brought)
            else:
                part, leaf = _place(module, name)
                device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
                part.register_buffer(leaf, brought.to(device), persistent)
        if self.takes:
            for part, leaf in (_place(module, name) for name in own):
                setattr(part, leaf, None)
            for part, state in ((_place(module, name)[0], state) for name, state in extra.items()):
                part.set_extra_state(state)

    @property
    def _is_source(self) -> bool:
        return dist.get_rank(self.group) == self.source

    def _brought(self, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._is_source and tensor is not None:
            parcel = tensor.detach().cpu().contiguous()
        else:
            parcel = torch.empty(shape, dtype=dtype)
        spread(parcel, self.group, self.source)
        return parcel


def _facts(module: nn.Module) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype, bool]], dict[str, Any]]:
    """Return each buffer's shape, type and whether it is saved, and what else the module's parts save."""
    state = module.state_dict(keep_vars=True)
    buffers = {name: (tuple(each.shape), each.dtype, name in state) for name, each in module.named_buffers()}
    extra = {name: each for name, each in state.items() if name.endswith(_EXTRA_STATE_KEY_SUFFIX)}
    return buffers, map_tensors(lambda tensor: tensor.detach().cpu(), extra)


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the part of a module that a name is of, and the name there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
