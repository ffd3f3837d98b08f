"""`diagnose`: whether any training step leaves plain training's gradients; if not, which factor is wrong.

Each micro-batch adds its own gradient. `diagnose` computes them one by one and finds, by least squares, how often each
is in the gradient that the step has left. These *counts* show what is wrong. Of four micro-batches:

    1  1  1  1   right                            0  0  0  1   only the last one counted
    4  4  4  4   summed, not averaged             1  2  1  1   one counted twice
    ½  1  2  4   divided again at each addition   a rest       what no micro-batch explains

All of it follows from inner products. Where a rest is left, `causes` looks for what the step does otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pipelab.engine.stage.batch import Reduction, row_counts, rows_of
from pipelab.engine.stage.pytree import tensors_of
from pipelab.engine.stage.snapshot import RandomSnapshot, overwrite
from pipelab.engine.verify.causes import HINTS, Evidence, Finding, Gradients, Sizes, cause_of, listed, named
from pipelab.engine.verify.reference import (
    NEARBY,
    LossFunction,
    caller_of,
    flat,
    gradient_of,
    in_types,
    microbatch_gradients,
    nearby_weights,
    relative,
    restored,
    seen,
    unproven_of,
)
from pipelab.errors import UsageError

_TOLERANCE = 1e-3
"""Largest rest of a gradient, relative to the norms of what is added up: rounding is far below it, even where the step
cuts its batch otherwise; a micro-batch too many is above it, unless there are a thousand."""

_ROUNDING = 1e-5
"""How far gradients may be off by rounding alone, relative to what is added up. Near the targets, it is more."""

_MOST_ROUNDING = 0.1
"""With a larger tolerance than this, nothing can be named."""

_LEAST = 1e-3
"""A micro-batch whose gradient is a smaller share of the largest one's is not judged: it adds nothing."""

_UNCLEAR = 0.05
"""Largest error of a count, as a share of the largest count, with which micro-batches can be told apart."""

_ALIKE = 2e-3
"""Counts that differ by a smaller share of the largest one are equal; in coarse types, half of the tolerance."""

_OFF = 0.1
"""A count that is further from 1 is wrong in coarse types too, if it explains half of the difference."""

_AT_ONCE = 1 << 20
"""How many elements of a gradient are in double precision at the same time."""


class Compared(NamedTuple):
    """How the gradient of one parameter compares with plain training's.

    Attributes:
        right: whether they differ by rounding only.
        factor: what it is multiplied by: 1 if it is right, `None` if it is no multiple of plain training's.
        off: by which share of what is added up they differ (2-norm).
    """

    right: bool
    factor: float | None
    off: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong with a training step's gradients, if anything is.

    Attributes:
        code: `"right"`, or the kind of mistake.
        factor: what the gradients are multiplied by, compared with plain training's; of a moving average, what they are
            divided by at each addition. `None` if it is not one number.
        microbatches: which micro-batches the code is about: the only ones that counted, those that counted more than
            once, those that cannot be told apart, those with another sign; empty if it is about all.
        parameters: for each parameter, by name, whether its gradient is right, and its own factor.
        counts: how often each micro-batch is in the gradients, 1 being right; NaN for one that adds nothing in plain
            training either. Empty if there is nothing to count.
        residual: the largest share of a parameter's gradient that the counts do not explain (2-norm, relative to what
            is added up).
        sentence: the diagnosis in words, with what to try.

    Codes: `right`, `times-microbatches`, `divided-by-microbatches`, `times-tokens`, `divided-by-tokens`,
    `summed-over-replicas`, `divided-by-replicas`, `scaled` (by another number, or by one that is several of these),
    `moving-average`, `missing-microbatches`, `repeated-microbatches`, `weighed-alike`, `weighed-by-rows`,
    `weighed-by-replicas`, `other-weights`, `sign`, `loss-scale`, `clipped`, `no-zero-grad`, `stage-twice`,
    `other-mode`, `weights-change`, `stale-weights`, `other-batch`, `other-targets`, `tied-weights`, `weight-decay`,
    `swapped`, `passed-back`, `only-their-own`, `missing-gradients`, `no-gradients`, `collinear`, `rounding`,
    `unexplained`, `not-finite`, `random-numbers`.
    """

    code: str
    sentence: str
    factor: float | None = None
    microbatches: tuple[int, ...] = ()
    parameters: dict[str, Compared] = field(default_factory=dict)
    counts: tuple[float, ...] = ()
    residual: float = 0.0

    @property
    def wrong(self) -> tuple[str, ...]:
        """The parameters whose gradients are wrong."""
        return tuple(name for name, each in self.parameters.items() if not each.right)

    def __str__(self) -> str:
        return self.sentence


def diagnose(
    step: Callable[[Any, Any], object],
    model: nn.Module,
    x: Any,
    y: Any,
    loss_fn: LossFunction,
    *,
    microbatches: int | Sequence[int],
    replicas: int = 1,
    forward: Callable[[Any], Any] | None = None,
    reduction: Reduction | None = None,
    trained: Sequence[nn.Module] = (),
    repeat: bool = True,
) -> Diagnosis:
    """Compare the gradients that any training step leaves with plain training's, and name the factor that is wrong.

    Plain training runs `loss_fn(model(x), y)` on each micro-batch, and weighs it as the loss of the whole batch does.
    Plain training computes in the type in which the step's layers give their outputs: bfloat16, if the step is under
    autocast. Gradients, weights, buffers, random state and the batch are restored afterwards; an optimizer's state is
    not.

    Args:
        step: a function of `(x, y)` with what comes between `zero_grad` and `optimizer.step`: a loop, or a schedule's
            step.
        model: leaves its gradients in the `.grad` of its parameters.
        x: the batch, of all replicas.
        y: its targets.
        loss_fn: takes the model's output and the targets, and returns the loss that you mean to train with.
        microbatches: into how many micro-batches the step cuts the batch, all replicas together; or the rows of each.
        replicas: how many replicas share the batch.
        forward: how the model is called, if not as `model(x)`: `lambda x: model(**x)`.
        reduction: as in `Pipeline`, for a loss that cannot be computed from the outputs of all micro-batches joined.
        trained: the modules that the step trains, if not the whole model: this process's stages, for example. Their
            parameters are the model's own, or have their names and weights.
        repeat: whether the step may run again, on another batch and with other weights, to find a cause. It never does
            if there are several processes.

    Example:
        >>> def step(x, y):
        ...     for rows, targets in zip(x.chunk(4), y.chunk(4)):
        ...         loss_fn(model(rows), targets).backward()
        >>> model, loss_fn = nn.Linear(8, 8), nn.MSELoss()
        >>> found = diagnose(step, model, torch.randn(20, 8), torch.randn(20, 8), loss_fn, microbatches=4)
        >>> found.code, found.factor
        ('times-microbatches', 4.0)
        >>> print(found)
        The gradients are 4 times plain training's: 4 is the number of micro-batches.
          try: divide each micro-batch's loss by 4, once

    Raises:
        UsageError: if `microbatches` do not add up to the rows, or a parameter of `trained` is none of the model's.
        LossError: if the batch's loss is no weighted sum of the micro-batches' losses.
    """
    rows, learning = rows_of(x, "x"), _learning(model, trained)
    counts = row_counts(rows, microbatches) if isinstance(microbatches, int) else list(microbatches)
    if sum(counts) != rows or min(counts) < 1:
        raise UsageError(f"microbatches={microbatches!r} are {sum(counts)} rows, and the batch has {rows}")
    repeat = repeat and not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    modules = [each for each in (model, loss_fn, *trained) if isinstance(each, nn.Module)]
    weights = [(each, each.detach().clone()) for module in modules for each in module.parameters()]
    with restored(modules, [x, y]) as rewind:

        def again(x: Any, y: Any) -> tuple[dict[str, list[torch.Tensor]], list[float]]:
            rewind()
            return microbatch_gradients(model, partial(in_types, coarse, run), x, y, loss_fn, counts, reduction)

        def stepped(x: Any, y: Any, times: float | None = None, seed: int | None = None) -> Gradients:
            if times and not repeat:
                raise UsageError("the step must not run again")
            rewind()
            try:
                for parameter, values in weights:
                    overwrite(parameter.data, values * (times or 1.0))
                torch.clear_autocast_cache()  # of copies in a coarser type
                if seed is not None:
                    torch.manual_seed(seed)
                step(x, y)
                return Gradients({name: gradient_of(each).cpu() for name, each in learning.items()})
            finally:
                for parameter, values in weights:
                    overwrite(parameter.data, values)
                torch.clear_autocast_cache()

        run, coarse, start = forward or model, set[torch.dtype](), RandomSnapshot()
        with seen([model, *trained]) as before:
            plain, shares = again(x, y)
        remarks = [f"not verified: {reason}" for reason in unproven_of(model, RandomSnapshot() != start)]
        with seen([model, *trained]) as during:
            left = stepped(x, y)
        coarse |= (during.types - before.types) & {torch.bfloat16, torch.float16}
        if coarse:  # the step's own: plain training in other types would differ by more than its rounding
            plain, shares = again(x, y)
        types = during.types | before.types | {each.dtype for each in learning.values()} | caller_of(model).types
        tolerance = max(_TOLERANCE, *(8 * float(torch.finfo(each).eps) for each in types))
        tables = {name: _products([*plain[name], each]) for name, each in left.items()}
        elements = {name: each.numel() for name, each in learning.items()}
        runs = round(min(during.times(before).values(), default=1.0))
        sizes = Sizes(counts, shares, replicas, _tokens(y, loss_fn), runs, backwards=during.backwards)

        def look(case: _Case, wrong: dict[str, float | None], share: str) -> Finding:
            facts = (left, _summed(plain, learning), wrong, before, during, (x, y), counts)
            train = lambda x, y: _summed(again(x, y)[0], learning)  # noqa: E731
            return cause_of(Evidence(model, *facts, case.alike, train, stepped), share)

        named = sorted(str(each).removeprefix("torch.") for each in types if torch.finfo(each).eps > 1e-6)
        case = _Case(tables, elements, sizes, named, tolerance, remarks, look)
        for seed in range(NEARBY if case.most > tolerance else 0):
            with nearby_weights([model], seed, 0.0):
                near = _summed(again(x, y)[0], learning)
            moved = {name: _products([*plain[name], near[name]]) for name in tables}
            case = replace(case, tolerance=max(case.tolerance, 4 * replace(case, tables=moved).most))
        return case.diagnosis()


def _summed(gradients: dict[str, list[torch.Tensor]], names: Iterable[str]) -> Gradients:
    return Gradients({name: torch.stack(gradients[name]).sum(0) for name in names})


def _learning(model: nn.Module, trained: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters that the step trains, by the model's names."""
    own = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if not own:
        raise UsageError("no parameter of the model requires a gradient: there is nothing to compare")
    if not trained:
        return own
    names = {id(each): name for name, each in own.items()}
    found: dict[str, nn.Parameter] = {}
    for given, parameter in (each for module in trained for each in module.named_parameters()):
        name = names.get(id(parameter), given.replace("_orig_mod.", "").removeprefix("module."))
        if parameter.requires_grad and not (name in own and torch.equal(own[name].cpu(), parameter.cpu())):
            why = "has other weights than the model's" if name in own else "is none of the model's that learn"
            raise UsageError(f"{given} in trained {why}\n  try: load the model's state_dict into it first")
        if parameter.requires_grad:
            found[name] = parameter
    return found


def _tokens(y: Any, loss_fn: object) -> dict[int, str]:
    """Return the numbers that a loss may average over: of rows, of targets, of those that are not ignored."""
    ignored, found = getattr(loss_fn, "ignore_index", -100), dict[int, str]()
    for each in tensors_of(y):
        found[int((each != ignored).sum())] = "targets that are not ignored"
        found |= {each.numel(): "targets", len(each): "rows"}
    return found


# ── Counting ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _products(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the inner products of what each micro-batch adds and of what the step left, which is the last."""
    pieces = zip(*(flat([each]).split(_AT_ONCE) for each in gradients), strict=True)
    return torch.stack([rows @ rows.T for rows in (torch.stack(each).double() for each in pieces)]).sum(0)


@dataclass(frozen=True)
class _Case:
    tables: dict[str, torch.Tensor]  # of each parameter: the inner products
    elements: dict[str, int]
    sizes: Sizes
    coarse: list[str]  # the types coarser than float32 in which the step computes
    tolerance: float
    remarks: list[str]  # what cannot be verified
    look: Callable[[_Case, dict[str, float | None], str], Finding]  # for what counts do not explain

    def diagnosis(self) -> Diagnosis:
        """Find the parameters that are wrong, and explain those that have a gradient."""
        if not all(bool(table.isfinite().all()) for table in self.tables.values()):
            plain = all(bool(table[:-1, :-1].isfinite().all()) for table in self.tables.values())
            where = "Gradients of the step" if plain else "Gradients of plain training, without the step,"
            return self._result(Finding("not-finite", f"{where} are NaN or infinite: there is nothing to compare."))
        rest = self._rest(self._ones)
        if max(rest.values()) > _TOLERANCE and self.tolerance > _MOST_ROUNDING:
            return self._result(
                Finding("rounding", "Rounding errors decide the gradients: outputs equal their targets.")
            )
        miscounted, doubt = self._miscounted()
        wrong = [name for name, each in rest.items() if each > self.tolerance] or miscounted
        silent = [name for name in wrong if not self.tables[name][-1, -1]]
        if silent and not any(table[-1, -1] for table in self.tables.values()):
            return self._result(Finding("no-gradients", "The step left no gradients."), wrong=silent)
        loud = [name for name in wrong if name not in silent]
        found, silent = self._explained(loud, silent) if loud else (self._right(doubt, silent), silent)
        if not silent:
            return found
        missing = f"The step left no gradient in {listed(silent)}, where plain training leaves one."
        first = self._result(Finding("missing-gradients", missing)).sentence
        others = f"Of the others: {found}" if loud else "The others are right."
        return replace(found, code="missing-gradients", sentence=f"{first}\n{others}")

    @property
    def most(self) -> float:
        """The largest difference of a parameter's gradient from plain training's, relative to what is added up."""
        return max(self._rest(self._ones).values())

    @property
    def _ones(self) -> torch.Tensor:
        return torch.ones(len(self.sizes.rows), dtype=torch.double)

    def _miscounted(self) -> tuple[list[str], bool]:
        """Return the parameters, if counts are wrong where rounding may change a gradient by more; and a doubt.

        Rounding falls on all elements nearly at random, so it hardly changes counts. The doubt is whether it hides one.
        """
        names = [name for name, each in self.tables.items() if each[-1, -1]]
        counts, slack, unclear = self._fit([*self.tables])
        table, off = self._table([*self.tables]), (counts - 1).abs().nan_to_num(0.0)
        off[unclear] = 0.0
        far = float(off.max()) > max(_OFF, slack)
        explains = 2 * _left(table, counts) < _left(table, self._ones)
        return names if far and explains else [], far or bool(unclear)

    def _right(self, doubt: bool, silent: list[str]) -> Diagnosis:
        many = f"{len(self._ones)} micro-batch{'es' * (len(self._ones) > 1)}"
        words = f"All {len(self.tables)} gradients match plain training with the same {many} within {self.most:.1e}"
        words += f", in {', '.join(self.coarse)}." if self.coarse else "."
        if doubt and self.most > _TOLERANCE:
            words += "\nSuch rounding may hide a micro-batch: look again in float32, with fresh weights."
        return self._result(Finding("right", words, 1.0), self._ones, self.most, silent)

    def _fit(self, names: list[str]) -> tuple[torch.Tensor, float, list[int]]:
        """Return each micro-batch's count, by how much counts may be off, and for which that is too much.

        How far off follows from what is left, as in any least-squares fit, and from how alike gradients are.
        """
        table, elements = self._table(names), sum(self.elements[name] for name in names)
        norms, counts = _norms(table)[:-1], torch.full([len(table) - 1], math.nan, dtype=torch.double)
        live = (norms > _LEAST * norms.max()).nonzero().flatten()
        if not len(live):
            return counts, 0.0, []
        values, vectors = torch.linalg.eigh(table[live][:, live] / norms[live].outer(norms[live]))
        values = values.clamp(1e-12)
        counts[live] = vectors @ (vectors.T @ (table[live, -1] / norms[live]) / values) / norms[live]
        noise = _left(table, counts) / math.sqrt(max(1, elements - len(live)))
        noise = max(noise, _ROUNDING * float(_norms(table, counts)[:-1].norm()))
        off = noise / norms[live] * (vectors.square() / values).sum(1).sqrt()
        most = float(counts[live].abs().max())
        unclear = [int(m) for m, each in zip(live, off, strict=True) if not each <= _UNCLEAR * most]
        return counts, max(max(_ALIKE, self.tolerance / 2) * most, 3 * float(off.max())), unclear

    def _explained(self, names: list[str], silent: list[str]) -> tuple[Diagnosis, list[str]]:
        """Explain the wrong gradients, and all others that the explanation fits; return which it leaves silent."""
        counts, slack, unclear = self._fit(names)
        left = self._rest(counts)
        worst = max(names, key=lambda name: left[name])
        if left[worst] > self.tolerance:
            share = f"{left[worst]:.1%} of the gradient of {worst} comes from no micro-batch."
            factors = {name: each.factor for name, each in self._compared({*names, *silent}).items() if not each.right}
            strict = replace(self, tolerance=min(self.tolerance, left[worst] / 8))  # an explanation leaves little
            return self._result(self.look(strict, factors, share), counts, left[worst], [*names, *silent]), silent
        others = [name for name, table in self.tables.items() if name not in silent and table.any()]
        about = names if any(left[name] > self.tolerance for name in others) else others
        norm = math.sqrt(float(self._table(names)[-1, -1]))
        sizes = replace(self.sizes, norm=norm, about=about)
        found = self._unclear(names, unclear) if unclear else named(counts, slack, sizes)
        counts[unclear] = math.nan
        still = [name for name in silent if left[name] > self.tolerance]
        return self._result(found, counts, left[worst], [*about, *still]), still

    def _unclear(self, names: list[str], unclear: list[int]) -> Finding:
        """Say that micro-batches cannot be told apart, and of what the gradients are a multiple, if they are."""
        table = self._table(names)
        factor = float(table[-1, :-1].sum() / table[:-1, :-1].sum())
        alike = self._rest(factor * self._ones)
        multiple = all(alike[name] <= self.tolerance for name in names)
        fact = f"The gradients are {factor:.6g} times plain training's" if multiple else "The gradients are wrong"
        words = f"{fact}, but micro-batches {listed(unclear)} have gradients too alike to tell which of them counted."
        return Finding("collinear", words, factor if multiple else None, tuple(unclear))

    def _table(self, names: list[str]) -> torch.Tensor:
        return torch.stack([self.tables[name] for name in names]).sum(0)

    def _rest(self, counts: torch.Tensor | dict[str, torch.Tensor]) -> dict[str, float]:
        """Return what these counts do not explain of each parameter's gradient, relative to what is added up."""
        each = counts if isinstance(counts, dict) else dict.fromkeys(self.tables, counts)
        return relative({name: _left(table, each[name]) for name, table in self.tables.items()}, self._added(each))

    def _added(self, counts: dict[str, torch.Tensor]) -> dict[str, float]:
        norms = {name: _norms(table, counts[name]) for name, table in self.tables.items()}
        return {name: max(float(each[:-1].sum()), float(each[-1])) for name, each in norms.items()}

    def alike(self, differences: Gradients) -> bool:
        """Return whether differences of some gradients are no more than rounding."""
        off = {name: float(each.double().norm()) for name, each in differences.items()}
        share = relative(
            {name: off.get(name, 0.0) for name in self.tables}, self._added(dict.fromkeys(self.tables, self._ones))
        )
        return max(share.values()) <= self.tolerance

    def _compared(self, wrong: set[str]) -> dict[str, Compared]:
        """Compare each parameter's gradient with plain training's, if these are wrong and the others right."""
        sums = {name: table[:, :-1].sum(1) for name, table in self.tables.items()}
        multiples = {name: float((each[-1] / each[:-1].sum()).nan_to_num(0.0, 0.0)) for name, each in sums.items()}
        off, rest = self._rest(self._ones), self._rest({name: each * self._ones for name, each in multiples.items()})
        factors = {name: each if rest[name] <= self.tolerance else None for name, each in multiples.items()}
        factors |= {name: 1.0 for name in factors if name not in wrong}
        return {name: Compared(name not in wrong, each, off[name]) for name, each in factors.items()}

    def _result(
        self, found: Finding, counts: torch.Tensor | None = None, residual: float = 0.0, wrong: Sequence[str] = ()
    ) -> Diagnosis:
        """Return a diagnosis: the finding, which parameters are wrong, what else is known, and what to try."""
        hint = HINTS.get(found.code, "").format(microbatches=len(self._ones), replicas=self.sizes.replicas)
        remarks = self.remarks * (found.code in ("right", "unexplained", "no-gradients"))
        parameters = self._compared({*wrong}) if found.code not in ("not-finite", "rounding") else {}
        sentence = "\n".join([found.words, *_grouped(parameters), *remarks, *([f"  try: {hint}"] if hint else [])])
        numbers = () if counts is None else tuple(round(each, 6) for each in counts.tolist())
        return Diagnosis(found.code, sentence, found.factor, found.microbatches, parameters, numbers, residual)


def _grouped(parameters: dict[str, Compared]) -> list[str]:
    """Return which parameters are right, and which are wrong by which factor; nothing if all are alike."""
    groups: dict[str, list[str]] = {}
    for name, each in parameters.items():
        times = "no multiple" if each.factor is None else f"{each.factor:.4g} times"
        groups.setdefault("right" if each.right else f"wrong, {times}", []).append(name)
    return [f"  {what}: {listed(names)}" for what, names in groups.items()] if len(groups) > 1 else []


def _norms(table: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
    """Return the norms of what the micro-batches add, each as often as it counts, and of what the step left."""
    norms = table.diagonal().clamp(min=0.0).sqrt()
    return norms if counts is None else norms * _signed(counts).abs()


def _left(table: torch.Tensor, counts: torch.Tensor) -> float:
    return math.sqrt(max(0.0, float(_signed(counts) @ table @ _signed(counts))))


def _signed(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat([counts.nan_to_num(0.0), -torch.ones(1, dtype=torch.double)])
