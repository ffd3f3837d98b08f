"""Why gradients are wrong: causes in one table. `named` reads counts; where none explain, causes look themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from pipelab.engine.stage.batch import Reduction, join, join_outputs, split_batch
from pipelab.engine.stage.errors import left_on
from pipelab.engine.stage.pytree import described, map_tensors, named_leaves, rebuild, take_apart, tensors_of
from pipelab.engine.stage.split_backward import custom_functions
from pipelab.engine.verify.reference import (
    NEARBY,
    Counts,
    Evidence,
    Gradients,
    NoSumError,
    Reference,
    flat,
    least_of,
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
"""Largest difference from the whole batch's gradient, relative to itself: a wrong weight is off by far more."""

CUT_BEFORE = "the micro-batches were cut before: there is no whole batch to compare with"
_OTHER = "differs by {:.1e} (2-norm, relative to the sum), with slightly different weights too"
_NOT_THE_SUM = f"their sum is not the whole batch's: {{}} {_OTHER}\n{{}}"

_MOVE = 0.05
"""How far to move weights to look again: so far that residuals are no rounding errors, and that faults stay."""

_OTHER_KERNELS = {"cuda"}
"""Where libraries take other kernels for other numbers of rows: among a million ReLUs, rounding decides one or two."""

_LAST_BITS = 1e-6
"""How far to move weights to see what rounding changes there: sums of a hundred numbers in another order are so far."""

_BY_ROUNDING = 3.0  # how often so much a difference may still be rounding


class Finding(NamedTuple):
    """What is wrong: the code, the factor and the micro-batches of a `Diagnosis`, and the fact in words."""

    code: str
    words: str
    factor: float | None = None
    microbatches: tuple[int, ...] = ()


class Cause(NamedTuple):
    """What to say of a cause, what to try, and what finds it: where no counts do, or in the batch at once."""

    words: str = ""
    hint: str = ""
    explains: Callable[[Evidence], object] | None = None
    at_once: Callable[[Whole], object] | None = None


# ── What counts say ───────────────────────────────────────────────────────────────────────────────────────────────────


def named(counts: Counts) -> Finding:
    """Return what wrong counts say."""
    for look in (_one_factor, _other_shares, _moving_average, _whole_times):
        if found := look(counts):
            return found
    return finding("other-weights", counts.shown)


def _one_factor(counts: Counts) -> Finding | None:
    """Find one factor of all gradients."""
    factor = counts.multiple_of(torch.ones(len(counts.numbers)))
    if not factor:
        return None
    code, size, words = _of_a_factor(counts, abs(factor))
    if factor > 0:
        return Finding(code, f"The gradients are {words}.", size)
    if abs(factor + 1) <= counts.relative_slack:
        return Finding("sign", "The gradients are plain training's with the wrong sign.", -1.0)
    return Finding("sign", f"The gradients have the wrong sign, and are {words}.", -size)


def _of_a_factor(counts: Counts, factor: float) -> tuple[str, float, str]:
    """Return the code of a factor, the exact factor, and what it is: a number of the step, several, or none."""
    size, slack = max(factor, 1 / factor), counts.relative_slack
    known = counts.sizes.called(size, slack)
    size = round(size) if known else size
    words = f"{size:.6g} times plain training's" if factor > 1 else f"plain training's divided by {size:.6g}"
    codes = {number.times if factor > 1 else number.divided for number in known}
    code = codes.pop() if len(codes) == 1 else "scaled"
    if known:
        words += f": {size} is {', and '.join(number.what for number in known)}"
    norm = float(f"{counts.sizes.norm:.1g}")
    if not known and factor < 1 and norm and abs(counts.sizes.norm / norm - 1) <= slack:
        code, words = "clipped", f"{words}: clipped to a norm of {norm:g}"
    return code, float(size) if factor > 1 else 1 / size, words


def _other_shares(counts: Counts) -> Finding | None:
    """Find weights of micro-batches that are not their shares in the loss of the batch."""
    shares = counts.sizes.shares
    weights: list[tuple[str, Sequence[float], tuple[object, ...]]] = [
        ("weighed-alike", [1.0] * len(shares), ()),
        ("weighed-by-rows", counts.sizes.rows, ()),
        *(("weighed-by-replicas", own, (replicas,)) for replicas, own in counts.sizes.apart()),
    ]
    for code, own, about in weights:
        factor = counts.multiple_of(torch.tensor(own) / sum(own) / torch.tensor(shares))
        if factor and counts.known(factor):
            return finding(code, shown(shares), *about, factor=factor)
    return None


def _moving_average(counts: Counts) -> Finding | None:
    """Find a division that is repeated, unless some micro-batches only count more often than others."""
    times, factor = counts.whole_times()
    two_kinds = len(times[times.isfinite()].unique()) == 2
    if factor is not None and factor >= 1 - counts.slack and counts.known(factor) and two_kinds:
        return None
    for divisor, steps in _averages(counts):
        each_time = "each micro-batch" if steps == 1 else f"each {steps} micro-batches"
        return finding("moving-average", each_time, f"{divisor:.4g}", counts.shown, factor=divisor)
    return None


def _averages(counts: Counts) -> Iterator[tuple[float, int]]:
    """Yield divisors that were applied again after every so many micro-batches; the first time, with the second."""
    numbers, many = counts.numbers, len(counts.numbers)
    for steps in (number for number in range(1, many) if many % number == 0):
        later = many // steps - 1 - torch.arange(many) // steps
        last = int(numbers.isfinite().nonzero()[-1])
        earlier = (numbers.isfinite() & (later > later[last])).nonzero().flatten()
        ratio = float(numbers[last] / numbers[earlier[-1]]) if len(earlier) else 0.0
        if not 1 < ratio < float(numbers[last].abs()) / counts.slack:
            continue
        divisor = ratio ** (1 / float(later[earlier[-1]] - later[last]))
        for most in (many // steps - 1, many // steps - 2):
            if most and counts.multiple_of(divisor ** -later.clamp(max=most).double()):
                yield divisor, steps


def _whole_times(counts: Counts) -> Finding | None:
    """Find micro-batches that never count, several times, or with the wrong sign."""
    times, factor = counts.whole_times()
    if not factor:
        return None
    among = len(times) - 1
    kinds = times < 0, times == 0, times == 1, times > 1
    negative, none, once, more = (tuple(each.nonzero().flatten().tolist()) for each in kinds)
    if negative:
        words = f"Of micro-batches 0 to {among}, {listed(negative)} with the wrong sign: {counts.shown}."
        return Finding("sign", words, factor, negative)
    if not more:
        return finding("missing-microbatches", among, listed(once), counts.shown, factor=factor, microbatches=once)
    repeated = f"{listed(more)} repeatedly" + (f", and {listed(none)} never" if none else "")
    if {*times[times.isfinite()].tolist()} == {1.0, among + 1.0}:
        counts_as = f"count{'s' * (len(more) == 1)} {among + 1} times as much as the others"
        repeated = f"{listed(more)} {counts_as}, as if not divided by {among + 1}"
    return finding("repeated-microbatches", among, repeated, counts.shown, factor=factor, microbatches=more)


# ── What no counts explain ────────────────────────────────────────────────────────────────────────────────────────────


def _other_mode(e: Evidence) -> list[str]:
    layers, odd = dict(e.trial.model.named_modules()), sorted(e.during.modes - e.before.modes)
    known = [(name, training) for name, training in odd if isinstance(layers.get(name), (_BatchNorm, _DropoutNd))]
    return [f"{name} in {'training' if training else 'evaluation'}" for name, training in known]


def _more_often(e: Evidence) -> list[str]:
    times = e.during.times(e.before)
    return [name for name, often in times.items() if often > 1.5 * min(times.values())]


def _norm_of_groups(e: Evidence) -> str:
    norms = dict[float, float]()
    for name, factor in e.wrong.items():
        group = round(factor or math.inf, 4)
        norms[group] = math.hypot(norms.get(group, 0.0), e.left.norms[name])
    most = max(norms.values())
    return f"{most:.4g}" if max(norms) < 1 and most <= 1.001 * min(norms.values()) else ""


def _tied(e: Evidence) -> str:
    model, [name] = e.trial.model, e.wrong
    weight = model.get_parameter(name)
    uses = [use for use, parameter in model.named_parameters(remove_duplicate=False) if parameter is weight]
    layers = [(model.get_submodule(use.rpartition(".")[0]), use.rpartition(".")[2]) for use in uses]
    try:
        for layer, own in layers[1:]:
            setattr(layer, own, nn.Parameter(weight.detach().clone()))
        alone, _ = e.trial.each_alone(*e.batch)
    finally:
        for layer, own in layers:
            setattr(layer, own, weight)
    for use, (times, what) in product(uses, ((-1, "is lost"), (1, "counts twice"))):
        its = torch.stack([gradients[use] for gradients in alone]).sum(0)
        if len(uses) > 1 and e.rounding(Gradients({name: e.left[name] - e.plain[name] - times * its})):
            return f"{', '.join(uses)} share a weight: the gradient of {use} {what}"
    return ""


def _decay(e: Evidence) -> str:
    rest, weights = e.left - e.plain, {name: e.trial.model.get_parameter(name).detach().cpu() for name in e.wrong}
    along, size = (sum(float((some[name] * weights[name]).sum()) for name in e.wrong) for some in (rest, weights))
    off = Gradients({name: rest[name] - along / size * weights[name] for name in e.wrong})
    return f"{along / size:.3g}" if e.rounding(off) else ""


def _shift(e: Evidence) -> str:
    rows, (x, y) = e.sizes.rows, e.batch
    total, starts = sum(rows), [sum(rows[:m]) for m in range(len(rows))]
    for by, inside in ((rows[0], 0), (-rows[0], 0), (1, 0), (-1, 0), (1, 1), (-1, 1), (0, 0), (0, 1)):
        order = [[(row + by) % many for row in range(many)] for many in (rows if inside else [total])]
        order = [own if by else own[::-1] for own in order]
        which = (start + row for start, own in zip(starts, order, strict=False) for row in own)
        if e.rounding(e.left - e.trial.plainly(x, e.trial.taken(y, which))):
            how = f"{abs(by)} {'further on' if by > 0 else 'before'}" if by else "in reverse order"
            return f"{how}{', within its micro-batch' * inside}"
    return ""


def _swapped(e: Evidence) -> list[str]:
    found = [
        f"{name} has {other}'s"
        for name in e.wrong
        for other, plain in e.plain.items()
        if plain.shape == e.left[name].shape and e.rounding(Gradients({name: e.left[name] - plain}))
    ]
    return found if len(found) == len(e.wrong) else []


def _border(e: Evidence) -> str:
    wrong = _wrong_by_layer(e)
    first = sum(wrong.values())
    return [*wrong][first] if all([*wrong.values()][:first]) and first < len(wrong) else ""


def _own(e: Evidence) -> bool:
    wrong = [*_wrong_by_layer(e).values()]
    return wrong[:1] + wrong[-1:] == [False, False]  # so what is passed back is right, and the loss


def _wrong_by_layer(e: Evidence) -> dict[str, bool]:
    """Return which layers have wrong gradients, if that is clear, without those whose gradients are nearly zero."""
    layers, norms, off = dict[str, bool](), e.plain.norms, e.rest(e.ones)
    for name in (name for name in e.plain if norms[name] > least_of(norms)):
        layer = name.rpartition(".")[0]
        layers[layer] = layers.get(layer, False) or name in e.wrong
    return {} if any(e.tolerance / 8 < off[name] for name in off.keys() - e.wrong) else layers


def _random(e: Evidence) -> bool:
    if any(isinstance(layer, _DropoutNd) and layer.training and layer.p for layer in e.trial.model.modules()):
        return False  # `unproven_of` says so
    same, other = (
        e.rounding(e.trial.stepped(*e.batch, seed=seed) - e.left) for seed in (None, torch.initial_seed() + 1)
    )
    return same and not other


def _adds_again(e: Evidence) -> bool:
    more = e.trial.stepped(*e.batch) - e.left
    return e.rounding(more - e.plain) and not e.rounding(more)


def _other_batch(e: Evidence) -> str:
    x, y = (e.trial.taken(part, (row // 2 for row in range(sum(e.sizes.rows)))) for part in e.batch)  # half, twice
    left, plain = e.trial.stepped(x, y), e.trial.plainly(x, y)
    if e.rounding(plain - e.plain):
        return ""
    if e.rounding(left - e.left):
        return "leaves the same gradients: it does not learn from the batch that it gets"
    rest = (left - plain) - (e.left - e.plain)
    same = e.rounding(rest) and not _random(e)
    return "is wrong by the same: it adds gradients of yet another batch, or of a penalty" if same else ""


def _stale(e: Evidence) -> bool:
    left = e.trial.stepped(*e.batch, times=2.0)
    return e.rounding(left - e.left) or e.rounding(left - e.plain)


# ── Why has the whole batch other gradients? ──────────────────────────────────────────────────────────────────────────


class Difference(NamedTuple):
    """How far the whole batch's gradients are; if too far, the cause's code, and where and why in words."""

    size: float
    nearby: bool  # whether with slightly different weights
    code: str = ""
    why: str = ""


@dataclass
class Whole:
    """A batch at once, and its micro-batches: what the model makes of them."""

    named: nn.Module  # the model, or its stages, with the layers' names
    forward: Callable[[tuple[Any, Mapping[str, Any]]], Any]  # runs all of it
    plain: Reference  # runs the micro-batches
    x: tuple[Any, Mapping[str, Any]]  # the input and keywords
    y: Any
    reduction: Reduction | None
    batch_dim: int
    rewind: Callable[[], None]
    types: set[torch.dtype]  # in which it computes

    @property
    def allowed(self) -> float:
        """The largest difference that may be rounding."""
        return max(_TOLERANCE, rounding_of(self.types))

    def difference(self, sums: Gradients) -> Difference:
        """Compare these sums; a difference is a fault if it is there with most of some other weights too, no kink."""
        least, wrong = self._compared(sums)
        faults, looks = 0, NEARBY if wrong else 0
        rounds = any(each.device.type in _OTHER_KERNELS for each in self.plain.parameters.values())
        for seed in range(looks):
            with nearby_weights([self.named], seed, max(_MOVE, 4 * self.allowed)):
                self.rewind()
                size, wrong = self._compared(sums := self.plain.gradients())
                if wrong and rounds and size <= _BY_ROUNDING * self._rounding(sums, seed):
                    wrong = []
                least, faults = min(size, least), faults + bool(wrong)
                if wrong and faults > NEARBY // 2:
                    equal = ""
                    with suppress(Exception):  # what cannot be compared is not said to be equal
                        equal = "outputs and losses are equal: but " if self.shares and not any(self.odd) else ""
                    code, words = next(_found(self), ("rows-mixed", (wrong[-1], equal)))
                    why = said(code, *words)
                    return Difference(size, bool(looks), code, _NOT_THE_SUM.format(wrong[0], size, why))
        return Difference(least, bool(looks))

    def _compared(self, sums: Gradients) -> tuple[float, list[str]]:
        """Return the largest difference with the weights as they are, and where it is too large, the largest first."""
        self.rewind()
        at_once = replace(self.plain, forward=self.forward, rows=[self.x], targets=[self.y], weights=[1.0])
        whole = at_once.gradients()
        off = relative((sums - whole).norms, whole.norms)
        most = max(off, key=off.__getitem__)
        wrong = [name for name, difference in off.items() if not difference <= self.allowed]
        return off[most], [most, *wrong] if wrong else []

    def _rounding(self, sums: Gradients, seed: int) -> float:
        """Return by how much these sums change, relative to themselves, if the weights' last bits do."""
        with nearby_weights([self.named], seed, _LAST_BITS):
            self.rewind()
            return max(relative((sums - self.plain.gradients()).norms, sums.norms).values())

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

    def own(self, value: Any, microbatch: int) -> Any:
        """Return a micro-batch's rows of an output."""

        def its(each: torch.Tensor) -> torch.Tensor:
            by_rows = each.dim() > self.batch_dim and each.shape[self.batch_dim] == sum(self.counts)
            start, many = sum(self.counts[:microbatch]), self.counts[microbatch]
            return each.narrow(self.batch_dim if by_rows else 0, start, many)

        return map_tensors(its, value)

    @cached_property
    def at(self) -> int:
        """The first micro-batch whose rows have other outputs in the whole batch; 0 if none has."""
        odd = (any(self.unlike(part, self.own(self.whole, m))) for m, part in enumerate(self.parts))
        return [*odd, True].index(True) % len(self.parts)

    @cached_property
    def shares(self) -> list[float]:
        """Each micro-batch's weight in the loss of the batch, for any outputs; none if that is not a weighted sum."""
        looks = list[torch.Tensor]()
        for by in (1.0, 0.3, 3.0):
            outputs = [map_tensors(partial(_stretched, by=by), part) for part in self.parts]
            try:
                found = shares_of(self.plain.loss_fn, outputs, [*self.plain.targets], self.y, self.joined)
                looks.append(torch.tensor(found))
            except NoSumError:
                return []
            except Exception:  # noqa: BLE001, S112 - a loss may not take other outputs
                continue
        for look in looks:
            both = (look != 0) & (looks[0] != 0) & (look.isfinite() | looks[0].isnan())
            if not self.alike(look[both], looks[0][both]):
                return []
        return looks[0].tolist()

    def alike(self, some: torch.Tensor, others: torch.Tensor) -> bool:
        """Return whether weights of micro-batches differ by no more than rounding."""
        return torch.allclose(some, others, max(1e-3, self.allowed), 0.0)

    def unlike(self, ours: Any, theirs: Any) -> list[bool]:
        """Return, for each tensor of two values, whether they differ by more than rounding."""
        ours, theirs = ([leaf.to(torch.cdouble) for leaf in tensors_of(value)] for value in (ours, theirs))
        return [
            one.shape != other.shape or float((one - other).norm()) > self.allowed * float(other.norm())
            for one, other in zip(ours, theirs, strict=True)
        ]

    def feels(self, index: int, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> bool:
        """Return whether outputs of the micro-batch `at` change with the other rows of a leaf of `x`."""
        (leaves, spec), dim = take_apart(self.x), self.cut[index]
        pieces, last = [*leaves[index].split(self.counts, dim)], leaves[index].narrow(dim, -1, 1)
        leaves[index] = torch.cat([each if m == self.at else change(each, last) for m, each in enumerate(pieces)], dim)
        both = (self.own(value, self.at) for value in (self.out(rebuild(leaves, spec)), self.whole))
        return any(self.unlike(*both))

    def backwards(self, given: Any, target: Any) -> tuple[list[str], list[Gradients]]:
        """Autograd functions that are not PyTorch's; the gradients of the loss, by way of the output alone, of 0."""
        self.rewind()
        found = list[Gradients]()
        with self.plain.around(), torch.enable_grad():
            output = self.forward(given)
            value = loss_of(self.plain.loss_fn, output, target).of(0, output)
            ends = [each for each in tensors_of(output) if each.requires_grad]
            slopes = torch.autograd.grad(value, ends, retain_graph=True, materialize_grads=True)
            for outputs, starts in (([value], None), (ends, slopes), (ends, [*map(torch.zeros_like, ends)])):
                torch.autograd.backward(outputs, starts, retain_graph=True)
                found.append(Gradients.of(self.plain.parameters))
                for parameter in self.plain.parameters.values():
                    parameter.grad = None
        return [*custom_functions(ends)], found


def _stretched(each: torch.Tensor, by: float) -> torch.Tensor:
    times = torch.linspace(1.0, by, each.numel()).view(each.shape)
    return each * times.to(each) if each.is_floating_point() else each


def _spreads(e: Whole) -> tuple[object, ...]:
    """Return shapes that the loss broadcasts: it pairs every output with every target, in any order."""
    output, turned = e.whole, e.y.flip(0)
    spread = torch.broadcast_shapes(output.shape, e.y.shape)
    if output.numel() != e.y.numel() or spread.numel() == e.y.numel() or torch.equal(turned, e.y):
        return ()
    before, after = (e.plain.loss_fn(output, targets.to(output.device)) for targets in (e.y, turned))
    shapes = list(output.shape), list(e.y.shape), str(list(output.shape))[1:-1]
    return shapes if torch.allclose(before, after, rtol=1e-4) else ()


def _pairs(e: Whole) -> bool:
    rows = [1, e.counts[0] - 1]
    output, target = (split_batch(each, rows, e.batch_dim)[0] for each in (e.parts[0], e.plain.targets[0]))
    output = map_tensors(lambda each: each.clone().requires_grad_(each.is_floating_point()), output)
    slopes = slopes_of(e.plain.loss_fn, output, target, [each for each in tensors_of(output) if each.requires_grad])
    return not (e.shares or any(bool(each.nan_to_num().any()) for each in slopes))


def _reduction(e: Whole) -> tuple[str, ...]:
    reduction = repr(e.reduction) if isinstance(e.reduction, str) else "a function"
    shares, counts, ours = map(torch.tensor, (e.shares, e.counts, [*e.plain.weights]))
    known = {"reduction='mean'": counts / counts.sum(), "reduction='sum'": torch.ones(len(counts))}
    way = next((way for way, weights in known.items() if e.alike(shares, weights)), _A_FUNCTION)
    return () if e.alike(shares, ours) else (reduction, shown(e.plain.weights), shown(e.shares), way)


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
    """Return the first layer that makes something else of one micro-batch's rows alone."""
    made = dict[nn.Module, list[Any]]()
    with nn.modules.module.register_module_forward_hook(lambda layer, _, out: made.setdefault(layer, []).append(out)):
        e.out(e.plain.rows[e.at]), e.out(e.x)
    names = {layer: name for name, layer in e.named.named_modules()}
    for layer, (alone, *_, whole) in made.items():
        if any(e.unlike(alone, e.own(whole, e.at))):
            return names.get(layer) or "the model"
    return ""


def _branch(e: Whole) -> str:
    numbers = [i for i, (_, leaf) in enumerate(named_leaves(e.x)) if torch.is_tensor(leaf) and leaf.is_floating_point()]
    follows = not numbers or any(e.feels(i, lambda later, _: later * 1.01) for i in numbers)
    return "" if follows else _first_layer(e)


def _beside(e: Whole) -> str:
    loss, along, _ = e.backwards(e.x, e.y)[1]
    off = relative((loss - along).norms, loss.norms)
    return listed(left_on(e.named)) or "something that is not an output" if max(off.values()) > e.allowed else ""


def _injected(e: Whole) -> tuple[str, ...]:
    functions, (*_, of_zero) = e.backwards(e.x, e.y)
    whole, many = flat(of_zero.values()), len(e.parts)
    parts = [flat(e.backwards(*part)[1][-1].values()) for part in zip(e.plain.rows, e.plain.targets, strict=True)]
    times = float(torch.stack(parts).sum(0) @ whole / (whole @ whole)) if whole.any() else 0.0
    much, way = f"all micro-batches together {times:.3g} times as much as the whole batch", _ONE_BY_ONE
    if times > (1 + many) / 2:
        much = f"as much for each of the {many} micro-batches as for the whole batch"
        way = f"multiply it by the micro-batch's share of the batch, 1/{many}, unless it is already; then {way}"
    return (listed(functions) or "a hook", much, way) if abs(times) > 0 else ()


# ── The table ─────────────────────────────────────────────────────────────────────────────────────────────────────────


_BATCH = "though in the loss of the whole batch they weigh {0}"
_WEIGH = "weigh each micro-batch's loss by its share of what the loss averages over"
_AVERAGE = "After {}, .grad is divided by {} once more, which makes it a moving average: {}."
_REPLICAS = f"Each micro-batch counts by its share of its replica's loss, and {{1}} replicas alike, {_BATCH}."

_STEP_ONCE = "let optimizer.step() run once, after the last backward"
_CALLED_TWICE = "look for a stage that is called twice"
_CLIP_ONCE = "clip once, all gradients together, after the last backward"
_EMPTY = "call zero_grad() before each step, and empty every other buffer that gradients are added to"
_COPY = "copy the weights after each optimizer.step(), before the next forward"
_NOISE = "look for noise that is added to gradients, and for dropout that the model has not"
_BACK = "look for a detach(), or for the gradient of another micro-batch, on the way back between them"
_OWN = "look for what is done to their .grad alone, and to what their backward has saved"

_WATCH = "Pipeline(..., watch_nan=True), whose step names the first action that makes one"
_A_FUNCTION = "a function from a target to the weight of its micro-batch"
_ONE_BY_ONE = "pipe.verify(x, y, against='microbatches'), if each micro-batch is to have its own"

CAUSES = {
    # one factor of all gradients
    "times-microbatches": Cause(hint="divide each micro-batch's loss by {microbatches}, once"),
    "divided-by-microbatches": Cause(hint="divide by {microbatches} once only: in the loss, or by scale_grads"),
    "times-tokens": Cause(hint="divide the loss by that number, or use a loss that averages"),
    "divided-by-tokens": Cause(hint="divide by that number once only"),
    "summed-over-replicas": Cause(hint="divide by {replicas} after the sum, or all-reduce with an average"),
    "divided-by-replicas": Cause(hint="average once only; a loss that counts all replicas' rows needs a sum"),
    "loss-scale": Cause(hint="divide by the scale once, before the step ends: scaler.unscale_(optimizer)"),
    "sign": Cause(hint="look for a minus too many: a loss to be maximised, a gradient that is subtracted"),
    # counts that differ
    "weighed-alike": Cause(f"Each micro-batch counts alike, {_BATCH}.", _WEIGH),
    "weighed-by-rows": Cause(f"Each micro-batch counts by its rows, {_BATCH}.", _WEIGH),
    "weighed-by-replicas": Cause(_REPLICAS, "all-reduce how much each replica's loss averages over, weigh by that"),
    "moving-average": Cause(_AVERAGE, "divide once, after the last addition; or what is added, not what is in .grad"),
    "missing-microbatches": Cause(
        "Of micro-batches 0 to {}, only {} counted: {}.",
        "look for what empties .grad in between (zero_grad), and for a loop that ends too early",
    ),
    "repeated-microbatches": Cause("Of micro-batches 0 to {}, {}: {}.", "look for an index or a divisor that is off"),
    "other-weights": Cause("The micro-batches do not count alike: {}.", "look for another loss, or clipping of each"),
    "collinear": Cause(
        "{}, but micro-batches {} have gradients too alike to tell which of them counted.",
        "take another batch, such as random rows, or fewer micro-batches",
    ),
    # nothing to count
    "missing-gradients": Cause(
        "The step left no gradient in {}, where plain training leaves one.",
        "look for a detach() before them, or a stage whose backward never runs; if another process leaves them, pass "
        "trained=[…] with what this one trains",
    ),
    "no-gradients": Cause("The step left no gradients.", "zero_grad() after it; trained=[…] if it trains a copy"),
    "not-finite": Cause("{} are NaN or infinite: there is nothing to compare."),
    "rounding": Cause("Rounding decides the gradients: outputs equal their targets.", "take fresh weights or targets"),
    # what no counts explain: the first that is found is the cause
    "other-mode": Cause(
        "Layers run in another mode than the model's: {}.", "call model.train() or .eval()", _other_mode
    ),
    "weights-change": Cause(
        "Weights change before a forward of their layers: {}.", _STEP_ONCE, lambda e: sorted(e.during.changed)
    ),
    "stage-twice": Cause("These layers run more often than the others: {}.", _CALLED_TWICE, _more_often),
    "clipped": Cause("Groups of gradients are clipped, each to a norm of {}.", _CLIP_ONCE, _norm_of_groups),
    "tied-weights": Cause("{}.", "add up the gradients of all, once", _tied),
    "weight-decay": Cause("The gradients contain {} times the weights.", "leave it to the optimizer", _decay),
    "other-targets": Cause("Outputs meet the targets of other rows: {}.", "number micro-batches in both", _shift),
    "swapped": Cause("Gradients are swapped: {}.", "look for a flat buffer that is cut in another order", _swapped),
    "no-zero-grad": Cause("When it runs again, the step adds to what it has left before.", _EMPTY, _adds_again),
    "other-batch": Cause("On another batch, the step {}.", "look for a batch of another step", _other_batch),
    "stale-weights": Cause("With new weights the step leaves older gradients: it computes with a copy.", _COPY, _stale),
    "random-numbers": Cause("With other random numbers, the step leaves other gradients.", _NOISE, _random),
    "passed-back": Cause(
        "From {0} to the loss all is right: what {0} passes back is wrong or lost, or gradients before it are.",
        _BACK,
        _border,
    ),
    "only-their-own": Cause("What they pass back is right, and their own gradients are wrong.", _OWN, _own),
    "unexplained": Cause(hint="look for another loss, and for a stage that computes something else"),
    "not-compared": Cause("The gradients could not be compared, as random numbers are drawn in another order: {}"),
    # what `verify` says of a pipeline
    "remembers": Cause(
        hint="look for state that a stage stores from one micro-batch to the next, and for what a stage does to a "
        "tensor of an earlier stage: reads it from an attribute, hooks it, or runs its own backward"
    ),
    "unlike-its-trace": Cause(
        hint="look for what the traced model reads outside of its modules, such as a global variable or a class "
        "attribute; after it has changed, split the model again"
    ),
    "spread": Cause(
        "the output is {} and y is {}: the loss broadcasts them, every row of one against every row of the other",
        "y.view({2})",
        at_once=_spreads,
    ),
    "rows-mixed": Cause(
        "{1}{0} and the layers before it have other gradients than with the whole batch",
        "look, from there to the loss, for a hook, or for an autograd function whose backward branches on values",
    ),
    # what `verify` tries out, if the loss or the model is no sum over rows
    "pairs-of-rows": Cause(
        "loss_fn compares rows with each other: one row alone has no gradient, and a micro-batch has fewer pairs",
        f"{_ONE_BY_ONE}; or one micro-batch, or earlier rows without gradients to compare with",
        at_once=_pairs,
    ),
    "loss-of-several-rows": Cause(
        "loss_fn of the whole batch is not a weighted sum of the micro-batches': it takes a statistic of several rows, "
        "as an auxiliary loss does that balances experts",
        f"{_ONE_BY_ONE}; or a loss that is a mean or a sum over rows",
        at_once=lambda e: not e.shares,
    ),
    "reduction": Cause(
        "reduction is {}, which weighs the micro-batches {}, and in loss_fn of the whole batch they weigh {}",
        "{3}",
        at_once=_reduction,
    ),
    "state-between-calls": Cause(
        "{} changes in a forward, and with it the next output: micro-batches are several calls, the whole batch is one",
        f"update it once a step, after the last backward; or {_ONE_BY_ONE}",
        at_once=_state,
    ),
    "sequence-first": Cause(
        "x is cut along dimension {}, and the model is right for parts of it along dimension {}{}",
        "Pipeline(..., batch_dim=1), if x is [tokens, rows, ...]; batch_first=True, if it is [rows, tokens, ...]",
        at_once=_other_dimension,
    ),
    "not-by-rows": Cause(
        "rows of the output depend on other rows of {}: part of it means something else than all of it",
        "pipelab.whole(...) around what every micro-batch needs all of, such as a mask; or "
        "pipelab.microbatches([...]), each with its own offsets",
        at_once=_leaves,
    ),
    "auxiliary-output": Cause(
        "{} depends on the other rows of its micro-batch, and {} does not: an auxiliary loss, as one that balances "
        "experts, is another one for each micro-batch",
        _ONE_BY_ONE,
        at_once=_auxiliary,
    ),
    "branch": Cause(
        "{} has other values for the same rows in the whole batch, and does not follow small changes of its other "
        "rows: it branches on values",
        "a decision for each row, such as torch.where",
        at_once=lambda e: any(e.odd) and _branch(e),
    ),
    "statistic": Cause(
        "{} is the first layer that gives the same rows other values in the whole batch: a mean or another statistic "
        "of several rows",
        f"a statistic of each row; or {_ONE_BY_ONE}",
        at_once=lambda e: any(e.odd) and _first_layer(e),
    ),
    "loss-beside": Cause(
        "the loss depends on {}, beside the model's output, and is not a weighted sum over micro-batches",
        f"return it with the output, so that it passes through the stages; {_ONE_BY_ONE}",
        at_once=_beside,
    ),
    "injected": Cause("{} adds a gradient in the backward that is not the loss's: {}", "{2}", at_once=_injected),
    "not-finite-at": Cause("micro-batch {} is the first that makes one{}", _WATCH),
}
"""By code, every cause that `diagnose` and `verify` name."""


def finding(code: str, *found: object, factor: float | None = None, microbatches: tuple[int, ...] = ()) -> Finding:
    """Return a cause of the table, with what was found in its sentence."""
    return Finding(code, CAUSES[code].words.format(*found), factor, microbatches)


def said(code: str, *found: object) -> str:
    """Return a cause of the table and what to try, as the lines of an error."""
    words, hint = (text.format(*found) for text in CAUSES[code][:2])
    return (f"  {words}\n" if words else "") + f"  try: {hint}"


def cause_of(evidence: Evidence, share: str) -> Finding:
    """Return the first cause that the evidence shows, or none; `share` says how much no counts explain."""
    code, words = next(_found(evidence), ("unexplained", ()))
    return Finding(code, "\n".join(filter(None, [share, finding(code, *words).words])))


def _found(e: Evidence | Whole) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield each cause that is found, and what was found, for its sentence."""
    for code, cause in CAUSES.items():
        with suppress(Exception):  # a model, a loss or a step that does not take what is tried
            look: Any = cause.at_once if isinstance(e, Whole) else cause.explains
            if found := look and look(e):
                words = listed(found) if isinstance(found, list) else found
                yield code, words if isinstance(words, tuple) else (words,)
