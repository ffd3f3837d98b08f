"""The processes have the same pipeline and call it differently: all refuse, and go on."""

from __future__ import annotations

import plain
from facts import attempt
from odd_rank import odd, pipeline, x, y


def disagree():
    with pipeline() as pipe:
        pipe.step(x, y)
        attempt("another call", lambda: pipe.state_dict() if odd else pipe.step(x, y))
        attempt("another batch", lambda: pipe.step(*plain.batch(11 if odd else 12)))
        attempt("other rows", lambda: pipe.step(*plain.batch(12, seed=7 if odd else 1)))
        attempt("another mode", lambda: pipe.forward(x) if odd else pipe.eval().forward(x))
        pipe.train()
        attempt("one evaluates", lambda: pipe.evaluate(x, y) if odd else pipe.step(x, y))
        pipe.step(x, y)  # as if nothing had been


attempt("disagree", disagree)
