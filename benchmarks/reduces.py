"""What an all-reduce placed early by hand gains: predicted, and measured with emulated stages in both engines.

Two replicas of two ranks with two stages each, one micro-batch through each: while one rank of a replica runs a
backward, the other one would wait, or reduces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from statistics import median

import torch
from torch import nn

import pipelab

FORWARD, BACKWARD, REDUCE = 20.0, 40.0, 40.0


class Early(pipelab.Interleaved1F1B):
    """Every stage is reduced right after its last backward on the rank."""

    def actions(self, rank):
        """Yield a rank's row."""
        row = list(super().actions(rank))
        last = {action.stage: index for index, action in enumerate(row)}
        for index, action in enumerate(row):
            yield action
            if last[action.stage] == index:
                yield pipelab.R(action.stage)


class Late(pipelab.Interleaved1F1B):
    """All stages are reduced at the end of the row."""

    def actions(self, rank):
        """Yield a rank's row."""
        yield from super().actions(rank)
        yield from (pipelab.R(stage) for stage in reversed(self.stages_of(rank)))


def spans(engine: str, steps: int) -> dict[str, float]:
    """Return the median makespan with each placement, in milliseconds."""
    found = {}
    batch = torch.ones(2, 1)
    for kind in (Early, Late):
        model = pipelab.emulated(4, FORWARD, BACKWARD, all_reduce_ms=REDUCE)
        with pipelab.Pipeline(model, pipelab.replicate(kind(2, 1), 2), nn.functional.mse_loss, engine=engine) as pipe:
            pipe.step(batch, batch)
            found[kind.__name__] = median(pipe.step(batch, batch).trace.makespan for _ in range(steps))
    return found


def measure(quick: bool = False) -> dict[str, object]:
    """Return the makespans with each placement: simulated, in threads, in processes."""
    steps = 1 if quick else 21
    cost = pipelab.Cost(forward=FORWARD, backward=BACKWARD, all_reduce=REDUCE, per="stage", unit="ms")
    plans = {kind.__name__: pipelab.replicate(kind(2, 1), 2) for kind in (Early, Late)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    ran = subprocess.run([*command, __file__, str(steps)], stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return {
        "simulated": {name: pipelab.simulate(plan, cost).makespan for name, plan in plans.items()},
        "threads": spans("threads", steps),
        "torch": json.loads(ran.stdout.splitlines()[-1]),
    }


def report(found: dict[str, object]) -> str:
    """Return the figures as Markdown."""
    lines = ["| | each `R` after its stage's last backward | all at the end | gain |", "|---|---:|---:|---:|"]
    for name in ("simulated", "threads", "torch"):
        early, late = (found[name][kind] for kind in ("Early", "Late"))  # type: ignore[index]
        lines.append(f"| {name} | {early:.1f} ms | {late:.1f} ms | **{late - early:.1f} ms** |")
    return "\n".join(lines)


if __name__ == "__main__":
    here = spans("torch", int(sys.argv[1]))
    if os.environ["RANK"] == "0":
        print(json.dumps(here))
