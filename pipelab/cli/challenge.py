"""`pipelab challenge`: levels with pars, attempts at them, the best results so far, and a sheet for teachers."""

from __future__ import annotations

import json
import os
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from pipelab import files
from pipelab.challenges.levels import Attempt, Level, built, judge, level, levels
from pipelab.cli.options import untimed
from pipelab.cli.printing import echo, folded, say
from pipelab.cli.targets import find, has_sizes
from pipelab.draw import text
from pipelab.draw.wording import columns
from pipelab.errors import FormatError

_MOST_REFUSALS = 3
_MARKS = {"par": "***", "good": "** ", "legal": "*  ", "": ""}


def challenge(
    name: Annotated[str | None, typer.Argument(help="a level's name or number", show_default=False)] = None,
    target: Annotated[
        str | None,
        typer.Argument(help="your attempt: my_file.py:MySchedule, plan.csv, or a plan's rows", show_default=False),
    ] = None,
    hint: Annotated[int, typer.Option(min=0, max=3, help="show so many hints")] = 0,
    sheet: Annotated[bool, typer.Option("--sheet", help="all levels with answers, as Markdown, for a teacher")] = False,
) -> None:
    """Write the order that reaches a level's par.

    The exit code of a refused attempt is 1.

    For example: pipelab challenge; pipelab challenge four; pipelab challenge four my_file.py:MySchedule
    """
    if sheet:
        echo(_sheet())
    elif name is None:
        _list()
    elif target is None:
        _show(level(name), hint)
    else:
        _try(level(name), target)


def _list() -> None:
    best, rows = _best(), [("level", "", "best", "good", "par", "what it is about")]
    for number, each in enumerate(levels().values(), 1):
        own = best.get(each.name, inf)
        reached = _MARKS["par" if own <= each.par else "good" if own <= each.good else "legal" if own < inf else ""]
        shown = _shown(own) if each.name in best else ""
        par = f"{each.par:g} {each.unit}"
        rows.append((f"{number} {each.name}", reached, shown, f"{each.good:g}", par, each.title))
    echo("\n".join(["Write an order that reaches par", "", *map(str.rstrip, columns(rows, 80, left=range(6)))]))
    say("pipelab challenge fill: what to do in the first one")


def _show(level: Level, hints: int) -> None:
    echo(folded(f"{level.title}. {level.story}"))
    echo(folded(f"\n  {level.given}\n  {level.goals}"))
    for rank, row in enumerate(level.listed):
        echo(f"  rank {rank} | {row}")
    if (own := _best().get(level.name)) is not None:
        echo(f"  your best so far: {_shown(own)}")
    for number, hint in enumerate(level.hints[:hints], 1):
        echo(folded(f"  hint {number}: {hint}"))
    more = f"; --hint {hints + 1}: {'another' if hints else 'a'} hint" if hints < len(level.hints) else ""
    say(f"pipelab challenge {level.name} my_file.py:MySchedule: your attempt{more}")


def _shown(own: float) -> str:
    return f"{own:g}" if own < inf else "looked up"


def _try(level: Level, target: str) -> None:
    sizes = () if has_sizes(target) else (level.ranks, level.microbatches)
    attempt = judge(level, untimed(find(target, *sizes)))
    if attempt.trace is None:
        more = len(attempt.refusals) - _MOST_REFUSALS
        echo(f"{level.title}: refused", error=True)
        for refusal in attempt.refusals[:_MOST_REFUSALS]:
            echo(folded(refusal), error=True)
        if more > 0:
            echo(f"and {more} more: pipelab check shows all", error=True)
        raise typer.Exit(1)
    echo(text.timeline(attempt.trace))
    score = f"{attempt.score:g} {level.unit}"
    ahead = "good" if attempt.reached == "good" else f"legal; good is {level.good:g}"
    par = f"{score}. Par! No order does better. {level.lesson}"
    echo(folded(f"{level.title}: {par if attempt.reached == 'par' else f'{score}, {ahead}; par is {level.par:g}'}"))
    if attempt.recognised is not None:
        say(built(attempt.recognised))
    if attempt.looked_up:
        say("looked up: now you know where it leads. Write it yourself, and it counts")
    _keep(attempt)


def _file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "pipelab" / "challenges.json"


def _best() -> dict[str, float]:
    """Return the lowest score so far, by level, of what the file holds that can be one; infinity is "looked up"."""
    try:
        found = files.read_data(_file(), "a file of scores")
    except (OSError, FormatError):
        return {}
    # Nothing is below par: neither NaN nor a negative number hides what is reached later.
    return {
        name: float(best)
        for name, best in found.items()
        if name in levels() and isinstance(best, (int, float)) and best >= levels()[name].par
    }


def _keep(attempt: Attempt) -> None:
    best = _best()
    assert attempt.score is not None
    score, name = inf if attempt.looked_up else attempt.score, attempt.level.name
    if name not in best or score < best[name]:
        path = _file()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, json.dumps(best | {name: score}, indent=1))
        except OSError as error:
            say(f"this result is not kept: {error.filename}: {error.strerror}")


def _sheet() -> str:
    lines = ["# Levels of `pipelab challenge`, with answers"]
    for number, each in enumerate(levels().values(), 1):
        lines += [f"\n## {number}. {each.title} (`{each.name}`)", each.story, f"{each.given}."]
        lines += [f"{each.goals.capitalize()}, proven. {each.note}", f"Source: {each.source}."]
        lines += [f"```text\n{each.solution}\n```"]
    return "\n\n".join(lines)
