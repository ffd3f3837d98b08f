"""`diagnose`: whether any training step leaves plain training's gradients; if not, which factor is wrong.

Each micro-batch adds its own gradient. `diagnose` computes them one by one and finds, by least squares, how often each
is in the gradient that the step has left. These *counts* show what is wrong. Of four micro-batches:

    1  1  1  1   right                            0  0  0  1   only the last one counted
    4  4  4  4   summed, not averaged             1  2  1  1   one counted twice
    ½  1  2  4   divided again at each addition   a rest       what no micro-batch explains
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pipelab.engine.stage.batch import Reduction, counts_of, ready_counts, rows_of
from pipelab.engine.stage.errors import in_short
from pipelab.engine.stage.inputs import unmarked
from pipelab.engine.stage.pytree import tensors_of
from pipelab.engine.stage.snapshot import RandomSnapshot, restored
from pipelab.engine.stage.streams import LOSS, latest
from pipelab.engine.verify.causes import CAUSES, CUT_BEFORE, Cause, Finding, Whole, cause_of, finding, named
from pipelab.engine.verify.reference import (
    ANEW,
    NEARBY,
    OTHERWISE,
    Counts,
    Evidence,
    Gradients,
    LossFunction,
    Sizes,
    Trial,
    cast,
    coarse_in,
    least_of,
    listed,
    nearby_weights,
    products,
    rest_of,
    rounded,
    rounding_of,
    seen,
    unproven_of,
)
from pipelab.errors import UsageError, counted, require_size

_TOLERANCE = 1e-3
"""Largest unexplained part of a gradient, relative to the micro-batches': rounding is far below, one in 1000 is not."""

_MOST_ROUNDING = 0.1  # with a larger tolerance than this, nothing can be named


class Compared(NamedTuple):
    """How the gradient of one parameter compares with plain training's; if right, its factor is 1."""

    right: bool  # whether they differ by rounding only
    factor: float | None  # what it is multiplied by; `None` if it is no multiple
    off: float  # how far they differ, relative to the micro-batches' gradients (2-norm)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong with a training step's gradients, if anything is.

    Attributes:
        code: `"right"`, or the kind of mistake.
        factor: what the gradients are multiplied by; for a moving average, what they are divided by; `None` if several.
        microbatches: which micro-batches the code is about: the only ones that counted, those that counted more than
            once, those that cannot be told apart, those with another sign; empty if it is about all.
        parameters: for each parameter, by name, whether its gradient is right, and its own factor.
        counts: how often each micro-batch is in the gradients, 1 being right; NaN for one that adds nothing in plain
            training either. Empty if there is nothing to count.
        residual: the largest share of a gradient that the counts do not explain (2-norm, of the micro-batches').
        sentence: the diagnosis in words, with what to try.

    The codes are those of `causes.CAUSES`, and `right` and `scaled` (by another number, or one with several meanings).
    From `spread` on, the step is right for its micro-batches, but not for the whole batch.
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
    batch_dim: int = 0,
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
        batch_dim: the dimension of the rows of `x` and `y`, as in `Pipeline`. The step gets `x` and `y` as they are,
            and the model without marks such as `pipelab.whole`.
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
        UsageError: if `microbatches` do not add up to the rows, or a parameter of `trained` is not the model's.
        LossError: if the batch's loss is not a weighted sum of the micro-batches' losses.
    """
    many = require_size("microbatches", microbatches if isinstance(microbatches, int) else len(microbatches))
    learning = _learning(model, trained)
    own = ready_counts(x, "x", many, batch_dim) or ready_counts(y, "y", many, batch_dim)
    counts = counts_of(x, "x", many, batch_dim, own) if isinstance(microbatches, int) else list(microbatches)
    rows = sum(own or [rows_of(x, "x", batch_dim)])
    if sum(counts) != rows or min(counts) < 1:
        raise UsageError(f"microbatches={microbatches!r} are {counted(sum(counts), 'row')}, and the batch has {rows}")
    repeat = repeat and not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    modules = [module for module in (model, loss_fn, *trained) if isinstance(module, nn.Module)]
    with restored(modules, [x, y]) as rewind:
        trial = Trial(step, model, modules, learning, forward or model, loss_fn, counts, reduction, rewind, repeat)
        trial = replace(trial, batch_dim=batch_dim)
        return _diagnosis(_evidence(trial, [model, *trained], (x, y), replicas))


def _learning(model: nn.Module, trained: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters that the step trains, by the model's names."""
    own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not own:
        raise UsageError("no parameter of the model requires a gradient: there is nothing to compare")
    if not trained:
        return own
    names, found = {parameter: name for name, parameter in own.items()}, dict[str, nn.Parameter]()
    pairs = [pair for module in trained for pair in module.named_parameters() if pair[1].requires_grad]
    for given, parameter in pairs:
        name = names.get(parameter, given.replace("_orig_mod.", "").removeprefix("module."))
        if name not in own or not torch.equal(own[name].cpu(), parameter.cpu()):
            why = "has other weights than the model's" if name in own else "is not a parameter of the model that learns"
            raise UsageError(f"{given} in trained {why}\n  try: load the model's state_dict into it first")
        found[name] = parameter
    return found


def _evidence(trial: Trial, watched: Sequence[nn.Module], batch: tuple[Any, Any], replicas: int) -> Evidence:
    """Run plain training and the step; return what is known."""
    start, last = RandomSnapshot(), latest()
    with seen(watched) as before:
        alone, shares = trial.each_alone(*batch)
    draws = OTHERWISE if RandomSnapshot() != start else ""
    with seen(watched) as during:
        left = trial.stepped(*batch, again=False)
    step = latest()
    if draws and step is not None and step is not last and step.drew <= {LOSS, *dict(trial.model.named_modules())}:
        trial, draws = replace(trial, seed=step.seed), ANEW
        alone, shares = trial.each_alone(*batch)
    coarse = (during.types - before.types) & {torch.bfloat16, torch.float16}
    if coarse:  # the step's own: plain training in other types would differ by more than its rounding
        trial = replace(trial, types=frozenset(coarse))
        alone, shares = trial.each_alone(*batch)
    loud = [name for name, norm in left.norms.items() if norm > least_of(left.norms)]
    computed = during.types | before.types | {tensor.dtype for tensor in left.values()} | trial.caller.types
    sums = {kind for name in loud for kind in coarse_in(left[name]) - coarse_in(alone[0][name])}
    casts, sums = (set(), set()) if coarse else (during.casts - before.casts, sums)  # layers make such numbers
    types = computed | sums | {kind for _, kind in casts}
    runs = round(min(during.times(before).values(), default=1.0))
    sizes = Sizes(trial.rows, shares, replicas, _tokens(batch[1], trial.loss_fn), runs)
    plain, tables, least = trial.summed(alone), products(alone, left), rounding_of(types - computed) / 8
    tolerance = max(_TOLERANCE, rounding_of(computed), least)  # the types' own rounding, and one of a cast
    evidence = Evidence(trial, batch, left, plain, tables, before, during, sizes, tolerance, types, draws)
    for seed in range(NEARBY if evidence.most > tolerance else 0):
        with nearby_weights([trial.model], seed, 0.0), rounded(trial.model, casts):
            near = trial.plainly(*batch)
        for kind in sums:
            near = Gradients({name: cast(gradient, kind) for name, gradient in near.items()})
        tolerance = max(tolerance, 4 * replace(evidence, tables=products(alone, near)).most)
    return replace(evidence, tolerance=tolerance)


def _tokens(y: Any, loss_fn: object) -> dict[int, str]:
    """Return the numbers that a loss may average over: of rows, of targets, of those that are not ignored."""
    ignored, found = getattr(loss_fn, "ignore_index", -100), dict[int, str]()
    for target in tensors_of(y):
        found[int((target != ignored).sum())] = "targets that are not ignored"
        found |= {target.numel(): "targets", len(target): "rows"}
    return found


# ── What the evidence says ────────────────────────────────────────────────────────────────────────────────────────────


def _diagnosis(e: Evidence) -> Diagnosis:
    """Find the parameters that are wrong, and explain those that have a gradient."""
    if incomparable := _incomparable(e):
        return _with_words(e, incomparable)
    counts = e.fit(e.tables)
    wrong = [name for name, off in e.rest(e.ones).items() if off > e.tolerance] or _miscounted(e, counts)
    silent = [name for name in wrong if not e.tables[name][-1, -1]]
    if silent and not any(table[-1, -1] for table in e.tables.values()):
        return _with_words(e, finding("no-gradients"), wrong=silent)
    loud = [name for name in wrong if name not in silent]
    found, silent = _explained(e, loud, silent) if loud else (_right(e, counts, silent), silent)
    if not silent:
        return found if loud else _at_once(e, found)
    first = _with_words(e, finding("missing-gradients", listed(silent))).sentence
    others = f"Of the others: {found}" if loud else "The others are right."
    return replace(found, code="missing-gradients", sentence=f"{first}\n{others}")


def _incomparable(e: Evidence) -> Finding | None:
    tables = e.tables.values()
    if not all(table.isfinite().all() for table in tables):
        plain = all(table[:-1, :-1].isfinite().all() for table in tables)
        where = "Gradients of the step" if plain else "Gradients of plain training, without the step,"
        return finding("not-finite", where)
    most = max(_TOLERANCE, rounding_of(e.types))
    return finding("rounding") if e.most > most and e.tolerance > _MOST_ROUNDING else None


def _right(e: Evidence, counts: Counts, silent: list[str]) -> Diagnosis:
    many = counted(len(e.sizes.rows), "micro-batch")
    match = f"All {len(e.tables)} gradients match" if len(e.tables) != 1 else "The only gradient matches"
    coarse = sorted(str(kind).removeprefix("torch.") for kind in e.types if torch.finfo(kind).eps > 1e-6)
    types = f", in {', '.join(coarse)}" if coarse else ""
    words = f"{match} plain training with the same {many} within {e.most:.1e}{types}."
    if (counts.unclear or counts.are_off) and e.most > _TOLERANCE:
        words += "\nSuch rounding may hide a micro-batch: look again in float32, with fresh weights."
    return _with_words(e, Finding("right", words, 1.0), e.ones, e.most, silent)


def _at_once(e: Evidence, right: Diagnosis) -> Diagnosis:
    """Compare with the batch at once too, of a step that is right for its micro-batches."""
    trial, (x, y) = e.trial, e.batch
    unproven = unproven_of(trial.model, e.draws and ANEW)
    if any(ready_counts(given, "", len(trial.rows), trial.batch_dim) for given in (x, y)):
        unproven += (CUT_BEFORE,)
    if not unproven:
        plain = trial.reference(x, y, e.sizes.shares)
        run = lambda given: trial.run(given[0])  # noqa: E731 - beside it, a pipeline has keywords
        plain = replace(plain, rows=[(rows, {}) for rows in plain.rows], forward=run)
        x, y = unmarked(e.batch)
        trial.rewind()
        try:
            whole = Whole(trial.model, run, plain, (x, {}), y, trial.reduction, trial.batch_dim, trial.rewind, e.types)
            found = whole.difference(plain.gradients())
        except Exception as error:  # noqa: BLE001 - it ran on each micro-batch
            unproven = (f"the model does not take the whole batch ({in_short(error)})",)
        else:
            words = f"{right.sentence}\nRight for these micro-batches, not for the batch: {found.why}"
            return replace(right, code=found.code, sentence=words) if found.why else right
    return replace(right, sentence="\n".join([right.sentence, *(f"not verified: {each}" for each in unproven)]))


def _explained(e: Evidence, names: list[str], silent: list[str]) -> tuple[Diagnosis, list[str]]:
    """Explain the wrong gradients, and all others that the explanation fits; return which it leaves silent."""
    counts = e.fit(names)
    left, before = e.rest(counts.numbers), e.rest(e.ones)
    worst = max(names, key=lambda name: left[name])
    little = 1 / 2 if e.tolerance > _TOLERANCE else 1 / 8  # an explanation leaves little, and rounding may be much
    if left[worst] > min(e.tolerance, little * max(before[name] for name in names)):
        wrong, strict = [*names, *silent], min(e.tolerance, left[worst] / 8)
        factors = e.factors()
        more = replace(e, tolerance=strict, wrong={name: factors[name] for name in e.tables if name in wrong})
        found = cause_of(more, share := f"{left[worst]:.1%} of the gradient of {worst} comes from no micro-batch.")
        if found.code == "unexplained" and e.draws == OTHERWISE:
            found = finding("not-compared", share)
        return _with_words(e, found, counts.numbers, left[worst], wrong), silent
    others = [name for name, table in e.tables.items() if name not in silent and table.any()]
    about = names if any(left[name] > e.tolerance for name in others) else others
    found = _unclear(e, names, counts) if counts.unclear else named(counts)
    counts.numbers[[*counts.unclear]] = math.nan
    still = [name for name in silent if left[name] > e.tolerance]
    return _with_words(e, found, counts.numbers, left[worst], [*about, *still]), still


def _with_words(
    e: Evidence, found: Finding, counts: torch.Tensor | None = None, residual: float = 0.0, wrong: Sequence[str] = ()
) -> Diagnosis:
    """Return a diagnosis: the finding, which parameters are wrong, what else is known, and what to try."""
    parameters = _compared(e, wrong) if found.code not in ("not-finite", "rounding") else {}
    lines = [found.words, *_grouped(parameters)]
    if found.code in ("unexplained", "not-compared", "no-gradients"):
        lines += [f"not verified: {reason}" for reason in unproven_of(e.trial.model, e.draws)]
    if hint := CAUSES.get(found.code, Cause()).hint:
        lines.append("  try: " + hint.format(microbatches=len(e.sizes.rows), replicas=e.sizes.replicas))
    numbers = () if counts is None else tuple(round(count, 6) for count in counts.tolist())
    return Diagnosis(found.code, "\n".join(lines), found.factor, found.microbatches, parameters, numbers, residual)


def _miscounted(e: Evidence, counts: Counts) -> list[str]:
    """Return the parameters, if counts are wrong where rounding changes a gradient by more, but hardly its counts."""
    table = e.table(e.tables)
    explains = 2 * rest_of(table, counts.numbers) < rest_of(table, e.ones)
    return [name for name, own in e.tables.items() if own[-1, -1] and explains and counts.are_off]


def _unclear(e: Evidence, names: list[str], counts: Counts) -> Finding:
    """Say that micro-batches cannot be told apart, and of what the gradients are a multiple, if they are."""
    table = e.table(names)
    factor = float(table[-1, :-1].sum() / table[:-1, :-1].sum())
    alike = e.rest(factor * e.ones)
    multiple = all(alike[name] <= e.tolerance for name in names)
    fact = f"The gradients are {factor:.6g} times plain training's" if multiple else "The gradients are wrong"
    about = counts.unclear
    return finding("collinear", fact, listed(about), factor=factor if multiple else None, microbatches=about)


def _compared(e: Evidence, wrong: Sequence[str]) -> dict[str, Compared]:
    """Compare each parameter's gradient with plain training's, if these are wrong and the others right."""
    off, factors = e.rest(e.ones), e.factors()
    return {name: Compared(name not in wrong, factors[name] if name in wrong else 1.0, off[name]) for name in e.tables}


def _grouped(parameters: dict[str, Compared]) -> list[str]:
    """Return which parameters are right, and which are wrong by which factor; nothing if all are alike."""
    groups: dict[str, list[str]] = {}
    for name, compared in parameters.items():
        times = "no multiple" if compared.factor is None else f"{compared.factor:.4g} times"
        groups.setdefault("right" if compared.right else f"wrong, {times}", []).append(name)
    return [f"  {what}: {listed(names)}" for what, names in groups.items()] if len(groups) > 1 else []
