"""When the action that this thread is running began: what an emulated stage counts its time from."""

from __future__ import annotations

import threading
import time

__all__ = ["here", "since"]

_OVERHEAD_NANOSECONDS = 1_000_000


class _Here(threading.local):
    """Per thread: the reading of the clock at the start of its action; `None` outside of a pipeline, and on CUDA."""

    began: object = None


here = _Here()


def since() -> int:
    """Return the moment from which an emulated layer counts, in nanoseconds of `time.perf_counter_ns`.

    It is the start of the action, or the end of the emulated layer before, as long as only overhead lies between; after
    real work of a millisecond or more, it is now.
    """
    now = time.perf_counter_ns()
    if isinstance(here.began, int) and now - here.began < _OVERHEAD_NANOSECONDS:
        return here.began
    return now
