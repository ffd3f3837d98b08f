"""A student's file, as the command line is given it."""

from __future__ import annotations

from pathlib import Path

RIGHT = (Path(__file__).parent / "scripts" / "my_schedule.py").read_text()
