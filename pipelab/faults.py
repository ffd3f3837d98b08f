"""What a mistake in a plan looks like: a fact, the cause with numbers, the next move, and the few columns around it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Code", "Fault", "shorten", "students_line"]

Code = Literal[
    "missing",
    "duplicate",
    "out-of-range",
    "wrong-rank",
    "ambiguous-stage",
    "not-an-action",
    "unordered",
    "deadlock",
    "endless",
    "memory-cap",
    "refused",
    "exception",
]

_PACKAGE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Fault:
    """One mistake in a plan, and what to do about it.

    Attributes:
        code: the kind of mistake, such as `"missing"` or `"deadlock"`.
        rank: the rank whose row shows it; `None` where it belongs to no single rank.
        position: the place in the rank's row, from 0; `None` where nothing stands there.
        action: the action concerned, as it was written.
        message: the fact, with its cause; the first line is the summary.
        hint: the next move.
        excerpt: the columns around the place.

    Example:
        >>> import pipelab
        >>> fault, = pipelab.check(pipelab.Plan.parse(["0F0 0B0 0F0"]))
        >>> fault.code, fault.rank, fault.position
        ('duplicate', 0, 2)
    """

    code: Code
    rank: int | None
    position: int | None
    action: object
    message: str
    hint: str = ""
    excerpt: str = ""

    def __str__(self) -> str:
        """Return the whole explanation, its details indented."""
        lines = [f"{self.code}: {self.message}"]
        if self.hint:
            lines.append(f"  try: {self.hint}")
        lines.extend(f"    {line}" for line in self.excerpt.splitlines())
        return "\n".join(lines)


def shorten(thing: object, width: int = 60) -> str:
    """Return `repr(thing)`, cut to `width` characters."""
    try:
        text = repr(thing)
    except Exception as error:  # a student's __repr__ may raise; the fault must still be told
        text = f"<{type(thing).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= width else text[: width - 1] + "…"


def students_line(error: BaseException) -> str:
    """Return where a student's code raised: file, line, and the line itself."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not Path(frame.filename).is_relative_to(_PACKAGE)
    ]
    if not frames:
        frames = list(traceback.extract_tb(error.__traceback__))
    if not frames:
        return "an unknown line"
    frame = frames[-1]
    code = f": {frame.line}" if frame.line else ""
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}{code}"
