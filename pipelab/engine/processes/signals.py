"""Obey a SIGTERM as ever, but say first what this process was waiting for.

When one process dies, torchrun sends the others this signal, often before they have noticed.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

__all__ = ["told_before_the_end"]


@contextmanager
def told_before_the_end(what: Callable[[], str], for_good: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Have a SIGTERM tell something before it does what it would have done.

    Args:
        what: what to tell; asked for when the signal comes.
        for_good: whether to go on telling afterwards, as the process is about to end; asked for at the end.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is None:
        yield
        return

    def tell(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - Python calls it so
        try:
            words = f"pipelab: told to stop (SIGTERM): {what()}\n"
            with suppress(OSError, RuntimeError, ValueError):  # gone, in the middle of a write, or closed
                errors.write(words)
                errors.flush()
        finally:
            signal.signal(signal.SIGTERM, before)
            signal.raise_signal(signal.SIGTERM)

    errors = sys.stderr  # as it is now: while PyTorch has a traceback written, it collects the text, and that is lost
    before = signal.signal(signal.SIGTERM, tell)
    try:
        yield
    finally:
        if not for_good():
            signal.signal(signal.SIGTERM, before)
