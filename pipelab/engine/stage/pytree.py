"""Tensors, tuples, lists and dicts of them: what a stage may take and give.

PyTorch's own tree utilities live under a private name; they are used here and nowhere else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["hides_learning_tensors", "map_leaves", "map_tensors", "rebuild", "take_apart", "tensors_of"]

Spec = Any


def tensors_of(value: object) -> list[torch.Tensor]:
    """Return every tensor in a value, in order.

    Example:
        >>> [tuple(tensor.shape) for tensor in tensors_of({"a": torch.zeros(2), "b": (torch.zeros(3), "text")})]
        [(2,), (3,)]
    """
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return the value with `function` applied to every tensor in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return map_leaves(torch.Tensor, function, value)


def map_leaves(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """Return the value with `function` applied to every leaf of a kind."""
    return pytree.tree_map_only(kind, function, value)


def take_apart(value: object) -> tuple[list[Any], Spec]:
    """Return the leaves of a value, and what `rebuild` needs to put them back."""
    return pytree.tree_flatten(value)


def rebuild(leaves: list[Any], spec: Spec) -> Any:
    """Return the value that `take_apart` took apart, with other leaves."""
    return pytree.tree_unflatten(leaves, spec)


def hides_learning_tensors(leaf: object) -> bool:
    """Tell whether an object that is no tensor itself holds some with a history: made by a stage, from its input.

    Containers, attributes, and what functions have taken along are looked through; parameters keep their own gradients,
    and modules hold nothing else.

    Example:
        >>> from types import SimpleNamespace
        >>> made = torch.zeros(2, requires_grad=True) * 2
        >>> [hides_learning_tensors(SimpleNamespace(a=a)) for a in (3, torch.zeros(2), [made])]
        [False, False, True]
    """
    if isinstance(leaf, torch.Tensor):
        return False
    seen: dict[int, object] = {}
    todo = [leaf]
    while todo:
        each = todo.pop()
        if isinstance(each, torch.Tensor):
            if each.requires_grad and not isinstance(each, nn.Parameter):
                return True
        elif id(each) not in seen and not isinstance(each, _HOLD_NONE):
            seen[id(each)] = each
            todo += _held_by(each)
    return False


_HOLD_NONE = (type(None), bool, int, float, complex, str, bytes, type, ModuleType, nn.Module)


def _held_by(holder: object) -> list[Any]:
    """Return what an object holds: items, attributes, what a function has taken along."""
    held: list[Any] = []
    if isinstance(holder, Mapping):
        held += holder.values()
    elif isinstance(holder, (list, tuple, set, frozenset, deque)):
        held += holder
    if isinstance(holder, FunctionType):
        held += [_content(cell) for cell in holder.__closure__ or ()]
    if isinstance(holder, MethodType):
        held.append(holder.__self__)
    held += getattr(holder, "__dict__", {}).values()
    slots = [name for kind in type(holder).__mro__ for name in vars(kind).get("__slots__", ())]
    return held + [getattr(holder, name, None) for name in slots]


def _content(cell: CellType) -> object:
    """Return what a function has taken along; `None` for a name that has no value yet."""
    try:
        content: object = cell.cell_contents
    except ValueError:
        return None
    return content
