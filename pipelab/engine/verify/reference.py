"""Plain training, and what is known of a step that is compared with it; counts come from inner products."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, combinations, islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from pipelab.engine.stage.autograd import CallerContext
from pipelab.engine.stage.batch import Reduction, join, join_outputs, split_batch, ways_of, weights_of
from pipelab.engine.stage.inputs import Marked
from pipelab.engine.stage.loss import Loss
from pipelab.engine.stage.pytree import full_tensor, map_tensors, take_apart, tensors_of
from pipelab.engine.stage.snapshot import overwrite
from pipelab.engine.stage.stage import asking
from pipelab.engine.stage.streams import StepStreams, Streams
from pipelab.errors import LossError, UsageError

LossFunction = Callable[[Any, Any], torch.Tensor]

NEARBY = 5
"""With how many other weights to look again: by chance, a ReLU's input is near zero with few of them."""

_SMALLEST_SHARE = 1e-2
"""A gradient below this share of the model's largest is measured against that: only rounding may be left of it."""

_MOST_NAMES, _MOST_NUMBERS = 6, 16

_OF_A_LOSS = 1e-3  # how far slopes of a batch's loss may be from multiples of its micro-batches', relative to all
_ROUNDING = 1e-5  # how far gradients may be off by rounding alone, relative to what is added up
_LEAST = 1e-3  # a micro-batch whose gradient is a smaller share of the largest one's is not judged: it adds nothing
_UNCLEAR = 0.05  # largest error of a count, as a share of the largest count, with which micro-batches can be told apart

_ALIKE = 2e-3
"""Counts that differ by a smaller share of the largest one are equal; in coarse types, half of the tolerance."""

_OFF = 0.1  # a count that is further from 1 is wrong in coarse types too, if it explains half of the difference
_MOST_TIMES = 8  # a micro-batch that seems to count more often than this does not count a whole number of times
_FEW, _SOME = 3, 1 << 10  # so few numbers may be those of a coarse type by chance; so many are looked at
_AT_ONCE = 1 << 20  # how many elements of a gradient are in double precision at the same time


class Gradients(dict[str, torch.Tensor]):
    """Gradients by the names of parameters."""

    def __sub__(self, other: Gradients) -> Gradients:
        return Gradients({name: gradient - other[name] for name, gradient in self.items()})

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter], device: str | None = None) -> Gradients:
        """Return copies of the gradients as they are now, zeros where there is none."""
        return cls({name: _gradient_of(parameter).to(device) for name, parameter in parameters.items()})

    @property
    def norms(self) -> dict[str, float]:
        """Each gradient's 2-norm."""
        return {name: float(torch.linalg.vector_norm(gradient.abs().double())) for name, gradient in self.items()}


def _gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
    found: torch.Tensor = full_tensor(gradient)
    return found.to_dense() if found.is_sparse else found.clone()


@dataclass(frozen=True)
class Reference:
    """Plain training of a model on a batch: one micro-batch after another, forward and backward."""

    parameters: Mapping[str, nn.Parameter]  # those that learn
    forward: Callable[[Any], Any]  # runs the model on some rows
    loss_fn: LossFunction
    caller: CallerContext  # forwards run under its autocast, and backwards do not
    rows: Sequence[Any]  # the inputs of each micro-batch
    targets: Sequence[Any]
    weights: Sequence[float]  # of each one's loss
    around: Callable[[], AbstractContextManager[StepStreams | None]] = nullcontext  # in which the model can run

    def gradients(self, only: int | None = None) -> Gradients:
        """Run all micro-batches, or one of them; return copies of the gradients."""
        self.run(only)
        return Gradients.of(self.parameters)

    def run(self, only: int | None = None) -> Any:
        """Run all micro-batches, or one of them, and add to `.grad`; return the last one's output."""
        with self.around() as streams:
            for microbatch in range(len(self.rows)) if only is None else [only]:
                with torch.enable_grad(), _drawing(streams, microbatch, "F"):
                    output = self.forward(self.rows[microbatch])
                    loss = loss_of(self.loss_fn, output, self.targets[microbatch], self.weights[microbatch])
                    value = loss.of(0, output)
                with self.caller.autocast_off(), _drawing(streams, microbatch, "B"):
                    value.backward(loss.gradient(0, value))
        return output


@contextmanager
def _drawing(streams: StepStreams | None, microbatch: int, kind: str) -> Iterator[None]:
    """Return a context in which this thread draws as a pipeline does."""
    if streams is None:
        yield
        return
    with torch.autograd.set_multithreading_enabled(False), streams.running(-1, microbatch, kind, forward=kind == "F"):
        yield


def loss_of(loss_fn: LossFunction, output: Any, target: Any, weight: float = 1.0) -> Loss:
    """Return a loss whose target is where the output is."""
    places = [tensor.device for tensor in tensors_of(output)]
    return Loss(loss_fn, [moved(target, places[0]) if places else target], [weight])


def moved(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors on a device."""
    return map_tensors(lambda tensor: tensor.to(device), value)


def relative(differences: Mapping[str, float], norms: Mapping[str, float]) -> dict[str, float]:
    """Return the norms of differences relative to the gradients' norms; see `_SMALLEST_SHARE`."""
    least = least_of(norms)
    return {name: off / (max(norms[name], least) or 1.0) for name, off in differences.items()}


def least_of(norms: Mapping[str, float]) -> float:
    """Return the norm below which a gradient is not measured against itself."""
    return _SMALLEST_SHARE * max(norms.values(), default=0.0)


ANEW = "draws anew for each micro-batch, so the whole batch is not compared: repeat after model.eval() to compare it"
OTHERWISE = "draws other random numbers than the plain model: set model.eval()"


def unproven_of(model: nn.Module, draws: str = "") -> tuple[str, ...]:
    """Return what the comparisons cannot show; `draws` says how the model draws random numbers, if it does."""
    layers = [layer for layer in model.modules() if layer.training]
    reasons: list[str] = []
    if draws:
        drops = any(isinstance(layer, _DropoutNd) and layer.p for layer in layers)
        reasons.append(f"{'dropout' if drops else 'the model'} {draws}")
    if any(isinstance(layer, _BatchNorm) for layer in layers):
        reasons.append("BatchNorm sees each micro-batch alone: equal to micro-batches, not to the whole batch")
    return tuple(reasons)


@contextmanager
def nearby_weights(modules: Sequence[nn.Module], seed: int, share: float) -> Iterator[None]:
    """Multiply every weight by a random number near 1, the same in every process, and restore them afterwards."""
    generator = torch.Generator().manual_seed(seed)

    def near(weights: torch.Tensor) -> torch.Tensor:
        if not (weights.is_floating_point() or weights.is_complex()):
            return weights
        least = max(share, 2 * torch.finfo(weights.dtype).eps)
        draws = torch.rand(weights.shape, generator=generator) * 2 - 1
        return weights * (1 + least * draws).to(weights.device, weights.dtype)

    with other_weights(modules, near):
        yield


@contextmanager
def other_weights(modules: Sequence[nn.Module], change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Change every weight, and restore all of them afterwards."""
    parameters = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    before = [(parameter, parameter.detach().clone()) for parameter in parameters]
    try:
        for parameter, weights in before:
            overwrite(parameter.data, change(weights))
        torch.clear_autocast_cache()  # of copies in a coarser type
        yield
    finally:
        for parameter, weights in before:
            overwrite(parameter.data, weights)
        torch.clear_autocast_cache()


def rounding_of(types: Iterable[torch.dtype]) -> float:
    """Return how far gradients may be apart that are computed in types so coarse."""
    return max((8 * float(torch.finfo(kind).eps) for kind in types), default=0.0)


def listed(names: Sequence[object]) -> str:
    """Return the first of some names, joined."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(str, names[:_MOST_NAMES])) + more


def shown(numbers: Sequence[float]) -> str:
    """Return the first of some numbers, rounded."""
    words = ("-" if math.isnan(number) else f"{round(number, 3) + 0.0:g}" for number in numbers[:_MOST_NUMBERS])
    return " ".join(words) + " …" * (len(numbers) > _MOST_NUMBERS)


@dataclass(frozen=True)
class Trial:
    """A step, and plain training of its model; each can run again from the same start."""

    step: Callable[[Any, Any], object]
    model: nn.Module
    modules: Sequence[nn.Module]  # all whose weights a step may change
    learning: Mapping[str, nn.Parameter]  # what the step trains, by the model's names
    forward: Callable[[Any], Any]
    loss_fn: LossFunction
    rows: list[int]  # of each micro-batch
    reduction: Reduction | None
    rewind: Callable[[], None]
    repeat: bool  # whether the step may run again
    types: frozenset[torch.dtype] = frozenset()  # the coarse ones in which the step computes
    seed: int | None = None  # of the random numbers of the step, if it is a pipeline's
    batch_dim: int = 0  # of what is not marked otherwise

    @property
    def caller(self) -> CallerContext:
        """The settings of this thread for the model's devices."""
        return CallerContext.capture({parameter.device.type for parameter in self.model.parameters()})

    def each_alone(self, x: Any, y: Any) -> tuple[list[Gradients], list[float]]:
        """Return what each micro-batch adds in plain training, and its weight in the batch's loss."""
        self.rewind()
        plain, outputs, alone = self.reference(x, y, [1.0] * len(self.rows)), list[Any](), list[Gradients]()
        targets = [*plain.targets]
        for microbatch in range(len(self.rows)):
            outputs.append(map_tensors(torch.Tensor.detach, plain.run(microbatch)))
            alone.append(Gradients.of(plain.parameters, "cpu"))
            for parameter in plain.parameters.values():
                parameter.grad = None
        if self.reduction is None:
            join_all = partial(join_outputs, counts=self.rows, dim=self.batch_dim)
            shares = shares_of(self.loss_fn, outputs, targets, join(targets, ways_of(y, self.batch_dim)), join_all)
        else:
            shares = weights_of(self.reduction, self.rows, targets)
        for gradients, share in zip(alone, shares, strict=True):
            for name, gradient in gradients.items():  # of no share, also where it is no number
                gradients[name] = gradient * share if share else torch.zeros_like(gradient)
        return alone, shares

    def reference(self, x: Any, y: Any, weights: Sequence[float]) -> Reference:
        """Return plain training of the whole model on the micro-batches."""
        own = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        inputs, targets = (split_batch(value, self.rows, self.batch_dim) for value in (x, y))
        around = nullcontext if self.seed is None else partial(Streams(self.model).plainly, [self.model], self.seed)
        return Reference(own, self.run, self.loss_fn, self.caller, inputs, targets, weights, around)

    def plainly(self, x: Any, y: Any) -> Gradients:
        """Return plain training's gradients of what the step trains."""
        return self.summed(self.each_alone(x, y)[0])

    def summed(self, alone: Sequence[Gradients]) -> Gradients:
        """Return the sums of what the micro-batches add."""
        return Gradients({name: torch.stack([own[name] for own in alone]).sum(0) for name in self.learning})

    def stepped(self, x: Any, y: Any, times: float = 1.0, seed: int | None = None, *, again: bool = True) -> Gradients:
        """Return what the step leaves, with weights multiplied, and other random numbers if there is a seed."""
        if again and not self.repeat:
            raise UsageError("the step must not run again")
        self.rewind()
        with other_weights(self.modules, lambda weights: weights * times):
            if seed is not None:
                torch.manual_seed(seed)
            self.step(x, y)
            return Gradients.of(self.learning, "cpu")

    def taken(self, value: Any, which: Iterable[int]) -> Any:
        """Return these rows of inputs or targets; with marks, all as they are."""
        if any(isinstance(leaf, Marked) for leaf in take_apart(value, (Marked,))[0]):
            return value
        rows = split_batch(value, [1] * sum(self.rows), self.batch_dim)
        return join([rows[row % len(rows)] for row in which], self.batch_dim)

    def run(self, rows: Any) -> Any:
        """Run the model under autocast to the step's types; the loss gets float32, as it does under autocast."""
        device = next(iter(self.model.parameters())).device
        rows = moved(rows, device)
        with ExitStack() as stack:
            for kind in self.types:
                stack.enter_context(torch.autocast(device.type, dtype=kind))
            output = self.forward(rows)
        return map_tensors(lambda tensor: tensor.float() if tensor.dtype in self.types else tensor, output)


class NoSumError(LossError):
    """The loss of a batch is not a weighted sum of its micro-batches' losses."""


def shares_of(
    loss_fn: LossFunction, outputs: list[Any], targets: list[Any], y: Any, join_all: Callable[[list[Any]], Any]
) -> list[float]:
    """Return each micro-batch's weight in the batch's loss: by how much its own loss's slope is multiplied there."""
    outputs = [map_tensors(lambda each: asking(each.clone()), output) for output in outputs]
    leaves = [[tensor for tensor in tensors_of(output) if tensor.requires_grad] for output in outputs]
    alone = [slopes_of(loss_fn, *each) for each in zip(outputs, targets, leaves, strict=True)]
    try:
        with torch.enable_grad():
            at_once = slopes_of(loss_fn, join_all(outputs), y, [*chain.from_iterable(leaves)])
    except Exception as error:
        raise LossError(
            f"the loss of all micro-batches' outputs, joined, raised {type(error).__name__}: {error}\n"
            "  try: reduction='mean', 'sum' or a function from a target to the weight of its micro-batch"
        ) from error
    shares, rest, slopes = list[float](), 0.0, iter(at_once)
    for own in map(flat, alone):
        whole = flat([*islice(slopes, len(leaves[0]))])
        shares.append(float(whole @ own / (own @ own)) if whole.any() else 0.0)
        if shares[-1]:
            rest += float((whole - shares[-1] * own).norm())
        elif own.isfinite().all():  # a micro-batch whose loss counts for nothing, as with a maximum
            rest += float(own.norm()) / len(outputs)
    if rest > max(_OF_A_LOSS, rounding_of(slope.dtype for slope in at_once)) * float(flat(at_once).norm()):
        raise NoSumError(
            "the loss of the whole batch is not a weighted sum of the losses of its micro-batches, so no training on "
            "micro-batches has its gradients\n  try: reduction='mean', to compare with the mean of their losses by rows"
        )
    return shares


def slopes_of(loss_fn: LossFunction, output: Any, target: Any, along: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the gradients of a loss by some tensors."""
    with torch.enable_grad():
        return torch.autograd.grad(loss_of(loss_fn, output, target).of(0, output), along, materialize_grads=True)


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the real numbers in some tensors, in double precision."""
    real = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors)
    return torch.cat([tensor.detach().cpu().flatten().double() for tensor in real])


@dataclass(frozen=True)
class Seen:
    """What layers did; a call that is repeated within a backward, as activation checkpoints do, is left out."""

    types: set[torch.dtype] = field(default_factory=set)  # of their outputs
    modes: set[tuple[str, bool]] = field(default_factory=set)  # the layers that ran, and whether in training
    ran: list[tuple[str, int]] = field(default_factory=list)  # the layers, and how many numbers they gave each time
    changed: set[str] = field(default_factory=set)  # the layers that ran after their weights had changed
    casts: set[tuple[str, torch.dtype]] = field(default_factory=set)  # the layers that get numbers of a coarse type

    def times(self, other: Seen) -> dict[str, float]:
        """Return how many times as many numbers as there each layer gave that ran here and there."""
        theirs = other._numbers()
        return {name: many / theirs[name] for name, many in self._numbers().items() if theirs[name]}

    def _numbers(self) -> Counter[str]:
        found = Counter[str]()
        for name, many in self.ran:
            found[name] += many
        return found


@contextmanager
def seen(modules: Sequence[nn.Module]) -> Iterator[Seen]:
    """Yield what layers do meanwhile, in whatever thread; their copies too, made meanwhile."""
    found = Seen()
    versions = {id(each): each._version for module in modules for each in module.parameters()}  # noqa: SLF001

    def note_cast(name: str, got: torch.Tensor) -> None:
        found.casts.update((name, kind) for kind in coarse_in(got))

    def note(name: str, layer: nn.Module, given: object, output: object) -> None:
        made = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
        found.types.update(tensor.dtype for tensor in made)
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0:  # noqa: SLF001 - run again for a backward
            return
        for tensor in tensors_of(given):
            note_cast(name, tensor)
        for tensor in made:
            if tensor.requires_grad:
                tensor.register_hook(partial(note_cast, name))
        found.modes.add((name, layer.training))
        found.ran.append((name, sum(tensor.numel() for tensor in made[:1])))  # states, say, have no rows
        if any(each._version != versions.get(id(each), each._version) for each in layer.parameters()):  # noqa: SLF001
            found.changed.add(name)

    with ExitStack() as stack:
        named = {layer: name for module in modules[::-1] for name, layer in module.named_modules()}
        for layer, name in named.items():
            if not any(layer.children()):
                stack.callback(layer.register_forward_hook(partial(note, name)).remove)
        yield found


def coarse_in(tensor: torch.Tensor) -> set[torch.dtype]:
    """Return the coarse type that has all numbers of a tensor of a finer type: it was cast, and cast back."""
    if type(tensor) is not torch.Tensor or tensor.dtype not in (torch.float32, torch.float64):
        return set()  # of a tracer, say
    some = tensor.detach().flatten()[:_SOME]
    kinds = (kind for kind in (torch.bfloat16, torch.float16) if torch.equal(cast(some, kind), some))
    return {kind for kind in islice(kinds, 1) if len(some[some != 0].unique()) > _FEW}


def cast(value: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return numbers rounded to a type, as their gradients are."""
    return value.to(kind).to(value.dtype) if value.is_floating_point() else value


@contextmanager
def rounded(model: nn.Module, casts: Iterable[tuple[str, torch.dtype]]) -> Iterator[None]:
    """Round what layers give, and its gradients, to types."""
    layers = dict(model.named_modules())
    with ExitStack() as stack:
        for layer, kind in ((layers[name], kind) for name, kind in casts if name in layers):
            there = partial(map_tensors, partial(cast, kind=kind))
            stack.callback(layer.register_forward_hook(lambda _, __, made, there=there: there(made)).remove)
        yield


class Number(NamedTuple):
    """A number of a step, what it is, and the codes of gradients that are multiplied and divided by it."""

    size: float
    what: str
    times: str = "scaled"
    divided: str = "scaled"


@dataclass(frozen=True)
class Sizes:
    """The numbers of a step, which may be factors."""

    rows: list[int]  # of each micro-batch
    shares: list[float]  # of each micro-batch's loss in the loss of the batch
    replicas: int
    tokens: dict[int, str]  # numbers that a loss may average over, and of what
    runs: int = 1  # how often the step's layers ran the batch
    norm: float = 0.0  # of the wrong gradients together

    def called(self, number: float, slack: float) -> list[Number]:
        """Return what a number is: one of the step's, or else made of those, or of another kind."""
        own = [
            Number(len(self.rows), "the number of micro-batches", "times-microbatches", "divided-by-microbatches"),
            Number(self.replicas, "the number of replicas", "summed-over-replicas", "divided-by-replicas"),
            Number(self.runs, "how often the step runs the batch", "no-zero-grad"),
            *(
                Number(n, f"the number of {what}", "times-tokens", "divided-by-tokens")
                for n, what in self.tokens.items()
            ),
        ]
        own = [known for known in own if known.size > 1]
        others = [Number(one.size * two.size, f"{one.what} times {two.what}") for one, two in combinations(own, 2)]
        own += [Number(2**n, f"2^{n}, as a GradScaler's scale", "loss-scale", "loss-scale") for n in range(8, 33)]
        fitting = [[known for known in some if abs(number / known.size - 1) <= slack] for some in (own, others)]
        return fitting[0] or fitting[1]

    def apart(self) -> Iterator[tuple[int, list[float]]]:
        """Yield weights of micro-batches in a mean of the means of so many replicas, which may take them in turns."""
        many = len(self.shares)
        for replicas in (number for number in range(2, many) if many % number == 0):
            for own in ([m * replicas // many for m in range(many)], [m % replicas for m in range(many)]):
                shares = list(zip(self.shares, own, strict=True))
                totals = [sum(share for share, its in shares if its == replica) for replica in range(replicas)]
                yield replicas, [share / (totals[its] or 1.0) for share, its in shares]


@dataclass(frozen=True)
class Counts:
    """How often each micro-batch counts; those that differ by at most `slack` are equal, and NaN says nothing."""

    numbers: torch.Tensor
    slack: float
    sizes: Sizes
    unclear: tuple[int, ...] = ()  # the micro-batches whose numbers may be off by too much

    @property
    def relative_slack(self) -> float:
        """The slack relative to the largest number."""
        return self.slack / float(self.numbers[self.numbers.isfinite()].abs().max())

    @property
    def are_off(self) -> bool:
        """Whether one of those that are clear is so far from 1 that it is wrong in coarse types too."""
        off = (self.numbers - 1).abs().nan_to_num(0.0)
        off[[*self.unclear]] = 0.0
        return float(off.max()) > max(_OFF, self.slack)

    @property
    def shown(self) -> str:
        """The numbers as a part of a sentence."""
        return f"they count {shown(self.numbers.tolist())} times"

    def whole_times(self) -> tuple[torch.Tensor, float | None]:
        """Return how many whole times each micro-batch counts, and the factor besides; `None` if they do not."""
        least = self.numbers[self.numbers.abs() > self.slack].abs().min()
        times = (self.numbers / least).round()
        unsure = bool((times.abs() > _MOST_TIMES).any()) or self.slack > least / 4
        return times, None if unsure else self.multiple_of(times)

    def multiple_of(self, pattern: torch.Tensor) -> float | None:
        """Return by which factor the counts are a pattern; `None` if they are not."""
        live = self.numbers.isfinite() & pattern.isfinite()
        found, pattern = self.numbers[live], pattern[live].double()
        factor = float(found @ pattern / (pattern @ pattern))
        return factor if float((found - factor * pattern).abs().max()) <= self.slack else None

    def known(self, factor: float) -> bool:
        """Return whether a factor is 1, or is or divides by a number of the step."""
        size = max(abs(factor), 1 / abs(factor))
        return size - 1 <= self.relative_slack or bool(self.sizes.called(size, self.relative_slack))


@dataclass(frozen=True)
class Evidence:
    """What is known of a step, and what can be tried out."""

    trial: Trial
    batch: tuple[Any, Any]
    left: Gradients  # by the step
    plain: Gradients  # of plain training
    tables: dict[str, torch.Tensor]  # of each parameter, the inner products
    before: Seen  # in plain training
    during: Seen  # in the step
    sizes: Sizes
    tolerance: float  # the largest rest of a gradient that may be rounding
    types: set[torch.dtype]  # in which the step and plain training compute
    draws: str  # how the model draws random numbers, if it does
    wrong: Mapping[str, float | None] = field(default_factory=dict)  # the parameters, and the factor of each, if any

    @property
    def ones(self) -> torch.Tensor:
        """The counts of a right step."""
        return torch.ones(len(self.sizes.rows), dtype=torch.double)

    @property
    def most(self) -> float:
        """The largest difference of a parameter's gradient from plain training's, relative to what is added up."""
        return max(self.rest(self.ones).values())

    def table(self, names: Iterable[str]) -> torch.Tensor:
        """Return the inner products of some parameters together."""
        return torch.stack([self.tables[name] for name in names]).sum(0)

    def rest(self, counts: torch.Tensor, times: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return what these counts, `times` each parameter's number, do not explain of what is added up to it."""
        own = {name: counts * (times or {}).get(name, 1.0) for name in self.tables}
        left = {name: rest_of(table, own[name]) for name, table in self.tables.items()}
        return relative(left, {name: _added(table, own[name]) for name, table in self.tables.items()})

    def rounding(self, differences: Gradients) -> bool:
        """Return whether differences of some gradients are no more than rounding."""
        added = {name: _added(table, self.ones) for name, table in self.tables.items()}
        return max(relative(differences.norms, added).values()) <= self.tolerance

    def fit(self, names: Iterable[str]) -> Counts:
        """Count the micro-batches in some parameters' gradients, by least squares."""
        names = list(names)
        table, elements = self.table(names), sum(self.left[name].numel() for name in names)
        sizes = replace(self.sizes, norm=float(_norms(table)[-1]))
        norms, counts = _norms(table)[:-1], torch.full([len(table) - 1], math.nan, dtype=torch.double)
        live = (norms > _LEAST * norms.max()).nonzero().flatten()
        if not len(live):
            return Counts(counts, 0.0, sizes)
        values, vectors = torch.linalg.eigh(table[live][:, live] / norms[live].outer(norms[live]))
        values = values.clamp(1e-12)
        counts[live] = vectors @ (vectors.T @ (table[live, -1] / norms[live]) / values) / norms[live]
        noise = rest_of(table, counts) / math.sqrt(max(1, elements - len(live)))
        noise = max(noise, _ROUNDING * float((norms * counts.nan_to_num(0.0)).norm()))
        off = noise / norms[live] * (vectors.square() / values).sum(1).sqrt()
        most = float(counts[live].abs().max())
        slack = max(max(_ALIKE, self.tolerance / 2) * most, 3 * float(off.max()))
        return Counts(counts, slack, sizes, tuple(live[~(off <= _UNCLEAR * most)].tolist()))

    def factors(self) -> dict[str, float | None]:
        """Return of which multiple of plain training's each gradient is; `None` if it is none."""
        sums = {name: table[:, :-1].sum(1) for name, table in self.tables.items()}
        times = {name: float((each[-1] / each[:-1].sum()).nan_to_num(0.0, 0.0)) for name, each in sums.items()}
        rest = self.rest(self.ones, times)
        return {name: factor if rest[name] <= self.tolerance else None for name, factor in times.items()}


def products(alone: Sequence[Gradients], left: Gradients) -> dict[str, torch.Tensor]:
    """Return, for each gradient left, the inner products of what the micro-batches add and of that, which is last."""
    return {name: _products([*(own[name] for own in alone), gradient]) for name, gradient in left.items()}


def _products(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    pieces = zip(*(gradient.flatten().split(_AT_ONCE) for gradient in gradients), strict=True)
    return torch.stack([rows @ rows.T for rows in (torch.stack([*map(flat, zip(piece))]) for piece in pieces)]).sum(0)


def rest_of(table: torch.Tensor, counts: torch.Tensor) -> float:
    """Return the norm of what the step left, less the micro-batches, each as often as it counts."""
    signed = torch.cat([counts.nan_to_num(0.0), -torch.ones(1, dtype=torch.double)])
    return math.sqrt(max(0.0, float(signed @ table @ signed)))


def _norms(table: torch.Tensor) -> torch.Tensor:
    return table.diagonal().clamp(min=0.0).sqrt()


def _added(table: torch.Tensor, counts: torch.Tensor) -> float:
    """Return the norms of what is added up, or of what the step left, if that is more."""
    norms = _norms(table)
    return max(float((norms[:-1] * counts.nan_to_num(0.0).abs()).sum()), float(norms[-1]))
