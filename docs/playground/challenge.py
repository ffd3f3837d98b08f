"""What the page of challenges asks of Python: what a reader's code is worth in a level.

Like `playground.py`, it runs in the web browser; `pipelab challenge` says the same in a terminal.
"""

from __future__ import annotations

import inspect
import traceback
from typing import Any

from playground import FILE, run_code, subject_of

import pipelab
from pipelab.challenges.levels import Attempt, built, judge, levels
from pipelab.errors import PipelabError, clean


def attempt(name: str, code: str) -> dict[str, Any]:
    """Return what a reader's code is worth in a level; if it counts, its actions in the order of their starts.

    What the catalogue or `optimum` made is `looked` up.
    """
    level = levels()[name]
    try:
        found = subject_of(*run_code(code))
        if inspect.isclass(found):
            found = found(level.ranks, level.microbatches)
        made = judge(level, found.plan if isinstance(found, pipelab.Trace) else found)
    except PipelabError as error:
        return {"worth": {"reached": "refused", "said": clean(str(error), keep="\n")}, "moves": [], "looked": False}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the code raises is shown
        last = traceback.format_exception_only(error)[-1].strip()
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == FILE]
        where = f"line {lines[-1]}: " if lines else ""
        return {"worth": {"reached": "refused", "said": clean(f"{where}{last}")}, "moves": [], "looked": False}
    events = sorted(made.trace.events, key=lambda each: (each.start, each.end)) if made.trace else []
    return {"worth": worth(made), "moves": [str(each.action) for each in events], "looked": made.looked_up}


def worth(made: Attempt) -> dict[str, Any]:
    """Return what an attempt is worth, in a word, a number and a sentence."""
    if made.trace is None:
        return {"reached": "refused", "said": clean("\n".join(made.refusals[:3]), keep="\n")}
    return {
        "reached": made.reached,
        "score": made.score,
        "said": built(made.recognised) if made.recognised else "",
    }
