"""Watch for NaN and infinity in what an action made."""

from __future__ import annotations

from typing import Any

import torch

from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import tensors_of
from pipelab.engine.stage.stage import Stage
from pipelab.errors import StageError
from pipelab.plan.actions import Action

__all__ = ["batch_has_nan", "refuse_nan"]


def batch_has_nan(action: Action, stage: Stage, given: Any) -> bool:
    """Tell whether the first stage receives NaN of the batch; to be asked before it writes into it."""
    return action.kind == "F" and stage.is_first and any(bool(tensor.isnan().any()) for tensor in tensors_of(given))


def refuse_nan(rank: int, action: Action, stage: Stage, made: Any, loss: Loss | None, *, had_nan: bool = False) -> None:
    """Look at everything that an action made.

    Args:
        rank: which rank ran it.
        action: which action.
        stage: its stage.
        made: what it made for another stage.
        loss: the step's loss; `None` for an evaluation.
        had_nan: whether there was NaN in the batch before, as far as the action was given it.

    Raises:
        StageError: naming the first NaN or infinity.
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
            raise StageError(
                f"{action} on rank {rank} made {kind}: the {what} of stage {stage.index}"
                f"{of_microbatch}, shape {tuple(tensor.shape)}, is not finite{_source(action, stage, had_nan=had_nan)}",
                rank,
                stage.index,
                str(action),
            )


def _found(value: Any) -> tuple[str, torch.Tensor] | None:
    """Return `"NaN"` or `"infinity"`, and the first tensor that has it."""
    for tensor in tensors_of(value):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return ("NaN" if bool(torch.isnan(tensor).any()) else "infinity"), tensor
    return None


def _source(action: Action, stage: Stage, *, had_nan: bool) -> str:
    """Return where a forward got NaN from, if it did not make it: the batch, or a parameter."""
    if had_nan:
        return f"\n  there was NaN in what it was given: in the rows of x of micro-batch {action.microbatch}"
    if action.kind == "F":
        for name, parameter in stage.module.named_parameters():
            if bool(parameter.isnan().any()):
                return f"\n  there was NaN in {name} of stage {stage.index} before: look at the step before this one"
    return ""
