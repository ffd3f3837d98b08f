"""The processes make different pipelines: before they connect."""

from __future__ import annotations

import plain
import torch
from facts import attempt
from odd_rank import odd, pipeline

from pipelab import GPipe, OneFOneB

version = torch.__version__
torch.__version__ = "2.9.1" if odd else version
attempt("version", pipeline)
torch.__version__ = version
attempt("plan", lambda: pipeline(plan=GPipe(3, 4) if odd else None))
attempt("sizes", lambda: pipeline(plan=OneFOneB(3, 5) if odd else None))
attempt("ranks", lambda: pipeline(plan=OneFOneB(2, 4) if odd else None, timeout=1))
attempt("all ranks", lambda: pipeline(plan=OneFOneB(2, 4)))
attempt("model", lambda: pipeline(model=plain.mlp(6, width=8) if odd else None))
attempt("reduction", lambda: pipeline(reduction="sum" if odd else "mean"))
attempt("buffers", lambda: pipeline(replicated_buffers="lowest" if odd else "refuse"))
