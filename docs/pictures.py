"""Draw the README's pictures, with its own lines, and the slides', so that none is out of date: `make pictures`."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pipelab

ROOT = Path(__file__).resolve().parent.parent


def examples(page: str = "README.md") -> list[tuple[str, str | None]]:
    """Return a page's Python blocks, each with what it prints: the text block that follows it, if there is one."""
    parts = re.split(r"^```python\n", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = []
    for part in parts:
        code, _, rest = part.partition("\n```")
        printed = re.search(r"^```text\n(.*?)^```", rest, flags=re.MULTILINE | re.DOTALL)
        found.append((code, printed[1] if printed else None))
    return found


def run(code: str, folder: Path, namespace: dict[str, Any]) -> str:
    """Run one block in a folder, where it saves its pictures; return what it prints."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, namespace)  # noqa: S102 - the README's own lines
    return printed.getvalue()


def others(folder: Path) -> None:
    """Draw the README's first picture and the slides': two schedules on one axis, and the naive one alone."""
    naive, gpipe, delayed, alternate = (
        pipelab.simulate(kind(ranks=4, microbatches=8))
        for kind in (pipelab.Naive, pipelab.GPipe, pipelab.DelayedBackward, pipelab.OneFOneB)
    )
    naive.save(folder / "naive.svg")
    pipelab.compare(gpipe, alternate, names=["GPipe", "1F1B"]).save(folder / "gpipe_and_1f1b.svg")
    pipelab.compare(delayed, alternate, names=["Single loop", "1F1B"]).save(folder / "delayed_and_1f1b.svg")


if __name__ == "__main__":
    first, _ = examples()[0]
    run(first, ROOT / "docs" / "images", {"__name__": "__main__"})
    others(ROOT / "docs" / "images")
