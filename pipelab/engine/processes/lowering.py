"""Lower a pipeline onto PyTorch's pipelining runtime: its plan becomes the runtime's order.

PyTorch's runtime takes every rank's actions, adds the sends and receives between them, and then works through one
rank's list. It asks the rank's stages for everything else; `stages` answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipelab.engine import native
from pipelab.plan.actions import Action
from pipelab.plan.plan import Plan

__all__ = ["lowered"]


def lowered(
    plan: Plan, rank: int, stages: Sequence[Any], receiving: Callable[[int, int, list[Any]], None]
) -> Callable[[list[tuple[Any, ...]] | None], None]:
    """Lower a plan; return what runs one rank's part of it on PyTorch's runtime, given the first stage's inputs.

    An overlapped pair runs as its forward, then its backward, as in the threads engine: PyTorch's runtime would wait
    for what both of them need before it starts either, which may be for ever.

    Args:
        plan: the plan of one pipeline: every stage is on one rank, and every rank has something to do.
        rank: which rank.
        stages: the rank's stages, as PyTorch's runtime asks for them.
        receiving: called with a stage, a micro-batch, and what is under way for it from another rank, to be waited for.

    Raises:
        EngineError: if this torch lacks what is needed.
    """
    action = plan.program.numbering.action
    rows = [[action(code) for code in row] for row in plan.program.rows]
    computing = {each: [str(action) for action in row if action.kind != "R"] for each, row in enumerate(rows)}
    return native.order_runner(stages, plan.microbatches, computing, _reduces(rows[rank]), receiving)


def _reduces(row: Sequence[Action]) -> dict[int, list[int]]:
    """Return the stages of the all-reduces in a row, by the number of other actions before them."""
    found: dict[int, list[int]] = {}
    before = 0
    for action in row:
        if action.kind != "R":
            before += 1
        elif action.stage is not None:
            found.setdefault(before, []).append(action.stage)
    return found
