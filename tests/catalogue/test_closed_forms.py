"""Every formula that a reader sees, in a docstring or on the page of the reference, is what `simulate` gives.

Formulas are read from where they stand, and so are the conditions under which they hold. Their letters: `P` ranks, `M`
micro-batches, `v` stages per rank, the longest round `L`, the rank `r`; the times `F`, `I` and `W`, with `B = I + W`,
and `FB` of an overlapped pair.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import isclose
from pathlib import Path
from types import CodeType

import pytest

import pipelab
from pipelab import Cost, Plan, Schedule, schedules, simulate
from pipelab.catalogue.bases import Looped

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "schedules.md").read_text(encoding="utf-8")

# The grid

SIZES = [*((ranks, m) for ranks in (1, 2, 3, 4) for m in range(1, 2 * ranks + 4)), (5, 12), (6, 7), (6, 12), (6, 14)]
TIMES = [
    *[(1, 1, 1), (2, 2, 1), (3.5, 3.5, 3), (1, 1, 2), (1, 2, 1), (2, 1, 2), (2, 1, 1), (1, 2, 2)],  # some are equal
    *[(1, 2, 3.5), (1, 3.5, 2), (2, 1, 3.5), (2, 3.5, 1), (3.5, 1, 2), (3.5, 2, 1), (5, 1, 6), (12, 14, 9)],  # none is
]
"""(F, I, W), in any order of length."""
STAGES_PER_RANK = (1, 2, 3)


@dataclass(frozen=True)
class Timing:
    """What is left of a trace."""

    makespan: float
    bubble: float
    busy: tuple[float, ...]
    spans: tuple[float, ...]
    ends: list[float]
    peaks: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A point of the grid: a schedule of some size, times of a rank's share of the model, and what they lead to.

    `alone` is with pairs as a forward, then a backward, and `paired` with pairs as one slot.
    """

    schedule: Schedule
    plan: Plan
    letters: dict[str, float]
    alone: Timing
    paired: Timing


def timing(plan: Plan, letters: dict[str, float], pair: float | None) -> Timing:
    cost = Cost(
        forward=letters["F"], backward=letters["B"], input_grad=letters["I"], weight_grad=letters["W"], pair=pair
    )
    trace = simulate(plan, cost)
    ends = [each[-1] for each in trace.ends]
    return Timing(trace.makespan, trace.bubble, trace.busy, trace.spans, ends, trace.peak_activations)


def pairs_of(plan: Plan) -> list[int]:
    return [sum(isinstance(item, pipelab.Pair) for item in row) for row in plan.rows]


@cache
def cases(name: str) -> list[Case]:
    """All times for each size that a schedule accepts; with pairs, of a few lengths each."""
    kind = schedules[name]
    more = [{"stages_per_rank": number} for number in STAGES_PER_RANK] if issubclass(kind, Looped) else [{}]
    overlaps = any(pairs_of(kind(4, 8).plan()))
    found = []
    for (ranks, microbatches), each in product(SIZES, more):
        if kind.refusal(ranks, microbatches) is not None:
            continue
        schedule = kind(ranks, microbatches, **each)
        plan = schedule.plan()
        longest = max(map(len, schedule.rounds)) if isinstance(schedule, Looped) else 0
        sizes = {"P": ranks, "M": microbatches, "v": schedule.stages_per_rank, "L": longest}
        for forward, inputs, weights in TIMES:
            backward = inputs + weights
            times = {"F": forward, "I": inputs, "W": weights, "B": backward}
            alone = timing(plan, times, None)
            slots = [forward + backward, max(forward, backward), forward, backward / 2]
            for pair in slots if overlaps else slots[:1]:
                paired = timing(plan, times, pair) if overlaps else alone
                found.append(Case(schedule, plan, {**sizes, **times, "FB": pair}, alone, paired))
    return found


# What formulas are about: by rank


Quantity = Callable[[Case], dict[int, float]]


def makespan(case: Case) -> dict[int, float]:
    return {0: case.alone.makespan}


def bubble(case: Case) -> dict[int, float]:
    return {0: case.alone.bubble}


def peak(case: Case) -> dict[int, float]:
    return dict(enumerate(case.alone.peaks))


def wait(case: Case) -> dict[int, float]:
    return {rank: case.alone.makespan - busy for rank, busy in enumerate(case.alone.busy)}


def span(case: Case) -> dict[int, float]:
    return dict(enumerate(case.alone.spans))


def wait_in_span(case: Case) -> dict[int, float]:
    return {rank: case.alone.spans[rank] - busy for rank, busy in enumerate(case.alone.busy)}


def wait_outside_span(case: Case) -> dict[int, float]:
    return {rank: case.alone.makespan - own for rank, own in enumerate(case.alone.spans)}


def done_before_the_last(case: Case) -> dict[int, float]:
    return {0: case.alone.ends[-1] - case.alone.ends[0]}


def warm_up(case: Case) -> dict[int, float]:
    return {rank: [item.kind for item in row].index("I") for rank, row in enumerate(case.plan.rows)}


def last(case: Case) -> list[int]:
    return [case.plan.ranks - 1]


def middle(case: Case) -> list[int]:
    return [case.plan.ranks // 2 - 1, case.plan.ranks // 2]


def paired_wait(ranks: Callable[[Case], list[int]]) -> Quantity:
    return lambda case: {rank: case.paired.makespan - case.paired.busy[rank] for rank in ranks(case)}


def work(ranks: Callable[[Case], list[int]]) -> Quantity:
    return lambda case: {rank: case.alone.busy[rank] for rank in ranks(case)}


def saved(ranks: Callable[[Case], list[int]]) -> Quantity:
    return lambda case: {rank: case.alone.busy[rank] - case.paired.busy[rank] for rank in ranks(case)}


def pairs(case: Case) -> dict[int, float]:
    return {rank: pairs_of(case.plan)[rank] for rank in middle(case)}


def saved_by_a_pair(case: Case) -> dict[int, float]:
    return {rank: saved(middle)(case)[rank] / number for rank, number in pairs(case).items()}


# Reading formulas


@dataclass(frozen=True)
class ClosedForm:
    """A formula as it was read: of what, and under which conditions."""

    name: str
    formula: str
    quantity: Quantity
    conditions: tuple[str, ...] = ()
    per_stage: bool = False

    def mistake(self, without: str | None = None) -> str | None:
        """Return where `simulate` gives something else, whatever one of the conditions says."""
        conditions = [compiled(each) for each in self.conditions if each != without]
        formula, held = compiled(self.formula), False
        for case in cases(self.name):
            letters = dict(case.letters)
            if self.per_stage:
                letters |= {time: letters[time] / letters["v"] for time in ("F", "I", "W", "B", "FB")}
            if all(value(each, letters) for each in conditions):
                held = held or letters["P"] > 1
                for rank, simulated in self.quantity(case).items():
                    told = value(formula, letters | {"r": rank})
                    if not isclose(told, simulated, rel_tol=1e-12, abs_tol=1e-12):
                        return f"`{self.formula}` is {told}, not {simulated}, on rank {rank} with {letters}"
        return None if held else f"`{self.formula}` was never tried: {self.conditions}"


@cache
def compiled(text: str) -> CodeType:
    """Return a formula, or a condition as mathematics writes it, as code."""
    return compile(re.sub(r"(?<![<>])=", "==", text), text, "eval")


def value(code: CodeType, letters: dict[str, float]) -> float:
    return eval(code, {"min": min, "max": max, "__builtins__": {}}, letters)  # noqa: S307 - this project's own pages


def document(name: str) -> str:
    """Return a schedule's docstring as one line, without its example."""
    return " ".join(inspect.getdoc(schedules[name]).partition("\nArgs:")[0].partition("\nExample:")[0].split())


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def rows(heading: str) -> list[list[str]]:
    """Return the cells of one of the page's tables, row by row."""
    lines = PAGE.partition(heading)[2].partition("\n\n")[0].splitlines()[2:]
    return [line.strip("| ").split(" | ") for line in lines]


# The docstrings: which words stand right before a formula, what it is of, and which conditions it has, in these words

TOLD = {
    "naive": [("Makespan", makespan), ("bubble", bubble)],
    "gpipe": [("Makespan", makespan), ("bubble", bubble), ("Every rank holds all", peak)],
    "1f1b": [("Makespan", makespan), ("bubble", bubble), ("rank `r` holds only", peak)],
    "delayed": [("Makespan", makespan, "M >= 2"), ("Peak", peak)],
    "interleaved-1f1b": [
        ("Makespan", makespan, "M >= P"),
        ("bubble", bubble, "M >= P"),
        ("come round again:", makespan, "M < P"),
        ("rank `r` holds", peak),
    ],
    "looped-bfs": [
        ("Makespan", makespan, "M >= P"),
        ("bubble", bubble, "M >= P"),
        ("the makespan is", makespan, "M < P"),
        ("Every rank holds all", peak),
    ],
    "zb-h1": [
        ("Makespan", makespan, "M >= P", "W <= min(F, I)"),
        ("In general it is", makespan),
        ("Every rank holds", peak),
    ],
    "zb-h2": [
        ("warms up with", warm_up, "M >= 2 * P - 1"),
        ("every rank's own span is", span, "M >= 2 * P - 1", "F = I = W"),
        ("the makespan is", makespan, "M >= 2 * P - 1"),
        ("rank 0 is then done", done_before_the_last, "M >= 2 * P - 1", "I = W <= F"),
        ("on rank `r` it is", span, "M >= 2 * P - 1"),
        ("Every rank holds", peak),
    ],
    "interleaved-zb": [("Makespan", makespan, "M >= P"), ("Every rank holds", peak)],
    "zbv": [
        ("every rank's own span is", span, "M >= 2 * P - 1", "F = I = W"),
        ("the makespan longer by", wait_outside_span, "M >= 2 * P - 1", "F = I = W"),
        ("Every rank holds", peak, "M >= 2 * P - 1"),
        ("rank `r` holds", peak),
        ("rank `r` waits", wait_in_span, "M >= 2 * P - 1", "F = I >= W"),
        ("the makespan is", makespan, "M >= 2 * P - 1", "F = I >= W"),
    ],
    "dualpipev": [
        ("the last rank waits", paired_wait(last), "M >= 2 * P", "F = I >= W", "FB >= B"),
        ("works", work(last)),
        ("less what its pairs save,", saved(last), "M >= 2 * P"),
        ("(`Cost(pair=None)`), it is", makespan, "M >= 2 * P", "F = I >= W"),
        ("Rank `r` holds", peak),
    ],
    "dualpipe": [
        ("counts a bubble of", paired_wait(middle), "F = I >= W", "FB >= B"),
        ("these ranks' work:", work(middle)),
        ("less what their", pairs),
        ("pairs save,", saved_by_a_pair),
        ("the two in the middle wait", paired_wait(middle), "F >= I", "FB >= max(F, B)"),
        ("the makespan is", makespan, "F = I >= W"),
        ("Every rank holds", peak),
    ],
}

ASIDE = {"delayed": {"M * P * (F + B)"}, "zb-h2": {"2 * P - 1", "2 * r"}, "dualpipe": {"P - 1 - r"}}
"""What else looks like a formula: another schedule's makespan, a number of micro-batches, a stage."""


def told(name: str) -> list[ClosedForm]:
    """Return the formulas of a docstring."""
    found = []
    for words, quantity, *conditions in TOLD[name]:
        formulas = re.findall(rf"{re.escape(words)} `([^`]+)`", document(name))
        assert len(formulas) == 1, f"{name}: {len(formulas)} formulas right after {words!r}"
        found.append(ClosedForm(name, formulas[0], quantity, tuple(conditions), per_stage=name == "dualpipev"))
    return found


# The page

WHOSE = {
    "rank `r`'s, in its own span": wait_in_span,
    "the last rank's, with pairs": paired_wait(last),
    "the two middle ranks', with pairs": paired_wait(middle),
}


def listed() -> list[ClosedForm]:
    """Return the formulas of the page."""
    found = []
    for name, conditions, *formulas, _ in rows("| schedule | holds for | wait | peak | source |"):
        for formula, quantity in zip(formulas, (wait, peak), strict=True):
            if name != "`greedy`":
                found.append(ClosedForm(*codes(name), *codes(formula), quantity, tuple(codes(conditions))))
    for name, conditions, whose, formula in rows("| schedule | holds for | whose wait | wait |"):
        found.append(ClosedForm(*codes(name), *codes(formula), WHOSE[whose], tuple(codes(conditions))))
    return found


def is_formula(code: str) -> bool:
    """Tell whether something is worked out of sizes and times, as in `M - 1` or `min(F, I)`."""
    try:
        tree = ast.parse(code, mode="eval").body
    except SyntaxError:
        return False
    names = {part.id for part in ast.walk(tree) if isinstance(part, ast.Name)}
    operations = (ast.Add, ast.Sub, ast.Mult, ast.Div)
    works = (isinstance(tree, ast.BinOp) and isinstance(tree.op, operations)) or isinstance(tree, ast.Call)
    return works and names <= {*"PMvLrFIWB", "FB", "min", "max"}


def test_every_schedule_but_greedy_has_closed_forms():
    assert {*TOLD, "greedy"} == {form.name for form in listed()} | {"greedy"} == set(schedules)


@pytest.mark.parametrize("form", listed(), ids=lambda form: f"{form.name}: {form.formula}")
def test_the_formulas_of_the_page_are_what_simulate_gives(form):
    assert form.mistake() is None


@pytest.mark.parametrize("name", TOLD)
def test_the_formulas_of_a_docstring_are_what_simulate_gives(name):
    assert [form.mistake() for form in told(name)] == [None] * len(TOLD[name])


@pytest.mark.parametrize("name", TOLD)
def test_a_docstring_says_under_which_conditions_its_formulas_hold(name):
    conditions = {condition for form in told(name) for condition in form.conditions}
    assert conditions <= set(codes(document(name)))


@pytest.mark.parametrize("name", TOLD)
def test_no_formula_of_a_docstring_goes_untested(name):
    formulas = {code for code in codes(document(name)) if is_formula(code)}
    assert formulas - {form.formula for form in told(name)} == ASIDE.get(name, set())


def test_every_condition_matters():
    """Without it, some formula of the row, or that of the sentence, is wrong."""
    rows = [((form.name, condition), form) for form in listed() for condition in form.conditions]
    sentences = [
        ((form.name, form.formula, condition), form)
        for name in TOLD
        for form in told(name)
        for condition in form.conditions
    ]
    without = [(key, form.mistake(without=key[-1])) for key, form in rows + sentences]
    assert {key for key, _ in without} == {key for key, mistake in without if mistake}
