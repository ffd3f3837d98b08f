"""Compare a pipeline's gradients with plain training's: the same micro-batches, and the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from pipelab.engine.stage.pytree import tensors_of
from pipelab.engine.stage.snapshot import AttributeSnapshot, RandomSnapshot
from pipelab.engine.verify.causes import listed
from pipelab.engine.verify.reference import (
    NEARBY,
    differences,
    far,
    full_batch,
    gradients_of,
    learning,
    matters,
    nearby_weights,
    norms_of,
    restored,
    sequential,
    tolerance,
    unproven_of,
    whole_batch_tolerance,
)
from pipelab.errors import VerificationError
from pipelab.plan.fault import ranges

if TYPE_CHECKING:
    from pipelab.engine.pipeline import Pipeline

Found = TypeVar("Found")
Gradients = dict[str, torch.Tensor]
Rewind = Callable[[], None]

_WITH_OTHER_WEIGHTS = (
    " with slightly different weights. With the present ones they differ by more, as they do where rounding decides."
)


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a verification: how far a pipeline's gradients are from plain training's.

    Plain training runs the model itself; if the model is a list of stages, or is traced and on several devices, plain
    training runs the stages, one after the other.

    Attributes:
        parameters: how many parameters were compared.
        microbatches: how many micro-batches plain training ran, one after another.
        exact: whether all gradients are equal bit for bit.
        largest_difference: the largest difference of a parameter's gradient, in the 2-norm, relative to what the
            micro-batches add to it: the sum of the norms of their gradients.
        whole_batch_difference: the largest difference of a parameter's gradient from the whole batch's, in the
            2-norm, relative to the gradient itself; `None` if something is unproven.
        unproven: what cannot be verified, such as dropout.
        idle: the parameters that got no gradient, in the pipeline and in plain training alike.
        compared: whether the gradients could be compared. If they differ, and the model draws random numbers in another
            order, nothing is verified.
        nearby: whether `whole_batch_difference` is that with slightly different weights. With the present ones the
            gradients are within rounding of zero, or the input of a layer such as ReLU is within rounding of its kink:
            then operations on all rows and on some rows may round to other gradients.

    A gradient below a hundredth of the model's largest is measured relative to that hundredth.
    """

    parameters: int
    microbatches: int
    exact: bool
    largest_difference: float
    whole_batch_difference: float | None = None
    unproven: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    compared: bool = True
    nearby: bool = False

    def __str__(self) -> str:
        if not self.compared:
            first = (
                f"{self.parameters} gradients could not be compared: they differ by up to "
                f"{self.largest_difference:.1e} (2-norm, relative to what is added up), and random numbers are drawn "
                "in another order."
            )
        else:
            how = "bit for bit" if self.exact else f"within {self.largest_difference:.1e} of what is added up"
            first = (
                f"All {self.parameters} gradients match plain training with the same {self.microbatches} "
                f"micro-batches {how}."
            )
        if self.compared and self.whole_batch_difference is not None:
            first += f" Against the whole batch at once they differ by at most {self.whole_batch_difference:.1e}"
            first += _WITH_OTHER_WEIGHTS if self.nearby else "."
        remarks = [f"not verified: {reason}" for reason in self.unproven]
        if self.idle:
            remarks.insert(
                0, f"{len(self.idle)} parameters got no gradient, in plain training either: {listed(self.idle)}"
            )
        return "\n".join([first, *remarks])


def _at_once(
    pipe: Pipeline, x: Any, y: Any, reference: Gradients, rewind: Rewind
) -> tuple[tuple[float | None, bool, tuple[str, ...]], str]:
    """Return how far the micro-batches' gradients are from the whole batch's; if too far, also why.

    Operations on all rows round otherwise than on some. Where residuals are rounding errors themselves, or a ReLU's
    input is within rounding of zero, that decides the gradients. Nearby it does not, but a fault is there too: so a
    difference is a fault if it is too large with most of some other weights.
    """
    try:
        difference, wrong = _difference_at_once(pipe, x, y, reference)
    except Exception as error:
        if not isinstance(pipe.stages.model, nn.ModuleList):
            raise
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error).strip() else repr(error)
        return (None, False, (f"the stages, given as a list, do not take the whole batch ({why})",)), ""
    if not wrong:
        return (difference, False, ()), ""
    looks: list[tuple[float, str]] = []
    for seed in range(NEARBY):
        with nearby_weights(pipe.stages.modules, seed, far(pipe)):
            rewind()
            nearby = sequential(pipe, x, y)
            rewind()
            looks.append(_difference_at_once(pipe, x, y, nearby))
        alike = [each for each in looks if bool(each[1]) == bool(looks[-1][1])]
        if len(alike) > NEARBY // 2:
            break
    difference, wrong = alike[0]
    return (difference, True, ()), wrong


def _difference_at_once(pipe: Pipeline, x: Any, y: Any, reference: Gradients) -> tuple[float, str]:
    """Compare with the whole batch, with the weights as they are; if the difference is too large, say why.

    Then the loss does not average as `reduction` says, or a stage computes something else of a part of the batch.
    """
    output = full_batch(pipe, x, y)
    whole = gradients_of(pipe)
    off = differences(reference, whole, norms_of(whole))
    name = max(off, key=lambda each: off[each])
    wrong = [each for each in off if not off[each] <= whole_batch_tolerance(pipe)]
    if not wrong:
        return off[name], ""
    fact = (
        f"the micro-batches' gradients are equal to the plain model's, but their sum is not the whole batch's: "
        f"{name} differs by {off[name]:.1e} (2-norm, relative to the sum), with slightly different weights too\n"
    )
    return off[name], fact + (_of_a_spread(pipe, output, y) or _of_rows_mixed(pipe, wrong, reference))


def _of_a_spread(pipe: Pipeline, output: Any, y: Any) -> str:
    """Return the explanation that the loss broadcasts output and targets; "" if it does not.

    Such a loss pairs every row of one with every row of the other, in any order.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(y, torch.Tensor) and output.numel() == y.numel()):
        return ""
    try:
        spread = torch.broadcast_shapes(output.shape, y.shape)
    except RuntimeError:  # the loss does something else with them
        return ""
    turned = y.flip(0)
    if spread.numel() == y.numel() or torch.equal(turned, y):
        return ""
    with torch.no_grad():
        before, after = (pipe.loss_fn(output, each.to(output.device)) for each in (y, turned))
    if not torch.allclose(before, after, rtol=1e-4):
        return ""
    shape = list(output.shape)
    return (
        f"  the output is {shape} and y is {list(y.shape)}: the loss broadcasts them, every row of one against every "
        f"row of the other\n  try: y.view({', '.join(map(str, shape))})"
    )


def _of_rows_mixed(pipe: Pipeline, wrong: list[str], reference: dict[str, torch.Tensor]) -> str:
    """Return the explanation that the reduction is wrong; or a stage, if a gradient nearer to the loss is right."""
    names = list(reference)
    behind = names[names.index(wrong[-1]) + 1 :]
    right = next((each for each in behind if matters(each, reference)), None)
    named = repr(pipe.reduction) if isinstance(pipe.reduction, str) else "a function"
    if right is not None:  # a wrong reduction would make it wrong too
        return (
            f"  {right} is right, so reduction={named} is right: but {wrong[-1]} and the layers before it have other "
            "gradients than with the whole batch\n"
            "  try: look, from there to the loss, for a branch on values, or for a mean or another statistic of "
            "several rows"
        )
    return (
        f"  reduction is {named}; it must say how loss_fn averages over rows\n"
        "  try: reduction='sum' for a loss that sums, or a function from a target to the weight of its micro-batch. If "
        "it is right, look for a stage that computes a micro-batch differently from the whole batch, or for a loss "
        "that is not an average over rows"
    )


def verify(pipe: Pipeline, x: Any, y: Any) -> Verification:
    """Compare a pipeline's gradients with plain training's, one micro-batch after another."""
    x, y = pipe.engine.share_batch(x, y)
    loss = [pipe.loss_fn] if isinstance(pipe.loss_fn, nn.Module) else []
    with pipe.engine.full_model(), restored([*pipe.stages.modules, *loss], [x, y]) as rewind, _as_in_the_workers(pipe):
        for runner in pipe.engine.runners.of.values():
            runner.steps = 0  # the next one compares contents again
        modules, replicas = pipe.stages.modules, pipe.plan.replicas
        replicated = [(stage, AttributeSnapshot(modules[stage])) for stage, ranks in replicas.items() if len(ranks) > 1]
        pipe.run(x, y)
        changed = ((stage, each.changed(AttributeSnapshot(modules[stage]))) for stage, each in replicated)
        apart = next((_state_apart(stage, replicas[stage], name) for stage, name in changed if name), "")
        pipe.engine.gather_gradients()
        ours = gradients_of(pipe)
        rewind()
        before = RandomSnapshot()
        reference = _alike(pipe, lambda: (sequential(pipe, x, y), ""))
        idle = tuple(name for name, parameter in learning(pipe) if parameter.grad is None and not ours[name].any())
        draws = RandomSnapshot() != before
        rewind()
        exact = all(torch.equal(gradient, reference[name]) for name, gradient in ours.items())
        added = _alike(pipe, lambda: (norms_of(reference) if exact else _added_up(pipe, x, y, rewind), ""))
        off = differences(ours, reference, added)
        wrong = [name for name, gradient in ours.items() if not off[name] <= tolerance(pipe, gradient)]
        worst = max(off.values(), default=0.0)
        _alike(pipe, lambda: (None, _of_no_numbers(pipe, x, y, ours, reference, rewind)))
        seen = ""
        if wrong and not draws:
            first, many = wrong[0], "1 parameter differs" if len(wrong) == 1 else f"{len(wrong)} parameters differ"
            seen = (
                f"the gradient of {first} differs from the plain model's by {off[first]:.1e} (2-norm, relative to what "
                f"is added up; allowed {tolerance(pipe, ours[first]):.0e}); {many} in all"
            )
        # Each process computes its own reference: state of a stage may exist in one process only.
        if seen := pipe.engine.first_message(seen):
            raise VerificationError(f"{seen}\n{_explanation(pipe, x, y, rewind)}")
        unproven = unproven_of(pipe.stages.model, draws)
        whole, nearby = None, False
        if not unproven:
            whole, nearby, unproven = _alike(pipe, lambda: _at_once(pipe, x, y, reference, rewind))
        unproven += tuple(filter(None, [pipe.engine.first_message(apart)]))  # a process may hold other stages
    compared = not wrong
    return Verification(len(ours), len(pipe.cut.sequences), exact, worst, whole, unproven, idle, compared, nearby)


def _state_apart(stage: int, ranks: Sequence[int], name: str) -> str:
    return (
        f"stage {stage} is on ranks {', '.join(map(str, ranks))}, and its {name} changes from call to call: no rank "
        "sees all calls in the order of plain training"
    )


def _added_up(pipe: Pipeline, x: Any, y: Any, rewind: Rewind) -> dict[str, float]:
    """Return, for each gradient, the sum of the norms of what the micro-batches add to it."""
    added = dict.fromkeys((name for name, _ in learning(pipe)), 0.0)
    for microbatch in range(len(pipe.cut.sequences)):
        for name, norm in norms_of(sequential(pipe, x, y, microbatch)).items():
            added[name] += norm
        rewind()
    return added


def _alike(pipe: Pipeline, look: Callable[[], tuple[Found, str]]) -> Found:
    """Run a comparison on all processes, so that none waits for ever if one of them fails."""
    try:
        found, seen = look()
    except Exception as error:  # the model's own, or memory that runs out
        error.add_note("raised where verify ran the plain model, without the pipeline")
        pipe.engine.first_message(f"{type(error).__name__} on another process: {error}")
        raise
    if fault := pipe.engine.first_message(seen):
        raise VerificationError(fault)
    return found


def _explanation(pipe: Pipeline, x: Any, y: Any, rewind: Rewind) -> str:
    """Find the first micro-batch that alone makes a difference."""
    for microbatch, slices in enumerate(pipe.cut.sequences):
        pipe.run(x, y, only=microbatch)
        pipe.engine.gather_gradients()
        ours = gradients_of(pipe)
        rewind()
        alone = sequential(pipe, x, y, microbatch)
        off = differences(ours, alone, norms_of(alone))
        rewind()
        wrong = [name for name, each in off.items() if not each <= tolerance(pipe, ours[name])]
        whole = pipe.cut.dim is None
        named = f"micro-batch {microbatch}" if whole else f"the sequence of micro-batches {ranges(slices)}"
        seen = f"{named} is the first that differs, at {wrong[0]}" if wrong else ""
        if seen := pipe.engine.first_message(seen):
            return seen + (_UNLIKE_ITS_TRACE if pipe.stages.is_traced else _BESIDE_THE_VALUES)
    return "every micro-batch alone is right: they differ only together" + _BESIDE_THE_VALUES


_BESIDE_THE_VALUES = (
    "\n  try: look for state that a stage stores from one micro-batch to the next, and for what a stage does to a "
    "tensor of an earlier stage: reads it from an attribute, hooks it, or runs its own backward"
)
_UNLIKE_ITS_TRACE = (
    "\n  try: look for what the traced model reads outside of its modules, such as a global variable or a class "
    "attribute; after it has changed, split the model again"
)


def _of_no_numbers(pipe: Pipeline, x: Any, y: Any, ours: Gradients, reference: Gradients, rewind: Rewind) -> str:
    """Return the explanation that a gradient is NaN or infinite in the plain model too; "" if none is."""
    name = next((each for each in ours if not (_finite(ours[each]) or _finite(reference[each]))), None)
    if name is None:
        return ""
    kind = "NaN" if bool(reference[name].isnan().any()) else "infinite"
    fact = f"the gradient of {name} is {kind}, in the plain model too: there is nothing to compare"
    for microbatch, value in enumerate(pipe.cut.rows(x, "x")):
        found = not all(map(_finite, sequential(pipe, x, y, microbatch).values()))
        rewind()
        if found:
            given = "" if all(map(_finite, tensors_of(value))) else ", and its rows of x are not finite"
            fact += f"\n  micro-batch {microbatch} is the first that makes one{given}"
            break
    return f"{fact}\n  try: Pipeline(..., watch_nan=True), whose step names the first action that makes one"


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


@contextmanager
def _as_in_the_workers(pipe: Pipeline) -> Iterator[None]:
    """Let operations use as many processor threads as in the workers: the order of their sums depends on it."""
    callers = torch.get_num_threads()
    torch.set_num_threads(pipe.engine.intra_op_threads)
    try:
        yield
    finally:
        torch.set_num_threads(callers)
