"""Compare a pipeline's gradients with plain training's: the same micro-batches, and the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from pipelab.engine.engine import Assembly
from pipelab.engine.model.traced import call
from pipelab.engine.stage.batch import split_batch, weights_of
from pipelab.engine.stage.errors import in_short
from pipelab.engine.stage.inputs import taken, unmarked
from pipelab.engine.stage.pytree import map_tensors, tensors_of
from pipelab.engine.stage.snapshot import AttributeSnapshot, RandomSnapshot, restored
from pipelab.engine.stage.streams import StepStreams
from pipelab.engine.verify.causes import CUT_BEFORE, Difference, Whole, said
from pipelab.engine.verify.reference import (
    ANEW,
    OTHERWISE,
    Gradients,
    Reference,
    listed,
    moved,
    relative,
    rounding_of,
    unproven_of,
)
from pipelab.errors import VerificationError, counted
from pipelab.plan.fault import ranges

_TOLERANCE = 1e-6
"""Largest difference between orders of adding up, relative to the norms added: near a minimum, the sum is smaller."""

_TOLERANCE_ON_A_GPU = 1e-5
"""Likewise on a GPU: libraries choose other kernels for a part of it than for all of it; some add up in no order."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a verification: how far a pipeline's gradients are from plain training's.

    Plain training runs the model itself; if the model is a list of stages, or is traced and on several devices, plain
    training runs the stages, one after the other.

    Attributes:
        parameters: how many parameters were compared.
        microbatches: how many micro-batches plain training ran, one after another.
        exact: whether all gradients are equal bit for bit.
        largest_difference: the largest difference (2-norm) of a gradient, relative to the norms that are added up.
        whole_batch_difference: the same from the whole batch's, relative to that; `None` if not asked for, or unproven.
        unproven: what cannot be verified, such as dropout.
        idle: the parameters that got no gradient, in the pipeline and in plain training alike.
        compared: whether the gradients could be compared: not where the model draws random numbers in another order.
        nearby: whether `whole_batch_difference` is that with slightly different weights, as rounding decides otherwise.

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
        lines = [self._comparison, *(f"not verified: {reason}" for reason in self.unproven)]
        if self.idle:
            idle = counted(len(self.idle), "parameter")
            lines.insert(1, f"{idle} got no gradient, in plain training either: {listed(self.idle)}")
        return "\n".join(lines)

    @property
    def _comparison(self) -> str:
        off = f"{self.largest_difference:.1e}"
        if not self.compared:
            return (
                f"{counted(self.parameters, 'gradient')} could not be compared: random numbers come in another order. "
                f"The largest difference is {off} (2-norm, relative to the micro-batches' gradients)."
            )
        how = " bit for bit." if self.exact else f", equal to their sum within {off}."
        match = f"All {self.parameters} gradients match" if self.parameters != 1 else "The only gradient matches"
        same = f"{match} plain training with the same {counted(self.microbatches, 'micro-batch')}{how}"
        if self.whole_batch_difference is None:
            return same
        others = " with slightly different weights: with the present ones rounding decides." * self.nearby or "."
        at_once = f"Against the whole batch at once they differ by at most {self.whole_batch_difference:.1e}{others}"
        return f"{same} {at_once}"


def _reference_of(pipe: Assembly, x: Any, y: Any, keywords: dict[str, Any]) -> Reference:
    """Return plain training with the pipeline's micro-batches."""
    ready = pipe.cut.ready({"x": x, "y": y, "keywords": keywords})
    rows, targets = pipe.cut.whole("x", x, ready), pipe.cut.whole("y", y, ready)
    named = split_batch(keywords, rows.counts, pipe.cut.batch_dim)
    weights = weights_of(pipe.reduction, targets.counts, targets.pieces)
    forward = partial(_through_model if pipe.stages.is_traced else _through_stages, pipe)
    return Reference(
        _learning(pipe),
        forward,
        pipe.loss_fn,
        pipe.caller(),
        [*zip(rows.pieces, named, strict=True)],
        targets.pieces,
        weights,
        partial(_as_in_the_step, pipe),
    )


def _learning(pipe: Assembly) -> dict[str, nn.Parameter]:
    """Return the parameters that learn, under the model's own names, as in `"0.weight (stage 0)"`."""
    names = {parameter: name for name, parameter in pipe.stages.named.named_parameters()}
    found: dict[nn.Parameter, str] = {}
    for stage, module in enumerate(pipe.stages.modules):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:  # of several stages, the first names it
                found.setdefault(parameter, f"{names.get(parameter, name)} (stage {stage})")
    return {name: parameter for parameter, name in found.items()}


@contextmanager
def _as_in_the_step(pipe: Assembly) -> Iterator[StepStreams]:
    """Return a context in which the model runs with the random numbers of the pipeline's last step."""
    random = pipe.engine.random
    with _ties_apart(pipe), random.plainly([*pipe.stages.modules, pipe.stages.model], random.last.seed) as streams:
        yield streams


def _ties_apart(pipe: Assembly) -> AbstractContextManager[None]:
    """Return a context in which a parameter of stages on several devices is on each of them."""
    runners = pipe.engine.runners
    apart = runners.ties and len(set(pipe.engine.stage_devices)) > 1
    return runners.running(pipe.stages.modules, learning=True) if apart else nullcontext()


def _through_model(pipe: Assembly, given: tuple[Any, dict[str, Any]]) -> Any:
    """Return what comes out of the user's own model; of the stages, if there is none, or none on one device."""
    model, devices = pipe.stages.model, set(pipe.engine.stage_devices)
    value, keywords = given
    if len(devices) > 1 or isinstance(model, nn.ModuleList) or keywords:
        return _through_stages(pipe, given)
    value = _cloned(pipe, 0, moved(value, *devices))
    return call(model, value) if pipe.stages.is_traced else model(value)


def _through_stages(pipe: Assembly, given: tuple[Any, dict[str, Any]]) -> Any:
    value, keywords = given
    for stage, (module, device) in enumerate(zip(pipe.stages.modules, pipe.engine.stage_devices, strict=True)):
        value = module(_cloned(pipe, stage, moved(value, device)), **moved(taken(module, keywords), device))
    return value


def _cloned(pipe: Assembly, stage: int, value: Any) -> Any:
    """Return a clone of a stage's input where the engine makes one, and only there: strides may change last bits."""
    clones = any(runner.clones_input for (index, _), runner in pipe.engine.runners.of.items() if index == stage)
    return map_tensors(torch.clone, value) if clones else value


def tolerance(devices: Sequence[Any], cast: set[torch.dtype], gradient: torch.Tensor) -> float:
    """Return how far a gradient may be from the same micro-batches', added up in another order."""
    if all(each.device.type == "cpu" for each in devices):
        return max(_TOLERANCE, rounding_of([gradient.dtype]))
    return max(_TOLERANCE_ON_A_GPU, rounding_of([gradient.dtype, *cast]))


@dataclass(frozen=True)
class _Comparison:
    """A pipeline, a batch, plain training, and what restores all that a run changes."""

    pipe: Assembly
    x: Any
    y: Any
    keywords: dict[str, Any]
    plain: Reference
    rewind: Callable[[], None]

    def allowed(self, gradient: torch.Tensor) -> float:
        return tolerance(self.pipe.engine.devices, self.plain.caller.types, gradient)

    def wrong(self, ours: Gradients, off: dict[str, float]) -> list[str]:
        """Return the parameters whose gradients differ by more than rounding."""
        return [name for name, gradient in ours.items() if not off[name] <= self.allowed(gradient)]

    def alone(self, microbatch: int) -> Gradients:
        """Return what one micro-batch adds in plain training."""
        gradients = self.plain.gradients(microbatch)
        self.rewind()
        return gradients

    def added_up(self) -> dict[str, float]:
        """Return, for each gradient, the sum of the norms of what the micro-batches add to it."""
        added = dict.fromkeys(self.plain.parameters, 0.0)
        for microbatch in range(len(self.plain.rows)):
            for name, norm in self.alone(microbatch).norms.items():
                added[name] += norm
        return added


def verify(pipe: Assembly, x: Any, y: Any, keywords: Mapping[str, Any] | None, *, at_once: bool) -> Verification:
    """Compare a pipeline's gradients with plain training's: one micro-batch after another, and the batch at once."""
    x, y, named = pipe.engine.share_batch(x, y, dict(keywords or {}))
    with pipe.engine.full_model(), restored(pipe.modules, [x, y, named]) as rewind, _as_in_the_workers(pipe):
        for runner in pipe.engine.runners.of.values():
            runner.steps = 0  # the next one compares contents again
        modules = pipe.stages.modules
        before = {stage: AttributeSnapshot(modules[stage]) for stage, ranks in pipe.plan.replicas.items() if ranks[1:]}
        pipe.run(x, y, named)
        apart = [_state_apart(pipe, stage, modules[stage], noted) for stage, noted in before.items()]
        pipe.engine.gather_gradients()
        both = _Comparison(pipe, x, y, named, _reference_of(pipe, x, y, named), rewind)
        return _compared(both, Gradients.of(both.plain.parameters), next(filter(None, apart), ""), at_once=at_once)


def _compared(both: _Comparison, ours: Gradients, apart: str, *, at_once: bool) -> Verification:
    """Compare the gradients of a step; `apart` is what each rank of a replicated stage has for itself."""
    pipe, plain = both.pipe, both.plain
    both.rewind()
    before = RandomSnapshot()
    with _on_all_processes(pipe):
        sums = plain.gradients()
        draws = _draws(pipe, unseen=RandomSnapshot() != before)
        idle = [name for name, each in plain.parameters.items() if each.grad is None and not ours[name].any()]
        both.rewind()
        exact = all(torch.equal(gradient, sums[name]) for name, gradient in ours.items())
        off = relative((ours - sums).norms, sums.norms if exact else both.added_up())
        wrong = both.wrong(ours, off)
        _require_numbers(both, ours, sums)
    seen = ""
    if wrong and draws != OTHERWISE:
        first = wrong[0]
        seen = (
            f"the gradient of {first} differs from the plain model's by {off[first]:.1e} (2-norm, relative to the "
            f"micro-batches'; allowed {both.allowed(ours[first]):.0e}); wrong gradients: {len(wrong)} of {len(ours)}"
        )
    # Each process computes its own reference: state of a stage may exist in one process only.
    if seen := pipe.engine.first_message(seen):
        raise VerificationError(f"{seen}\n{_explanation(both)}")
    unproven = unproven_of(pipe.stages.model, draws)
    whole: Difference | None = None
    if at_once and not unproven:
        with _on_all_processes(pipe):
            whole, unproven = _at_once(both, sums)
    unproven += tuple(filter(None, [pipe.engine.first_message(apart)]))  # others may hold other stages
    return Verification(
        parameters=len(ours),
        microbatches=len(plain.rows),
        exact=exact,
        largest_difference=max(off.values(), default=0.0),
        whole_batch_difference=None if whole is None else whole.size,
        unproven=unproven,
        idle=tuple(idle),
        compared=not wrong,
        nearby=whole is not None and whole.nearby,
    )


def _draws(pipe: Assembly, *, unseen: bool) -> str:
    """Return how the model draws random numbers, as plain training has just shown; "" if it does not."""
    drew = pipe.engine.random.last
    other = unseen or drew.apart or (drew.drew and pipe.cut.dim is not None)
    return OTHERWISE if other else ANEW if drew.drew else ""


def _state_apart(pipe: Assembly, stage: int, module: nn.Module, before: AttributeSnapshot) -> str:
    """Return the state that each rank of a stage has for itself, as a sentence; "" if it has none."""
    name, ranks = before.changed(AttributeSnapshot(module)), pipe.plan.replicas[stage]
    where = f"stage {stage} is on ranks {', '.join(map(str, ranks))}, and its {name}"
    return f"{where} changes from call to call: no rank sees all calls in the order of plain training" if name else ""


@contextmanager
def _on_all_processes(pipe: Assembly) -> Iterator[None]:
    """Let a comparison fail on all processes if it fails on one, so that none waits for ever."""
    fault = ""
    try:
        yield
    except VerificationError as error:
        fault = str(error)
    except Exception as error:  # the model's own, or memory that runs out
        error.add_note("raised where verify ran the plain model, without the pipeline")
        pipe.engine.first_message(f"{type(error).__name__} on another process: {error}")
        raise
    if fault := pipe.engine.first_message(fault):
        raise VerificationError(fault)


@contextmanager
def _as_in_the_workers(pipe: Assembly) -> Iterator[None]:
    """Let operations use as many processor threads as in the workers: the order of their sums depends on it."""
    callers = torch.get_num_threads()
    torch.set_num_threads(pipe.engine.intra_op_threads)
    try:
        yield
    finally:
        torch.set_num_threads(callers)


def _at_once(both: _Comparison, sums: Gradients) -> tuple[Difference | None, tuple[str, ...]]:
    """Return how far the micro-batches' gradients are from the whole batch's, and what is unproven; refuse too far."""
    pipe = both.pipe
    if pipe.cut.ready({"x": both.x, "y": both.y, "keywords": both.keywords}):
        return None, (CUT_BEFORE,)
    types = {parameter.dtype for parameter in both.plain.parameters.values()} | both.plain.caller.types
    x, y, forward = unmarked((both.x, both.keywords)), unmarked(both.y), partial(_through_model, pipe)
    whole = Whole(pipe.stages.named, forward, both.plain, x, y, pipe.reduction, pipe.cut.batch_dim, both.rewind, types)
    try:
        found = whole.difference(sums)
    except Exception as error:
        if not isinstance(pipe.stages.model, nn.ModuleList):
            raise
        return None, (f"the stages, given as a list, do not take the whole batch ({in_short(error)})",)
    if found.why:
        raise VerificationError(f"the micro-batches' gradients are equal to the plain model's, but {found.why}")
    return found, ()


def _explanation(both: _Comparison) -> str:
    """Find the first micro-batch that alone makes a difference."""
    pipe = both.pipe
    for microbatch, slices in enumerate(pipe.cut.sequences):
        pipe.run(both.x, both.y, both.keywords, microbatch)
        pipe.engine.gather_gradients()
        ours = Gradients.of(both.plain.parameters)
        both.rewind()
        alone = both.alone(microbatch)
        wrong = both.wrong(ours, relative((ours - alone).norms, alone.norms))
        named = (
            f"micro-batch {microbatch}" if pipe.cut.dim is None else f"the sequence of micro-batches {ranges(slices)}"
        )
        if seen := pipe.engine.first_message(f"{named} is the first that differs, at {wrong[0]}" if wrong else ""):
            return f"{seen}\n{said('unlike-its-trace' if pipe.stages.is_traced else 'remembers')}"
    return f"every micro-batch alone is right: they differ only together\n{said('remembers')}"


def _require_numbers(both: _Comparison, ours: Gradients, sums: Gradients) -> None:
    """Refuse a gradient that is NaN or infinite in the plain model too."""
    name = next((name for name in ours if not (_finite(ours[name]) or _finite(sums[name]))), None)
    if name is None:
        return
    kind = "NaN" if bool(sums[name].isnan().any()) else "infinite"
    fact = f"the gradient of {name} is {kind}, in the plain model too: there is nothing to compare"
    for microbatch, rows in enumerate(both.plain.rows):
        if not all(map(_finite, both.alone(microbatch).values())):
            given = "" if all(map(_finite, tensors_of(rows))) else ", and its rows of x are not finite"
            fact = f"{fact}\n{said('not-finite-at', microbatch, given)}"
            break
    raise VerificationError(fact)


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
