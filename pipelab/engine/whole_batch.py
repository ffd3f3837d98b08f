"""Compare micro-batches with the whole batch at once: does their sum make its gradients?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pipelab.engine.differences import differences, matters, whole_batch_tolerance
from pipelab.engine.plainly import gradients_of, run_at_once

if TYPE_CHECKING:
    from pipelab.engine.pipeline import Pipeline

__all__ = ["whole_batch_difference"]


def whole_batch_difference(pipe: Pipeline, x: Any, y: Any, reference: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Return how far the micro-batches' gradients are from those of the whole batch at once.

    Args:
        pipe: the pipeline, without gradients.
        x: the batch.
        y: the targets.
        reference: the micro-batches' gradients.

    Returns:
        The difference; and if they are far, for the loss does not average as `reduction` says, or a stage does not
        treat a micro-batch as the whole batch, what to say of that.
    """
    output = run_at_once(pipe, x, y)
    off = differences(reference, gradients_of(pipe))
    name = max(off, key=lambda each: off[each])
    allowed = whole_batch_tolerance(pipe)
    if off[name] <= allowed:
        return off[name], ""
    told = (
        f"the micro-batches' gradients are equal to the plain model's, but their sum is not the whole batch's: "
        f"{name} differs by {off[name]:.1e} (2-norm, relative)\n"
    )
    wrong = [each for each in off if off[each] > allowed]
    return off[name], told + (_of_a_spread(pipe, output, y) or _of_rows_mixed(pipe, wrong, reference))


def _of_a_spread(pipe: Pipeline, output: Any, y: Any) -> str:
    """Say that the loss spreads output and targets over each other; nothing if it does not.

    Then it takes every row of one with every row of the other, and it is all the same to it in which order they are.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(y, torch.Tensor) and output.numel() == y.numel()):
        return ""
    try:
        spread = torch.broadcast_shapes(output.shape, y.shape)
    except RuntimeError:  # then the loss does something else with them
        return ""
    turned = y.flip(0)
    if spread.numel() == y.numel() or torch.equal(turned, y):
        return ""
    with torch.no_grad():
        as_it_is, turned_round = (pipe.loss_fn(output, each.to(output.device)) for each in (y, turned))
    if not torch.allclose(as_it_is, turned_round, rtol=1e-4):
        return ""
    shape = list(output.shape)
    return (
        f"  the output is {shape} and y is {list(y.shape)}: the loss spreads them over each other, every row of one "
        f"against every row of the other\n  try: y.view({', '.join(map(str, shape))})"
    )


def _of_rows_mixed(pipe: Pipeline, wrong: list[str], reference: dict[str, torch.Tensor]) -> str:
    """Say that the reduction is wrong; or if a gradient behind those that differ is right, that a stage is."""
    names = list(reference)
    behind = names[names.index(wrong[-1]) + 1 :]
    right = next((each for each in behind if matters(each, reference)), None)
    named = repr(pipe.reduction) if isinstance(pipe.reduction, str) else "a function"
    if right is not None:  # a wrong reduction would show there, too
        return (
            f"  {right} is right, so reduction={named} is right: but {wrong[-1]} and what lies before it see a "
            "micro-batch treated otherwise than the whole batch\n"
            "  try: look, from there to the loss, for a branch on values, or for a mean or another figure of several "
            "rows"
        )
    return (
        f"  reduction is {named}; it must say how loss_fn averages over rows\n"
        "  try: reduction='sum' for a loss that sums, or a function from a target to the weight of its micro-batch; "
        "where it is right, look for a stage that treats a micro-batch otherwise than the whole batch, or for a loss "
        "that is more than an average over rows: a batch in parts is another loss then"
    )
