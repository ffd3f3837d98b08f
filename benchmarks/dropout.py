"""A step of two GPT-2 blocks in threads, with the random numbers of pipelab and with those of PyTorch's default."""

from __future__ import annotations

from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from timing import in_turns, milliseconds, one_thread, timed
from torch import nn

import pipelab

ROWS, TOKENS, HEADS = 16, 64, 4
SIZES = ((256, 30), (64, 60))
"""Width, and rounds of one step each."""


class Attention(nn.Module):
    """GPT-2's: dropout on the weights of attention, and on its output."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.qkv, self.out, self.drop, self.p = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(p), p

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102 - a layer's
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        made = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)
        return self.drop(self.out(made.transpose(1, 2).flatten(-2)))


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, p))
        widened = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.feed_forward = nn.Sequential(nn.LayerNorm(width), *widened, nn.Dropout(p))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102 - a layer's
        x = x + self.attention(x)
        return x + self.feed_forward(x)


def measure() -> dict[str, object]:
    """Return step times in milliseconds, by width and dropout."""
    with one_thread():
        return {"rows": [_row(width, p, rounds) for width, rounds in SIZES for p in (0.1, 0.0)]}


def _row(width: int, p: float, rounds: int) -> dict[str, object]:
    x, y = torch.randn(ROWS, TOKENS, width), torch.randn(ROWS, TOKENS, width)
    model = nn.Sequential(Block(width, p), Block(width, p))
    names = ("own", "default")
    loss = nn.functional.mse_loss
    pipes = {name: pipelab.Pipeline(model, pipelab.OneFOneB(2, 8), loss, intra_op_threads=1) for name in names}
    _silence(pipes["default"].engine.random)
    sets = {name: lambda pipe=pipe: timed(model, lambda: pipe.step(x, y), 1) for name, pipe in pipes.items()}
    times = in_turns(sets, rounds)
    for pipe in pipes.values():
        pipe.close()
    over = median(own / default for own, default in zip(times["own"], times["default"], strict=True))
    return {"width": width, "p": p, "ms": {name: milliseconds(found) for name, found in times.items()}, "over": over}


def _silence(random: Any) -> None:
    """Let a pipeline draw from the default generator, as it would by itself."""
    nothing = SimpleNamespace(drew=set(), running=lambda *_, **__: SimpleNamespace(generator=lambda _: None))
    random.begin, random.end = lambda *_, **__: nothing, lambda **_: None


def report(found: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    head = "| width | dropout | numbers of pipelab, ms | PyTorch's default, ms | median of pairs |"
    lines = [head, "|---:|---:|---:|---:|---:|"]
    for row in found["rows"]:
        own, default = (f"{row['ms'][name]['median']:.1f}" for name in ("own", "default"))
        lines.append(f"| {row['width']} | {row['p']:g} | {own} | {default} | {row['over']:.3f} |")
    return "\n".join(lines)
