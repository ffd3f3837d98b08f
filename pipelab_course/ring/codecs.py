"""Codecs: how a chunk of numbers becomes a message, and the message numbers again.

    chunk float32    1.0   -0.5    0.2                    12 bytes
      │ encode                                            scale = 1.0 / 127
    message int8     127    -64     25   and the scale     3 + 4 bytes
      │ decode                                            integers * scale
    chunk float32    1.0  -0.504  0.197

Pass a codec's name, or your own object with the three attributes of `Codec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch

from pipelab.errors import UsageError

Message = tuple[torch.Tensor, ...]
"""What crosses the wire for one chunk: the payload, and after it the scales, if the codec has any."""


class Codec(Protocol):
    """How numbers travel. An object with these three attributes is a codec too, and may be passed instead of a name.

    Example:
        >>> class Signs:
        ...     '''One sign for each number, and their mean size.'''
        ...     feedback = True
        ...     def encode(self, values):
        ...         return (values.sign().to(torch.int8), values.abs().mean().reshape(1))
        ...     def decode(self, message, dtype):
        ...         signs, size = message
        ...         return signs.to(dtype) * size
        >>> codec = codec_of(Signs())
        >>> codec.decode(codec.encode(torch.tensor([1.0, -3.0])), torch.float32)
        tensor([ 2., -2.])
    """

    @property
    def feedback(self) -> bool:
        """Whether a sender adds what the codec lost of a number to what it sends the next time."""

    def encode(self, values: torch.Tensor) -> Message:
        """Return the message for some numbers: `[n]`, at least one.

        The shapes and types in the message may depend on the shape and type of the numbers only: the receiver makes
        its buffers before the message arrives. All its tensors have one dimension.
        """

    def decode(self, message: Message, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers of a message: `[n]`, of this type. The same message gives the same bits everywhere."""


class Cast:
    """Send numbers as another floating-point type; without one, as they are.

    Example:
        >>> [Cast(torch.float16).encode(torch.tensor([70000.0, 0.1]))[0].tolist()]
        [[inf, 0.0999755859375]]
    """

    feedback = False

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def encode(self, values: torch.Tensor) -> Message:
        """Return the numbers in the codec's type; a number that is too large for it becomes infinity."""
        return (values.to(self.dtype or values.dtype),)

    def decode(self, message: Message, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers in the receiver's type."""
        return message[0].to(dtype)


class Int8:
    """Send numbers as integers from -127 to 127, and one scale: the largest magnitude in the message / 127.

    A number is wrong by at most half a scale. The scale is a float32, of float64 numbers a float64. A message with NaN
    or infinity arrives as NaN from end to end, because one scale stands for all of it. A message of zeros arrives as
    zeros.

    Example:
        >>> integers, scale = Int8().encode(torch.tensor([2.54, -1.0, 0.0]))
        >>> integers.tolist(), round(scale.item(), 4)
        ([127, -50, 0], 0.02)
    """

    LARGEST: ClassVar = 127

    def __init__(self, *, feedback: bool = False) -> None:
        self.feedback = feedback

    def encode(self, values: torch.Tensor) -> Message:
        """Return the integers and the scale."""
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        scale = values.abs().max().reshape(1) / self.LARGEST
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        # Without `where`, 0 / 0, and a number of a NaN message, would be NaN, which no integer can stand for.
        integers = torch.where(scale > 0, values / scale, 0.0).round().clamp(-self.LARGEST, self.LARGEST)
        return integers.to(torch.int8), scale

    def decode(self, message: Message, dtype: torch.dtype) -> torch.Tensor:
        """Return integers times scale."""
        integers, scale = message
        return (integers * scale).to(dtype)


CODECS: Mapping[str, Codec] = {
    "none": Cast(),
    "fp16": Cast(torch.float16),
    "bf16": Cast(torch.bfloat16),
    "int8": Int8(),
    "int8-ef": Int8(feedback=True),
}
"""The codecs by name."""


def codec_of(codec: str | Codec) -> Codec:
    """Return the codec with a name; a codec itself is returned as it is."""
    if isinstance(codec, str) and codec in CODECS:
        return CODECS[codec]
    if all(hasattr(codec, name) for name in ("feedback", "encode", "decode")):
        return codec  # type: ignore[return-value] # it has what a codec has
    raise UsageError(f"codec={codec!r}: expected one of {' '.join(CODECS)}, or an object with encode and decode")


def name_of(codec: Codec) -> str:
    """Return a codec's name, or its class's.

    Example:
        >>> name_of(CODECS["fp16"])
        'fp16'
    """
    return next((name for name, each in CODECS.items() if each is codec), type(codec).__name__)
