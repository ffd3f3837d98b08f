"""Plans as text: in PyTorch's CSV notation (`compute_only`), one line per rank, and as `print` shows them."""

from __future__ import annotations

import csv
import io
import os
import re
import warnings
from collections.abc import Iterable

from pipelab.errors import FormatError
from pipelab.files import write
from pipelab.plan.actions import EVERY_KIND, Action, Item, Posting, halves_of, parse_item, parse_word
from pipelab.plan.fault import shorten

_IDLE = ("",)
"""The cells of a rank without actions, which is written `""`: an empty line would look like the end of the file."""

_IS_PAIR = re.compile(r"\([^()]*\)OVERLAP_F_B")
_WORD = re.compile(r"\([^()]*\)[^\s,]*|[^\s,]+")
"""An action, or an overlapped pair, which may have blanks between its parentheses."""
_LINE_END = re.compile(r"\n|;(?![^();\n]*\))")
"""What separates ranks in one text; the semicolon in an overlapped pair does not."""
_RANK = re.compile(r"\s*rank\s+([0-9]+)\s*[|│]")
"""How a printed row begins."""
_NOTHING = re.compile(r'""|[0-9]+WAIT_REDUCE_GRAD')
"""Words that say nothing about a plan: of an idle rank, and of the wait for a reduction."""
_MOST_SHOWN = 8
"""How many micro-batches a message lists."""


def is_plan(text: str) -> bool:
    """Return whether a text is a plan, and not the name of a file: several words, and one of them an action."""
    words = _WORD.findall(_LINE_END.sub(" ", text))
    return len(words) > 1 and "." not in text and any(map(_is_item, words))


def _is_item(word: str) -> bool:
    try:
        parse_item(word, "")
    except FormatError:
        return False
    return True


def lines_of(text: str) -> list[str]:
    """Return the rows of a plan in one text, which are on separate lines or between semicolons."""
    return [line for line in _LINE_END.split(text) if line.strip()]


def parse_row(text: object, rank: int) -> list[Item | Posting]:
    """Read the actions of one rank, separated by blanks or commas; `rank 0 |` may come first, as in `print(plan)`."""
    if not isinstance(text, str):
        raise FormatError(
            f"Plan.parse takes a text, or a list with one text per rank; of rank {rank} is {shorten(text)}"
        )
    words = [word for word in _WORD.findall(_unnumbered(text, rank, f"row {rank}")) if not _NOTHING.fullmatch(word)]
    return [parse_word(word, f"rank {rank}, position {at}") for at, word in enumerate(words)]


def _unnumbered(text: str, rank: int, where: str) -> str:
    """Return a row without the `rank 0 |` at its beginning."""
    match = _RANK.match(text)
    if match is None:
        return text
    if int(match[1]) != rank:
        raise FormatError(f"{where} says rank {match[1]}, but it is the row of rank {rank}: write the ranks in order")
    return text[match.end() :]


def read_rows(text: str, name: str) -> list[list[Item | Posting]]:
    """Read every rank's actions. Empty cells are idle; empty lines at the end are ignored; a cell may hold several."""
    rows: list[list[Item | Posting]] = []
    lines = csv.reader(io.StringIO(text, newline=""))
    empty = 0
    try:
        for cells in lines:
            if not cells or (len(cells) == 1 and tuple(cells) != _IDLE and not cells[0].strip()):
                empty = empty or lines.line_num
            elif empty:
                raise FormatError(
                    f"{name}, line {empty} is empty, and other lines follow it: is it a rank?\n"
                    '  try: write "" for a rank without actions; otherwise remove the line'
                )
            else:
                where = f"{name}, line {lines.line_num}"
                rows.append(_items([_unnumbered(cells[0], len(rows), where), *cells[1:]], where))
    except csv.Error as error:
        raise FormatError(f"{name}, line {lines.line_num}: {error}") from error
    return rows


def write_rows(
    path: str | os.PathLike[str], rows: Iterable[Iterable[object]], lowered: Iterable[Iterable[str]] | None = None
) -> None:
    """Write every rank's actions; `read_rows` reads the same. If the rows are given lowered too, write those.

    Warns:
        UserWarning: if the last stage's forwards are not in ascending order; at the line that calls `to_csv`.
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
    csv.writer(buffer).writerows([cell(item) for item in row] or _IDLE for row in lowered or rows)
    write(path, buffer.getvalue())


def _forwards_of_the_last_stage(rows: Iterable[Iterable[object]]) -> list[int]:
    """Return the micro-batches in the order in which the last stage of several runs them, if one rank holds it."""
    found: dict[int, dict[int, list[int]]] = {}
    for rank, row in enumerate(rows):
        for item in row:
            action = halves_of(item)[0]
            if isinstance(action, Action) and action.kind in EVERY_KIND and action.traits.forward:
                stage, microbatch = action.stage, action.microbatch
                if isinstance(stage, int) and isinstance(microbatch, int):  # a faulty plan may hold anything
                    found.setdefault(stage, {}).setdefault(rank, []).append(microbatch)
    last = max(found, default=0)
    return next(iter(found[last].values())) if last > 0 and len(found[last]) == 1 else []


def _items(cells: list[str], where: str) -> list[Item | Posting]:
    if len(cells) == 1 and ";" in cells[0] and "," not in cells[0] and not _IS_PAIR.fullmatch(cells[0].strip()):
        raise FormatError(f"{where}: its cells are separated by semicolons\n  try: save it with commas between cells")
    items: list[Item | Posting] = []
    for column, cell in enumerate(cells, 1):
        words = [word for word in _WORD.findall(cell) if not _NOTHING.fullmatch(word)]
        for number, word in enumerate(words, 1):
            items.append(parse_word(word, f"{where}, column {column}{f', word {number}' * (len(words) > 1)}"))
    return items


def cell(item: object) -> str:
    """Return an item in PyTorch's notation, which has a longer word for `R`."""
    if isinstance(item, Action) and item.kind in EVERY_KIND and (word := item.traits.notation):
        return f"{'' if item.stage is None else item.stage}{word}"
    return str(item)
