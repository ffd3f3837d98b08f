"""Rank 1's script leaves between steps, fails there, or at last makes no pipeline at all."""

from __future__ import annotations

import time

from facts import attempt
from odd_rank import odd, pipeline, x, y


def leaves():
    with pipeline() as pipe:
        pipe.step(x, y)
        if not odd:
            pipe.step(x, y)


def script_raises():
    with pipeline() as pipe:
        pipe.step(x, y)
        if odd:
            raise KeyError("a slip of mine")
        pipe.step(x, y)


attempt("leaves", leaves)
attempt("script", script_raises)
attempt("absent", lambda: time.sleep(2) if odd else pipeline(timeout=0.5))
