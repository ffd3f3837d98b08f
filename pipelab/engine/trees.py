"""Tensors, tuples, lists and dicts of them: what a stage may take and give.

PyTorch's own tree utilities live under a private name; they are used here and nowhere else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
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
    """Tell whether what is no tensor itself is an object that holds tensors which learn; or cannot be looked into.

    Example:
        >>> from types import SimpleNamespace
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> [hides_learning_tensors(SimpleNamespace(a=a)) for a in (3, torch.zeros(2), weight)]
        [False, False, True]
    """
    if leaf is None or isinstance(
        leaf, (torch.Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device)
    ):
        return False
    finder = _Finder()
    try:
        finder.dump(leaf)
    except Exception:  # noqa: BLE001 - an object may refuse to be looked into in any way it likes
        return True
    return finder.found


class _Finder(pickle.Pickler):
    """Walks through an object, as if to save it, and finds out whether a tensor that learns is in it."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found = False

    def persistent_id(self, each: object) -> object:
        """Return something for what is not walked through: tensors, and what is saved by its name."""
        if isinstance(each, torch.Tensor):
            self.found |= each.requires_grad
            return True
        return True if isinstance(each, (type, FunctionType)) else None
