"""What a whole model is called with: a tuple is several arguments, a dict keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipelab.engine.stage.pytree import map_leaves, opened, take_apart, tensors_of
from pipelab.errors import BatchError


def call(model: nn.Module, given: Any) -> Any:
    """Call a whole model as its traced stages are called: a tuple is several arguments, a dict keyword arguments."""
    args, kwargs = arguments_of(model, given)
    return model(*args, **kwargs)


def arguments_of(model: nn.Module, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that a batch stands for, and the keyword arguments."""
    given = opened(given)
    if isinstance(given, dict):
        try:
            inspect.signature(model.forward).bind(**given)
        except TypeError:  # the model takes the dict itself, or has other names
            return (given,), {}
        return (), given
    return (tuple(given) if isinstance(given, (tuple, list)) else (given,)), {}


def in_order(model: nn.Module, given: Any) -> Any:
    """Return keyword arguments in the order of the model's parameters, which is the tracer's too."""
    kwargs = arguments_of(model, given)[1]
    known = [name for name in inspect.signature(model.forward).parameters if name in kwargs]
    return {name: kwargs[name] for name in (*known, *(each for each in kwargs if each not in known))} or given


def received(given: Any) -> Sequence[Any]:
    """Return the values that arrive as one value."""
    return given if isinstance(given, (tuple, list)) else (given,)


def shapes_of(given: Any) -> tuple[torch.Size, ...]:
    """Return the shapes of the tensors in a value; a dict's in the order of its names."""
    if isinstance(given, dict):
        given = [given[name] for name in sorted(given)]
    return tuple(tensor.shape for tensor in tensors_of(given))


def require_like(example: Any, given: Any) -> None:
    """Refuse another structure than the example's, or another constant: the tracer has recorded those."""
    (ours, spec), (theirs, other) = map(take_apart, (example, given))
    if spec != other or any(map(_other_constant, ours, theirs)):
        raise BatchError(
            f"the model was traced with {_described(example)}, and the batch is {_described(given)}: the tracer "
            "records names, and values that are no tensors\n  try: a batch like the example, or split the model again "
            "with example= one micro-batch of this kind"
        )


def _other_constant(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor))
    return bool(one != other)


def _described(given: Any) -> str:
    """Return a batch in words, sizes left out: `{'ids': tensor, 'cache': False}`."""
    return str(map_leaves(torch.Tensor, lambda _: _Word("tensor"), given))


class _Word(str):
    __slots__ = ()
    __repr__ = str.__str__
