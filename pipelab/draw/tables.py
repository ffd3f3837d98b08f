"""Tables as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["columns"]


def columns(rows: Sequence[Sequence[str]], width: int, least: int = 16) -> list[str]:
    r"""Return rows in columns: the first one flush left, and cut where the lines would be wider than `width`.

    Args:
        rows: the cells, heads first.
        width: how many characters a line may have.
        least: how many characters of the first column are kept, however narrow the lines.

    Example:
        >>> print(*columns([("name", "bubble"), ("GPipe", "27.3 %")], width=80), sep="\n")
        name   bubble
        GPipe  27.3 %
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rest = sum(widths[1:]) + 2 * (len(widths) - 1)
    widths[0] = min(widths[0], max(width - rest, least))
    lines: list[str] = []
    for name, *figures in rows:
        cells = [f"{each:>{size}}" for each, size in zip(figures, widths[1:], strict=True)]
        lines.append("  ".join([f"{_cut(name, widths[0]):<{widths[0]}}", *cells]))
    return lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
