"""Keep what running a model changes besides its gradients, its buffers and the random state, and put it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pipelab.engine.stage.pytree import tensors_of

__all__ = ["KeptBatch", "KeptBuffers", "KeptRandomState", "overwrite", "unchanged"]


class KeptBuffers:
    """The buffers of some modules, as they are now.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> kept = KeptBuffers([norm])
        >>> _ = norm(torch.randn(4, 2))
        >>> kept.put_back()
        >>> norm.running_mean
        tensor([0., 0.])
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Copy them."""
        self._kept = [
            (part, name, buffer, None if buffer is None else buffer.clone())
            for module in modules
            for part in module.modules()
            for name, buffer in part._buffers.items()  # noqa: SLF001 - named_buffers leaves out those not made yet
        ]

    def put_back(self) -> None:
        """Give every buffer its values back, and its place, where a module has put another tensor."""
        with torch.no_grad():
            for part, name, buffer, before in self._kept:
                if buffer is not None and before is not None:
                    overwrite(buffer, before)
                setattr(part, name, buffer)


class KeptBatch:
    """The numbers of a batch, as they are now: a stage may write into it, as its first operation does on purpose."""

    def __init__(self, value: object) -> None:
        """Copy them; an inference tensor may not be written into, and a sparse one is not."""
        tensors = [each for each in tensors_of(value) if each.layout == torch.strided and not each.is_inference()]
        self._kept = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def put_back(self) -> None:
        """Give every tensor that was written into its numbers back; others are not touched."""
        with torch.no_grad():
            for tensor, before in self._kept:
                if not bool(((tensor == before) | (tensor.isnan() & before.isnan())).all()):
                    overwrite(tensor, before)


class KeptRandomState:
    """The state, as it is now, of every random generator that an operation draws from unless it is told of another."""

    def __init__(self) -> None:
        """Copy it."""
        self._processor = torch.get_rng_state()
        self._gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put_back(self) -> None:
        """Let the next random numbers be those that would have come next."""
        torch.set_rng_state(self._processor)
        if self._gpus:
            torch.cuda.set_rng_state_all(self._gpus)

    def __eq__(self, other: object) -> bool:
        """Tell whether the same numbers come next."""
        if not isinstance(other, KeptRandomState):
            return NotImplemented
        ours, theirs = [self._processor, *self._gpus], [other._processor, *other._gpus]
        return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))

    __hash__ = None  # type: ignore[assignment]  # it holds tensors


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put the buffers of these modules and all random state back afterwards."""
    buffers, random_state = KeptBuffers(modules), KeptRandomState()
    try:
        yield
    finally:
        buffers.put_back()
        random_state.put_back()


def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor, also into one that shows the same memory several times, as `expand` makes it.

    Example:
        >>> mask = torch.zeros(1, 2).expand(3, 2)
        >>> overwrite(mask, torch.ones(3, 2))
        >>> mask.sum()
        tensor(6.)
    """
    if tensor.layout == torch.strided:
        for dimension, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dimension] > 1:
                tensor, values = tensor.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    tensor.copy_(values)
