"""Plans as files in PyTorch's CSV notation (`compute_only`): one line for each rank, one cell for each action."""

from __future__ import annotations

import csv
import io
import os
import re
import warnings
from collections.abc import Iterable

from pipelab.errors import FormatError
from pipelab.files import read_text, write
from pipelab.plan.actions import Action, Item, Pair, parse_item

__all__ = ["read_rows", "write_rows"]

_IDLE = ("",)
"""The cells of a rank without actions, which is written `""`: an empty line would look like the end of the file."""

_IS_PAIR = re.compile(r"\([^()]*\)OVERLAP_F_B")
_MOST_SHOWN = 8
"""How many micro-batches a message lists."""


def read_rows(path: str | os.PathLike[str]) -> list[list[Item]]:
    """Read every rank's actions. Empty cells are idle; empty lines at the end of the file are ignored.

    Raises:
        FormatError: if a cell is not an action, with its line and column; if a line between others is empty; or if
            the file is not text in UTF-8.
    """
    text = read_text(path)
    rows: list[list[Item]] = []
    lines = csv.reader(io.StringIO(text, newline=""))
    empty = 0
    try:
        for cells in lines:
            if _is_empty(cells):
                empty = empty or lines.line_num
            elif empty:
                raise FormatError(
                    f"{path}, line {empty} is empty, and other lines follow it: is it a rank?\n"
                    '  try: write "" for a rank without actions; otherwise remove the line'
                )
            else:
                rows.append(_items(cells, f"{path}, line {lines.line_num}"))
    except csv.Error as error:
        raise FormatError(f"{path}, line {lines.line_num}: {error}") from error
    return rows


def write_rows(path: str | os.PathLike[str], rows: Iterable[Iterable[object]]) -> None:
    """Write every rank's actions; `read_rows` reads the same.

    Warns:
        UserWarning: if the last stage's forwards are not in ascending order; at the line that calls `Plan.to_csv`.
    """
    rows = [list(row) for row in rows]
    forwards = _forwards_of_the_last_stage(rows)
    if forwards != sorted(forwards):
        order = ", ".join(map(str, forwards[:_MOST_SHOWN])) + ", …" * (len(forwards) > _MOST_SHOWN)
        warnings.warn(
            f"the last stage's forwards run in the order {order}, and PyTorch's runtime numbers losses in the order of "
            "the forwards: with this file it would start backwards from the wrong losses, and fail or hang\n"
            "  try: pipelab.Pipeline(..., engine='torch'), which runs this order; or these forwards in ascending order",
            stacklevel=3,
        )
    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows([_cell(item) for item in row] or _IDLE for row in rows)
    write(path, buffer.getvalue())


def _forwards_of_the_last_stage(rows: Iterable[Iterable[object]]) -> list[int]:
    """Return the micro-batches in the order in which the last stage of several runs them, if one rank holds it."""
    found: dict[int, dict[int, list[int]]] = {}
    for rank, row in enumerate(rows):
        for item in row:
            action = item.forward if isinstance(item, Pair) else item
            if isinstance(action, Action) and action.kind == "F":
                stage, microbatch = action.stage, action.microbatch
                if isinstance(stage, int) and isinstance(microbatch, int):  # a faulty plan may hold anything
                    found.setdefault(stage, {}).setdefault(rank, []).append(microbatch)
    last = max(found, default=0)
    return next(iter(found[last].values())) if last > 0 and len(found[last]) == 1 else []


def _is_empty(cells: list[str]) -> bool:
    """Return whether a line has no cell, not even an idle one."""
    return not cells or (len(cells) == 1 and tuple(cells) != _IDLE and not cells[0].strip())


def _items(cells: list[str], where: str) -> list[Item]:
    if len(cells) == 1 and ";" in cells[0] and "," not in cells[0] and not _IS_PAIR.fullmatch(cells[0].strip()):
        raise FormatError(f"{where}: its cells are separated by semicolons\n  try: save it with commas between cells")
    return [parse_item(cell, f"{where}, column {column}") for column, cell in enumerate(cells, 1) if cell.strip()]


def _cell(item: object) -> str:
    """Return an item in PyTorch's notation, which has a longer word for `R`."""
    if isinstance(item, Action) and item.kind == "R":
        return f"{'' if item.stage is None else item.stage}REDUCE_GRAD"
    return str(item)
