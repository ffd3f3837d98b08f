"""Layers that are made where their stage is: from functions, or from a model on PyTorch's meta device.

Until then they have names, shapes and types, but no memory. A layer's numbers depend on the seed and its name alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pipelab.engine.stage.snapshot import unchanged
from pipelab.errors import SplitError, UsageError

Layer = nn.Module | Callable[[], nn.Module]
_swap = torch._C._swap_tensor_impl  # noqa: SLF001 - the public one refuses the parameters of an nn.GRU


class UnmadeLayers(nn.Sequential):
    """Layers, of which functions make some; these are on the meta device until `make`."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        with torch.device("meta"), unchanged([]):
            super().__init__(*(layer if isinstance(layer, nn.Module) else layer() for layer in layers))
        self.functions = {str(index): each for index, each in enumerate(layers) if not isinstance(each, nn.Module)}


def unmade(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Return the tensors on the meta device of some modules, each once."""
    return [each for each in dict.fromkeys(tensor for part in modules for tensor in _tensors(part)) if each.is_meta]


def require_makeable(model: nn.Module) -> None:
    """Refuse parameters and buffers on the meta device that nothing could fill."""
    for name, part in model.named_modules():
        own = [each for each in _tensors(part, recurse=False) if each.is_meta]
        if not own or name.partition(".")[0] in getattr(model, "functions", {}):
            continue
        if _are_spread(own):
            raise SplitError(
                f"layer {name!r} was spread over processes on the meta device\n  try: a function for each layer that "
                "makes and spreads it: lambda: fully_shard(Block(), mesh=…)"
            )
        if not _reset(part):
            raise SplitError(
                f"layer {name!r}, {type(part).__name__}, is on the meta device and has no reset_parameters(), which "
                "would fill its parameters and buffers where its stage is\n"
                "  try: write that method; or pass a function for each layer, Pipeline([make_first, make_second, …], …)"
            )


def make(module: nn.Module, model: nn.Module, named: nn.Module, seed: int) -> None:
    """Make a stage of a model in the processor's memory, with random numbers by the seed and the names in `named`.

    If several layers have one parameter, the first one's `reset_parameters` fills it.
    """
    names = {part: name for each in (model, named) for name, part in each.named_modules()}
    with unchanged([]), torch.no_grad():
        functions = getattr(model, "functions", {})
        for name in functions.keys() & module._modules.keys():  # noqa: SLF001 - named_children leaves out doubles
            if unmade([module.get_submodule(name)]):
                _seed(seed, name)
                with torch.enable_grad():
                    model._modules[name] = module._modules[name] = functions[name]()  # noqa: SLF001
        filled = dict.fromkeys(unmade([module]))
        for tensor in filled:
            _swap(tensor, _like(tensor))
        for part in reversed(list(model.modules())):  # a layer after what it holds, as when it was written
            own = [(each, each._version) for each in _tensors(part, recurse=False) if each in filled]  # noqa: SLF001
            if own and (reset := _reset(part)):
                _seed(seed, names[part])
                reset()
                _require_filled(own, f"layer {names[part]!r}, {type(part).__name__}")


def _require_filled(tensors: Iterable[tuple[torch.Tensor, int]], layer: str) -> None:
    if any(each._version == version for each, version in tensors):  # noqa: SLF001
        raise SplitError(
            f"reset_parameters() of {layer}, leaves a parameter or a buffer without numbers\n"
            "  try: fill all of them there; or pass a function for each layer"
        )


@contextmanager
def room_for(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Return a context in which all these modules have memory, with any numbers in what is not made."""
    if unmade(modules) and _are_spread(each for module in modules for each in _tensors(module)):
        raise UsageError(
            "this process does not have the whole model, and as layers are spread over processes, it cannot gather it\n"
            "  try: pipe.state_dict(whole=False), which has this process's own"
        )
    others = [(tensor, _like(tensor)) for tensor in unmade(modules)]
    for each in others:
        _swap(*each)
    try:
        yield
    finally:
        for each in others:
            _swap(*each)


def _are_spread(tensors: Iterable[torch.Tensor]) -> bool:
    return any(hasattr(each, "to_local") for each in tensors)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", requires_grad=tensor.requires_grad)


def _tensors(part: nn.Module, *, recurse: bool = True) -> list[torch.Tensor]:
    return [*part.parameters(recurse), *part.buffers(recurse)]


def _reset(part: nn.Module) -> Callable[[], None] | None:
    """Return the method that fills a layer's own parameters."""
    return getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)


def _seed(seed: int, name: str) -> None:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "big") >> 1)
