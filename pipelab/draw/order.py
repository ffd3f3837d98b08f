"""What a picture of faults shows: a plan's rows as listed, run as far as they can.

    rank 0 | 0F0 [0B0] 0F1 0B1         [ ] blocked: nothing can start any more
    rank 1 | 1F0 [1F1] 1B0 1B1         0B0 needs 1B0, which comes after 1F1, which needs 0F1, which comes after 0B0

`drawings` makes them: for a cycle, its steps as numbered arrows to what waits, and beside it the order that pipelab has
tried out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from pipelab.checking.transfers import hang
from pipelab.errors import clean
from pipelab.plan.actions import TRAITS, Action, Pair
from pipelab.plan.fault import Code, Fault, Link, shorten
from pipelab.plan.order import traverse
from pipelab.simulation.wire import lower

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pipelab.checking.checker import Faults
    from pipelab.checking.transfers import Hang
    from pipelab.plan.plan import Plan
    from pipelab.plan.transfers import Step

_STRUCK: tuple[Code, ...] = ("wrong-rank", "duplicate", "out-of-range", "not-an-action", "ambiguous-stage", "endless")
"""The faults of an item that may not be where it is."""
_MOST_CYCLES = 4
"""How many cycles get their own pictures: a message shows as many in full."""
_MOST_NOTES = 16
_MOST_ACTIONS = 20_000
"""Of larger plans there is no second picture, which would take long."""
_INCHES, _ROWS = 14.0, 16
"""How much of a plan one can read in a picture: its width, and ranks; the parts around the faults come first."""
_CELL, _LETTER = 0.5, 0.085
"""Inches: the least width of a cell, and a letter of 8 points at most."""
_LONGEST_COMPARED = 400

State = Literal["ran", "blocked", "waiting", "missing"]
Spot = tuple[int | None, int | None]
"""A fault's rank and position."""


@dataclass(frozen=True, slots=True)
class Cell:
    """An item in its row.

    Attributes:
        label: what is written in it.
        names: what cycles call it: itself, and if it is a pair, its halves.
        actions: what gives it its colours: one, two of a pair, none of a transfer.
        state: whether it ran, is what its rank is stuck at, comes after that, or is missing.
        position: where it is in the row as written; `None` if it does not.
        struck: whether it may not be there.
        over: whether its rank holds more activations with it than a cap allows.
        moved: whether a repair has moved it.
    """

    label: str
    names: tuple[str, ...]
    actions: tuple[Action, ...]
    state: State
    position: int | None = None
    struck: bool = False
    over: bool = False
    moved: bool = False


@dataclass(frozen=True, slots=True)
class Arrow:
    """A step of a cycle, from row and column to row and column: from what comes first to what waits for it."""

    start: tuple[int, int]
    end: tuple[int, int]
    number: int


@dataclass(frozen=True)
class Drawing:
    """One picture.

    Attributes:
        title: what it shows.
        rows: the cells of each rank; a last row without a rank holds what belongs to no known rank.
        arrows: the cycle, closed; its steps that are in a row.
        notes: what the arrows say, or the faults.
        hint: what to do about it.
        after: whether it shows what pipelab has tried out.
        unplaced: whether the last row has no rank.
    """

    title: str
    rows: list[list[Cell]]
    arrows: list[Arrow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hint: str = ""
    after: bool = False
    unplaced: bool = False

    @cached_property
    def faulty(self) -> bool:
        """Whether something is wrong in it."""
        return bool(self.notes or self.hint or self._places(_is_marked) or self._places(_is_blocked))

    @cached_property
    def cell(self) -> float:
        """How many inches a cell is wide."""
        return max(_CELL, 0.16 + _LETTER * max([0, *(len(cell.label) for row in self.rows for cell in row)]))

    @cached_property
    def view(self) -> tuple[list[int], list[int]]:
        """Which rows and columns are shown: all, or those around what the picture is about."""
        about = [place for arrow in self.arrows for place in (arrow.start, arrow.end)]
        about += self._places(_is_marked)
        ranks = [rank for rank, _ in about]
        others = sorted(range(len(self.rows)), key=lambda rank: abs(rank - ranks[0]) if ranks else 0)
        rows = sorted(_chosen([*ranks, *others], _ROWS))
        about += self._places(_is_blocked)  # last, because it may be every rank
        longest = max([0, *(len(self.rows[rank]) for rank in rows)])
        near = [column + by for rank, column in about if rank in rows for by in (0, -1, 1, -2, 2)]
        ends = [each for column in range((longest + 1) // 2) for each in (column, longest - 1 - column)]
        return rows, sorted(_chosen([each for each in (*near, *ends) if 0 <= each < longest], int(_INCHES / self.cell)))

    def _places(self, wanted: Callable[[Cell], bool]) -> list[tuple[int, int]]:
        return [(rank, at) for rank, row in enumerate(self.rows) for at, cell in enumerate(row) if wanted(cell)]


def _is_marked(cell: Cell) -> bool:
    return cell.struck or cell.over or cell.moved or cell.state == "missing"


def _is_blocked(cell: Cell) -> bool:
    return cell.state == "blocked"


def _chosen(wanted: Iterable[int], most: int) -> list[int]:
    return list(dict.fromkeys(wanted))[:most]


def drawings(faults: Faults) -> list[Drawing]:
    """Return the pictures of faults; none if the schedule could not write a plan."""
    if faults.plan is None:
        return []
    if not faults:
        return [plan_drawing(faults.plan)]
    found: list[Drawing] = []
    left = list(faults)
    if faults.meant is not None:
        mistake = left.pop(0)
        found.append(_of_plan(faults.plan, [mistake]))
        if not left:
            found.append(replace(plan_drawing(faults.meant), title=f"try: {_said(mistake.hint)}", after=True))
    plan = faults.meant or faults.plan
    cycles = [fault for fault in left if fault.cycle]
    if others := [fault for fault in left if not fault.cycle]:
        found.append(_of_plan(plan, others, title="where it goes wrong"))
    for fault, *alike in list(_causes(cycles))[:_MOST_CYCLES]:
        if fault.code == "transfer-deadlock":
            found += _of_transfers(plan, fault, faults)
            continue
        before = _of_plan(plan, left, fault)
        found.append(replace(before, title=f"{before.title}{_more(alike)}"))
        if fault.tried is not None:
            after = _moved(_rows(fault.tried), before.rows)
            still = any(cell.state == "blocked" for row in after for cell in row) and len(faults) > 1
            more = "; what is still blocked waits for another fault" if still else ""
            found.append(Drawing(f"try: {_said(fault.hint)}{more}", after, after=True))
    return found


def _causes(faults: Iterable[Fault]) -> Iterable[list[Fault]]:
    """Return faults by cause: those that one repair removes, or that say the same about other numbers."""
    causes: dict[str, list[Fault]] = {}
    for fault in faults:
        causes.setdefault(fault.alike if fault.tried is None else fault.hint, []).append(fault)
    return causes.values()


def _more(alike: Sequence[Fault]) -> str:
    return f"; and {len(alike)} more like it" if alike else ""


def plan_drawing(plan: Plan) -> Drawing:
    """Return the picture of a plan without faults."""
    return Drawing("every rank's actions in order", _rows(plan))


def _of_plan(plan: Plan, faults: Sequence[Fault], shown: Fault | None = None, title: str = "") -> Drawing:
    """Return a plan with the places of its faults, and the cycle of one of them."""
    rows = _rows(plan, faults)
    if shown is not None:
        return _with_cycle(rows, shown, unplaced=len(rows) > plan.ranks)
    unplaced = len(rows) > plan.ranks
    if len(faults) == 1:
        hint = "" if faults[0].tried is not None else _said(faults[0].hint)
        return Drawing(_line(faults[0]), rows, hint=hint, unplaced=unplaced)
    return Drawing(
        title,
        rows,
        notes=[
            f"{_line(fault)}{f'; try: {_said(fault.hint)}' if fault.hint else ''}{_more(alike)}"
            for fault, *alike in _causes(faults)
        ],
        unplaced=unplaced,
    )


def _said(words: str) -> str:
    """Return a sentence without Python: `yield F(1, stage=2)` becomes `run 2F1`, and moves are words."""
    return re.sub(r"\b([A-Z]+)\((\d*)(?:(?:, )?(?:stage=)?(\d+))?\)", _named, words.replace("yield ", "run "))


def _named(found: re.Match[str]) -> str:
    """Return an action as its cell has it, or what moves weights or an activation."""
    kind, microbatch, stage = found.groups(default="")
    traits = next((each for name, each in TRAITS.items() if name == kind), None)
    if traits is None or traits.computes:
        return f"{stage}{kind}{microbatch}" if microbatch or stage else kind
    return f"the {traits.word} of {f'micro-batch {microbatch}' if microbatch else f'the weights of stage {stage}'}"


def _line(fault: Fault) -> str:
    return f"{fault.code}: {fault.message.splitlines()[0]}"


def _with_cycle(rows: list[list[Cell]], fault: Fault, *, unplaced: bool = False) -> Drawing:
    """Return rows with the arrows of a cycle."""
    where: dict[tuple[int, str], int] = {}
    for rank, row in enumerate(rows):
        for column, cell in enumerate(row):
            for name in cell.names:
                where.setdefault((rank, name), column)

    def place(link: Link) -> tuple[int, int] | None:
        column = where.get((link.rank, link.name))
        return None if column is None else (link.rank, column)

    steps = zip(fault.cycle, [*fault.cycle[1:], fault.cycle[0]], strict=True)
    ends = [(place(giver), place(link), number) for number, (link, giver) in enumerate(steps, 1)]
    arrows = [Arrow(start, end, number) for start, end, number in ends if start is not None and end is not None]
    notes = [_said(link.words) for link in fault.cycle]
    hint = "" if fault.tried is not None else _said(fault.hint)
    return Drawing(_line(fault), rows, arrows, notes, hint, unplaced=unplaced)


def _rows(plan: Plan, faults: Sequence[Fault] = ()) -> list[list[Cell]]:
    """Return a plan's rows, run as far as they can, with what faults strike out, mark and miss."""
    walk = traverse(plan.bound)
    struck = {(fault.rank, fault.position) for fault in faults if fault.code in _STRUCK}
    over = {(fault.rank, fault.position) for fault in faults if fault.code == "memory-cap"}
    rows = [_row(plan, rank, walk.stuck.get(rank), struck, over) for rank in range(plan.ranks)]
    nowhere: list[Cell] = []
    for rank, action in (each for fault in faults for each in fault.lacking):
        row = nowhere if rank is None else rows[rank]
        row.append(Cell(str(action), (str(action),), (action,), "missing"))
    return [*rows, nowhere] if nowhere else rows


def _row(plan: Plan, rank: int, stuck: int | None, struck: set[Spot], over: set[Spot]) -> list[Cell]:
    """Return the items that a rank lists and the all-reduces that pipelab inserts, in order."""
    bound, written = plan.bound, plan.written[rank]
    row, placed = bound.lists[rank], bound.placed(rank)
    stuck = None if stuck is None else row.index(bound.computing[rank][stuck])
    codes_at: dict[int, list[int]] = {}
    inserted: dict[int, list[int]] = {}
    for index, code in enumerate(row):
        kept = inserted if code in bound.automatic else codes_at
        kept.setdefault(placed[code], []).append(index)
    cells: list[Cell] = []

    def actions(indices: Sequence[int]) -> tuple[Action, ...]:
        return tuple(bound.codes.action(row[index]) for index in indices)

    for position, item in enumerate(written):
        indices = codes_at.get(position, [])
        here = actions(indices)
        paired = isinstance(item, Pair)
        label = "&".join(map(str, here)) if len(here) == 1 + paired else clean(shorten(item, 16))
        place = (rank, position)
        names = tuple(dict.fromkeys([str(Pair(*here)) if len(here) > 1 else label, *map(str, here)]))
        cells.append(Cell(label, names, here, _state(indices, stuck), position, place in struck, place in over))
        for index in inserted.get(position, ()):
            (reduce,) = actions([index])
            cells.append(Cell(str(reduce), (str(reduce),), (reduce,), _state([index], stuck)))
    return cells


def _state(indices: Sequence[int], stuck: int | None) -> State:
    """Return whether an item ran, whose actions have these indices, on a rank that is stuck at one, or at none."""
    if not indices:  # an item that cannot be read does not run
        return "waiting"
    if stuck is None or indices[-1] < stuck:
        return "ran"
    return "blocked" if stuck in indices else "waiting"


def _moved(rows: list[list[Cell]], before: list[list[Cell]]) -> list[list[Cell]]:
    """Return rows, with what has moved framed."""
    found: list[list[Cell]] = []
    for row, old in zip(rows, before, strict=False):
        names, old_names = ([cell.label for cell in each] for each in (row, old))
        changed: set[int] = set()
        if names != old_names and len(row) <= _LONGEST_COMPARED:
            for word, _, _, first, last in SequenceMatcher(None, old_names, names, autojunk=False).get_opcodes():
                changed.update(range(first, last) if word in ("insert", "replace") else ())
        found.append([replace(cell, moved=column in changed) for column, cell in enumerate(row)])
    return found


def _of_transfers(plan: Plan, fault: Fault, faults: Faults) -> list[Drawing]:
    """Return a plan with its sends and receives, and the order by time, in which none waits for ever."""
    hung = hang(plan.bound, faults.order, faults.transport)
    assert hung is not None, "check found the fault in this plan"
    rows = [
        [_transfer_cell(hung, rank, step) for step in steps if step[0] in ("run", "SEND", "RECV")]
        for rank, steps in enumerate(hung.low.rows)
    ]
    before = _with_cycle(rows, fault)
    size = sum(map(len, plan.bound.computing))
    if "by-time" not in fault.hint or size > _MOST_ACTIONS:
        return [before]
    known = {name: cell for row in rows for cell in row for name in cell.names[:1]}
    ordered = [[replace(known[word], state="ran") for word in row] for row in lower(plan, order="by-time").rows]
    return [replace(before, hint=""), Drawing(f"try: {fault.hint}", _moved(ordered, rows), after=True)]


def _transfer_cell(hung: Hang, rank: int, step: Step) -> Cell:
    """Return what a rank runs, sends or receives."""
    label, (word, numbers) = hung.low.word(step), step
    actions = tuple(map(hung.low.bound.codes.action, numbers)) if word == "run" else ()
    names = tuple(dict.fromkeys([label, *map(str, actions)]))
    state: State = "waiting"
    if hung.has_run(step):
        state = "ran"
    elif hung.blocks(rank, step):
        state = "blocked"
    return Cell("&".join(map(str, actions)) or label, names, actions, state)


def sentences(drawing: Drawing) -> list[tuple[int | None, str]]:
    """Return the notes of a picture with their arrows' numbers, the middle of many left out."""
    numbered: list[tuple[int | None, str]] = list(enumerate(drawing.notes, 1))
    return numbered if len(numbered) <= _MOST_NOTES else [*numbered[: _MOST_NOTES - 4], (None, "…"), *numbered[-3:]]
