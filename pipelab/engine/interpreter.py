"""The interpreter lock, which every rank needs between any two of its operations."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quick_switches"]

_SWITCH_SECONDS = 5e-6

_guard = threading.Lock()
_inside = 0
_before = 0.0


@contextmanager
def quick_switches() -> Iterator[None]:
    """Let a thread that wants the interpreter lock have it at once, instead of after Python's usual 5 milliseconds.

    A rank whose backward has ended needs the lock to go on; another rank that is running a forward gives it up and
    takes it back many times in a row, each time too briefly for a sleeping thread to wake up. With a short interval it
    is made to wait for its turn. The setting is the whole process's, so it is put back after the step.
    """
    global _inside, _before  # noqa: PLW0603 - it guards a setting of the process
    with _guard:
        if _inside == 0:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_SECONDS)
        _inside += 1
    try:
        yield
    finally:
        with _guard:
            _inside -= 1
            if _inside == 0:
                sys.setswitchinterval(_before)
