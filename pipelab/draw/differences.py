"""Two traces compared, in words: the sentence, the table, and the data of a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelab.draw import wording
from pipelab.draw.wording import number
from pipelab.table import Column, Table
from pipelab.trace.diff import PARTS, diff, why_not

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipelab.trace.diff import Diff, Part
    from pipelab.trace.trace import Trace

_NOISE = 0.001
"""Of the makespan: no measurement is as exact, so a smaller difference is not explained."""
MOST = 12
"""How many actions a text shows."""


def sentence(found: Diff) -> str:
    """Return the difference of the makespans and its parts."""
    before, after = map(wording.called, found.names)
    longest = max(found.before.makespan, found.after.makespan)
    if "measured" in (found.before.source, found.after.source) and 0 < abs(found.longer) < _NOISE * longest:
        return f"{after} takes as long as {before}, within {wording.percent(_NOISE)} ({wording.span(found.after)})"
    if abs(found.longer) <= 1e-9 * longest:
        told = f"{after} takes as long as {before} ({wording.span(found.after)})"
    else:
        word = "longer" if found.longer > 0 else "shorter"
        both = f"{number(found.after.makespan)} instead of {wording.span(found.before)}"
        told = f"{after} is {wording.span(found.after, abs(found.longer))} {word} than {before} ({both})"
    parts = ", ".join(f"{signed(value)} {part}" for part, value in found.parts.items())
    return f"{told}: {parts}" if parts else told


def first(found: Diff) -> str:
    """Return which action differs first, and by how much."""
    change = found.first
    if change is None:
        return "every action starts and ends at the same time"
    least = 1e-6 * max(found.before.makespan, found.after.makespan)
    parts = [f"it is on rank {change.rank} instead of {change.moved_from}"] if change.rank != change.moved_from else []
    for word, value, more in (("starts at", change.start, change.shift), ("takes", change.duration, change.change)):
        if abs(more) > least:
            parts.append(f"it {word} {number(value + more)} instead of {number(value)} ({signed(more)})")
    return f"the first action that differs is {change.action} on rank {change.moved_from}: {', '.join(parts)}"


def signed(value: float) -> str:
    """Return a number with its sign."""
    shown = number(value)
    return f"+{shown}" if value > 0 and shown != "0" else shown


def table(found: Diff, most: int | None = None) -> Table:
    """Return a row for each action, the largest effect first, and the sums in sentences."""
    parts = _parts(found)
    shown = (
        found.changes
        if most is None
        else [each for each in found if each.effects or any(number(by) != "0" for by in (each.shift, each.change))]
    )
    more = len(shown) - len(shown[:most])
    rows: list[dict[str, Any]] = []
    for change in shown[:most]:
        moved = {"moved_from": change.moved_from} if change.moved_from != change.rank else {}
        rows.append(
            {
                "action": str(change.action),
                "rank": change.rank,
                **moved,
                "effect": change.effect,
                **{part: change.effects.get(part, 0.0) for part in PARTS},
                "start": change.start,
                "shift": change.shift,
                "duration": change.duration,
                "change": change.change,
            }
        )
    columns = [Column("action"), Column("rank")]
    if any("moved_from" in row for row in rows):
        columns.append(Column("moved_from", "on rank before"))
    columns.append(Column("effect", show=signed))
    columns += [Column(part, show=signed) for part in parts] if len(parts) > 1 else []
    columns += [Column("start", show=number), Column("shift", show=signed)]
    columns += [Column("duration", show=number), Column("change", show=signed)]
    notes = _sums(found)
    if more:
        notes.append(f"{more} more action{' changes' if more == 1 else 's change'}, with a smaller effect")
    return Table(rows, columns, notes=notes, title=sentence(found))


def _parts(found: Diff) -> list[Part]:
    """Return the parts that some action's effect has, although they may add up to 0."""
    least = 1e-9 * max(found.before.makespan, found.after.makespan)
    return [part for part in PARTS if any(abs(change.effects.get(part, 0.0)) > least for change in found)]


def _sums(found: Diff) -> list[str]:
    """Return the effects by rank and by kind, in one sentence; nothing if there are none, or the orders differ."""
    if not found.parts or "order" in found.parts:  # another order has its critical path anywhere
        return []
    word = {change.action.kind: change.action.word for change in found}
    ranks = _listed((value, f"on rank {rank}") for rank, value in found.by("rank").items())
    kinds = _listed((value, word[kind]) for kind, value in found.by("kind").items())  # type: ignore[index]  # kinds
    return [f"by rank: {ranks}; by kind: {kinds}"]


def _listed(sums: Iterable[tuple[float, str]]) -> str:
    there = [(value, name) for value, name in sums if number(value) != "0"]
    shown = sorted(there, key=lambda each: -abs(each[0]))
    more = [f"{len(shown) - 8} more"] if len(shown) > 8 else []
    return ", ".join([*(f"{signed(value)} {name}" for value, name in shown[:8]), *more]) or "nothing"


def text(found: Diff, width: int = 80) -> str:
    """Return the sentence, and the actions with the largest effects."""
    return table(found, MOST).text(width)


def data(before: Trace, after: Trace, names: tuple[str, str]) -> dict[str, Any]:
    """Return what a page shows of two traces: the sentence, the parts, and each action's effects that are not 0.

    An action is named by its place: how many actions are before it on its rank and on the ranks before. Moves, which
    have none, are in the notes only.
    """
    if refusal := why_not(before, after):
        return {"refusal": refusal}
    found = diff(before, after, names)
    parts = _parts(found)
    place = {(event.rank, event.action): at for at, event in enumerate(after.events)}
    effects = [
        [place[change.rank, change.action], *(float(f"{change.effects.get(part, 0.0):.7g}") for part in parts)]
        for change in found
        if (change.rank, change.action) in place and any(change.effects.get(part) for part in parts)
    ]
    return {"notes": [sentence(found), *_sums(found)], "parts": parts, "effects": effects}
