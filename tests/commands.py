"""What tests of commands share: a student's file, and how a help is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

RIGHT = (Path(__file__).parent / "scripts" / "my_schedule.py").read_text()


def one_line_each(shown: str) -> int:
    """Return how many commands a help lists, each in one line."""
    listed = re.findall(r"^│ (\S+) {2,}\S.*│$", shown, re.MULTILINE)
    panels = shown.split("╭─ ")[2:]
    commands = [name for name in listed if not name.startswith("-")]
    assert sum(panel.count("│\n") for panel in panels) == len(commands)
    return len(commands)


def ran(page: Path) -> dict[str, Any]:
    """Run the Python of a page from top to bottom; return what it has made."""
    made: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(block, made)  # noqa: S102 - it is the page's own
    return made
