"""Why gradients are wrong: every cause with its sentence and what to try, in one table.

`named` reads counts. Where no counts explain the gradients, each cause that can looks at the evidence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from pipelab.engine.verify.reference import Counts, Evidence, Gradients, listed, shown


class Finding(NamedTuple):
    """What is wrong: the code, the factor and the micro-batches of a `Diagnosis`, and the fact in words."""

    code: str
    words: str
    factor: float | None = None
    microbatches: tuple[int, ...] = ()


class Cause(NamedTuple):
    """What to say of a cause, what to try, and what finds it in the evidence where no counts do."""

    words: str = ""
    hint: str = ""
    explains: Callable[[Evidence], object] | None = None


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
    """Find a divisor that was applied again after every so many micro-batches; yield it, and how many.

    The first division may come with the second addition, as in `grad = (grad + new) / 2`.
    """
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
    negative, none, once, more = map(_where, (times < 0, times == 0, times == 1, times > 1))
    if negative:
        words = f"Of micro-batches 0 to {among}, {listed(negative)} with the wrong sign: {counts.shown}."
        return Finding("sign", words, factor, negative)
    if not more:
        return finding("missing-microbatches", among, listed(once), counts.shown, factor=factor, microbatches=once)
    repeated = f"{listed(more)} repeatedly" + (f", and {listed(none)} never" if none else "")
    return finding("repeated-microbatches", among, repeated, counts.shown, factor=factor, microbatches=more)


def _where(which: torch.Tensor) -> tuple[int, ...]:
    return tuple(which.nonzero().flatten().tolist())


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


def _tied(e: Evidence) -> list[str]:
    wrong = {e.trial.model.get_parameter(name) for name in e.wrong}
    every = [(name, parameter) for name, parameter in e.trial.model.named_parameters(remove_duplicate=False)]
    uses = Counter(parameter for _, parameter in every)
    tied = all(uses[parameter] > 1 for parameter in wrong)
    return [name for name, parameter in every if tied and parameter in wrong]


def _decay(e: Evidence) -> str:
    rest, weights = e.left - e.plain, {name: e.trial.model.get_parameter(name).detach().cpu() for name in e.wrong}
    along, size = (sum(float((some[name] * weights[name]).sum()) for name in e.wrong) for some in (rest, weights))
    off = Gradients({name: rest[name] - along / size * weights[name] for name in e.wrong})
    return f"{along / size:.3g}" if e.rounding(off) else ""


def _shift(e: Evidence) -> str:
    rows, (x, y) = e.sizes.rows, e.batch
    for by in (rows[0], -rows[0], 1, -1):
        shifted = e.trial.taken(y, range(by, by + sum(rows)))
        if e.rounding(e.left - e.trial.plainly(x, shifted)):
            return f"{abs(by)} {'further on' if by > 0 else 'before'}"
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
    layers = dict[str, set[bool]]()  # whether gradients of each are wrong
    for name in e.plain:
        layers.setdefault(name.rpartition(".")[0], set()).add(name in e.wrong)
    states = [*layers.values()]
    wrong = states.count({True})
    if {False} not in states or states != [{True}] * wrong + [{False}] * (len(states) - wrong):
        return ""
    return [*layers][wrong]


def _random(e: Evidence) -> bool:
    if any(isinstance(layer, _DropoutNd) and layer.training and layer.p for layer in e.trial.model.modules()):
        return False  # `unproven_of` says so
    same, other = (
        e.rounding(e.trial.stepped(*e.batch, seed=seed) - e.left) for seed in (None, torch.initial_seed() + 1)
    )
    return same and not other


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
    "repeated-microbatches": Cause("Of micro-batches 0 to {}, {}: {}.", "look for an index that is off by one"),
    "other-weights": Cause("The micro-batches do not count alike: {}."),
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
    "tied-weights": Cause(
        "{} share a weight: of one of them, its gradient is lost.", "add up the gradients of all", _tied
    ),
    "weight-decay": Cause("The gradients contain {} times the weights.", "leave it to the optimizer", _decay),
    "other-targets": Cause("Outputs meet the targets of other rows: {}.", "number micro-batches in both", _shift),
    "swapped": Cause("Gradients are swapped: {}.", "look for a flat buffer that is cut in another order", _swapped),
    "no-zero-grad": Cause(
        "When it runs again, the step adds to what it has left before.",
        _EMPTY,
        lambda e: e.rounding(e.trial.stepped(*e.batch) - e.left - e.plain),
    ),
    "other-batch": Cause("On another batch, the step {}.", "look for a batch of another step", _other_batch),
    "stale-weights": Cause("With new weights the step leaves older gradients: it computes with a copy.", _COPY, _stale),
    "random-numbers": Cause("With other random numbers, the step leaves other gradients.", _NOISE, _random),
    "passed-back": Cause("From {0} to the loss all is right: what {0} passes back is wrong, or lost.", _BACK, _border),
    "only-their-own": Cause(
        "What they pass back is right, and their own gradients are wrong.",
        _OWN,
        lambda e: [*(e.plain.keys() - e.wrong)],
    ),
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
        "y.view({shape})",
    ),
    "rows-mixed": Cause(
        "outputs and losses are equal: but {} and the layers before it have other gradients than with the whole batch",
        "look, from there to the loss, for a hook, or for an autograd function whose backward branches on values",
    ),
    "reduction": Cause(
        "reduction is {}, which weighs the micro-batches {}, and in loss_fn of the whole batch they weigh {}",
        "reduction='sum' for a loss that sums, or a function from a target to the weight of its micro-batch",
    ),
    # what `verify` tries out, if the loss or the model is no sum over rows
    "pairs-of-rows": Cause(
        "loss_fn compares rows with each other: one row alone has no gradient, and a micro-batch has fewer pairs",
        f"{_ONE_BY_ONE}; or one micro-batch, or earlier rows without gradients to compare with",
    ),
    "loss-of-several-rows": Cause(
        "loss_fn of the whole batch is no weighted sum of the micro-batches': it takes a statistic of several rows, as "
        "an auxiliary loss does that balances experts",
        f"{_ONE_BY_ONE}; or a loss that is a mean or a sum over rows",
    ),
    "state-between-calls": Cause(
        "{} changes in a forward, and with it the next output: micro-batches are several calls, the whole batch is one",
        f"update it once a step, after the last backward; or {_ONE_BY_ONE}",
    ),
    "sequence-first": Cause(
        "x is cut along dimension {}, and the model is right for parts of it along dimension {}{}",
        "Pipeline(..., batch_dim=1), if x is [tokens, rows, ...]; batch_first=True, if it is [rows, tokens, ...]",
    ),
    "not-by-rows": Cause(
        "rows of the output depend on other rows of {}: part of it means something else than all of it",
        "pipelab.whole(...) around what every micro-batch needs all of, such as a mask; or "
        "pipelab.microbatches([...]), each with its own offsets",
    ),
    "auxiliary-output": Cause(
        "{} depends on the other rows of its micro-batch, and {} does not: an auxiliary loss, as one that balances "
        "experts, is another one for each micro-batch",
        _ONE_BY_ONE,
    ),
    "branch": Cause(
        "{} has other values for the same rows in the whole batch, and does not follow small changes of its other "
        "rows: it branches on values",
        "a decision for each row, such as torch.where",
    ),
    "statistic": Cause(
        "{} is the first layer that gives the same rows other values in the whole batch: a mean or another statistic "
        "of several rows",
        f"a statistic of each row; or {_ONE_BY_ONE}",
    ),
    "loss-beside": Cause(
        "the loss depends on {}, beside the model's output, and is no weighted sum over micro-batches",
        f"return it with the output, so that it passes through the stages; {_ONE_BY_ONE}",
    ),
    "injected": Cause(
        "{} adds a gradient in the backward that is not the loss's: as much for each of the {microbatches} "
        "micro-batches as for the whole batch",
        f"multiply it by the micro-batch's share of the batch, 1/{{microbatches}}; then {_ONE_BY_ONE}",
    ),
    "not-finite-at": Cause(
        "micro-batch {} is the first that makes one{}",
        "Pipeline(..., watch_nan=True), whose step names the first action that makes one",
    ),
}
"""By code, every cause that `diagnose` and `verify` name."""


def finding(code: str, *found: object, factor: float | None = None, microbatches: tuple[int, ...] = ()) -> Finding:
    """Return a cause of the table, with what was found in its sentence."""
    return Finding(code, CAUSES[code].words.format(*found), factor, microbatches)


def said(code: str, *found: object, **more: object) -> str:
    """Return a cause of the table and what to try, as the lines of an error."""
    words, hint = CAUSES[code].words.format(*found, **more), CAUSES[code].hint.format(**more)
    return (f"  {words}\n" if words else "") + f"  try: {hint}"


def cause_of(evidence: Evidence, share: str) -> Finding:
    """Return the first cause that the evidence shows, or none; `share` says how much no counts explain."""
    for code, cause in CAUSES.items():
        with suppress(Exception):  # a step that does not run again, a loss that takes no other targets
            if found := cause.explains and cause.explains(evidence):
                words = cause.words.format(listed(found) if isinstance(found, list) else found)
                return Finding(code, f"{share}\n{words}")
    return Finding("unexplained", share)
