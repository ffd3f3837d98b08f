"""The door to PyTorch's own pipelining: every private name that pipelab uses of it stands here, and only here.

`torch.distributed.pipelining` has no public way to run an order of one's own. A contract test holds what is expected of
these names; where a torch has moved one, `load` says which.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from pipelab.errors import EngineError

__all__ = ["Native", "load"]


@dataclass(frozen=True, slots=True)
class Native:
    """What pipelab needs of PyTorch's pipelining.

    Attributes:
        action: reads an action, `action.from_str("0F0")`.
        runtime: the schedule class that runs any order.
        schedules: the module, whose public `Schedule...` classes are PyTorch's native schedules.
        stage: a stage of a pipeline.
        stage_backward_input: the input gradient of a stage alone (`I`).
        stage_backward_weight: its weight gradients, from what the former kept (`W`).
    """

    action: Any
    runtime: Any
    schedules: Any
    stage: Any
    stage_backward_input: Any
    stage_backward_weight: Any

    def local_stage(self, module: torch.nn.Module, index: int, count: int, device: torch.device) -> Any:
        """Return one of a pipeline's stages that all are in this process, for PyTorch's native schedules."""
        stage = self.stage(module, index, count, device)
        stage._get_init_p2p_neighbors_ops = list  # noqa: SLF001 - up to torch 2.11 it would greet itself, and wait
        return stage


_NAMES = {
    "action": ("schedules", "_Action"),
    "runtime": ("schedules", "_PipelineScheduleRuntime"),
    "stage": ("stage", "PipelineStage"),
    "stage_backward_input": ("_backward", "stage_backward_input"),
    "stage_backward_weight": ("_backward", "stage_backward_weight"),
}


@cache
def load() -> Native:
    """Return PyTorch's pipelining.

    Raises:
        EngineError: naming what this torch lacks.
    """
    found: dict[str, Any] = {}
    for attribute, (module, name) in _NAMES.items():
        where = f"torch.distributed.pipelining.{module}"
        try:
            found[attribute] = getattr(import_module(where), name)
        except (ImportError, AttributeError):
            raise EngineError(
                f"torch {torch.__version__} has no {where}.{name}, which pipelab runs plans with: "
                "use torch 2.10 to 2.13, or engine='threads'"
            ) from None
    return Native(schedules=import_module("torch.distributed.pipelining.schedules"), **found)
