"""Plain training, without the engine: the gradients that a pipeline's are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipelab.engine.stage.batch import row_counts, rows_of, split_batch, weights_of
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import map_tensors

if TYPE_CHECKING:
    from pipelab.engine.pipeline import Pipeline

__all__ = [
    "differences",
    "full_batch",
    "gradients_of",
    "learning",
    "matters",
    "sequential",
    "tolerance",
    "whole_batch_tolerance",
]


def learning(pipe: Pipeline) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that learn, under the model's own names, as in `"0.weight (stage 0)"`."""
    names = {id(parameter): name for name, parameter in pipe.stages.model.named_parameters()}
    return [
        (f"{names.get(id(parameter), name)} (stage {stage})", parameter)
        for stage, module in enumerate(pipe.stages.modules)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]


def gradients_of(pipe: Pipeline) -> dict[str, torch.Tensor]:
    """Return copies of the gradients as they are now, zeros where there is none."""
    return {name: _gradient(parameter) for name, parameter in learning(pipe)}


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.detach().to_dense() if parameter.grad.is_sparse else parameter.grad.detach().clone()


def sequential(pipe: Pipeline, x: Any, y: Any, only: int | None = None) -> dict[str, torch.Tensor]:
    """Run one micro-batch after another, forward and backward, or one alone; return copies of the gradients."""
    counts = row_counts(rows_of(x, "x"), pipe.plan.microbatches)
    targets = split_batch(y, counts)
    weights = weights_of(pipe.reduction, counts, targets)
    for microbatch, value in enumerate(split_batch(_batch(pipe, x), counts)):
        if only in (None, microbatch):
            through = _through_model if pipe.stages.is_traced else _through_stages
            _backward(pipe, through(pipe, value), targets[microbatch], weights[microbatch])
    return gradients_of(pipe)


def full_batch(pipe: Pipeline, x: Any, y: Any) -> Any:
    """Run the whole batch through the model, forward and backward; return the output."""
    output = _through_model(pipe, _batch(pipe, x))
    _backward(pipe, output, y, 1.0)
    return output


def _through_model(pipe: Pipeline, value: Any) -> Any:
    """Return what comes out of the user's own model.

    Where there is none (stages given as a list), or none that runs on one device, it is what comes out of the stages.
    """
    model, devices = pipe.stages.model, set(pipe.engine.stage_devices)
    if len(devices) > 1 or isinstance(model, nn.ModuleList):
        return _through_stages(pipe, value)
    value = _moved(value, *devices)
    return model(*value) if pipe.stages.is_traced and isinstance(value, (tuple, list)) else model(value)


def _through_stages(pipe: Pipeline, value: Any) -> Any:
    """Return what comes out of the stages, each on its device."""
    for module, device in zip(pipe.stages.modules, pipe.engine.stage_devices, strict=True):
        value = module(_moved(value, device))
    return value


def _backward(pipe: Pipeline, output: Any, target: Any, weight: float) -> None:
    """Run loss and backward, the latter outside of the caller's autocast, as the workers do."""
    loss = Loss(pipe.loss_fn, [_moved(target, pipe.engine.stage_devices[-1])], [weight])
    value = loss.of(0, output)
    with pipe.caller().autocast_off():
        value.backward(loss.gradient(0, value))


def _batch(pipe: Pipeline, x: Any) -> Any:
    """Return the batch; a copy only if the first stage writes into it, as other strides may change last bits."""
    writes = any(runner.clones_input for (stage, _), runner in pipe.engine.runners.of.items() if stage == 0)
    return map_tensors(torch.clone, x) if writes else x


def _moved(value: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), value)


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
    casts = (8 * float(torch.finfo(each).eps) for each in pipe.caller().types)
    return max(_TOLERANCE_ON_A_GPU, own, *casts)


def whole_batch_tolerance(pipe: Pipeline) -> float:
    """Return the tolerance for the coarsest type that gradients are made in."""
    types = {parameter.dtype for _, parameter in learning(pipe)}
    types |= pipe.caller().types
    return max(_WHOLE_BATCH_TOLERANCE, *(8 * float(torch.finfo(each).eps) for each in types))


def _least(gradients: dict[str, torch.Tensor]) -> float:
    return _SMALLEST_SHARE * max(map(_norm, gradients.values()), default=0.0)


def _norm(gradient: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient.abs().double()))
