"""A byte-level language model, and a text that comes with every Python: its standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn

from pipelab.errors import UsageError

_BYTES = 256


class Block(nn.Module):
    """A transformer block: causal self-attention, then a perceptron, each on a normalised residual stream.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3; layer norm first as in Radford et al. 2019, GPT-2.
    """

    def __init__(self, width: int, heads: int) -> None:
        """Make a block of `width` features and `heads` attention heads."""
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.grow = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the residual stream, `[rows, length, width]`."""
        rows, length, width = stream.shape
        query, key, value = (
            each.view(rows, length, self.heads, -1).transpose(1, 2)
            for each in self.attend(self.norm_1(stream)).chunk(3, dim=-1)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.project(seen.transpose(1, 2).reshape(rows, length, width))
        grown: torch.Tensor = self.shrink(nn.functional.gelu(self.grow(self.norm_2(stream))))
        return stream + grown


class _Embedding(nn.Module):
    """Bytes and their positions, as vectors."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(_BYTES, width)
        self.positions = nn.Embedding(length, width)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        return vectors


def language_model(blocks: int = 6, width: int = 128, heads: int = 4, length: int = 64) -> nn.Sequential:
    """Return a language model over bytes: an embedding, a stack of equal blocks, and a head.

    The input is `[rows, length]` bytes as integers, the output `[rows, length, 256]` scores of the next byte.

    Example:
        >>> model = language_model(blocks=2, width=16, heads=2, length=8)
        >>> model(torch.zeros(3, 8, dtype=torch.long)).shape
        torch.Size([3, 8, 256])
    """
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, _BYTES))
    return nn.Sequential(_Embedding(width, length), *(Block(width, heads) for _ in range(blocks)), head)


def next_byte_loss(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, in nats per byte, of scores `[rows, length, 256]` for bytes `[rows, length]`."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def standard_library(limit: int = 4_000_000) -> torch.Tensor:
    """Return the source text of Python's standard library, in order of file names, as bytes `[at most limit]`.

    Raises:
        UsageError: if this Python has no library sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if len(text) < 100_000:
        raise UsageError(f"{folder} holds {len(text)} bytes of Python source, too few to train on")
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


class Batches:
    """Random pieces of a text, the same ones for the same seed.

    Args:
        text: the bytes.
        rows: pieces per batch.
        length: bytes per piece.
        seed: chooses the pieces.
    """

    def __init__(self, text: torch.Tensor, rows: int, length: int, seed: int = 0) -> None:
        """Start the stream of pieces."""
        self.text = text
        self.rows = rows
        self.length = length
        self._random = torch.Generator().manual_seed(seed)

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch `[rows, length]`, and the byte that follows each of its bytes."""
        starts = torch.randint(len(self.text) - self.length, (self.rows,), generator=self._random)
        pieces = torch.stack([self.text[start : start + self.length + 1] for start in starts]).long()
        return pieces[:, :-1], pieces[:, 1:]
