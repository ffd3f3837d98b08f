"""Hypothesis strategies: sizes, legal plans, and the mistakes that students make in them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

import networkx
import oracle
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from tiers import sampled

from pipelab import Action, B, F, I, Pair, Plan, R, Schedule, W, schedules
from pipelab.plan.transfers import Order, Transport

OF_EACH = settings(max_examples=settings.default.max_examples // 4)
"""For a property that every schedule is tried with: a quarter of the examples, with each of them."""

SIZES = sampled((ranks, microbatches) for ranks in range(1, 7) for microbatches in range(1, 13))
"""Sizes up to 6 ranks and 12 micro-batches."""

_EACH_SIZE = [
    *((1, 1), (1, 3), (2, 1), (2, 2), (2, 5), (3, 2), (3, 4)),
    *((4, 3), (4, 7), (4, 8), (5, 6), (6, 12), (8, 9)),
]
EVERY_SCHEDULE = [
    pytest.param(kind, ranks, microbatches, id=f"{name}-{ranks}x{microbatches}")
    for name, kind in schedules.items()
    for ranks, microbatches in sampled(size for size in _EACH_SIZE if kind.refusal(*size) is None)
]
"""(schedule, ranks, micro-batches): one of each, fewer micro-batches than ranks, odd ones, more ranks than cores."""

WIRES = [{"order": order, "transport": transport} for order in get_args(Order) for transport in get_args(Transport)]
"""Every order of transfers on every transport."""


def sizes() -> st.SearchStrategy[tuple[int, int]]:
    """(ranks, micro-batches): small and odd ones included, fewer micro-batches than ranks, and no multiples."""
    odd = [(1, 1), (1, 12), (6, 1), (4, 3), (4, 2), (3, 7), (5, 12), (6, 11), (2, 2)]
    return st.sampled_from(odd) | st.sampled_from(SIZES)


def costs() -> st.SearchStrategy[float]:
    """Times that floats add exactly: whole numbers, and fractions of a power of two."""
    return st.integers(1, 20) | st.integers(1, 160).map(lambda eighths: eighths / 8)


ONE_COPY = [name for name in schedules if all(len(at) == 1 for at in schedules[name](2, 4).plan().replicas.values())]
"""Schedules that keep each stage on one rank, as PyTorch's runtime needs it."""


def near(name: str, ranks: int, microbatches: int) -> Plan:
    """Return a schedule's plan of this size, or of the next larger one that it accepts."""
    kind = schedules[name]
    larger = [(r, m) for r in range(ranks, 2 * ranks + 2) for m in range(microbatches, 4 * microbatches)]
    return kind(*next(size for size in larger if kind.refusal(*size) is None)).plan()


def with_stages(name: str, stages: int, microbatches: int) -> Plan:
    """Return a schedule's plan for a model that is cut into so many stages: on fewer ranks, where each has several."""
    kind = schedules[name]
    return near(name, stages // kind(1, 1).stages_per_rank, microbatches)


def split_plan(stages: int, microbatches: int) -> Plan:
    """Return a plan that runs all forwards, then every `I`, then every `W`, in the order of the micro-batches."""
    rows = [[make(m, stage) for make in (F, I, W) for m in range(microbatches)] for stage in range(stages)]
    return Plan(rows, stages, microbatches)


def written(actions, base=Schedule, **members) -> type[Schedule]:
    """Return a class of schedules with these actions, as a student may write it, and what else the class holds."""
    return type("Mine", (base,), {"actions": actions, **members})


def in_order(plan: Plan) -> bool:
    """Tell whether every stage's gradients are made in the order of the micro-batches, as plain training makes them."""
    for stage, ranks in plan.replicas.items():
        if len(ranks) > 1:
            return False  # each rank adds up its own first
        for row in plan.rows:
            halves = [half for item in row for half in oracle.halves(item)]
            order = [half.microbatch for half in halves if half.kind in "BW" and half.stage == stage]
            if order != sorted(order):
                return False
    return True


def reduced(plan: Plan) -> set[int]:
    """Return the stages whose all-reduce a plan lists."""
    return {item.stage for row in plan.rows for item in row if getattr(item, "kind", "") == "R"}


@st.composite
def catalogue_plans(draw: st.DrawFn) -> Plan:
    """A plan of a registered schedule, at a size that it accepts."""
    name = draw(st.sampled_from(sorted(schedules)))
    kind = schedules[name]
    accepted = [size for size in SIZES if kind.refusal(*size) is None]
    return kind(*draw(st.sampled_from(accepted))).plan()


@dataclass(frozen=True)
class Case:
    """The arguments of a plan."""

    rows: tuple[tuple[object, ...], ...]
    stages: int
    microbatches: int
    table: tuple[int, ...] | None = None

    @property
    def place(self):
        """The placement that the table describes."""
        if self.table is None:
            return None
        return lambda microbatch, stage: self.table[microbatch * self.stages + stage]

    @property
    def plan(self) -> Plan:
        """The plan, unchecked."""
        return Plan(self.rows, self.stages, self.microbatches, self.place)

    @property
    def runnable(self) -> Plan:
        """A plan without all-reduces, of a legal case: each stage on one rank, in an order that the case allows."""
        rows: list[list[Action]] = [[] for _ in self.rows]
        for action in networkx.topological_sort(self.plan.graph()):
            if action.kind != "R":
                rows[self.table[action.stage]].append(action)
        return Plan(rows, self.stages, self.microbatches)

    @property
    def legal(self) -> bool:
        """What the oracle says."""
        return oracle.legal(self.rows, self.stages, self.microbatches, self.place)

    def with_rows(self, rows) -> Case:
        """The same sizes and placement, with other rows."""
        return Case(tuple(map(tuple, rows)), self.stages, self.microbatches, self.table)


@st.composite
def legal_cases(draw: st.DrawFn, reduces: bool = True, pairs: bool = True) -> Case:
    """A random legal plan: any placement (replicas too), full and split backwards, all-reduces, overlapped pairs.

    Legal by construction: actions are dealt to their ranks in an order in which they could run.
    """
    random = draw(st.randoms(use_true_random=False))
    ranks, stages, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    table = tuple(draw(st.lists(st.integers(0, ranks - 1), min_size=(n := stages * microbatches), max_size=n)))
    slots = [(m, s) for m in range(microbatches) for s in range(stages)]
    todo: list[Action] = [F(m, s) for m, s in slots]
    for m, s in slots:
        todo += [B(m, s)] if random.random() < 0.6 else [I(m, s), W(m, s)]
    todo += [R(s) for s in range(stages) if reduces and random.random() < 0.5]
    rows: list[list[object]] = [[] for _ in range(ranks)]
    done: set[oracle.Value] = set()
    while todo:
        action = random.choice([each for each in todo if oracle.needs(each, stages, microbatches) <= done])
        todo.remove(action)
        done |= oracle.gives(action)
        if action.kind == "R":
            homes = {table[m * stages + action.stage] for m in range(microbatches)}
        else:
            homes = {table[action.microbatch * stages + action.stage]}
        for home in homes:
            rows[home].append(action)
    if pairs and random.random() < 0.5:
        rows = [paired(row, random) for row in rows]
    return Case(tuple(map(tuple, rows)), stages, microbatches, table)


def paired(row, random):
    """Join some forwards with the backward right after them."""
    joined = list(row)
    for before, after in pairwise(row):
        if (before.kind, after.kind) == ("F", "B") and random.random() < 0.7:
            at = joined.index(before)
            joined[at : at + 2] = [before & after]
    return joined


JUNK = ["0F0", "", None, 7, 1.5, F, [F(0)], (), {"kind": "F"}, object(), b"F0", float("nan")]
"""Things that are no action at all."""

ODD_ACTIONS = [
    Action("Q", 0, 0),
    Action("F", None, 0),
    Action("F", [1], 0),
    Action("F", 0, [1]),
    Action("F", 0, "x"),
    Action("F", -1, 0),
    Action("F", 0, -1),
    Action("F", 1.0, 0),
    Action("B", microbatch=True, stage=0),
    Action("F", 0, 0.0),
    Action("R", 0, 0),
    Action("R", 10**6, 0),
    Action("R", None, "x"),
    Action([], 0, 0),
    Action(None, 0, 0),
    Action("F", 10**9, 0),
    Action("F", 0, 10**9),
    Action("FB", 0, 0),
    Action("", 0, 0),
]
"""Actions with a field that can be in no plan."""


def actions(stages: int, microbatches: int, named: bool = True) -> st.SearchStrategy[Action]:
    """Any action, in range or just outside; without a stage too, unless `named`."""
    stage = st.integers(-1, stages)
    if not named:
        stage = st.none() | stage
    one = st.builds(Action, st.sampled_from("FBIW"), st.integers(-1, microbatches), stage)
    return one | st.builds(R, stage)


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """Rows of anything, most of them nonsense."""
    ranks, stages, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    placed = draw(st.booleans())
    n = stages * microbatches
    table = tuple(draw(st.lists(st.integers(0, ranks - 1), min_size=n, max_size=n))) if placed else None
    one = actions(stages, microbatches, named=not placed)
    pair = st.builds(Pair, one.filter(lambda a: a.kind == "F"), one.filter(lambda a: a.kind == "B"))
    item = one | one | one | pair | st.sampled_from(JUNK) | st.sampled_from(ODD_ACTIONS)
    rows = draw(st.lists(st.lists(item, max_size=8), min_size=ranks, max_size=ranks))
    return Case(tuple(map(tuple, rows)), stages, microbatches, table)


@st.composite
def shuffled_cases(draw: st.DrawFn) -> Case:
    """A legal plan with a few actions moved: some stay legal, some do not."""
    case = draw(legal_cases())
    rows = [list(row) for row in case.rows]
    for _ in range(draw(st.integers(1, 3))):
        source = draw(st.sampled_from([rank for rank, row in enumerate(rows) if row]))
        item = rows[source].pop(draw(st.integers(0, len(rows[source]) - 1)))
        target = source if draw(st.integers(0, 3)) else draw(st.integers(0, len(rows) - 1))
        rows[target].insert(draw(st.integers(0, len(rows[target]))), item)
    return case.with_rows(rows)
