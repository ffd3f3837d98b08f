"""How far gradients are apart, and how far they may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipelab.engine.plainly import learning

if TYPE_CHECKING:
    from pipelab.engine.pipeline import Pipeline

__all__ = ["differences", "matters", "tolerance", "whole_batch_tolerance"]

_TOLERANCE = 1e-6
"""Largest relative difference (2-norm, per parameter, float32) between orders of adding up the same micro-batches."""

_TOLERANCE_ON_A_GPU = 1e-5
"""Likewise on a GPU: libraries choose other kernels for a part of it than for all of it; some add up in no order."""

_WHOLE_BATCH_TOLERANCE = 1e-4
"""Likewise against the whole batch at once: generous, because a wrong weight is off by far more than rounding."""

_SMALLEST_SHARE = 1e-2
"""A gradient below this share of the model's largest is measured against that share: of one that ought to be zero (an
attention's key bias) only rounding is left, and rounding differs from itself by a hundred per cent."""


def differences(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return each gradient's relative difference, in the 2-norm."""
    least = _least(plain)
    return {
        name: _norm(gradient - plain[name]) / (max(_norm(plain[name]), least) or 1.0) for name, gradient in ours.items()
    }


def matters(name: str, gradients: dict[str, torch.Tensor]) -> bool:
    """Tell whether a gradient is large enough, among these, to be measured against itself."""
    return _norm(gradients[name]) > _least(gradients)


def tolerance(pipe: Pipeline, gradient: torch.Tensor) -> float:
    """Return how far a gradient may be from the same micro-batches', added up in another order."""
    own = 8 * float(torch.finfo(gradient.dtype).eps)
    if all(each.device.type == "cpu" for each in pipe.devices):
        return max(_TOLERANCE, own)
    casts = (8 * float(torch.finfo(each).eps) for each in pipe.surroundings().types)
    return max(_TOLERANCE_ON_A_GPU, own, *casts)


def whole_batch_tolerance(pipe: Pipeline) -> float:
    """Return the tolerance for the coarsest type that gradients are made in."""
    types = {parameter.dtype for _, parameter in learning(pipe)}
    types |= pipe.surroundings().types
    return max(_WHOLE_BATCH_TOLERANCE, *(8 * float(torch.finfo(each).eps) for each in types))


def _least(gradients: dict[str, torch.Tensor]) -> float:
    return _SMALLEST_SHARE * max(map(_norm, gradients.values()), default=0.0)


def _norm(gradient: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient.abs().double()))
