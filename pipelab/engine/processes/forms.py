"""The form of what travels between two stages: how it is put together, and each tensor's shape and type.

A process makes room for a value before it arrives, so it must know the value's form. Forms are learnt on real rows:
before the first step with micro-batches of a new size, one micro-batch is run forward through all stages, process by
process, and buffers and random state are put back afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipelab.engine.trees import Spec, rebuild, take_apart, tensors_of
from pipelab.errors import EngineError

__all__ = ["Form", "form_of"]


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor's shape, type and strides as it travels, and whether its gradient is wanted."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    learns: bool

    def room(self, device: torch.device) -> torch.Tensor:
        """Return an empty tensor of this form, without gaps."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def laid(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the numbers of a tensor as they lie in such a room: the order of later sums depends on it."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.stride() == self.strides and tensor.device == device:
            return tensor
        return self.room(device).copy_(tensor)

    def __str__(self) -> str:
        """Return shape and type, such as `[4, 6] float32`."""
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a value: its parts, and how they are put together.

    Attributes:
        spec: what `trees.rebuild` needs.
        parts: each tensor's form; `None` where the value holds `None`.
    """

    spec: Spec
    parts: tuple[TensorForm | None, ...]

    @property
    def learns(self) -> list[bool]:
        """For each tensor, whether its gradient is wanted."""
        return [part.learns for part in self.parts if part is not None]

    def room(self, device: torch.device) -> list[torch.Tensor]:
        """Return empty tensors for a value of this form."""
        return [part.room(device) for part in self.parts if part is not None]

    def room_for_gradients(self, device: torch.device) -> list[torch.Tensor]:
        """Return empty tensors for the gradients that come back for a value of this form."""
        return [part.room(device) for part in self._learning]

    def parcels(self, value: Any, device: torch.device) -> list[torch.Tensor]:
        """Return the tensors of a value as they travel."""
        parts = [part for part in self.parts if part is not None]
        return [part.laid(tensor, device) for part, tensor in zip(parts, tensors_of(value), strict=True)]

    def value(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value whose tensors these are, those that learn as the next stage must see them."""
        wanted = iter(self.learns)
        rest = (tensor.detach().requires_grad_(next(wanted)) for tensor in tensors)
        return rebuild([None if part is None else next(rest) for part in self.parts], self.spec)

    def gradients(self, tensors: Sequence[torch.Tensor], there: Sequence[bool]) -> Any:
        """Return gradients as a stage takes them: one for each tensor of the value, or `None`.

        Args:
            tensors: what arrived: see `parcels_of_gradients`.
            there: which of them are gradients: see `which_came`.
        """
        rest = iter([tensor if came else None for tensor, came in zip(tensors, there, strict=True)])
        found = [next(rest) if part.learns else None for part in self.parts if part is not None]
        return found[0] if len(found) == 1 else found

    def which_came(self, gradients: Any) -> list[bool]:
        """Return which of the gradients that the stage before wants there are."""
        return [gradient is not None for _, gradient in self._wanted(gradients)]

    def parcels_of_gradients(self, gradients: Any, device: torch.device) -> list[torch.Tensor]:
        """Return those of a stage's input gradients that the stage before wants, as they travel; zeros for `None`."""
        return [
            part.room(device).zero_() if gradient is None else part.laid(gradient, device)
            for part, gradient in self._wanted(gradients)
        ]

    def misfit(self, value: Any, giver: str, rows: int) -> str:
        """Return how a value differs from this form, which others of as many rows had; "" if it does not.

        Args:
            value: what a stage gave.
            giver: which stage.
            rows: of how many rows.
        """
        parts, spec = take_apart(value)
        if len(parts) != len(self.parts) or not all(map(_fits, parts, self.parts)):
            return (
                f"gives {form_of(value, giver)}, where micro-batches of {rows} rows gave {self} before: between "
                "processes a stage's output has one shape and type\n  try: engine='threads', where it may change"
            )
        if spec != self.spec:
            new, old = (" ".join(str(each).split()) for each in (spec, self.spec))
            return (
                f"gives its tensors in {new}, where micro-batches of {rows} rows gave them in {old} before: "
                "between processes a stage's output is always put together alike, with keys in the same order\n"
                "  try: engine='threads', where that may change"
            )
        learns = [part.requires_grad for part in parts if part is not None]
        if learns != self.learns:
            return (
                f"gives tensors with a history {learns}, where micro-batches of {rows} rows gave {self.learns} before: "
                "between processes the same gradients come back for every micro-batch\n"
                "  try: engine='threads', where that may change"
            )
        return ""

    def _wanted(self, gradients: Any) -> list[tuple[TensorForm, torch.Tensor | None]]:
        every = gradients if isinstance(gradients, list) else [gradients]
        parts = [part for part in self.parts if part is not None]
        return [(part, gradient) for part, gradient in zip(parts, every, strict=True) if part.learns]

    @property
    def _learning(self) -> list[TensorForm]:
        return [part for part in self.parts if part is not None and part.learns]

    def __str__(self) -> str:
        """Return the parts, such as `[4, 6] float32`."""
        return ", ".join(map(str, self.parts))


def form_of(value: Any, giver: str) -> Form:
    """Return the form of a value.

    Args:
        value: what a stage gave.
        giver: which stage, for the message.

    Raises:
        EngineError: if it holds anything but tensors.
    """
    parts, spec = take_apart(value)
    stranger = next((part for part in parts if not (part is None or isinstance(part, torch.Tensor))), None)
    if stranger is not None:
        raise EngineError(
            f"{giver} gives {type(stranger).__name__} among its outputs: between processes only tensors travel, in "
            "tuples, lists and dicts; make it a tensor, or use engine='threads'"
        )
    if not all(part is None or _is_plain(part) for part in parts):
        raise EngineError(
            f"{giver} gives a sparse, nested or quantized tensor: between processes only plain ones travel; use "
            "to_dense(), to_padded_tensor() or dequantize(), or engine='threads'"
        )
    forms = [
        None
        if part is None
        else TensorForm(tuple(part.shape), part.dtype, torch.empty_like(part).stride(), part.requires_grad)
        for part in parts
    ]
    return Form(spec, tuple(forms))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def _fits(part: Any, expected: TensorForm | None) -> bool:
    if expected is None:
        return part is None
    return isinstance(part, torch.Tensor) and part.shape == expected.shape and part.dtype == expected.dtype
