"""Watch for NaN and infinity in what an action made."""

from __future__ import annotations

from typing import Any

import torch

from pipelab.actions import Action
from pipelab.engine.loss import Loss
from pipelab.engine.stage import Stage
from pipelab.engine.trees import tensors_of
from pipelab.errors import NotANumberError

__all__ = ["refuse_nan"]


def refuse_nan(rank: int, action: Action, stage: Stage, given: Any, made: Any, loss: Loss | None) -> None:
    """Look at everything that an action made.

    Args:
        rank: which rank ran it.
        action: which action.
        stage: its stage.
        given: what the action was given.
        made: what it made for another stage.
        loss: the step's loss; `None` for an evaluation.

    Raises:
        NotANumberError: naming the first NaN or infinity.
    """
    if action.kind == "F":
        value = None if loss is None or action.microbatch is None else loss.values[action.microbatch]
        looked_at = [("output", made), ("loss", value if stage.is_last else None)]
    else:
        parameters = stage.module.named_parameters()
        looked_at = [("input gradient", made), *((f"gradient of {name}", each.grad) for name, each in parameters)]
    for what, value in looked_at:
        found = _found(value)
        if found is not None:
            kind, tensor = found
            of_microbatch = "" if action.microbatch is None else f", micro-batch {action.microbatch}"
            raise NotANumberError(
                f"{action} on rank {rank} made {kind}: the {what} of stage {stage.index}"
                f"{of_microbatch}, shape {tuple(tensor.shape)}, is not finite{_source(action, stage, given)}",
                rank,
                stage.index,
                str(action),
            )


def _found(value: Any) -> tuple[str, torch.Tensor] | None:
    """Return what is no number, and the first tensor that has it."""
    for tensor in tensors_of(value):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return ("NaN" if bool(torch.isnan(tensor).any()) else "infinity"), tensor
    return None


def _source(action: Action, stage: Stage, given: Any) -> str:
    """Say where a forward has it from, if it did not make it itself: the batch, or a parameter or buffer."""
    if action.kind != "F":
        return ""
    if found := _found(given):  # of what an earlier stage made, it would have been told there
        return f"\n  there was {found[0]} in what it was given: in the rows of x of micro-batch {action.microbatch}"
    for name, tensor in [*stage.module.named_parameters(), *stage.module.named_buffers()]:
        if found := _found(tensor):
            return f"\n  there was {found[0]} in {name} of stage {stage.index} before: look at the step before this one"
    return ""
