"""The gradients of a batch at once, against the sum of its micro-batches': why they differ is tried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from pipelab.engine.stage.batch import Reduction, join, join_outputs, split_batch
from pipelab.engine.stage.inputs import unmarked
from pipelab.engine.stage.pytree import described, map_tensors, named_leaves, rebuild, take_apart, tensors_of
from pipelab.engine.stage.split_backward import custom_functions
from pipelab.engine.verify.causes import said
from pipelab.engine.verify.reference import (
    NEARBY,
    Gradients,
    LossFunction,
    NoSumError,
    Reference,
    listed,
    loss_of,
    nearby_weights,
    relative,
    rounding_of,
    shares_of,
    shown,
    slopes_of,
)

_TOLERANCE = 1e-4
"""Largest difference (2-norm, per parameter) from the whole batch's gradient, relative to the sum itself: generous,
because a wrong weight is off by far more than rounding."""

CUT_BEFORE = "the micro-batches were cut before: there is no whole batch to compare with"

_MOVE = 0.05
"""How far to move weights to look again: far enough that residuals are no rounding errors, near enough that what is
wrong with the present weights is wrong with those. Types that round more coarsely must move further."""


class Difference(NamedTuple):
    """How far the whole batch's gradients are; if too far, at which parameter, with the cause's code and words."""

    size: float
    name: str = ""
    code: str = ""
    why: str = ""
    nearby: bool = False  # whether with slightly different weights


@dataclass
class Whole:
    """A batch at once, and its micro-batches: what the model makes of them."""

    named: nn.Module  # the model, or its stages, with the layers' names
    forward: Callable[[tuple[Any, Mapping[str, Any]]], Any]  # runs all of it
    loss_fn: LossFunction
    reduction: Reduction | None
    batch_dim: int
    x: tuple[Any, Mapping[str, Any]]  # the input and keywords
    y: Any
    plain: Reference  # runs the micro-batches
    rewind: Callable[[], None]
    types: set[torch.dtype]  # in which it computes

    def __post_init__(self) -> None:
        self.x, self.y = unmarked(self.x), unmarked(self.y)
        self.allowed = max(_TOLERANCE, rounding_of(self.types))

    def difference(self, sums: Gradients) -> Difference:
        """Compare these sums of the micro-batches' gradients, and look again if they differ too much.

        Operations on all rows round otherwise than on some. Where residuals are rounding errors themselves, or a ReLU's
        input is within rounding of zero, that decides the gradients. Nearby it does not, but a fault is there too: so a
        difference is a fault if it is too large with most of some other weights.
        """
        size, why = self._compared(sums)
        looks = {True: 0, False: 0}
        for seed in range(NEARBY if why else 0):
            with nearby_weights([self.named], seed, max(_MOVE, 4 * self.allowed)):
                self.rewind()
                size, why = self._compared(self.plain.gradients())
                looks[bool(why)] += 1
                if looks[bool(why)] > NEARBY // 2:
                    name, code, words = why() if why else ("", "", "")
                    return Difference(size, name, code, words, nearby=True)
        return Difference(size)

    def _compared(self, sums: Gradients) -> tuple[float, Callable[[], tuple[str, str, str]] | None]:
        """Compare with the weights as they are; if they differ too much, also return what says where and why."""
        self.rewind()
        at_once = replace(self.plain, forward=self.forward, rows=[self.x], targets=[self.y], weights=[1.0])
        output = at_once.run()
        whole = Gradients.of(at_once.parameters)
        off = relative((sums - whole).norms, whole.norms)
        name = max(off, key=off.__getitem__)
        wrong = [parameter for parameter, difference in off.items() if not difference <= self.allowed]
        return off[name], (lambda: (name, *self._why(output, wrong[-1]))) if wrong else None

    def _why(self, output: Any, wrong: str) -> tuple[str, str]:
        """Return why the whole batch has other gradients: the first cause of `_LOOKS` that finds something."""
        if _spreads(self.loss_fn, output, self.y):
            shapes = list(output.shape), list(self.y.shape)
            return "spread", said("spread", *shapes, shape=str(shapes[0])[1:-1])
        for code, look in _LOOKS.items():
            with suppress(Exception):  # a model, or a loss, that does not take what is tried
                if found := look(self):
                    words = found if isinstance(found, (tuple, list)) else [found]
                    return code, said(code, *words, microbatches=len(self.plain.rows))
        return "rows-mixed", said("rows-mixed", wrong)

    def out(self, given: Any) -> Any:
        """Return the model's output."""
        self.rewind()
        with self.plain.around(), torch.no_grad():
            return map_tensors(torch.clone, self.forward(given))

    @cached_property
    def whole(self) -> Any:
        """The whole batch's output."""
        return self.out(self.x)

    @cached_property
    def parts(self) -> list[Any]:
        """The micro-batches' outputs."""
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
        """Return the micro-batches' outputs as one."""
        return join_outputs(outputs, self.counts, self.batch_dim)

    @cached_property
    def counts(self) -> list[int]:
        """How many rows each micro-batch has."""
        leaf, dim = next(iter(self.cut.items()))
        return [take_apart(rows)[0][leaf].shape[dim] for rows in self.plain.rows]

    def first_rows(self, value: Any) -> Any:
        """Return the first micro-batch's rows of an output."""
        dim, rows = self.batch_dim, sum(self.counts)

        def first(each: torch.Tensor) -> torch.Tensor:
            return each.narrow(dim if each.dim() > dim and each.shape[dim] == rows else 0, 0, self.counts[0])

        return map_tensors(first, value)

    @cached_property
    def shares(self) -> list[float]:
        """Each micro-batch's weight in the loss of the batch; none if that is no weighted sum."""
        try:
            return shares_of(self.loss_fn, self.parts, [*self.plain.targets], self.y, self.joined)
        except NoSumError:
            return []

    def unlike(self, ours: Any, theirs: Any) -> list[bool]:
        """Return, for each tensor of two values, whether they differ by more than rounding."""
        return [
            one.shape != other.shape or float((one - other).norm()) > self.allowed * float(other.norm())
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
            output = self.forward(self.x)
            value = loss_of(self.loss_fn, output, self.y).of(0, output)
            ends = [each for each in tensors_of(output) if each.requires_grad]
            slopes = torch.autograd.grad(value, ends, retain_graph=True, materialize_grads=True)
            for outputs, starts in (([value], None), (ends, slopes), (ends, [*map(torch.zeros_like, ends)])):
                torch.autograd.backward(outputs, starts, retain_graph=True)
                found.append(Gradients.of(self.plain.parameters))
                for parameter in self.plain.parameters.values():
                    parameter.grad = None
        return [*custom_functions(ends)], found


def _spreads(loss_fn: LossFunction, output: Any, y: Any) -> bool:
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
        before, after = (loss_fn(output, targets.to(output.device)) for targets in (y, turned))
    return torch.allclose(before, after, rtol=1e-4)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.cdouble if tensor.is_complex() else torch.double)


def _pairs(e: Whole) -> bool:
    rows = [1, e.counts[0] - 1]
    output, target = (split_batch(each, rows, e.batch_dim)[0] for each in (e.parts[0], e.plain.targets[0]))
    output = map_tensors(lambda each: each.clone().requires_grad_(each.is_floating_point()), output)
    slopes = slopes_of(e.loss_fn, output, target, [each for each in tensors_of(output) if each.requires_grad])
    return not (e.shares or any(bool(each.nan_to_num().any()) for each in slopes))


def _reduction(e: Whole) -> tuple[str, ...]:
    reduction = repr(e.reduction) if isinstance(e.reduction, str) else "a function"
    both = zip(e.shares, e.plain.weights, strict=True)
    off = max(abs(one - other) / max(one, other) for one, other in both if one or other)
    return (reduction, shown(e.plain.weights), shown(e.shares)) if off > max(1e-3, e.allowed) else ()


def _state(e: Whole) -> str:
    before = {name: each.clone() for name, each in e.named.named_buffers()}
    e.rewind()
    with e.plain.around(), torch.no_grad():
        first, again = (map_tensors(torch.clone, e.forward(e.plain.rows[0])) for _ in range(2))
    changed = (name for name, each in e.named.named_buffers() if not torch.equal(each, before[name]))
    return next(changed, "an attribute") if any(e.unlike(first, again)) else ""


def _other_dimension(e: Whole) -> tuple[object, ...]:
    ours = e.batch_dim
    other = 0 if ours else 1
    pieces = split_batch(e.x, [1, tensors_of(e.x)[0].shape[other] - 1], other)
    if not any(e.odd) or any(e.unlike(join([*map(e.out, pieces)], other), e.whole)):
        return ()
    layers = (name for name, each in e.named.named_modules() if getattr(each, "batch_first", 1) is False)
    return ours, other, f": {name} has batch_first=False" if other and (name := next(layers, "")) else ""


def _leaves(e: Whole) -> str:
    named = named_leaves(e.x)
    found = [named[i] for i in e.cut if any(e.odd) and e.feels(i, lambda later, last: last.expand_as(later))]
    some = len(found) < len(e.cut) or not any(leaf.is_floating_point() for _, leaf in found)
    names = [f"x{place} ({described(leaf)})".replace("x[0]", "x").replace("x[1]", "keywords") for place, leaf in found]
    return listed(names) if len(e.cut) > 1 and some else ""


def _auxiliary(e: Whole) -> tuple[str, ...]:
    names = [f"output{place}" for place, leaf in named_leaves(e.whole) if isinstance(leaf, torch.Tensor)]
    odd = [name for name, is_odd in zip(names, e.odd, strict=True) if is_odd]
    return (listed(odd), listed([name for name in names if name not in odd])) if odd and not all(e.odd) else ()


def _first_layer(e: Whole) -> str:
    """Return the first layer that makes something else of the first micro-batch's rows alone."""
    made = dict[nn.Module, list[Any]]()
    with nn.modules.module.register_module_forward_hook(lambda layer, _, out: made.setdefault(layer, []).append(out)):
        e.out(e.plain.rows[0]), e.out(e.x)
    names = {layer: name for name, layer in e.named.named_modules()}
    for layer, (alone, *_, whole) in made.items():
        if any(e.unlike(alone, e.first_rows(whole))):
            return names.get(layer) or "the model"
    return ""


def _branch(e: Whole) -> str:
    numbers = [i for i, (_, leaf) in enumerate(named_leaves(e.x)) if torch.is_tensor(leaf) and leaf.is_floating_point()]
    follows = not numbers or any(e.feels(i, lambda later, _: later * 1.01) for i in numbers)
    return "" if follows else _first_layer(e)


def _beside(e: Whole) -> str:
    loss, along, _ = e.backwards[1]
    left = (
        f"{name}.{key}"
        for name, part in e.named.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    )
    off = relative((loss - along).norms, loss.norms)
    return listed([*left]) or "what is no output" if max(off.values()) > e.allowed else ""


def _injected(e: Whole) -> str:
    functions, (*_, of_zero) = e.backwards
    return (listed(functions) or "a hook") if any(bool(each.any()) for each in of_zero.values()) else ""


_LOOKS: dict[str, Callable[[Whole], Any]] = {
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
