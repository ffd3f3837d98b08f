"""Compare a pipeline's gradients with plain training's: the same micro-batches, and the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from pipelab.engine.engine import Assembly
from pipelab.engine.model.traced import call
from pipelab.engine.stage.batch import join, join_outputs, split_batch, weights_of
from pipelab.engine.stage.errors import in_short
from pipelab.engine.stage.inputs import taken, unmarked
from pipelab.engine.stage.pytree import described, map_tensors, named_leaves, rebuild, take_apart, tensors_of
from pipelab.engine.stage.snapshot import AttributeSnapshot, RandomSnapshot, restored
from pipelab.engine.stage.split_backward import custom_functions
from pipelab.engine.stage.streams import StepStreams
from pipelab.engine.verify.causes import said
from pipelab.engine.verify.reference import (
    ANEW,
    NEARBY,
    OTHERWISE,
    Gradients,
    NoSumError,
    Reference,
    listed,
    loss_of,
    moved,
    nearby_weights,
    relative,
    rounding_of,
    shares_of,
    shown,
    slopes_of,
    unproven_of,
)
from pipelab.errors import VerificationError
from pipelab.plan.fault import ranges

_TOLERANCE = 1e-6
"""Largest difference (2-norm, per parameter, float32) between orders of adding up the same micro-batches' gradients,
relative to the norms of what is added up: the sum may be much smaller, as it is near a minimum of the loss."""

_TOLERANCE_ON_A_GPU = 1e-5
"""Likewise on a GPU: libraries choose other kernels for a part of it than for all of it; some add up in no order."""

_WHOLE_BATCH_TOLERANCE = 1e-4
"""Likewise against the whole batch, relative to the sum itself: generous, because a wrong weight is off by far
more than rounding."""

_MOVE = 0.05
"""How far to move weights to look again: far enough that residuals are no rounding errors, near enough that what is
wrong with the present weights is wrong with those. Types that round more coarsely must move further."""

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
            2-norm, relative to the gradient itself; `None` if it was not asked for, or something is unproven.
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
        lines = [self._comparison, *(f"not verified: {reason}" for reason in self.unproven)]
        if self.idle:
            idle = f"{len(self.idle)} parameters got no gradient, in plain training either: {listed(self.idle)}"
            lines.insert(1, idle)
        return "\n".join(lines)

    @property
    def _comparison(self) -> str:
        off = f"{self.largest_difference:.1e}"
        if not self.compared:
            return (
                f"{self.parameters} gradients could not be compared: they differ by up to {off} (2-norm, relative to "
                "what is added up), and random numbers are drawn in another order."
            )
        how = "bit for bit" if self.exact else f"within {off} of what is added up"
        many = f"{self.parameters} gradients match plain training with the same {self.microbatches} micro-batches"
        if self.whole_batch_difference is None:
            return f"All {many} {how}."
        others = _WITH_OTHER_WEIGHTS if self.nearby else "."
        at_once = f"Against the whole batch at once they differ by at most {self.whole_batch_difference:.1e}{others}"
        return f"All {many} {how}. {at_once}"


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

    @property
    def allowed_of_the_batch(self) -> float:
        types = {parameter.dtype for parameter in self.plain.parameters.values()}
        return max(_WHOLE_BATCH_TOLERANCE, rounding_of(types | self.plain.caller.types))

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
        first, many = wrong[0], "1 parameter differs" if len(wrong) == 1 else f"{len(wrong)} parameters differ"
        seen = (
            f"the gradient of {first} differs from the plain model's by {off[first]:.1e} (2-norm, relative to what "
            f"is added up; allowed {both.allowed(ours[first]):.0e}); {many} in all"
        )
    # Each process computes its own reference: state of a stage may exist in one process only.
    if seen := pipe.engine.first_message(seen):
        raise VerificationError(f"{seen}\n{_explanation(both)}")
    unproven = unproven_of(pipe.stages.model, draws)
    whole = _Whole()
    if at_once and not unproven:
        with _on_all_processes(pipe):
            whole = _at_once(both, sums)
    unproven += (*whole.unproven, *filter(None, [pipe.engine.first_message(apart)]))  # others may hold other stages
    return Verification(
        parameters=len(ours),
        microbatches=len(plain.rows),
        exact=exact,
        largest_difference=max(off.values(), default=0.0),
        whole_batch_difference=whole.difference,
        unproven=unproven,
        idle=tuple(idle),
        compared=not wrong,
        nearby=whole.nearby,
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


class _Whole(NamedTuple):
    """How far the whole batch's gradients are, whether with nearby weights, and what is unproven."""

    difference: float | None = None
    nearby: bool = False
    unproven: tuple[str, ...] = ()


def _at_once(both: _Comparison, sums: Gradients) -> _Whole:
    """Return how far the micro-batches' gradients are from the whole batch's; refuse those that are too far.

    Operations on all rows round otherwise than on some. Where residuals are rounding errors themselves, or a ReLU's
    input is within rounding of zero, that decides the gradients. Nearby it does not, but a fault is there too: so a
    difference is a fault if it is too large with most of some other weights.
    """
    if both.pipe.cut.ready({"x": both.x, "y": both.y, "keywords": both.keywords}):
        return _Whole(unproven=("the micro-batches were cut before: there is no whole batch to compare with",))
    both = replace(both, x=unmarked(both.x), y=unmarked(both.y), keywords=unmarked(both.keywords))
    try:
        difference, is_wrong = _difference_at_once(both, sums)
    except Exception as error:
        if not isinstance(both.pipe.stages.model, nn.ModuleList):
            raise
        return _Whole(unproven=(f"the stages, given as a list, do not take the whole batch ({in_short(error)})",))
    if not is_wrong:
        return _Whole(difference)
    difference, wrong = _nearby(both)
    if wrong:
        raise VerificationError(wrong)
    return _Whole(difference, nearby=True)


def _nearby(both: _Comparison) -> tuple[float, str]:
    """Compare with the whole batch with some other weights; return what most of these comparisons say."""
    looks = {True: list[float](), False: list[float]()}
    for seed in range(NEARBY):
        with nearby_weights(both.pipe.stages.modules, seed, max(_MOVE, 4 * both.allowed_of_the_batch)):
            both.rewind()
            sums = both.plain.gradients()
            both.rewind()
            difference, why = _difference_at_once(both, sums)
            looks[bool(why)].append(difference)
            if len(looks[bool(why)]) > NEARBY // 2:
                return difference, why() if why else ""
    raise AssertionError("of an odd number of looks, most agree")


def _difference_at_once(both: _Comparison, sums: Gradients) -> tuple[float, Callable[[], str] | None]:
    """Compare with the whole batch, with the weights as they are; if they differ too much, return what says why."""
    forward = partial(_through_model, both.pipe)
    at_once = replace(both.plain, forward=forward, rows=[(both.x, both.keywords)], targets=[both.y], weights=[1.0])
    output = at_once.run()
    whole = Gradients.of(at_once.parameters)
    off = relative((sums - whole).norms, whole.norms)
    name = max(off, key=off.__getitem__)
    wrong = [parameter for parameter, difference in off.items() if not difference <= both.allowed_of_the_batch]
    if not wrong:
        return off[name], None
    fact = (
        f"the micro-batches' gradients are equal to the plain model's, but their sum is not the whole batch's: "
        f"{name} differs by {off[name]:.1e} (2-norm, relative to the sum), with slightly different weights too"
    )
    return off[name], lambda: f"{fact}\n{_why_at_once(both, output, wrong[-1])}"


def _why_at_once(both: _Comparison, output: Any, wrong: str) -> str:
    """Return why the whole batch has other gradients: the first cause of `_LOOKS` that finds something."""
    if _spreads(both.pipe, output, both.y):
        return said("spread", list(output.shape), list(both.y.shape), shape=str(list(output.shape))[1:-1])
    x, through = (both.x, both.keywords), partial(_through_model, both.pipe)
    plain = replace(both.plain, forward=through)
    if not both.keywords:  # then what is tried out is the input itself
        x, rows = both.x, [rows for rows, _ in both.plain.rows]
        plain = replace(plain, forward=lambda value: through((value, {})), rows=rows)
    tried = _AtOnce(both.pipe, x, both.y, both.keywords, plain, both.rewind)
    for code, look in _LOOKS.items():
        with suppress(Exception):  # a model, or a loss, that does not take what is tried
            if found := look(tried):
                words = found if isinstance(found, (tuple, list)) else [found]
                return said(code, *words, microbatches=len(plain.rows))
    return said("rows-mixed", wrong)


def _spreads(pipe: Assembly, output: Any, y: Any) -> bool:
    """Return whether the loss broadcasts output and targets.

    Such a loss pairs every row of one with every row of the other, in any order.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(y, torch.Tensor) and output.numel() == y.numel()):
        return False
    try:
        spread = torch.broadcast_shapes(output.shape, y.shape)
    except RuntimeError:  # the loss does something else with them
        return False
    turned = y.flip(0)
    if spread.numel() == y.numel() or torch.equal(turned, y):
        return False
    with torch.no_grad():
        before, after = (pipe.loss_fn(output, targets.to(output.device)) for targets in (y, turned))
    return torch.allclose(before, after, rtol=1e-4)


# ── Why has the whole batch other gradients? ──────────────────────────────────────────────────────────────────────────


class _AtOnce(_Comparison):
    """What the model makes of the batch at once, and of its micro-batches."""

    def out(self, given: Any) -> Any:
        self.rewind()
        with self.plain.around(), torch.no_grad():
            return map_tensors(torch.clone, self.plain.forward(given))

    @cached_property
    def whole(self) -> Any:
        return self.out(self.x)

    @cached_property
    def parts(self) -> list[Any]:
        return [*map(self.out, self.plain.rows)]

    @cached_property
    def odd(self) -> list[bool]:
        """For each tensor of the output, whether the micro-batches make another than the whole batch."""
        return self.unlike(self.joined(self.parts), self.whole)

    @cached_property
    def cut(self) -> dict[int, int]:
        """For each leaf of `x` that is cut, the dimension of its rows."""
        found = dict[int, int]()
        pairs = zip(take_apart(self.x)[0], take_apart(self.plain.rows[0])[0], strict=True)
        for index, (whole, part) in enumerate(pairs):
            if isinstance(whole, torch.Tensor) and whole.shape != part.shape:
                found[index] = [*map(int.__ne__, whole.shape, part.shape)].index(True)
        return found

    def joined(self, outputs: list[Any]) -> Any:
        return join_outputs(outputs, self.counts, self.pipe.cut.batch_dim)

    @cached_property
    def counts(self) -> list[int]:
        """How many rows each micro-batch has."""
        leaf, dim = next(iter(self.cut.items()))
        return [take_apart(rows)[0][leaf].shape[dim] for rows in self.plain.rows]

    def first_rows(self, value: Any) -> Any:
        """Return the first micro-batch's rows of an output."""
        dim, rows = self.pipe.cut.batch_dim, sum(self.counts)

        def first(each: torch.Tensor) -> torch.Tensor:
            return each.narrow(dim if each.dim() > dim and each.shape[dim] == rows else 0, 0, self.counts[0])

        return map_tensors(first, value)

    @cached_property
    def shares(self) -> list[float]:
        """Each micro-batch's weight in the loss of the batch; none if that is no weighted sum."""
        try:
            return shares_of(self.pipe.loss_fn, self.parts, [*self.plain.targets], self.y, self.joined)
        except NoSumError:
            return []

    def unlike(self, ours: Any, theirs: Any) -> list[bool]:
        """Return, for each tensor of two values, whether they differ by more than rounding."""
        return [
            one.shape != other.shape or float((one - other).norm()) > self.allowed_of_the_batch * float(other.norm())
            for one, other in zip(*(map(_double, tensors_of(value)) for value in (ours, theirs)), strict=True)
        ]

    def feels(self, index: int, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> bool:
        """Return whether outputs of the first micro-batch's rows change with the later rows of a leaf of `x`."""
        leaves, spec = take_apart(self.x)
        first, later, last = leaves[index].split([self.counts[0], sum(self.counts[1:]) - 1, 1], self.cut[index])
        leaves[index] = torch.cat([first, change(later, last), last], self.cut[index])
        return any(self.unlike(*map(self.first_rows, (self.out(rebuild(leaves, spec)), self.whole))))

    @cached_property
    def backwards(self) -> tuple[list[str], list[Gradients]]:
        """Autograd functions that are not PyTorch's; the gradients of the loss, by way of the output alone, of 0."""
        self.rewind()
        found = list[Gradients]()
        with self.plain.around(), torch.enable_grad():
            output = self.plain.forward(self.x)
            value = loss_of(self.pipe.loss_fn, output, self.y).of(0, output)
            ends = [each for each in tensors_of(output) if each.requires_grad]
            slopes = torch.autograd.grad(value, ends, retain_graph=True, materialize_grads=True)
            for outputs, starts in (([value], None), (ends, slopes), (ends, [*map(torch.zeros_like, ends)])):
                torch.autograd.backward(outputs, starts, retain_graph=True)
                found.append(Gradients.of(self.plain.parameters))
                for parameter in self.plain.parameters.values():
                    parameter.grad = None
        return [*custom_functions(ends)], found


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.cdouble if tensor.is_complex() else torch.double)


def _pairs(e: _AtOnce) -> bool:
    rows = [1, e.counts[0] - 1]
    output, target = (split_batch(each, rows, e.pipe.cut.batch_dim)[0] for each in (e.parts[0], e.plain.targets[0]))
    output = map_tensors(lambda each: each.clone().requires_grad_(each.is_floating_point()), output)
    slopes = slopes_of(e.pipe.loss_fn, output, target, [each for each in tensors_of(output) if each.requires_grad])
    return not (e.shares or any(bool(each.nan_to_num().any()) for each in slopes))


def _reduction(e: _AtOnce) -> tuple[str, ...]:
    reduction = repr(e.pipe.reduction) if isinstance(e.pipe.reduction, str) else "a function"
    both = zip(e.shares, e.plain.weights, strict=True)
    off = max(abs(one - other) / max(one, other) for one, other in both if one or other)
    return (reduction, shown(e.plain.weights), shown(e.shares)) if off > max(1e-3, e.allowed_of_the_batch) else ()


def _state(e: _AtOnce) -> str:
    before = {name: each.clone() for name, each in e.pipe.stages.named.named_buffers()}
    e.rewind()
    with e.plain.around(), torch.no_grad():
        first, again = (map_tensors(torch.clone, e.plain.forward(e.plain.rows[0])) for _ in range(2))
    changed = (name for name, each in e.pipe.stages.named.named_buffers() if not torch.equal(each, before[name]))
    return next(changed, "an attribute") if any(e.unlike(first, again)) else ""


def _other_dimension(e: _AtOnce) -> tuple[object, ...]:
    ours = e.pipe.cut.batch_dim
    other = 0 if ours else 1
    pieces = split_batch(e.x, [1, tensors_of(e.x)[0].shape[other] - 1], other)
    if not any(e.odd) or any(e.unlike(join([*map(e.out, pieces)], other), e.whole)):
        return ()
    layers = (name for name, each in e.pipe.stages.named.named_modules() if getattr(each, "batch_first", 1) is False)
    return ours, other, f": {name} has batch_first=False" if other and (name := next(layers, "")) else ""


def _leaves(e: _AtOnce) -> str:
    named = named_leaves(e.x)
    found = [named[i] for i in e.cut if any(e.odd) and e.feels(i, lambda later, last: last.expand_as(later))]
    some = len(found) < len(e.cut) or not any(leaf.is_floating_point() for _, leaf in found)
    parts = ("x[0]", "x"), ("x[1]", "keywords")
    names = [f"x{place} ({described(leaf)})" for place, leaf in found]
    return (
        listed([name.replace(*parts[name.startswith("x[1]")]) if e.keywords else name for name in names])
        if len(e.cut) > 1 and some
        else ""
    )


def _auxiliary(e: _AtOnce) -> tuple[str, ...]:
    names = [f"output{place}" for place, leaf in named_leaves(e.whole) if isinstance(leaf, torch.Tensor)]
    odd = [name for name, is_odd in zip(names, e.odd, strict=True) if is_odd]
    return (listed(odd), listed([name for name in names if name not in odd])) if odd and not all(e.odd) else ()


def _first_layer(e: _AtOnce) -> str:
    """Return the first layer that makes something else of the first micro-batch's rows alone."""
    made = dict[nn.Module, list[Any]]()
    with nn.modules.module.register_module_forward_hook(lambda layer, _, out: made.setdefault(layer, []).append(out)):
        e.out(e.plain.rows[0]), e.out(e.x)
    names = {layer: name for name, layer in e.pipe.stages.named.named_modules()}
    for layer, (alone, *_, whole) in made.items():
        if any(e.unlike(alone, e.first_rows(whole))):
            return names.get(layer) or "the model"
    return ""


def _branch(e: _AtOnce) -> str:
    numbers = [i for i, (_, leaf) in enumerate(named_leaves(e.x)) if torch.is_tensor(leaf) and leaf.is_floating_point()]
    follows = not numbers or any(e.feels(i, lambda later, _: later * 1.01) for i in numbers)
    return "" if follows else _first_layer(e)


def _beside(e: _AtOnce) -> str:
    loss, along, _ = e.backwards[1]
    left = (
        f"{name}.{key}"
        for name, part in e.pipe.stages.named.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    )
    off = relative((loss - along).norms, loss.norms)
    return listed([*left]) or "what is no output" if max(off.values()) > e.allowed_of_the_batch else ""


def _injected(e: _AtOnce) -> str:
    functions, (*_, of_zero) = e.backwards
    return (listed(functions) or "a hook") if any(bool(each.any()) for each in of_zero.values()) else ""


_LOOKS: dict[str, Callable[[_AtOnce], Any]] = {
    "pairs-of-rows": _pairs,
    "loss-of-several-rows": lambda e: not e.shares,
    "reduction": _reduction,
    "state-between-calls": _state,
    "sequence-first": _other_dimension,
    "not-by-rows": _leaves,
    "auxiliary-output": _auxiliary,
    "branch": lambda e: any(e.odd) and _branch(e),
    "statistic": lambda e: any(e.odd) and _first_layer(e),
    "loss-beside": _beside,
    "injected": _injected,
}
"""By code of a cause, what tries it out, and returns what it finds, for the cause's sentence."""


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
