"""What `Pipeline.verify` returns: the proof, in numbers and as a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from pipelab.engine.stage.batch import row_counts, rows_of, split_batch
from pipelab.engine.stage.pytree import tensors_of
from pipelab.engine.stage.snapshot import KeptBatch, KeptBuffers, KeptRandomState
from pipelab.engine.verify.reference import (
    differences,
    gradients_of,
    learning,
    matters,
    run_at_once,
    run_one_after_another,
    tolerance,
    whole_batch_tolerance,
)
from pipelab.errors import VerificationError

if TYPE_CHECKING:
    from pipelab.engine.pipeline import Pipeline

__all__ = ["Verification", "verify", "whole_batch_difference"]

_MOST_NAMES = 4
"""How many parameters without a gradient are named."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The proof that a pipeline's gradients are right.

    Attributes:
        parameters: how many parameters were compared.
        microbatches: how many micro-batches the reference ran, one after another.
        exact: whether all gradients are equal bit for bit.
        largest_difference: the largest relative difference of a parameter's gradient, in the 2-norm.
        whole_batch_difference: likewise, against the whole batch at once through the model, or through its stages
            where they were given as a list or are on several devices; `None` where something is unproven.
        unproven: what cannot be proved, such as dropout.
        idle: the parameters that got no gradient, in the pipeline and in the plain model alike.
        compared: whether the gradients could be compared with the micro-batches' at all: where they differ, and random
            numbers drawn in another order may be why, nothing is proved.
    """

    parameters: int
    microbatches: int
    exact: bool
    largest_difference: float
    whole_batch_difference: float | None = None
    unproven: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    compared: bool = True

    def __str__(self) -> str:
        """Return the proof as a sentence."""
        remarks = [f"not proved: {reason}" for reason in self.unproven]
        if self.idle:
            named = ", ".join(self.idle[:_MOST_NAMES]) + (", …" if len(self.idle) > _MOST_NAMES else "")
            remarks.insert(0, f"{len(self.idle)} of them got none, in the plain model either: {named}")
        if not self.compared:
            could_not = (
                f"gradients of {self.parameters} parameters could not be compared: they differ by up to "
                f"{self.largest_difference:.1e} (2-norm, relative), and random numbers are drawn in another order"
            )
            return "\n".join([could_not, *remarks])
        how = (
            "bit for bit"
            if self.exact
            else f"within {self.largest_difference:.1e} (2-norm, relative), as sums in another order are"
        )
        whole = self.whole_batch_difference
        lines = [
            f"gradients of {self.parameters} parameters equal to the same {self.microbatches} micro-batches "
            f"one after another, {how}" + ("" if whole is None else f"; to the whole batch within {whole:.1e}"),
            *remarks,
        ]
        return "\n".join(lines)


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


Found = TypeVar("Found")
Gradients = dict[str, torch.Tensor]
Rewind = Callable[[], None]


def verify(pipe: Pipeline, x: Any, y: Any) -> Verification:
    """Compare a pipeline's gradients with those of its stages run plainly, one micro-batch after another.

    Raises:
        VerificationError: naming the parameter and the micro-batch that differ first.
    """
    with pipe.engine.full_model(), _restored(pipe, x, y) as rewind, _as_in_the_workers(pipe):
        pipe.run(x, y)
        pipe.engine.gather_gradients()
        ours = gradients_of(pipe)
        rewind()
        before = KeptRandomState()
        reference = _alike(pipe, lambda: (_one_after_another(pipe, x, y), ""))
        idle = tuple(name for name, parameter in learning(pipe) if parameter.grad is None and not ours[name].any())
        draws = KeptRandomState() != before
        rewind()
        exact = all(torch.equal(gradient, reference[name]) for name, gradient in ours.items())
        off = differences(ours, reference)
        wrong = [name for name, gradient in ours.items() if not off[name] <= tolerance(pipe, gradient)]
        worst = max(off.values(), default=0.0)
        _alike(pipe, lambda: (None, _of_no_numbers(pipe, x, y, ours, reference, rewind)))
        seen = ""
        if wrong and not draws:
            seen = _difference(wrong, off[wrong[0]], tolerance(pipe, ours[wrong[0]]))
        # Each process has a reference of its own: where a stage's state is in one process only, that one sees it.
        if seen := pipe.engine.first_to_say(seen):
            raise VerificationError(f"{seen}\n{_explanation(pipe, x, y, rewind)}")
        unproven = _unproven(pipe.stages.model, draws)
        whole = None
        if not unproven:
            whole, unproven = _alike(pipe, lambda: _at_once(pipe, x, y, reference))
    return Verification(len(ours), pipe.plan.microbatches, exact, worst, whole, unproven, idle, compared=not wrong)


def _at_once(pipe: Pipeline, x: Any, y: Any, reference: Gradients) -> tuple[tuple[float | None, tuple[str, ...]], str]:
    """Return the difference from the whole batch, or why there is none; and what is wrong with it."""
    try:
        difference, told = whole_batch_difference(pipe, x, y, reference)
    except Exception as error:
        if not isinstance(pipe.stages.model, nn.ModuleList):
            raise
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error).strip() else repr(error)
        return (None, (f"the stages, given as a list, do not take the whole batch at once ({why})",)), ""
    return (difference, ()), told


def _alike(pipe: Pipeline, look: Callable[[], tuple[Found, str]]) -> Found:
    """Look at something on all processes; if one of them fails, or has something to say, none of them is left waiting.

    Raises:
        VerificationError: with the words of the lowest rank that has any.
    """
    try:
        found, seen = look()
    except Exception as error:  # the model's own, or memory that runs out
        error.add_note("raised where verify ran the plain model, without the pipeline")
        pipe.engine.first_to_say(f"{type(error).__name__} on another process: {error}")
        raise
    if told := pipe.engine.first_to_say(seen):
        raise VerificationError(told)
    return found


def _one_after_another(pipe: Pipeline, x: Any, y: Any, only: int | None = None) -> Gradients:
    """Return the plain model's gradients."""
    run_one_after_another(pipe, x, y, only)
    return gradients_of(pipe)


def _difference(wrong: list[str], difference: float, allowed: float) -> str:
    """Say which parameters' gradients differ: the first one by how much, and how many."""
    return (
        f"the gradient of {wrong[0]} differs from the plain model's by {difference:.1e} (2-norm, relative; "
        f"allowed {allowed:.0e}); {len(wrong)} parameter{'s differ' if len(wrong) > 1 else ' differs'} in all"
    )


def _explanation(pipe: Pipeline, x: Any, y: Any, rewind: Rewind) -> str:
    """Find the first micro-batch that alone makes a difference."""
    for microbatch in range(pipe.plan.microbatches):
        pipe.run(x, y, only=microbatch)
        pipe.engine.gather_gradients()
        ours = gradients_of(pipe)
        rewind()
        off = differences(ours, _one_after_another(pipe, x, y, microbatch))
        rewind()
        wrong = [name for name, each in off.items() if not each <= tolerance(pipe, ours[name])]
        seen = f"micro-batch {microbatch} is the first that differs, at {wrong[0]}" if wrong else ""
        if seen := pipe.engine.first_to_say(seen):
            return f"{seen}\ntry: look for state that the stage keeps from one micro-batch to the next"
    return (
        "every micro-batch alone is right: they differ only together\n"
        "try: look for state that a stage keeps from one micro-batch to the next"
    )


def _of_no_numbers(pipe: Pipeline, x: Any, y: Any, ours: Gradients, reference: Gradients, rewind: Rewind) -> str:
    """Say that a gradient is NaN or infinite in pipeline and plain model alike; nothing if none is."""
    name = next((each for each in ours if not (_finite(ours[each]) or _finite(reference[each]))), None)
    if name is None:
        return ""
    kind = "NaN" if bool(reference[name].isnan().any()) else "infinite"
    told = f"the gradient of {name} is {kind}, in the plain model too: there is nothing to compare"
    batches = split_batch(x, row_counts(rows_of(x, "x"), pipe.plan.microbatches))
    for microbatch, value in enumerate(batches):
        found = not all(map(_finite, _one_after_another(pipe, x, y, microbatch).values()))
        rewind()
        if found:
            given = "" if all(map(_finite, tensors_of(value))) else ", and its rows of x hold what is no number already"
            told += f"\n  micro-batch {microbatch} is the first that makes one{given}"
            break
    return f"{told}\n  try: Pipeline(..., watch_nan=True), whose step names the action after which there is one"


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


@contextmanager
def _restored(pipe: Pipeline, x: Any, y: Any) -> Iterator[Rewind]:
    """Keep gradients, buffers, random state and batch; yield what puts back all but the gradients, which it clears."""
    modules = [*pipe.stages.modules, *([pipe.loss_fn] if isinstance(pipe.loss_fn, nn.Module) else [])]
    gradients = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    kept: list[KeptBuffers | KeptRandomState | KeptBatch] = [KeptBuffers(modules), KeptRandomState(), KeptBatch([x, y])]

    def rewind() -> None:
        for parameter, _ in gradients:
            parameter.grad = None
        for each in kept:
            each.put_back()

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
    if draws and any(isinstance(layer, _DropoutNd) and layer.training and layer.p for layer in model.modules()):
        reasons.append("dropout draws from one random stream, in another order than the plain model: set model.eval()")
    elif draws:
        reasons.append(
            "the model draws from one random stream, in another order than the plain model: set model.eval(), or leave "
            "that out"
        )
    if any(isinstance(layer, _BatchNorm) and layer.training for layer in model.modules()):
        reasons.append("BatchNorm sees each micro-batch by itself: equal to micro-batches, not to the whole batch")
    return tuple(reasons)


@contextmanager
def _as_in_the_workers(pipe: Pipeline) -> Iterator[None]:
    """Let operations use as many processor threads as in the workers: the order of their sums depends on it."""
    callers = torch.get_num_threads()
    torch.set_num_threads(pipe.engine.intra_op_threads)
    try:
        yield
    finally:
        torch.set_num_threads(callers)
