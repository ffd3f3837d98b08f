"""Name the mistake behind the counts: how often each micro-batch is in a gradient, once being right."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

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
    "unexplained": "look for outputs that meet another micro-batch's targets, for weights that change before the last "
    "backward, for another loss",
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
    """The numbers of a step, which may be factors.

    Attributes:
        rows: of each micro-batch.
        shares: of each micro-batch's loss in the loss of the batch.
        replicas: how many there are.
        tokens: numbers that a loss may average over, and of what.
    """

    rows: list[int]
    shares: list[float]
    replicas: int
    tokens: dict[int, str]

    def called(self, number: float, slack: float) -> list[tuple[str, str, str]]:
        """Return what a number is the number of, with the codes for gradients multiplied and divided by it."""
        numbers = [
            (len(self.rows), "micro-batches", "times-microbatches", "divided-by-microbatches"),
            (self.replicas, "replicas", "summed-over-replicas", "divided-by-replicas"),
            *((size, what, "times-tokens", "divided-by-tokens") for size, what in self.tokens.items()),
        ]
        return [each[1:] for each in numbers if each[0] > 1 and abs(number / each[0] - 1) <= slack]

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
    for each, code, words in (([1.0] * many, "weighed-alike", "alike"), (sizes.rows, "weighed-by-rows", "by its rows")):
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
    words += f": {size} is the number of {', and of '.join(what for what, *_ in known)}" if known else ""
    codes = {times if multiplied else divided for _, times, divided in known}
    code = codes.pop() if len(codes) == 1 else "scaled"
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
