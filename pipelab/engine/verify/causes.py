"""Why gradients are wrong: what the counts of micro-batches say, and what else is seen or tried out.

`named` reads counts. Where no counts explain the gradients, each entry of `CAUSES` looks for one mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from pipelab.engine.stage.batch import join, split_batch
from pipelab.engine.verify.reference import Seen

_MOST_TIMES = 8
"""A micro-batch that seems to count more often than this does not count a whole number of times."""

_MOST_NAMES = 6
_MOST_COUNTS = 16


HINTS = {
    "times-microbatches": "divide each micro-batch's loss by {microbatches}, once",
    "divided-by-microbatches": "divide by {microbatches} once only: in the loss, or in the schedule (scale_grads)",
    "times-tokens": "divide the loss by that number, or use a loss that averages",
    "divided-by-tokens": "divide by that number once only",
    "summed-over-replicas": "divide by {replicas} after the sum, or all-reduce with an average",
    "divided-by-replicas": "average once only; a loss that already counts all replicas' rows needs a sum",
    "moving-average": "divide once, after the last addition; or divide what is added, not what is in .grad",
    "missing-microbatches": "look for what empties .grad in between (zero_grad), and for a loop that ends too early",
    "repeated-microbatches": "look for an index that is off by one, as i - 1 is in the first round",
    "weighed-alike": "weigh each micro-batch's loss by its share of what the loss averages over",
    "weighed-by-rows": "weigh each micro-batch's loss by its share of what the loss averages over",
    "missing-gradients": "look for a detach() before them, or a stage whose backward never runs; if another process "
    "leaves them, pass trained=[…] with what this one trains",
    "sign": "look for a minus too many: a loss to be maximised, a gradient that is subtracted",
    "rounding": "take fresh weights or other targets",
    "collinear": "take another batch, such as random rows, or fewer micro-batches",
    "loss-scale": "divide by the scale once, before the step ends: scaler.unscale_(optimizer)",
    "clipped": "clip once, all gradients together, after the last backward",
    "weighed-by-replicas": "all-reduce how much each replica's loss averages over, and weigh by that",
    "no-zero-grad": "call zero_grad() before each step, and empty every other buffer that gradients are added to",
    "stage-twice": "look for a stage that is called twice, and for retain_graph=True",
    "other-mode": "call model.train() or model.eval() before both",
    "weights-change": "let optimizer.step() run once, after the last backward",
    "tied-weights": "add up the gradients of all layers that share the weight",
    "weight-decay": "leave it to the optimizer, or take weight_decay out of the optimizer",
    "other-targets": "number micro-batches where targets are taken, and compare with the output's number",
    "swapped": "look for a flat buffer or a list that is cut in another order",
    "other-batch": "look for a batch of another step, and for gradients that were there before",
    "random-numbers": "look for noise that is added to gradients, and for dropout that the model has not",
    "stale-weights": "copy the weights after each optimizer.step(), before the next forward",
    "passed-back": "look for a detach(), or for the gradient of another micro-batch, on the way back between them",
    "only-their-own": "look for what is done to their .grad alone, and to what their backward has saved",
    "unexplained": "look for another loss, and for a stage that computes something else",
    "no-gradients": "let the step end before zero_grad(); or pass trained=[…] if it trains a copy of the model",
}
"""What to try, by code."""


class Finding(NamedTuple):
    """What is wrong: the code, the factor and the micro-batches of a `Diagnosis`, and the fact in words."""

    code: str
    words: str
    factor: float | None = None
    microbatches: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """The numbers of a step, which may be factors."""

    rows: list[int]  # of each micro-batch
    shares: list[float]  # of each micro-batch's loss in the loss of the batch
    replicas: int
    tokens: dict[int, str]  # numbers that a loss may average over, and of what
    runs: int = 1  # how often the step's layers ran the batch
    norm: float = 0.0  # of the wrong gradients together
    backwards: Mapping[str, float] = field(default_factory=dict)  # by layer, how many followed each forward
    about: Sequence[str] = ()  # the parameters whose gradients are wrong

    def called(self, number: float, slack: float) -> list[tuple[str, str, str]]:
        """Return what a number is, with the codes for gradients multiplied and divided by it."""
        numbers = [
            (len(self.rows), "the number of micro-batches", "times-microbatches", "divided-by-microbatches"),
            (self.replicas, "the number of replicas", "summed-over-replicas", "divided-by-replicas"),
            (self.runs, "how often the step runs the batch", "no-zero-grad", "scaled"),
            *(
                (size, f"the number of {what}", "times-tokens", "divided-by-tokens")
                for size, what in self.tokens.items()
            ),
        ]
        numbers = [each for each in numbers if each[0] > 1]
        every = {self.backwards.get(name.rpartition(".")[0], 1.0) for name in self.about}
        ran = every if len(every) == 1 else set()
        others = [
            *((a[0] * b[0], f"{a[1]} times {b[1]}", "scaled", "scaled") for a, b in combinations(numbers, 2)),
            *((2**power, f"2^{power}, as a GradScaler's scale", *["loss-scale"] * 2) for power in range(8, 33)),
            *((times, "how often their backward ran", "stage-twice", "scaled") for times in ran if times > 1),
        ]
        fits = [[each[1:] for each in some if abs(number / each[0] - 1) <= slack] for some in (numbers, others)]
        return fits[0] or fits[1]

    def apart(self) -> Iterator[tuple[int, list[float]]]:
        """Yield weights of micro-batches in a mean of the means of so many replicas, which may take them in turns."""
        many = len(self.shares)
        for replicas in (each for each in range(2, many) if many % each == 0):
            for own in ([m * replicas // many for m in range(many)], [m % replicas for m in range(many)]):
                totals = [sum(share for share, r in zip(self.shares, own, strict=True) if r == each) for each in own]
                yield replicas, [share / (total or 1.0) for share, total in zip(self.shares, totals, strict=True)]

    def known(self, factor: float, slack: float) -> bool:
        """Return whether a factor is 1, or is or divides by a number of the step."""
        size = max(abs(factor), 1 / abs(factor))
        return size - 1 <= slack or bool(self.called(size, slack))


def named(counts: torch.Tensor, slack: float, sizes: Sizes) -> Finding:
    """Return what wrong counts say; those that differ by at most `slack` are equal, and NaN says nothing.

    Example:
        >>> sizes = Sizes([2, 2, 2, 2], [0.25] * 4, replicas=1, tokens={})
        >>> for counts in ([4.0, 4, 4, 4], [0.0, 0, 0, 1], [1.0, 2, 1, 1], [0.5, 1, 2, 4]):
        ...     print(*named(torch.tensor(counts), 1e-3, sizes)[::2])
        times-microbatches 4.0
        missing-microbatches 1.0
        repeated-microbatches 1.0
        moving-average 2.0
    """
    counts, many = counts.double(), len(counts)
    most = float(counts[counts.isfinite()].abs().max())
    if factor := _multiple(counts, torch.ones(many), slack):
        return _scaled(factor, slack / most, sizes)
    weights: list[tuple[Sequence[float], str, str]] = [
        ([1.0] * many, "weighed-alike", "alike"),
        (sizes.rows, "weighed-by-rows", "by its rows"),
        *(
            (each, "weighed-by-replicas", f"by its share of its replica's loss, and {n} replicas alike")
            for n, each in sizes.apart()
        ),
    ]
    for each, code, words in weights:
        factor = _multiple(counts, torch.tensor(each) / sum(each) / torch.tensor(sizes.shares), slack)
        if factor and sizes.known(factor, slack / most):
            whole = f"though in the loss of the whole batch they weigh {_shown(sizes.shares)}"
            return Finding(code, f"Each micro-batch counts {words}, {whole}.", factor)
    shown = f"they count {_shown(counts.tolist())} times"
    times = (counts / counts[counts.abs() > slack].abs().min()).round()
    factor = _multiple(counts, times, slack) if (times.abs() > _MOST_TIMES).sum() == 0 else None
    often = factor is not None and factor >= 1 - slack and sizes.known(factor, slack / most)
    two = len(times[times.isfinite()].unique()) == 2
    for divisor, steps in () if often and two else _averages(counts, slack):  # some of them only count more often
        each_time = "each micro-batch" if steps == 1 else f"each {steps} micro-batches"
        fact = f"After {each_time}, .grad is divided by {divisor:.4g} once more, which makes it a moving average"
        return Finding("moving-average", f"{fact}: they count {_shown(counts.tolist())} times.", divisor)
    if not factor:
        return Finding("other-weights", f"The micro-batches do not count alike: {shown}.")
    among = f"Of micro-batches 0 to {many - 1}"
    negative, none, once, more = (_where(each) for each in (times < 0, times == 0, times == 1, times > 1))
    if negative:
        return Finding("sign", f"{among}, {listed(negative)} with the wrong sign: {shown}.", factor, negative)
    if not more:
        return Finding("missing-microbatches", f"{among}, only {listed(once)} counted: {shown}.", factor, once)
    never = f", and {listed(none)} never" if none else ""
    return Finding("repeated-microbatches", f"{among}, {listed(more)} repeatedly{never}: {shown}.", factor, more)


def listed(names: Sequence[object]) -> str:
    """Return the first of some names, joined."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(str, names[:_MOST_NAMES])) + more


def _scaled(factor: float, slack: float, sizes: Sizes) -> Finding:
    """Return what one factor of all gradients says: it may be a number of the step, or several."""
    multiplied = abs(factor) > 1
    size = abs(factor) if multiplied else 1 / abs(factor)
    known = sizes.called(size, slack)
    size = round(size) if known else size
    words = f"{size:.6g} times plain training's" if multiplied else f"plain training's divided by {size:.6g}"
    words += f": {size} is {', and '.join(what for what, *_ in known)}" if known else ""
    codes = {times if multiplied else divided for _, times, divided in known}
    code = codes.pop() if len(codes) == 1 else "scaled"
    limit = float(f"{sizes.norm:.1g}")
    if not known and 0 < factor < 1 and limit and abs(sizes.norm / limit - 1) <= slack:
        code, words = "clipped", f"{words}: clipped to a norm of {limit:g}"
    exact = math.copysign(size if multiplied else 1 / size, factor)
    if factor > 0:
        return Finding(code, f"The gradients are {words}.", exact)
    if abs(factor + 1) <= slack:
        return Finding("sign", "The gradients are plain training's with the wrong sign.", -1.0)
    return Finding("sign", f"The gradients have the wrong sign, and are {words}.", exact)


def _multiple(counts: torch.Tensor, pattern: torch.Tensor, slack: float) -> float | None:
    """Return by which factor counts are a pattern; `None` if they are not."""
    live = counts.isfinite() & pattern.isfinite()
    found, pattern = counts[live], pattern[live].double()
    factor = float(found @ pattern / (pattern @ pattern))
    return factor if float((found - factor * pattern).abs().max()) <= slack else None


def _averages(counts: torch.Tensor, slack: float) -> Iterator[tuple[float, int]]:
    """Find a divisor that was applied again after every so many micro-batches; yield it, and how many.

    The first division may come with the second addition, as in `grad = (grad + new) / 2`.
    """
    many = len(counts)
    for steps in (each for each in range(1, many) if many % each == 0):
        later = many // steps - 1 - torch.arange(many) // steps
        last = int(counts.isfinite().nonzero()[-1])
        earlier = (counts.isfinite() & (later > later[last])).nonzero().flatten()
        ratio = float(counts[last] / counts[earlier[-1]]) if len(earlier) else 0.0
        if not 1 < ratio < float(counts[last].abs()) / slack:
            continue
        divisor = ratio ** (1 / float(later[earlier[-1]] - later[last]))
        for most in (many // steps - 1, many // steps - 2):
            if most and _multiple(counts, divisor ** -later.clamp(max=most).double(), slack):
                yield divisor, steps


def _where(which: torch.Tensor) -> tuple[int, ...]:
    return tuple(which.nonzero().flatten().tolist())


def _shown(counts: Sequence[float]) -> str:
    numbers = ("-" if math.isnan(each) else f"{round(each, 3) + 0.0:g}" for each in counts[:_MOST_COUNTS])
    return " ".join(numbers) + " …" * (len(counts) > _MOST_COUNTS)


# ── What no counts explain ────────────────────────────────────────────────────────────────────────────────────────────


class Gradients(dict[str, torch.Tensor]):
    """Gradients by the names of parameters."""

    def __sub__(self, other: Gradients) -> Gradients:
        return Gradients({name: each - other[name] for name, each in self.items()})


@dataclass(frozen=True)
class Evidence:
    """What is known of a step whose gradients no counts explain, and what can be tried out."""

    model: nn.Module
    left: Gradients  # by the step
    plain: Gradients  # of plain training
    wrong: dict[str, float | None]  # the parameters that differ, each with its own factor, if there is one
    before: Seen  # in plain training
    seen: Seen  # in the step
    batch: tuple[Any, Any]
    rows: list[int]
    rounding: Callable[[Gradients], bool]  # whether differences are no more than that
    train: Callable[[Any, Any], Gradients]  # plainly, on another batch
    again: Callable[..., Gradients]  # the step: on a batch, with weights multiplied, and other random numbers or not

    def taken(self, value: Any, which: Iterable[int]) -> Any:
        """Return these rows of inputs or targets."""
        rows = split_batch(value, [1] * sum(self.rows))
        return join([rows[row % len(rows)] for row in which])


def _other_mode(e: Evidence) -> list[str]:
    layers, modes = dict(e.model.named_modules()), {each[:2] for each in e.before.ran}
    odd = {each[:2] for each in e.seen.ran if isinstance(layers.get(each[0]), (_BatchNorm, _DropoutNd))} - modes
    return [f"{name} in {'training' if training else 'evaluation'}" for name, training in sorted(odd)]


def _more_often(e: Evidence) -> list[str]:
    times = e.seen.times(e.before)
    return [name for name, each in times.items() if each > 1.5 * min(times.values())]


def _norm_of_groups(e: Evidence) -> str:
    norms = dict[float, float]()
    for name, factor in e.wrong.items():
        group = round(factor or math.inf, 4)
        norms[group] = math.hypot(norms.get(group, 0.0), float(e.left[name].norm()))
    most = max(norms.values())
    return f"{most:.4g}" if max(norms) < 1 and most <= 1.001 * min(norms.values()) else ""


def _tied(e: Evidence) -> list[str]:
    uses = dict[nn.Parameter, list[str]]()
    for name, parameter in e.model.named_parameters(remove_duplicate=False):
        uses.setdefault(parameter, []).append(name)
    tied = [name for names in uses.values() if len(names) > 1 and names[0] in e.wrong for name in names]
    return tied if {*e.wrong} <= {*tied} else []


def _decay(e: Evidence) -> str:
    rest, weights = e.left - e.plain, {name: e.model.get_parameter(name).detach().cpu() for name in e.wrong}
    along, size = (sum(float((each[name] * weights[name]).sum()) for name in e.wrong) for each in (rest, weights))
    off = Gradients({name: rest[name] - along / size * weights[name] for name in e.wrong})
    return f"{along / size:.3g}" if e.rounding(off) else ""


def _shift(e: Evidence) -> str:
    for by in (e.rows[0], -e.rows[0], 1, -1):
        targets = e.taken(e.batch[1], range(by, by + sum(e.rows)))
        if e.rounding(e.left - e.train(e.batch[0], targets)):
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
    wrong, right = ({n.rpartition(".")[0] for n in e.plain if (n in e.wrong) is each} for each in (True, False))
    layers = [*dict.fromkeys(name.rpartition(".")[0] for name in e.plain)]
    later = {*layers[len(wrong) :]}
    return layers[len(wrong)] if later and later == right - wrong and not wrong & right else ""


def _kept(e: Evidence) -> bool:
    return e.rounding(e.again(*e.batch, 1.0) - e.left - e.plain)


def _random(e: Evidence) -> bool:
    if any(isinstance(layer, _DropoutNd) and layer.training and layer.p for layer in e.model.modules()):
        return False  # `unproven_of` says so
    same, other = (e.rounding(e.again(*e.batch, 1.0, seed) - e.left) for seed in (None, torch.initial_seed() + 1))
    return same and not other


def _other_batch(e: Evidence) -> str:
    x, y = (e.taken(each, (row // 2 for row in range(sum(e.rows)))) for each in e.batch)  # half of it, twice
    left, plain = e.again(x, y, 1.0), e.train(x, y)
    if e.rounding(plain - e.plain):
        return ""
    if e.rounding(left - e.left):
        return "leaves the same gradients: it does not learn from the batch that it gets"
    rest = (left - plain) - (e.left - e.plain)
    same = e.rounding(rest) and not _random(e)
    return "is wrong by the same: it adds gradients of yet another batch, or of a penalty" if same else ""


def _stale(e: Evidence) -> bool:
    left = e.again(*e.batch, 2.0)
    return e.rounding(left - e.left) or e.rounding(left - e.plain)


CAUSES: tuple[tuple[str, Callable[[Evidence], object], str], ...] = (
    ("other-mode", _other_mode, "Layers run in another mode than the model's: {}."),
    ("weights-change", lambda e: sorted(e.seen.changed), "Weights change before a forward of their layers: {}."),
    ("stage-twice", _more_often, "These layers run more often than the others: {}."),
    ("clipped", _norm_of_groups, "Groups of gradients are clipped, each to a norm of {}."),
    ("tied-weights", _tied, "{} share a weight: of one of them, its gradient is lost."),
    ("weight-decay", _decay, "The gradients contain {} times the weights."),
    ("other-targets", _shift, "Outputs meet the targets of other rows: {}."),
    ("swapped", _swapped, "Gradients are swapped: {}."),
    ("no-zero-grad", _kept, "When it runs again, the step adds to what it has left before."),
    ("other-batch", _other_batch, "On another batch, the step {}."),
    ("stale-weights", _stale, "With new weights the step leaves the gradients of older ones: it computes with a copy."),
    ("random-numbers", _random, "With other random numbers, the step leaves other gradients."),
    ("passed-back", _border, "From {0} to the loss all is right: what {0} passes back is wrong, or is lost."),
    (
        "only-their-own",
        lambda e: [*(e.plain.keys() - e.wrong)],
        "What they pass back is right, and their own gradients are wrong.",
    ),
)
"""Code, what is looked for, and what to say of it. The first that is found is the cause."""


def cause_of(evidence: Evidence, share: str) -> Finding:
    """Return the first cause that the evidence shows, or none; `share` says how much no counts explain."""
    for code, look, words in CAUSES:
        with suppress(Exception):  # a step that does not run again, a loss that takes no other targets
            if found := look(evidence):
                return Finding(code, f"{share}\n{words.format(listed(found) if isinstance(found, list) else found)}")
    return Finding("unexplained", share)
