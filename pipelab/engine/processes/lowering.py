"""Lower a plan onto PyTorch's pipelining runtime: what it cannot express is refused, and the rest is its order.

PyTorch's runtime takes every rank's actions, adds the sends and receives between them, and then works through one
rank's list. It asks the rank's stages for everything else; `stages` answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipelab.actions import Action
from pipelab.engine import native
from pipelab.errors import EngineError
from pipelab.plan import Plan

__all__ = ["lowered", "require_lowerable"]


def require_lowerable(plan: Plan) -> None:
    """Refuse what PyTorch's runtime cannot express.

    Raises:
        EngineError: naming the stage or the rank, and what to do.
    """
    for stage, ranks in plan.replicas.items():
        if len(ranks) > 1:
            raise EngineError(
                f"stage {stage} is on ranks {', '.join(map(str, ranks))}: PyTorch's runtime has every stage of a "
                "pipeline on one rank; use engine='threads', or a schedule that places it so"
            )
    for rank, row in enumerate(plan.program.rows):
        if not row:
            raise EngineError(
                f"rank {rank} of {plan.ranks} has nothing to do: PyTorch's runtime needs an action on every rank; "
                "use fewer ranks, or engine='threads'"
            )


def lowered(
    plan: Plan, rank: int, stages: Sequence[Any], receiving: Callable[[int, int, Callable[[], None]], None]
) -> Callable[[list[tuple[Any, ...]] | None], None]:
    """Lower a plan; return what runs one rank's part of it on PyTorch's runtime, given the first stage's inputs.

    An overlapped pair runs as its forward, then its backward, as in the threads engine: PyTorch's runtime would wait
    for what both of them need before it starts either, which may be for ever.

    Args:
        plan: a legal plan that `require_lowerable` has passed.
        rank: which rank.
        stages: the rank's stages, as PyTorch's runtime asks for them.
        receiving: called with a stage, a micro-batch, and what waits for its value from another rank.

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
