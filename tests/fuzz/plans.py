"""Attacks on `check`: the oracle's verdict on random plans, and time that follows the actions, not their numbers."""

from __future__ import annotations

import time
from itertools import count, repeat
from random import Random

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from strategies import Case, catalogue_plans, legal_cases, random_cases, shuffled_cases

import pipelab
from pipelab import Action, Plan, R, ScheduleError, check, simulate
from pipelab.errors import MOST_SLOTS, PipelabError, UsageError

SECONDS = 20.0
"""How long a plan of a few thousand actions may take: far more than it does, far less than a table of huge numbers."""


@st.composite
def spoilt_cases(draw: st.DrawFn) -> Case:
    """A registered schedule's plan with a few actions dropped, repeated, moved or changed."""
    plan = draw(catalogue_plans())
    random = draw(st.randoms(use_true_random=False))
    rows = [list(row) for row in plan.rows]
    for _ in range(random.randrange(4)):
        row = random.choice([row for row in rows if row])
        at = random.randrange(len(row))
        match random.randrange(5):
            case 0:
                del row[at]
            case 1:
                random.choice(rows).insert(random.randrange(len(row) + 1), row[at])
            case 2:
                other = random.randrange(len(row))
                row[at], row[other] = row[other], row[at]
            case 3:
                row.insert(random.randrange(len(row) + 1), row.pop(at))
            case 4:
                numbers = random.randrange(-1, plan.microbatches + 1), random.randrange(-1, plan.stages + 1)
                row[at] = Action(random.choice("FBIW"), *numbers)
        rows = [row or [R(0)] for row in rows]
    return Case(tuple(map(tuple, rows)), plan.stages, plan.microbatches, tuple(plan.bound.rank_of_slot))


def fuzz_plans(number: int) -> str | None:
    """Compare the verdict on twenty random plans with the oracle's; simulate refuses the same plans."""

    @seed(number)
    @settings(max_examples=20, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=HealthCheck)
    @given(random_cases() | shuffled_cases() | legal_cases() | spoilt_cases())
    def agree(case: Case) -> None:
        start = time.process_time()
        faults = check(case.plan)
        assert (not faults) == case.legal, faults
        for fault in faults:
            assert str(fault)
        refused = None
        try:
            simulate(case.plan)
        except ScheduleError as error:
            refused = str(error)
        assert (refused is None) == (not faults)
        assert refused is None or refused.startswith(f"{len(faults)} fault")
        assert time.process_time() - start < SECONDS

    agree()
    return None


fuzz_plans.seeds = 4


def fuzz_sizes(number: int) -> str | None:
    """Check a plan that names a few huge numbers, or a schedule of a huge size, in bounded time."""
    random = Random(number)
    start = time.process_time()
    try:
        what = _schedule(random) if random.random() < 0.3 else _plan(random)
        told = f"{type(what).__name__}, {len(faults)} faults" if (faults := check(what)) else "no fault"
        for fault in faults[:100]:
            assert str(fault)
    except PipelabError as error:
        told = str(error)
        if not isinstance(error, UsageError):
            return f"{type(error).__name__}: {error}"
    spent = time.process_time() - start
    return None if spent < SECONDS else f"{spent:.1f} s: {told[:300]}"


fuzz_sizes.seeds = 8


def _huge(random: Random) -> int:
    """Return a number that is as often small as it is huge."""
    return random.randrange(4) if random.random() < 0.5 else random.randrange(10 ** random.randrange(1, 12))


def _plan(random: Random) -> Plan:
    """Return rows of at most a few thousand actions, with an all-reduce here and there, and perhaps an endless row."""
    length, ranks = random.choice([1, 2, 5, 50, 300]), random.choice([1, 2, 3, 40, 500])
    named = random.random() < 0.8
    largest = _huge(random) + 1

    def one() -> Action:
        stage = random.choice([_huge(random), random.randrange(largest), 0]) if named else None
        if random.random() < 0.1:
            return R(stage)
        microbatch = random.choice([_huge(random), random.randrange(largest), random.randrange(length)])
        return Action(random.choice("FFBBIW"), microbatch, stage)

    rows: list[object] = [[one() for _ in range(random.randrange(length + 1))] for _ in range(ranks)]
    if length == 300:
        rows = rows[:20]
    if random.random() < 0.2:
        rows[random.randrange(len(rows))] = random.choice([repeat(one()), (Action("F", m) for m in count())])
    sizes = {}
    for name in ("stages", "microbatches"):
        if random.random() < 0.3:
            sizes[name] = random.choice([random.randrange(1, 300), MOST_SLOTS * random.randrange(2, 10**6)])
    return Plan(rows, **sizes)


def _schedule(random: Random) -> pipelab.Schedule:
    """Return a registered schedule in which one size at least is huge."""
    kind = random.choice(list(pipelab.schedules.values()))
    sizes = [random.randrange(1, 9), MOST_SLOTS * random.randrange(1, 10**9)]
    random.shuffle(sizes)
    made = kind(*sizes)
    return pipelab.replicate(made, random.randrange(1, 10**9)) if random.random() < 0.3 else made
