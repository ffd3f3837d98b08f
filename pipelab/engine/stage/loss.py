"""The loss of a step, weighed by micro-batch; and losses that do not average as `reduction` says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipelab.engine.stage.batch import Reduction, Way, join
from pipelab.engine.stage.pytree import described, tensors_of
from pipelab.engine.stage.snapshot import unchanged
from pipelab.errors import LossError

_IGNORED = -100
"""The target that PyTorch's cross entropy ignores by default."""


@dataclass(slots=True)
class Loss:
    """The loss of one step: the function, and each micro-batch's target, weight and value."""

    function: Callable[[Any, Any], torch.Tensor]  # takes the model's output and the target, and returns a scalar
    targets: list[Any]  # per micro-batch
    weights: list[float]  # per micro-batch, the weight of its loss in the loss of the batch
    scale: float = 1.0  # what all gradients are multiplied by, for a `GradScaler`
    ways: Sequence[Way] = ()  # how each leaf of a target was cut
    updates: bool = False  # whether updates (`U`) change weights
    values: list[torch.Tensor | None] = field(default_factory=list)  # without weight and history

    def __post_init__(self) -> None:
        self.values = [None] * len(self.targets)

    def of(self, microbatch: int, output: Any) -> torch.Tensor:
        """Return the loss of one micro-batch, without its weight; store its value."""
        try:
            loss: object = self.function(output, self.targets[microbatch])
        except Exception as error:
            error.add_note(f"in the loss of an output {_sizes(output)} and a target {_sizes(self.targets[microbatch])}")
            raise
        if not isinstance(loss, torch.Tensor):
            part = "['loss']" if isinstance(loss, Mapping) else "[0]" if isinstance(loss, (tuple, list)) else ""
            hint = f"\n  try: loss_fn=lambda output, target: your_loss(output, target){part}" if part else ""
            raise LossError(f"the loss function returned {type(loss).__name__}, not a tensor{hint}")
        if loss.numel() != 1:
            raise LossError(
                f"the loss function returned a tensor of shape {tuple(loss.shape)}, not one number: "
                "average or sum it (most losses do with reduction='mean')"
            )
        if loss.is_complex():
            raise LossError(f"the loss is {loss.dtype}: only a real number can be made smaller; take .abs() or .real")
        if not loss.requires_grad and torch.is_grad_enabled():
            raise LossError(
                "the loss has no history, so it has no backward: it must depend on the model's output, and some "
                "parameter must require a gradient"
            )
        if not self.weights[microbatch]:
            loss = _nothing(output, loss) if loss.requires_grad else torch.zeros_like(loss)
        self.values[microbatch] = loss.detach()
        return loss

    def gradient(self, microbatch: int, loss: torch.Tensor) -> torch.Tensor:
        """Return the gradient that a micro-batch's backward starts from: the weight of its loss."""
        return torch.full_like(loss, self.weights[microbatch] * self.scale)

    def total(self) -> torch.Tensor:
        """Return the loss of the whole batch, without dimensions or history, on the first micro-batch's device."""
        known = [(value, weight) for value, weight in zip(self.values, self.weights, strict=True) if value is not None]
        device = known[0][0].device
        values = [(value.reshape(()) if value.dim() else value).to(device) for value, _ in known]
        if len({weight for _, weight in known}) == 1:  # nearly always, and a small step waits for this
            return (torch.stack(values) * known[0][1]).sum()
        return torch.stack([value * weight for value, (_, weight) in zip(values, known, strict=True)]).sum()


def require_loss(loss_fn: object, reduction: Reduction) -> None:
    """Refuse anything but a function, and a loss with another `reduction` than the pipeline's."""
    if isinstance(loss_fn, type):
        raise LossError(f"loss_fn is the class {loss_fn.__name__}: make one, {loss_fn.__name__}()")
    if not callable(loss_fn):
        raise LossError(f"loss_fn={loss_fn!r}: expected a function of output and target, such as torch.nn.MSELoss()")
    own = getattr(loss_fn, "reduction", None)
    if isinstance(reduction, str) and own in ("mean", "sum", "none") and own != reduction:
        raise LossError(
            f"{type(loss_fn).__name__} has reduction={own!r} and the pipeline reduction={reduction!r}, so gradients "
            f"would be wrong by a factor: pass Pipeline(..., reduction={own!r})"
            if own != "none"
            else f"{type(loss_fn).__name__} has reduction='none' and so returns several numbers: use 'mean' or 'sum'"
        )


_AVERAGE_OTHERWISE = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
"""Losses that ignore targets and weigh classes; a subclass may have another `forward`."""


def warned_of_targets(
    loss_fn: Callable[[Any, Any], torch.Tensor], reduction: Reduction, targets: Sequence[Any], counts: Sequence[int]
) -> bool:
    """Refuse row weights for a loss of PyTorch's that averages otherwise; return whether one of the user's own may.

    Cross entropy ignores targets equal to `ignore_index`, and multiplies each class by its `weight`: if micro-batches
    have different shares of those, their average by rows is not the batch's loss. What a loss of the user's own does
    with -100 cannot be seen from outside. To look at its targets on a GPU would wait for it.
    """
    classes = (torch.is_tensor(each) and not (each.is_floating_point() or each.is_complex()) for each in targets)
    if reduction != "mean" or not all(classes):  # else they are probabilities
        return False
    ignored, weight, own = _IGNORED, None, loss_fn not in (nn.functional.cross_entropy, nn.functional.nll_loss)
    if isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss) and type(loss_fn).forward in _AVERAGE_OTHERWISE:
        ignored, weight, own = loss_fn.ignore_index, loss_fn.weight, False
    if own and (type(loss_fn).__module__.startswith("torch.") or any(each.device.type != "cpu" for each in targets)):
        return False
    shares = [_share(each, ignored, weight) for each in targets]
    off = [abs(share * sum(counts) - sum(shares) * count) for share, count in zip(shares, counts, strict=True)]
    if max(off) <= 1e-6 * sum(shares) * sum(counts):
        return False
    all_count = weight is None and shares == [each.numel() for each in targets]
    if not own:
        raise _uneven(loss_fn, shares, ignored, weighed=weight is not None, all_count=all_count)
    have = f"the micro-batches have {_some(shares)} " + ("targets" if all_count else "others")
    counted = "target.numel()" if all_count else f"(target != {_IGNORED}).sum()"
    warnings.warn(
        f"{'' if all_count else f'of the targets, some are {_IGNORED}, and '}{have}: reduction='mean' "
        "weighs micro-batches by rows; if your loss averages over those alone, gradients are not the whole batch's\n"
        f"  try: Pipeline(..., reduction=lambda target: {counted}), of target[:, 1:] if your loss "
        "shifts them; or reduction=len, if it averages over rows",
        stacklevel=5,
    )
    return True


def _uneven(loss_fn: object, shares: Sequence[float], ignored: int, *, weighed: bool, all_count: bool) -> LossError:
    fact = "multiplies each target by the weight of its class, and the micro-batches have different sums of weights"
    counted = f"weight[target[target != {ignored}]].sum()"
    if all_count:
        fact, counted = f"averages over targets, and the micro-batches have {_some(shares)}", "target.numel()"
    elif not weighed:
        fact = f"ignores targets that are {ignored} and averages over the others, of which the micro-batches have "
        fact, counted = fact + _some(shares), f"(target != {ignored}).sum()"
    return LossError(
        f"{getattr(loss_fn, '__name__', type(loss_fn).__name__)} {fact}: reduction='mean', which weighs micro-batches "
        "by rows, would give other gradients than the whole batch\n"
        f"  try: Pipeline(..., reduction=lambda target: {counted}); or reduction=len, to weigh by rows nevertheless"
    )


def _some(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:g}" for share in shares[:8]) + (", …" if len(shares) > 8 else "")


def warn_of_another_average(loss: Loss, reduction: Reduction, together: Callable[[int], Any]) -> None:
    """Warn if, with `reduction="mean"`, the loss of a pair of micro-batches together is not the average of both."""
    values, weights = loss.values[:2], loss.weights[:2]
    known = [value for value, weight in zip(values, weights, strict=True) if value is not None and weight]
    if len(known) < 2 or reduction != "mean":
        return

    def again(some: int) -> torch.Tensor:
        with unchanged([loss.function], attributes=True), torch.no_grad():
            value = loss.function(together(some), join(loss.targets[:some], loss.ways))
        return value.detach().reshape(()).cpu().double()

    try:
        both = again(2)
    except Exception:  # noqa: BLE001 - outputs that cannot be joined, as with a loss among them
        return
    first, second = (value.reshape(()).to(both) for value in known)
    kind = known[0].dtype
    slack = max(1e-3, 8 * torch.finfo(kind).eps) if kind.is_floating_point else 1e-3
    total = (first * weights[0] + second * weights[1]) / sum(weights)
    # A NaN is no reason, nor is a loss that draws, or keeps something: it has another value in each call.
    if abs(both - total) > slack * abs(both) and abs(again(1) - first) <= slack * abs(first):
        warnings.warn(
            f"the losses of two micro-batches average to {total:.4g}, and loss_fn of both together is {both:.4g}: with "
            "reduction='mean', loss and gradients are not the whole batch's\n"
            "  try: reduction='sum' for a loss that sums, a function from a target to its micro-batch's weight for one "
            "that leaves targets out, or reduction=len to weigh by rows nevertheless",
            stacklevel=4,
        )


def _share(target: torch.Tensor, ignored: int, weight: torch.Tensor | None) -> float:
    """Return over how much cross entropy averages."""
    counted = target != ignored
    if weight is None:
        return float(counted.sum())
    known = counted & (target >= 0) & (target < len(weight))  # the loss itself refuses others
    return float(weight.to(target.device).double()[target[known].long()].sum())


def _sizes(value: Any) -> str:
    return ", ".join(map(described, tensors_of(value))) or f"without tensors ({type(value).__name__})"


def _nothing(output: Any, loss: torch.Tensor) -> torch.Tensor:
    """Return a loss of zero whose gradients are zero, even if `loss` is 0 / 0, as when all its rows are ignored."""
    learning = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    if not learning:
        return loss * 0
    return torch.cat([tensor.flatten()[:0].to(loss.dtype) for tensor in learning]).sum()
