"""The figures of the labs: how much memory a process has and a forward saves, and how a measured figure is quoted."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn


def kernel_bytes(path: str, key: str) -> int | None:
    """Return how much memory a file of Linux's /proc tells under a key, in bytes; `None` on another system."""
    try:
        found = re.search(rf"^{key}:\s*(\d+) kB", Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None


def quoted(measured: str, predicted: str | None, believed: bool) -> str:
    """Return a measured figure with its prediction, which comes first if the measured one is not believed."""
    shown = measured if believed else f"{measured}*"
    if predicted is None:
        return shown
    return f"{shown} (predicted {predicted})" if believed else f"predicted {predicted} (measured {shown})"


def saved_by(module: nn.Module, x: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return how many bytes a forward saves for its backward, without the module's parameters; and its output."""
    saved = list[torch.UntypedStorage]()  # alive, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(x).detach()
    own = {each.untyped_storage().data_ptr() for each in module.parameters()}
    return sum({each.data_ptr(): each.nbytes() for each in saved if each.data_ptr() not in own}.values()), output
