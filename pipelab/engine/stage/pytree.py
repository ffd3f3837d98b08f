"""Tensors, tuples, lists and dicts of them: what a stage may receive and return.

PyTorch's own tree utilities live under a private name; they are used here and nowhere else.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

Spec = Any


def opened(value: Any) -> Any:
    """Return the dict in a `UserDict`, such as the `BatchEncoding` that tokenizers return; anything else as it is."""
    return value.data if isinstance(value, UserDict) else value


def tensors_of(value: object) -> list[torch.Tensor]:
    """Return every tensor in a value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(opened(value)) if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return the value with `function` applied to every tensor in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return pytree.tree_map_only(torch.Tensor, function, opened(value))


def take_apart(value: object, whole: tuple[type, ...] = ()) -> tuple[list[Any], Spec]:
    """Return the leaves of a value, and what `rebuild` needs to put them back; objects of `whole` are leaves too."""
    return pytree.tree_flatten(opened(value), (lambda each: isinstance(each, whole)) if whole else None)


def named_leaves(value: object, whole: tuple[type, ...] = ()) -> list[tuple[str, Any]]:
    """Return the leaves of a value, each with its place, as in `["mask"]`; objects of `whole` are leaves too."""
    leaves, _ = pytree.tree_flatten_with_path(opened(value), lambda each: isinstance(each, whole))
    return [(pytree.keystr(path).replace("'", '"'), leaf) for path, leaf in leaves]


def open_with(kind: type, take: Callable[[Any], tuple[list[Any], Any]], make: Callable[[Any, Any], Any]) -> None:
    """Let the functions above find the tensors in objects of a class."""
    pytree.register_pytree_node(kind, take, make)


def rebuild(leaves: list[Any], spec: Spec) -> Any:
    """Return the value that `take_apart` took apart, with other leaves."""
    return pytree.tree_unflatten(leaves, spec)


def described(tensor: Any) -> str:
    """Return the shape and type of a tensor, or of what has both: `"[4, 16] float32"`."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def local_part(tensor: Any) -> Any:
    """Return this process's part of a DTensor, in the same memory; any other tensor as it is."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor


def full_tensor(tensor: Any) -> Any:
    """Return all of a DTensor, for which all processes of its mesh must call this; any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
