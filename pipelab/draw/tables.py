"""Tables as plain text."""

from __future__ import annotations

from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["columns"]


def columns(rows: Sequence[Sequence[str]], width: int, least: int = 15) -> list[str]:
    r"""Return rows in columns, the first one flush left.

    Where the lines would be wider than `width`, long heads go over several lines; then the first column is cut.

    Args:
        rows: the cells, heads first.
        width: how many characters a line may have.
        least: how many characters of the first column are kept, however narrow the lines.

    Example:
        >>> rows = [("name", "busy share per rank"), ("GPipe", "73 73 73 73 %")]
        >>> print(*columns(rows, width=80), sep="\n")
        name   busy share per rank
        GPipe        73 73 73 73 %
        >>> print(*columns(rows, width=24), sep="\n")
        name      busy share
                    per rank
        GPipe  73 73 73 73 %
    """
    if sum(_widths(rows)) + 2 * (len(rows[0]) - 1) > width:
        rows = [*_wrapped(rows[0], _widths(rows[1:])), *rows[1:]]
    widths = _widths(rows)
    rest = sum(widths[1:]) + 2 * (len(widths) - 1)
    widths[0] = min(widths[0], max(width - rest, least))
    lines: list[str] = []
    for name, *figures in rows:
        cells = [f"{each:>{size}}" for each, size in zip(figures, widths[1:], strict=True)]
        lines.append("  ".join([f"{_cut(name, widths[0]):<{widths[0]}}", *cells]))
    return lines


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _wrapped(heads: Sequence[str], widths: Sequence[int]) -> list[tuple[str, ...]]:
    """Return heads over two lines, each as narrow as its cells and words allow."""
    parts: list[list[str]] = []
    for head, size in zip(heads, widths, strict=True):
        narrow = range(max(size, *map(len, head.split())), len(head) + 1)
        parts.append(next((lines for width in narrow if len(lines := wrap(head, width)) <= 2), [head]))
    return list(zip_longest(*parts, fillvalue=""))


def _cut(text: str, width: int) -> str:
    """Cut a text in its middle: names of one schedule differ at their ends."""
    tail = min(12, width // 3)
    return text if len(text) <= width else f"{text[: width - 1 - tail]}…{text[-tail:]}"
