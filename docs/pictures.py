"""Draw the picture of the README with the README's own lines, so that neither can be out of date: `make pictures`."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def examples() -> list[tuple[str, str | None]]:
    """Return the README's Python blocks, each with what it prints: the text block that follows it, if there is one."""
    parts = re.split(r"^```python\n", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
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


if __name__ == "__main__":
    first, _ = examples()[0]
    run(first, ROOT / "docs" / "images", {"__name__": "__main__"})
