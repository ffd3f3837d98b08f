"""Whether all processes begin with the same weights.

Each process makes the whole model and trains its own stages of it. Where one was made from another seed, or a saved
state was loaded in one process only, everything would run, and train a model that nobody has made.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pipelab.engine.processes.stale import is_stale
from pipelab.engine.splitting import Stages

__all__ = ["digests_of_weights", "warn_of_other_weights"]

_SAMPLE = 16
"""How many numbers of each parameter are looked at: another seed changes them all."""


def digests_of_weights(stages: Stages) -> list[str | None]:
    """Return, for each stage, what stands for its weights; `None` where this process cannot know them."""
    return [None if is_stale(stages, stage) else _digest(module) for stage, module in enumerate(stages.modules)]


def warn_of_other_weights(holders: Mapping[int, Sequence[int]], digests: Sequence[Sequence[str | None]]) -> None:
    """Warn if a process has other weights for a stage than the process that will train it.

    Args:
        holders: by stage, the ranks that train it; the first one's weights are those that count.
        digests: by rank, what stands for the weights of each stage.
    """
    for stage, (first, *_) in sorted(holders.items()):
        counts = digests[first][stage]
        others = [
            rank for rank, each in enumerate(digests) if None not in (counts, each[stage]) and each[stage] != counts
        ]
        if others:
            who = f"rank {', '.join(map(str, others))} {'has' if len(others) == 1 else 'have'}"
            warnings.warn(
                f"{who} other weights for stage {stage} than rank {first}, which trains it: a stage begins with the "
                "weights that its own rank's process has\n"
                "  try: the same torch.manual_seed in every process before the model is made; a saved state is loaded "
                "in every process",
                stacklevel=5,
            )
            return


def _digest(module: nn.Module) -> str | None:
    found = hashlib.sha256()
    for parameter in module.parameters():
        plain = type(parameter) in (nn.Parameter, torch.Tensor) and parameter.layout is torch.strided
        if parameter.is_meta or not plain:  # of another class, it may lie in several processes
            return None
        flat: Any = parameter.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // _SAMPLE)][:_SAMPLE].contiguous()
        found.update(bytes(sample.view(torch.uint8).tolist()))
    return found.hexdigest()[:16]
