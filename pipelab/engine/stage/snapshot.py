"""Snapshots of all that a run of a model changes besides gradients: buffers, random state, and the batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn

from pipelab.engine.stage.pytree import tensors_of


class BufferSnapshot:
    """The buffers of some modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept = [
            (part, name, buffer, None if buffer is None else buffer.clone())
            for module in modules
            for part in module.modules()
            for name, buffer in part._buffers.items()  # noqa: SLF001 - named_buffers leaves out those not made yet
        ]

    def restore(self) -> None:
        """Restore the values of every buffer, and the buffer itself if a module has replaced it."""
        with torch.no_grad():
            for part, name, buffer, before in self._kept:
                if buffer is not None and before is not None:
                    overwrite(buffer, before)
                setattr(part, name, buffer)


class BatchSnapshot:
    """The numbers of a batch, into which a first stage may write."""

    def __init__(self, value: object) -> None:
        """Copy the tensors; an inference tensor may not be written into, and a sparse one is not."""
        tensors = [each for each in tensors_of(value) if each.layout == torch.strided and not each.is_inference()]
        self._kept = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Restore every tensor that was written into."""
        with torch.no_grad():
            for tensor, before in self._kept:
                if not bool(((tensor == before) | (tensor.isnan() & before.isnan())).all()):
                    overwrite(tensor, before)


class RandomSnapshot:
    """The state of PyTorch's default random generators, of the processor and all GPUs."""

    def __init__(self) -> None:
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._states = [torch.get_rng_state(), *gpus]

    def restore(self) -> None:
        """Reset the generators to this state."""
        processor, *gpus = self._states
        torch.set_rng_state(processor)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)

    def __eq__(self, other: object) -> bool:
        theirs = other._states if isinstance(other, RandomSnapshot) else []
        return len(self._states) == len(theirs) and all(map(torch.equal, self._states, theirs))

    __hash__ = None  # type: ignore[assignment]  # it holds tensors


class AttributeSnapshot:
    """What the modules of a model have beside parts, parameters and mode: attributes, hooks, buffers, a `forward`.

    Numbers and texts count by value, any other object by which one it is. Dicts, lists and configs are opened.
    """

    def __init__(self, model: nn.Module) -> None:
        self._noted: dict[str, object] = {}
        self._opened: set[int] = set()  # all modules may have one config
        for prefix, part in model.named_modules():
            for name, value in vars(part).items():  # every step waits for this, and most are dicts without hooks
                if not (isinstance(value, dict) and not value) and name not in ("training", "_parameters", "_modules"):
                    self._note(f"{prefix}.{name}" if prefix else name, value)

    def changed(self, later: AttributeSnapshot) -> str:
        """Return the name of the first attribute that differs in a later snapshot; "" if none does."""
        before, after, none = self._noted, later._noted, object()
        return next((name for name in before | after if not _same(before.get(name, none), after.get(name, none))), "")

    def _note(self, name: str, value: object) -> None:
        inner: Iterable[tuple[object, object]] = ()
        if isinstance(value, dict):
            inner = value.items()
        elif isinstance(value, (list, tuple, set)):
            inner = enumerate(value)
        else:
            self._noted[name] = value
            is_config = is_dataclass(value) or type(value).__name__.endswith(("Config", "Namespace"))
            if is_config and hasattr(value, "__dict__"):
                inner = vars(value).items()
        if inner and id(value) not in self._opened:
            self._opened.add(id(value))
            for key, each in inner:
                self._note(f"{name}.{key}", each)


def _same(one: object, other: object) -> bool:
    of_value = type(one) is type(other) and isinstance(one, (int, float, complex, str, bytes))
    return one is other or (of_value and one == other)


@contextmanager
def restored(modules: Iterable[nn.Module], batch: Any) -> Iterator[Callable[[], None]]:
    """Restore gradients, buffers, modes, random state and batch at the end; yield what restores all but gradients."""
    modules = list(modules)
    modes = [(layer, layer.training) for module in modules for layer in module.modules()]
    gradients = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    kept = (BufferSnapshot(modules), RandomSnapshot(), BatchSnapshot(batch))

    def rewind() -> None:
        for parameter, _ in gradients:
            parameter.grad = None
        for layer, training in modes:
            layer.training = training
        for each in kept:
            each.restore()

    rewind()
    try:
        yield rewind
    finally:
        rewind()
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def unchanged(of: Sequence[Any], *, attributes: bool = False) -> Iterator[None]:
    """Restore modules' buffers and random state afterwards; and attributes, with what lists, dicts and sets hold."""
    found = [each for one in of for each in (one, *getattr(one, "__dict__", {}).values())]
    modules = [each for each in found if isinstance(each, nn.Module)]
    parts = [*of, *(part for module in modules for part in module.modules())]
    own = [getattr(part, "__dict__", {}) for part in parts if attributes]
    inner = [each for held in own for name, each in held.items() if name != "_parameters"]
    opened = [(each, copy(each)) for each in (*own, *inner) if type(each) in (dict, list, set, deque)]
    numbers = BatchSnapshot([each for each in inner if isinstance(each, torch.Tensor)])
    kept = (numbers, BufferSnapshot(modules), RandomSnapshot())
    try:
        yield
    finally:
        for each, before in opened:
            each.clear()
            (each.extend if isinstance(each, (list, deque)) else each.update)(before)
        for state in kept:
            state.restore()


def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor, also into one that shows the same memory several times, as `expand` makes it."""
    if tensor.layout == torch.strided:
        for dimension, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dimension] > 1:
                tensor, values = tensor.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    tensor.copy_(values)
