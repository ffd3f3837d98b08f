"""Do what the hint of a deadlock says, to see whether it helps."""

from __future__ import annotations

import re

from oracle import halves

from pipelab import Plan

ACTION = r"(?:(to|before|after) )?(\w)\((\d+)(?:, stage=(\d+))?\)"


def written(plan):
    """Return a plan's rows, bound to stages, pairs as their halves, without the all-reduces that were put in place."""
    codes, automatic = plan.bound.codes, plan.bound.automatic
    put = {codes.action(code) for code in automatic}
    return [[half for item in row for half in halves(item) if half not in put] for row in plan.rows]


def follow(plan, hint):
    """Return the plan after a hint: `yield F(1) to F(3) before B(0) on rank 0`, and all other forms."""
    rows = written(plan)
    for part in hint.removesuffix(", then check again").split("; "):
        if match := re.fullmatch(r"on ranks? (.*), yield all forwards before the first backward \(GPipe: .*\)", part):
            for rank in _numbers(match[1]):
                rows[rank].sort(key=lambda action: action.kind != "F")
        elif match := re.fullmatch(r"yield (.*) on rank (\d+)|on rank (\d+), yield (.*)", part):
            rank = int(match[2] or match[3])
            _move(rows[rank], match[1] or match[4])
        else:
            raise AssertionError(hint)
    return Plan(rows, plan.stages, plan.microbatches)


def _move(row, words):
    """Change a row as words say: `F(1) and F(2) before B(0), F(3) before B(1), and so on to F(7) before B(5)`."""
    told, _, last = words.partition(", and so on to ")
    moves, whole = _moves(row, told)
    if last:
        moves += _between(*moves[-2:], _moves(row, last)[0][0], row)
    if not moves:
        assert sorted(map(str, whole)) == sorted(map(str, row))
        row[:] = whole
    for moved, side, place in moves:
        for action in moved:
            row.remove(action)
        at = row.index(place) + (side == "after")
        row[at:at] = moved


def _moves(row, words):
    """Return the moves in some words: (what, `before` or `after`, what); and the actions that are in none."""
    moves, listed = [], []
    for lead, kind, microbatch, stage in re.findall(ACTION, words):
        action = _find(row, kind, int(microbatch), int(stage) if stage else None)
        if lead in ("before", "after"):
            moves.append((listed, lead, action))
            listed = []
        elif lead == "to":
            while listed[-1] != action:
                listed.append(_later(row, listed[-1], 1))
        else:
            listed.append(action)
    return moves, listed


def _between(one, other, end, row):
    """Return the moves that `and so on` leaves out, the last one included."""
    step = other[2].microbatch - one[2].microbatch
    moves = [other]
    while moves[-1] != end:
        moved, side, place = moves[-1]
        moves.append(([_later(row, each, step) for each in moved], side, _later(row, place, step)))
    return moves[1:]


def _later(row, action, step):
    return _find(row, action.kind, action.microbatch + step, action.stage)


def _find(row, kind, microbatch, stage):
    (action,) = [
        each for each in row if (each.kind, each.microbatch) == (kind, microbatch) and stage in (None, each.stage)
    ]
    return action


def _numbers(text):
    """Return the numbers of `0…2, 5`."""
    numbers = []
    for run in text.split(", "):
        first, _, last = run.partition("…")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers
