"""Layers that are made where their stage is: from functions, or from a model on PyTorch's meta device.

    on "meta"     names, shapes and types, no memory       in every process, of all layers
    made          numbers, in memory                       in the process that holds the layer's stage

A layer's numbers depend on the seed and on its name alone: not on which process makes it, nor in which order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from pipelab.engine.stage.snapshot import unchanged
from pipelab.errors import SplitError

Layer = nn.Module | Callable[[], nn.Module]
Places = dict[int, tuple[torch.Tensor, list[tuple[nn.Module, str]]]]
"""By identity, tensors on the meta device, each with the modules that have it, and its name there."""


class UnmadeLayers(nn.Sequential):
    """Layers, of which functions make some; these are on the meta device until `make`."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.functions: dict[str, Callable[[], nn.Module]] = {}
        made: list[nn.Module] = []
        with torch.device("meta"), unchanged([]):
            for index, layer in enumerate(layers):
                if not isinstance(layer, nn.Module):
                    self.functions[str(index)] = layer
                made.append(layer if isinstance(layer, nn.Module) else layer())
        super().__init__(*made)


def unmade(modules: Iterable[nn.Module]) -> Places:
    """Return the tensors on the meta device of some modules."""
    found: Places = {}
    for part in dict.fromkeys(part for module in modules for part in module.modules()):
        for name, tensor in _own(part):
            if tensor.is_meta:
                found.setdefault(id(tensor), (tensor, []))[1].append((part, name))
    return found


def require_makeable(model: nn.Module) -> None:
    """Refuse parameters and buffers on the meta device that nothing could fill."""
    functions = getattr(model, "functions", {})
    for name, part in model.named_modules():
        if name.partition(".")[0] not in functions and any(each.is_meta for _, each in _own(part)) and not _reset(part):
            raise SplitError(
                f"layer {name!r}, {type(part).__name__}, is on the meta device and has no reset_parameters(), which "
                "would fill its parameters and buffers where its stage is\n"
                "  try: write that method; or pass a function for each layer, Pipeline([make_first, make_second, …], …)"
            )


def make(module: nn.Module, model: nn.Module, names: Mapping[nn.Module, str], others: Iterable[nn.Module]) -> None:
    """Make what a stage needs, in the processor's memory.

    If several layers have one parameter, the first one's `reset_parameters` fills it.

    Args:
        module: the stage.
        model: of which it is a part.
        names: the name of each layer, on which its random numbers depend.
        others: other modules that have the model's parameters.
    """
    seed = torch.initial_seed()
    with unchanged([]):
        functions = getattr(model, "functions", {})
        for name in functions.keys() & module._modules.keys():  # noqa: SLF001 - named_children leaves out doubles
            if unmade([module.get_submodule(name)]):
                _seed(seed, name)
                model._modules[name] = module._modules[name] = functions[name]()  # noqa: SLF001
        places = unmade([model, module, *others])
        needed = unmade([module]).keys()
        filled = {id(_fill(*places[each])) for each in needed}
        for part in reversed(list(model.modules())):  # a layer after what it holds, as when it was written
            reset = _reset(part)
            if reset is not None and any(id(each) in filled for _, each in _own(part)):
                _seed(seed, names[part])
                with torch.no_grad():
                    reset()


@contextmanager
def room_for(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Return a context in which all these modules have memory, with any numbers in what is not made."""
    places = unmade(modules).values()
    for each in places:
        _fill(*each)
    try:
        yield
    finally:
        for tensor, where in places:
            for part, name in where:
                setattr(part, name, tensor)


def _fill(tensor: torch.Tensor, places: Iterable[tuple[nn.Module, str]]) -> torch.Tensor:
    """Replace a tensor on the meta device by one in memory."""
    made = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
        vars(made).update(vars(tensor))
    for part, name in places:
        setattr(part, name, made)
    return made


def _own(part: nn.Module) -> list[tuple[str, torch.Tensor]]:
    both = (*part._parameters.items(), *part._buffers.items())  # noqa: SLF001 - named_parameters leaves out doubles
    return [(name, tensor) for name, tensor in both if tensor is not None]


def _reset(part: nn.Module) -> Callable[[], None] | None:
    """Return the method by which PyTorch's layers, and layers for its meta device, fill their parameters."""
    return getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)


def _seed(seed: int, name: str) -> None:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "big") >> 1)
