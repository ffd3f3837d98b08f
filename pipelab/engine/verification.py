"""Verify a pipeline: are its gradients those of the plain model?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipelab.engine.batches import row_counts, rows_of, split_batch, weights_of
from pipelab.engine.keeping import KeptBuffers, KeptRandomState
from pipelab.engine.proof import Verification
from pipelab.engine.stage import Loss
from pipelab.engine.trees import map_tensors
from pipelab.errors import VerificationError

if TYPE_CHECKING:
    from pipelab.engine.pipeline import Pipeline

__all__ = ["verify"]

Found = TypeVar("Found")

_TOLERANCE = 1e-6
"""Largest relative difference (2-norm, per parameter, float32) between orders of adding up the same micro-batches."""

_TOLERANCE_ON_A_GPU = 1e-5
"""Likewise on a GPU: libraries choose other kernels for a part of it than for all of it; some add up in no order."""

_WHOLE_BATCH_TOLERANCE = 1e-4
"""Likewise against the whole batch at once: generous, because a wrong weight is off by far more than rounding."""

_SMALLEST_SHARE = 1e-2
"""A gradient below this share of the model's largest is measured against that share: of one that ought to be zero (an
attention's key bias) only rounding is left, and rounding differs from itself by a hundred per cent."""


def verify(pipe: Pipeline, x: Any, y: Any) -> Verification:
    """Compare a pipeline's gradients with those of its stages run plainly, one micro-batch after another.

    Raises:
        VerificationError: naming the parameter and the micro-batch that differ first.
    """
    with pipe.home.whole(), _restored(pipe) as rewind, _as_in_the_workers(pipe):
        pipe.run(x, y)
        pipe.home.gather_gradients()
        ours = {name: _gradient(parameter) for name, parameter in _named(pipe)}
        rewind()
        before = KeptRandomState()
        reference = _alike(pipe, lambda: (_plain(pipe, x, y), ""))
        draws = KeptRandomState() != before
        rewind()
        exact = all(torch.equal(gradient, reference[name]) for name, gradient in ours.items())
        differences = _differences(ours, reference)
        wrong = [name for name, gradient in ours.items() if not differences[name] <= _tolerance(pipe, gradient)]
        worst = max(differences.values(), default=0.0)
        seen = ""
        if wrong and not draws:
            seen = _difference(wrong, differences[wrong[0]], _tolerance(pipe, ours[wrong[0]]))
        # Each process has a reference of its own: where a stage's state is in one process only, that one sees it.
        if seen := pipe.home.first_to_say(seen):
            raise VerificationError(f"{seen}\n{_explanation(pipe, x, y, rewind)}")
        unproven = _unproven(pipe.stages.model, draws)
        whole = _alike(pipe, lambda: (None, "") if unproven else _whole_batch_difference(pipe, x, y, reference))
    return Verification(len(ours), pipe.plan.microbatches, exact, worst, whole, unproven, compared=not wrong)


def _alike(pipe: Pipeline, look: Callable[[], tuple[Found, str]]) -> Found:
    """Look at something on all processes; if one of them fails, or has something to say, none of them is left waiting.

    Raises:
        VerificationError: with the words of the lowest rank that has any.
    """
    try:
        found, seen = look()
    except Exception as error:  # the model's own, or memory that runs out
        pipe.home.first_to_say(f"{type(error).__name__} on another process: {error}")
        raise
    if told := pipe.home.first_to_say(seen):
        raise VerificationError(told)
    return found


def _whole_batch_difference(
    pipe: Pipeline, x: Any, y: Any, reference: dict[str, torch.Tensor]
) -> tuple[float | None, str]:
    """Return how far the micro-batches' gradients are from those of the whole batch at once.

    Returns:
        The difference, `None` where the model cannot be run so; and if they are far, for the loss does not average as
        `reduction` says, or a stage does not treat a micro-batch as the whole batch, what to say of that.
    """
    model = pipe.stages.model
    devices = set(pipe.home.devices)
    if len(devices) > 1 or isinstance(model, nn.ModuleList):
        return None, ""
    (device,) = devices
    if pipe.stages.is_traced and isinstance(x, (tuple, list)):
        output = model(*_moved(_batch(pipe, x), device))
    else:
        output = model(_moved(_batch(pipe, x), device))
    _backward(pipe, Loss(pipe.loss_fn, [_moved(y, device)], [1.0]), output)
    differences = _differences(reference, {name: _gradient(parameter) for name, parameter in _named(pipe)})
    name = max(differences, key=lambda each: differences[each])
    if differences[name] <= _whole_batch_tolerance(pipe):
        return differences[name], ""
    reduction = pipe.reduction if isinstance(pipe.reduction, str) else "a function"
    told = (
        f"the micro-batches' gradients are equal to the plain model's, but their sum is not the whole batch's: "
        f"{name} differs by {differences[name]:.1e} (2-norm, relative)\n"
    )
    if spread := _spread(output, y):
        return differences[name], told + spread
    *_, last = (each for each, off in differences.items() if off > _whole_batch_tolerance(pipe))
    least = _SMALLEST_SHARE * max(map(_norm, reference.values()))
    behind = list(differences)[list(differences).index(last) + 1 :]
    right = next((each for each in behind if _norm(reference[each]) > least), None)
    if right is not None:  # a wrong reduction would show there, too
        return differences[name], (
            f"{told}  {last} is the last that differs, and {right} is right, so reduction={reduction!r} is right: "
            "between the two a micro-batch is not treated as the whole batch is\n"
            "  try: look there for a branch on values, or for a mean or another figure of several rows"
        )
    return differences[name], (
        f"{told}  reduction is {reduction!r}; it must say how loss_fn averages over rows\n"
        "  try: reduction='sum' for a loss that sums, or a function from a target to the weight of its micro-batch; "
        "where it is right, look for a stage that treats a micro-batch otherwise than the whole batch"
    )


def _spread(output: Any, y: Any) -> str:
    """Say that output and targets have as many numbers, and that a loss makes more of them; nothing if it does not."""
    if not (isinstance(output, torch.Tensor) and isinstance(y, torch.Tensor) and output.numel() == y.numel()):
        return ""
    try:
        spread = torch.broadcast_shapes(output.shape, y.shape)
    except RuntimeError:  # then the loss does something else with them
        return ""
    if spread.numel() == y.numel():
        return ""
    shape = list(output.shape)
    return (
        f"  the output is {shape} and y is {list(y.shape)}: the loss spreads them over each other, every row of one "
        f"against every row of the other\n  try: y.view({', '.join(map(str, shape))})"
    )


def _plain(pipe: Pipeline, x: Any, y: Any, only: int | None = None) -> dict[str, torch.Tensor]:
    """Return the gradients of the stages composed, without the engine; of one micro-batch if `only` is given."""
    modules = pipe.stages.modules
    counts = row_counts(rows_of(x, "x"), pipe.plan.microbatches)
    targets = split_batch(y, counts)
    weights = weights_of(pipe.reduction, counts, targets)
    devices = pipe.home.devices
    for microbatch, value in enumerate(split_batch(_batch(pipe, x), counts)):
        if only not in (None, microbatch):
            continue
        for module, device in zip(modules, devices, strict=True):
            value = module(_moved(value, device))  # noqa: PLW2901 - the value travels through the stages
        target = _moved(targets[microbatch], devices[-1])
        _backward(pipe, Loss(pipe.loss_fn, [target], [weights[microbatch]]), value)
    return {name: _gradient(parameter) for name, parameter in _named(pipe)}


def _backward(pipe: Pipeline, loss: Loss, output: Any) -> None:
    """Run loss and backward, the latter outside of the caller's autocast, as the workers do."""
    value = loss.of(0, output)
    with pipe.surroundings().autocast_off():
        value.backward(loss.gradient(0, value))


def _difference(wrong: list[str], difference: float, allowed: float) -> str:
    """Say which parameters' gradients differ: the first one by how much, and how many."""
    return (
        f"the gradient of {wrong[0]} differs from the plain model's by {difference:.1e} (2-norm, relative; "
        f"allowed {allowed:.0e}); {len(wrong)} parameter{'s differ' if len(wrong) > 1 else ' differs'} in all"
    )


def _explanation(pipe: Pipeline, x: Any, y: Any, rewind: Any) -> str:
    """Find the first micro-batch that alone makes a difference."""
    for microbatch in range(pipe.plan.microbatches):
        pipe.run(x, y, only=microbatch)
        pipe.home.gather_gradients()
        ours = {name: _gradient(parameter) for name, parameter in _named(pipe)}
        rewind()
        differences = _differences(ours, _plain(pipe, x, y, microbatch))
        rewind()
        wrong = [name for name, off in differences.items() if not off <= _tolerance(pipe, ours[name])]
        seen = f"micro-batch {microbatch} is the first that differs, at {wrong[0]}" if wrong else ""
        if seen := pipe.home.first_to_say(seen):
            return f"{seen}\ntry: look for state that the stage keeps from one micro-batch to the next"
    return (
        "every micro-batch alone is right: they differ only together\n"
        "try: look for state that a stage keeps from one micro-batch to the next"
    )


@contextmanager
def _restored(pipe: Pipeline) -> Iterator[Any]:
    """Keep gradients, buffers and random state; yield what puts back all but the gradients, which it clears."""
    modules = [*pipe.stages.modules, *([pipe.loss_fn] if isinstance(pipe.loss_fn, nn.Module) else [])]
    gradients = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    buffers, random_state = KeptBuffers(modules), KeptRandomState()

    def rewind() -> None:
        for parameter, _ in gradients:
            parameter.grad = None
        buffers.put_back()
        random_state.put_back()

    rewind()
    try:
        yield rewind
    finally:
        rewind()
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _unproven(model: nn.Module, draws: bool) -> tuple[str, ...]:
    """Return what the comparisons do not show, of a model that draws random numbers or does not."""
    reasons: list[str] = []
    if draws:
        reasons.append("dropout draws from one random stream, in another order than the plain model: set model.eval()")
    if any(isinstance(layer, _BatchNorm) and layer.training for layer in model.modules()):
        reasons.append("BatchNorm sees each micro-batch by itself: equal to micro-batches, not to the whole batch")
    return tuple(reasons)


def _named(pipe: Pipeline) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that learn, under the model's own names."""
    names = {id(parameter): name for name, parameter in pipe.stages.model.named_parameters()}
    return [
        (f"{names.get(id(parameter), name)} (stage {stage})", parameter)
        for stage, module in enumerate(pipe.stages.modules)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.detach().to_dense() if parameter.grad.is_sparse else parameter.grad.detach().clone()


def _differences(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return each gradient's relative difference, in the 2-norm."""
    sizes = {name: _norm(gradient) for name, gradient in plain.items()}
    least = _SMALLEST_SHARE * max(sizes.values(), default=0.0)
    return {name: _norm(gradient - plain[name]) / (max(sizes[name], least) or 1.0) for name, gradient in ours.items()}


def _norm(gradient: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient.abs().double()))


def _tolerance(pipe: Pipeline, gradient: torch.Tensor) -> float:
    """Return how far a gradient may be from the same micro-batches', added up in another order."""
    own = 8 * float(torch.finfo(gradient.dtype).eps)
    if all(each.device.type == "cpu" for each in pipe.devices):
        return max(_TOLERANCE, own)
    casts = (8 * float(torch.finfo(each).eps) for each in pipe.surroundings().types)
    return max(_TOLERANCE_ON_A_GPU, own, *casts)


def _whole_batch_tolerance(pipe: Pipeline) -> float:
    """Return the tolerance for the coarsest type that gradients are made in."""
    types = {parameter.dtype for _, parameter in _named(pipe)}
    types |= pipe.surroundings().types
    return max(_WHOLE_BATCH_TOLERANCE, *(8 * float(torch.finfo(each).eps) for each in types))


def _moved(value: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), value)


def _batch(pipe: Pipeline, x: Any) -> Any:
    """Return the batch, or a copy where the model writes into it: a copy may lie otherwise, which changes last bits."""
    return map_tensors(torch.clone, x) if pipe.writes_into_input else x


@contextmanager
def _as_in_the_workers(pipe: Pipeline) -> Iterator[None]:
    """Let operations use as many processor threads as in the workers: the order of their sums depends on it."""
    callers = torch.get_num_threads()
    torch.set_num_threads(pipe.intra_op_threads)
    try:
        yield
    finally:
        torch.set_num_threads(callers)
