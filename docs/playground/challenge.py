"""What the page of challenges asks of Python: what may run next in a level, and what an attempt is worth.

Like `playground.py`, it runs in the web browser; `pipelab challenge` says the same in a terminal.
"""

from __future__ import annotations

import inspect
import traceback
from typing import Any

from playground import FILE, run_code, subject_of

import pipelab
from pipelab.challenges.levels import Attempt, board, judge, levels
from pipelab.draw import colours
from pipelab.errors import PipelabError, clean


def state(name: str, rows: list[list[str]]) -> dict[str, Any]:
    """Return a level in which some actions have been placed by hand.

    Returns:
        `placed`, for each rank a list of word, start, end, colour; `ready`, likewise, of word, start, colour;
        and, once nothing is ready, what the attempt is worth: see `worth`.
    """
    level = levels()[name]
    found = board(level, rows)
    over = not any(found.ready)
    return {
        "placed": [[[word, *span, colour(word)] for word, span in row.items()] for row in found.placed],
        "ready": [[[word, begin, colour(word)] for word, begin in row.items()] for row in found.ready],
        "worth": worth(judge(level, pipelab.Plan.parse([" ".join(row) for row in rows]))) if over else None,
    }


def attempt(name: str, code: str) -> dict[str, Any]:
    """Return what a reader's code is worth in a level, and its rows if it counts."""
    level = levels()[name]
    try:
        found = subject_of(*run_code(code))
        if inspect.isclass(found):
            found = found(level.ranks, level.microbatches)
        made = judge(level, found.plan if isinstance(found, pipelab.Trace) else found)
    except PipelabError as error:
        return {"worth": {"reached": "refused", "said": clean(str(error), keep="\n")}, "rows": None}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the code raises is shown
        last = traceback.format_exception_only(error)[-1].strip()
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == FILE]
        where = f"line {lines[-1]}: " if lines else ""
        return {"worth": {"reached": "refused", "said": clean(f"{where}{last}")}, "rows": None}
    rows = None if made.trace is None else [list(map(str, row)) for row in made.trace.plan.rows]
    return {"worth": worth(made), "rows": rows}


def worth(made: Attempt) -> dict[str, Any]:
    """Return what an attempt is worth, in a word, a number and a sentence."""
    if made.trace is None:
        return {"reached": "refused", "said": clean("\n".join(made.refusals[:3]), keep="\n")}
    name = made.recognised
    source = pipelab.schedules[name].source if name else ""
    return {
        "reached": made.reached,
        "makespan": made.makespan,
        "said": f"You built {name}: {source}" if name else "",
        "peaks": list(made.trace.peak_activations),
    }


def colour(word: str) -> str:
    """Return the colour of an action's bar."""
    return colours.of(pipelab.Action.parse(word))
