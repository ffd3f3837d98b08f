"""Lanes with more actions than a picture has pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelab.draw import colours

if TYPE_CHECKING:
    from pipelab.draw.lanes import Lanes

__all__ = ["strip"]


def strip(lanes: Lanes, rank: int, columns: int) -> Any:
    """Return one lane as a row of pixels, `[1, columns, 4]`: red, green, blue, and how much of the pixel is busy.

    Each pixel is the mean of what the rank does in its time, so that no bar is lost and none is drawn too wide.

        busy time up to t    ────────╱────╱‾‾‾     of one colour: a line that rises where a bar of it lies;
        pixel edges          |   |   |   |   |     its rise within a pixel is the colour's share there

    Example:
        >>> import pipelab
        >>> from pipelab.draw.lanes import Lanes
        >>> lanes = Lanes(pipelab.simulate(pipelab.GPipe(ranks=2, microbatches=1)))    # rank 1: idle, F0, B0, idle
        >>> strip(lanes, 1, 3)[0, :, 3].tolist()
        [0.5, 1.0, 0.0]
    """
    import numpy as np

    edges = np.linspace(0.0, lanes.span, columns + 1)
    spans: dict[str, list[tuple[float, float, float]]] = {}
    for bar in lanes.bars(rank):
        share = 1.0 if bar.half == "whole" else 0.5
        spans.setdefault(colours.of(bar.action), []).append((bar.start, bar.end, share))
    pixels = np.zeros((1, columns, 4))
    for colour, found in spans.items():
        starts, ends, shares = np.array(found).T
        times = np.column_stack([starts, ends]).ravel()
        lasting = shares * (ends - starts)
        until = np.cumsum(lasting)
        busy = np.column_stack([until - lasting, until])
        inside = np.diff(np.interp(edges, times, busy.ravel())) * columns / lanes.span
        pixels[0, :, :3] += inside[:, None] * (np.array(colours.channels(colour)) / 255)
        pixels[0, :, 3] += inside
    worked = pixels[..., 3] > 0
    pixels[worked, :3] /= pixels[worked, 3:]
    return np.clip(pixels, 0.0, 1.0)
