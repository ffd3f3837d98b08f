"""Every formula of a schedule's `closed_forms` is what `simulate` gives, and each of its conditions is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import isclose
from types import CodeType

import pytest

import pipelab
from pipelab import Cost, Plan, simulate
from pipelab.catalogue import moving
from pipelab.catalogue.bases import Looped

SIZES = [*((ranks, m) for ranks in (1, 2, 3, 4) for m in range(1, 2 * ranks + 4)), (5, 12), (6, 7), (6, 12), (6, 14)]
TIMES = [
    *[(1, 1, 1), (2, 2, 1), (3.5, 3.5, 3), (1, 1, 2), (1, 2, 1), (2, 1, 2), (2, 1, 1), (1, 2, 2)],  # some are equal
    *[(1, 2, 3.5), (1, 3.5, 2), (2, 1, 3.5), (2, 3.5, 1), (3.5, 1, 2), (3.5, 2, 1), (5, 1, 6), (12, 14, 9)],  # none is
]
"""(F, I, W), in any order of length."""


@dataclass(frozen=True)
class Timing:
    """What is left of a trace."""

    makespan: float
    bubble: float
    spans: tuple[float, ...]
    peaks: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A point of the grid: the values of the letters, and what they lead to.

    `alone` is with pairs as a forward, then a backward, `paired` with pairs as one slot, and `late` with transfers that
    take time. `again` is with recomputation.
    """

    letters: dict[str, float]
    alone: Timing
    paired: Timing
    late: Timing
    again: Timing


QUANTITIES: dict[str, Callable[[Case], Sequence[float]]] = {
    "makespan": lambda case: [case.alone.makespan],
    "makespan with pairs": lambda case: [case.paired.makespan],
    "makespan with latency": lambda case: [case.late.makespan],
    "makespan with recomputation": lambda case: [case.again.makespan],
    "bubble": lambda case: [case.alone.bubble],
    "span": lambda case: case.alone.spans,
    "peak": lambda case: case.alone.peaks,
}
"""What the formulas are about: one number, or one for each rank."""

KINDS = {**pipelab.schedules, **moving}
FORMS = [
    (name, *key.partition(" if ")[::2], formula)
    for name, kind in KINDS.items()
    for key, formula in kind.closed_forms.items()
]


@cache
def cost_of(forward: float, inputs: float, weights: float, **more: float) -> Cost:
    return Cost(forward=forward, backward=inputs + weights, input_grad=inputs, weight_grad=weights, **more)


def timing(plan: Plan, letters: dict[str, float], **more: float) -> Timing:
    trace = simulate(plan, cost_of(letters["F"], letters["I"], letters["W"], **more))
    return Timing(trace.makespan, trace.bubble, trace.spans, trace.peak_activations)


@cache
def cases(name: str) -> list[Case]:
    """Times for each size that a schedule accepts, all for a small one; with pairs, and latency, of a few lengths."""
    kind = KINDS[name]
    more = [{"stages_per_rank": number} for number in (1, 2, 3)] if issubclass(kind, Looped) else [{}]
    overlaps = any(isinstance(item, pipelab.Pair) for row in kind(4, 8).plan().rows for item in row)
    waits, recomputes = (f"with {what}" in str(kind.closed_forms) for what in ("latency", "recomputation"))
    found = []
    for (ranks, microbatches), each in product(SIZES, more):
        if kind.refusal(ranks, microbatches) is not None:
            continue
        schedule = kind(ranks, microbatches, **each)
        plan = schedule.plan()
        longest = max(map(len, schedule.rounds)) if isinstance(schedule, Looped) else 0
        sizes = {"P": ranks, "M": microbatches, "v": schedule.stages_per_rank, "k": schedule.slices, "L": longest}
        for forward, inputs, weights in TIMES if ranks < 4 else TIMES[::2]:
            backward = inputs + weights
            letters = sizes | {"F": forward, "I": inputs, "W": weights, "B": backward, "C": 1.25 * forward}
            alone = timing(plan, letters)
            again = timing(pipelab.with_recompute(plan), letters, recompute=letters["C"]) if recomputes else alone
            slots = [forward + backward, max(forward, backward), forward, backward / 2]
            latencies = [0.5, (forward + backward) / 2, 2 * backward] if waits else [0]
            lates = {latency: timing(plan, letters, latency=latency) if waits else alone for latency in latencies}
            for pair in slots if overlaps else slots[:1]:
                paired = timing(plan, letters, pair=pair) if overlaps else alone
                for latency, late in lates.items():
                    found.append(Case(letters | {"FB": pair, "T": latency}, alone, paired, late, again))
    return found


@cache
def compiled(text: str) -> CodeType:
    return compile(text, "a formula", "eval")


def value(text: str, letters: dict[str, float]) -> float:
    names = {"min": min, "max": max, "__builtins__": {}}
    return eval(compiled(text), names, letters)  # noqa: S307 - this project's own formulas


def mistake(name: str, quantity: str, conditions: Sequence[str], formula: str) -> str | None:
    """Return where `simulate` gives something else while the conditions hold, or that they never do."""
    held = False
    for case in cases(name):
        if not all(value(condition, case.letters) for condition in conditions):
            continue
        held = held or case.letters["P"] > 1
        for rank, simulated in enumerate(QUANTITIES[quantity](case)):
            expected = value(formula, case.letters | {"r": rank})
            if not isclose(expected, simulated, rel_tol=1e-12, abs_tol=1e-12):
                return f"`{formula}` is {expected}, not {simulated}, on rank {rank} with {case.letters}"
    return None if held else f"`{formula}` was never tried: {conditions}"


def test_every_schedule_that_is_no_policy_has_closed_forms_of_its_makespan_and_peak():
    quantities = {(name, quantity) for name, quantity, *_ in FORMS}
    fixed = [name for name, kind in KINDS.items() if not issubclass(kind, pipelab.Greedy)]
    assert quantities >= {(name, quantity) for name in fixed for quantity in ("makespan", "peak")}


@pytest.mark.parametrize(
    ("name", "quantity", "condition", "formula"), FORMS, ids=[f"{name}-{quantity}" for name, quantity, *_ in FORMS]
)
def test_a_closed_form_is_what_simulate_gives_and_needs_all_of_its_conditions(name, quantity, condition, formula):
    conditions = condition.split(" and ") if condition else []
    assert mistake(name, quantity, conditions, formula) is None
    for each in conditions:
        others = [other for other in conditions if other != each]
        assert mistake(name, quantity, others, formula), f"it holds without `{each}` too"
