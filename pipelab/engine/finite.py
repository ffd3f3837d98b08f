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


def refuse_nan(rank: int, action: Action, stage: Stage, made: Any, loss: Loss | None) -> None:
    """Look at everything that an action made.

    Args:
        rank: which rank ran it.
        action: which action.
        stage: its stage.
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
        for tensor in tensors_of(value):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                kind = "NaN" if bool(torch.isnan(tensor).any()) else "infinity"
                of_microbatch = "" if action.microbatch is None else f", micro-batch {action.microbatch}"
                raise NotANumberError(
                    f"{action} on rank {rank} made {kind}: the {what} of stage {stage.index}"
                    f"{of_microbatch}, shape {tuple(tensor.shape)}, is not finite",
                    rank,
                    stage.index,
                    str(action),
                )
