"""Verify a pipeline: are its gradients those of the plain model?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from pipelab.engine.batches import row_counts, rows_of, split_batch
from pipelab.engine.differences import differences, tolerance
from pipelab.engine.keeping import KeptBatch, KeptBuffers, KeptRandomState
from pipelab.engine.plainly import gradients_of, learning, run_one_after_another
from pipelab.engine.proof import Verification
from pipelab.engine.trees import tensors_of
from pipelab.engine.whole_batch import whole_batch_difference
from pipelab.errors import VerificationError

if TYPE_CHECKING:
    from pipelab.engine.pipeline import Pipeline

__all__ = ["verify"]

Found = TypeVar("Found")
Gradients = dict[str, torch.Tensor]
Rewind = Callable[[], None]


def verify(pipe: Pipeline, x: Any, y: Any) -> Verification:
    """Compare a pipeline's gradients with those of its stages run plainly, one micro-batch after another.

    Raises:
        VerificationError: naming the parameter and the micro-batch that differ first.
    """
    with pipe.home.whole(), _restored(pipe, x, y) as rewind, _as_in_the_workers(pipe):
        pipe.run(x, y)
        pipe.home.gather_gradients()
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
        if seen := pipe.home.first_to_say(seen):
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
        pipe.home.first_to_say(f"{type(error).__name__} on another process: {error}")
        raise
    if told := pipe.home.first_to_say(seen):
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
        pipe.home.gather_gradients()
        ours = gradients_of(pipe)
        rewind()
        off = differences(ours, _one_after_another(pipe, x, y, microbatch))
        rewind()
        wrong = [name for name, each in off.items() if not each <= tolerance(pipe, ours[name])]
        seen = f"micro-batch {microbatch} is the first that differs, at {wrong[0]}" if wrong else ""
        if seen := pipe.home.first_to_say(seen):
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
    torch.set_num_threads(pipe.intra_op_threads)
    try:
        yield
    finally:
        torch.set_num_threads(callers)
