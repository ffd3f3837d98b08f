"""What the playground asks of Python: run a reader's code, and say what is to be drawn, or what is wrong.

This module runs in the web browser, in `worker.js`, which calls its functions with JSON. It needs the half of pipelab
that needs no PyTorch.
"""

from __future__ import annotations

import ast
import inspect
import io
import linecache
import re
import traceback
from contextlib import redirect_stderr, redirect_stdout
from types import ModuleType
from typing import Any

import pipelab
from pipelab.checking.checker import Faults
from pipelab.draw import colours
from pipelab.draw.order import Cell, Drawing, drawings, sentences
from pipelab.draw.order_figure import key_of
from pipelab.draw.page import content
from pipelab.errors import PipelabError, UsageError, clean

FILE = "schedule.py"
"""The name of the reader's code in messages."""
_LINE = re.compile(rf'{re.escape(FILE)}"?, line (\d+)')
_MOST_PRINTED = 20_000
_DRAWN = (pipelab.Schedule, pipelab.Plan, pipelab.Trace, pipelab.Comparison, Faults)


def draw(code: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run code and return what is to be drawn of it.

    Shown is the value of the code's last line if pipelab can draw it; or else its last schedule class, with the sizes
    in `settings`; or else the last of its variables that pipelab can draw.

    Returns:
        `content` for the timeline's page, or a `fault` in words with the `line` of the code that it names, the
        `pictures` of what is wrong, and `more` of the same if there are others; in any case what the code `printed`,
        and which settings it leaves open: `sets` is "nothing" (all are open), "sizes" or "all".
    """
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        found = _drawn(code, settings)
    text = printed.getvalue()
    more = f"\n… {len(text) - _MOST_PRINTED:,} more characters" if len(text) > _MOST_PRINTED else ""
    return {"sets": "nothing", **found, "printed": clean(text[:_MOST_PRINTED], keep="\n\t") + more}


def _drawn(code: str, settings: dict[str, Any]) -> dict[str, Any]:
    try:
        subject = subject_of(*run_code(code))
        sets = "sizes" if isinstance(subject, (pipelab.Schedule, pipelab.Plan)) else "all"
        if inspect.isclass(subject):
            sets, subject = "nothing", subject(settings["ranks"], settings["microbatches"])
        return {"sets": sets, **_shown(subject, settings)}
    except PipelabError as error:
        lead = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        return _fault(f"{lead}{error}")
    except ModuleNotFoundError as error:
        return _fault(
            f"{_traceback(error)}\n  try: this on your own machine: the browser has Python's standard library and the "
            "half of pipelab that needs no PyTorch"
        )
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - whatever the code raises is shown
        return _fault(_traceback(error))


def run_code(code: str) -> tuple[ModuleType, Any]:
    """Run code as a module; return it, and the value of its last line."""
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)  # for tracebacks
    module = ModuleType("schedule")
    module.__file__ = FILE
    tree = ast.parse(code, FILE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, FILE, "exec"), vars(module))  # noqa: S102 - the reader's own code, in the reader's browser
    value = eval(compile(ast.Expression(last.value), FILE, "eval"), vars(module)) if last else None  # noqa: S307
    return module, value


def subject_of(module: ModuleType, value: Any) -> Any:
    """Return what is to be drawn: a schedule class, or what `_DRAWN` lists."""
    if isinstance(value, _DRAWN) or _is_schedule(value):
        return value
    bound = list(vars(module).values())
    own = [each for each in bound if _is_schedule(each) and each.__module__ == module.__name__]
    shown = own or [each for each in bound if isinstance(each, _DRAWN)]
    if not shown:
        raise UsageError(
            "there is nothing to draw: the code holds no schedule, plan or trace\n"
            "  try: class MySchedule(pipelab.Schedule), or end with a line such as pipelab.OneFOneB"
        )
    return shown[-1]


def _is_schedule(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, pipelab.Schedule) and not inspect.isabstract(value)


def _shown(subject: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a page for what can be drawn, or its faults."""
    if isinstance(subject, pipelab.Comparison):
        return {"content": content(subject)}
    if isinstance(subject, Faults):
        return _faults(subject)
    cap = settings.get("cap")
    plan = subject.plan if isinstance(subject, pipelab.Trace) else subject
    if cap is not None and (faults := pipelab.check(plan, memory_cap=cap)):
        return _faults(faults)
    if isinstance(subject, pipelab.Trace):
        return {"content": content(subject, cap)}
    try:
        return {"content": content(pipelab.simulate(plan, pipelab.Cost(**settings.get("cost", {}))), cap)}
    except pipelab.ScheduleError:  # `check` says the same, with what a picture needs
        return _faults(pipelab.check(plan))


def _faults(faults: Faults) -> dict[str, Any]:
    """Return the first fault, whose repair may be that of all, and the others for who asks for `more`."""
    (first, *others), plan, given = faults, faults.plan, (faults.order, faults.transport)
    front = _fault(str(first), Faults([first], faults.subject, plan, faults.meant, *given))
    if not others:
        return front
    rest = Faults(others, faults.subject, faults.meant or plan, None, *given)
    words = "\n".join(str(rest).replace(": error.faults holds all", "").splitlines()[1:])
    return front | {"more": {"title": f"and {len(others)} more", **_fault(words, rest)}}


def _fault(text: str, faults: Faults | None = None) -> dict[str, Any]:
    """Return a fault in words, the innermost line of the code that they name, and pictures."""
    lines = _LINE.findall(text)
    pictures = [picture(each) for each in drawings(faults)] if faults else []
    return {"fault": clean(text, keep="\n\t"), "line": int(lines[-1]) if lines else None, "pictures": pictures}


def _traceback(error: BaseException) -> str:
    """Return what Python prints of an error, from the reader's first line on."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename != FILE:
        at = at.tb_next
    return "".join(traceback.format_exception(type(error), error, at)).rstrip()


def picture(drawing: Drawing) -> dict[str, Any]:
    """Return the picture of an order as data: the rows and columns that are shown, cells, arrows and words."""
    rows, columns = drawing.view
    nowhere = len(drawing.rows) - 1 if drawing.unplaced else None
    return {
        "title": clean(drawing.title),
        "kind": "after" if drawing.after else "faulty" if drawing.faulty else "",
        "columns": columns,
        "rows": [
            {
                "rank": rank,
                "name": "no rank" if rank == nowhere else f"rank {rank}",
                "cells": [_cell(drawing.rows[rank][at]) if at < len(drawing.rows[rank]) else None for at in columns],
            }
            for rank in rows
        ],
        "arrows": [[*arrow.start, *arrow.end, arrow.number] for arrow in drawing.arrows],
        "notes": [[number, clean(words)] for number, words in sentences(drawing)],
        "hint": clean(drawing.hint),
        "key": key_of(drawing),
    }


def _cell(cell: Cell) -> dict[str, Any]:
    marks = [name for name in ("struck", "over", "moved") if getattr(cell, name)]
    fills = [colours.of(each) for each in cell.actions if type(each.microbatch) in (int, type(None))]
    inks = [colours.ink(fill) for fill in fills]
    names = [str(each) for each in cell.actions] if len(fills) > 1 else [cell.label]
    return {"names": names, "state": cell.state, "marks": marks, "fills": fills, "inks": inks}
