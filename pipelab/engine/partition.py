"""Deal layers out to stages: contiguous, and as even as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

__all__ = ["cut"]


def cut(weights: Sequence[float], into: int) -> list[tuple[int, int]]:
    """Return `(first, past the last)` for each of `into` contiguous parts, none empty.

    The heaviest part is as light as can be. Ties go to the more even cut, then to the one whose first parts are longer:
    equal layers differ by at most one, the first parts taking the extra.

    Example:
        >>> cut([1] * 20, 3)
        [(0, 7), (7, 14), (14, 20)]
        >>> cut([5, 1, 1, 1, 1, 1], 2)
        [(0, 1), (1, 6)]
    """
    count = len(weights)
    total = [0.0, *accumulate(weights)]
    # best[start]: the (heaviest, sum of squares) of the best cut of layers start... into the parts that are left, and
    # where its first part ends. Filled from the last part to the first.
    best: list[tuple[float, float, int] | None] = [
        (total[count] - total[start], (total[count] - total[start]) ** 2, count) if start < count else None
        for start in range(count + 1)
    ]
    ends = [[entry[2] if entry else count for entry in best]]
    for parts in range(2, into + 1):
        following = best
        best = [None] * (count + 1)
        for start in range(count - parts + 1):
            for end in range(count - parts + 1, start, -1):
                rest = following[end]
                if rest is None:
                    continue
                load = total[end] - total[start]
                candidate = (max(load, rest[0]), load**2 + rest[1], end)
                known = best[start]
                if known is None or candidate[:2] < known[:2]:
                    best[start] = candidate
        ends.append([entry[2] if entry else count for entry in best])
    bounds: list[tuple[int, int]] = []
    start = 0
    for parts in range(into, 0, -1):
        end = ends[parts - 1][start]
        bounds.append((start, end))
        start = end
    return bounds
